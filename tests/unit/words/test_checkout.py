import subprocess

import pytest

import ultrabench
from ultrabench import checkout

GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=false"]


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """A repository with our package in it, from which ultrabench seems to be imported."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    package(tmp_path / "clone/src/ultrabench", monkeypatch)
    (tmp_path / "clone/notes.txt").write_bytes(b"one\n\ntwo\n\n")
    git(tmp_path / "clone", "init", "--quiet")
    git(tmp_path / "clone", "add", ".")
    git(tmp_path / "clone", "commit", "--quiet", "-m", "first")
    return tmp_path / "clone"


def package(folder, monkeypatch):
    """Makes this folder the one from which ultrabench seems to be imported."""
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    monkeypatch.setattr(ultrabench, "__file__", str(folder / "__init__.py"))


def git(folder, *words, **options):
    process = subprocess.run([*GIT, "-C", str(folder), *words], capture_output=True, check=True, **options)
    return process.stdout.decode().strip()


def test_the_commit_of_the_clone_whatever_variables_a_git_hook_has(clone, tmp_path, monkeypatch):
    other = tmp_path / "other"
    git(tmp_path, "init", "--quiet", "other")
    git(other, "commit", "--quiet", "--allow-empty", "-m", "theirs")
    expected = git(clone, "rev-parse", "HEAD")
    for name, path in (("GIT_DIR", ".git"), ("GIT_WORK_TREE", ""), ("GIT_INDEX_FILE", ".git/index")):
        monkeypatch.setenv(name, str(other / path))
    assert checkout.commit_sha() == expected
    assert checkout.uncommitted_patch() == b""


@pytest.mark.parametrize(
    "content", [b"ONE\n\ntwo\n\n", b"one\n\ntwo\n\n\n\n", b"one\r\n\r\ntwo\n\n", b"one\n\ntwo\n\nmore  ", b"\xff\xfe\n"]
)  # fmt: skip
def test_a_patch_of_tracked_files_gives_the_sources_back(clone, content):
    git(clone, "config", "color.ui", "always")
    git(clone, "config", "diff.external", "false")
    (clone / "untracked.txt").write_text("secret")
    (clone / "notes.txt").write_bytes(content)
    patch = checkout.uncommitted_patch()
    assert b"secret" not in patch
    git(clone, "checkout", "--quiet", "notes.txt")
    git(clone, "apply", "-", input=patch)
    assert (clone / "notes.txt").read_bytes() == content


@pytest.mark.parametrize("where", ["inside another project", "outside any clone", "without git"])
def test_where_git_does_not_track_the_package_nothing_is_known(clone, tmp_path, monkeypatch, where):
    (clone / "notes.txt").write_text("somebody's own work\n")
    if where == "without git":
        monkeypatch.setenv("PATH", str(clone))
    else:
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
        inside = clone if where == "inside another project" else tmp_path
        package(inside / ".venv/lib/ultrabench", monkeypatch)
    assert checkout.commit_sha() is None
    assert checkout.uncommitted_patch() == b""
