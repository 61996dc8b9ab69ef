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
    package = tmp_path / "clone/src/ultrabench"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (tmp_path / "clone/notes.txt").write_bytes(b"one\n\ntwo\n\n")
    git(tmp_path / "clone", "init", "--quiet")
    git(tmp_path / "clone", "add", ".")
    git(tmp_path / "clone", "commit", "--quiet", "-m", "first")
    monkeypatch.setattr(ultrabench, "__file__", str(package / "__init__.py"))
    return tmp_path / "clone"


def git(folder, *words, **more):
    done = subprocess.run([*GIT, "-C", str(folder), *words], capture_output=True, check=True, **more)
    return done.stdout.decode().strip()


def test_the_commit_of_the_clone(clone):
    assert checkout.commit() == git(clone, "rev-parse", "HEAD")
    assert checkout.difference() == b""


def test_what_was_changed_since_is_a_patch_that_applies(clone):
    (clone / "src/ultrabench/__init__.py").write_text("x = 1\n")
    git(clone, "config", "color.ui", "always")
    git(clone, "config", "diff.external", "false")
    assert b"\n+x = 1\n" in checkout.difference()
    (clone / "untracked.txt").write_text("secret")
    assert b"secret" not in checkout.difference()


@pytest.mark.parametrize(
    "content", [b"ONE\n\ntwo\n\n", b"one\n\ntwo\n\n\n\n", b"one\r\n\r\ntwo\n\n", b"one\n\ntwo\n\nmore  ", b"\xff\xfe\n"]
)  # fmt: skip
def test_a_patch_gives_the_sources_back(clone, content):
    (clone / "notes.txt").write_bytes(content)
    patch = checkout.difference()
    git(clone, "checkout", "--quiet", "notes.txt")
    git(clone, "apply", "-", input=patch)
    assert (clone / "notes.txt").read_bytes() == content


def test_a_package_installed_inside_another_project_has_no_commit(clone, monkeypatch):
    installed = clone / ".venv/lib/ultrabench"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    (clone / "notes.txt").write_text("somebody's own work\n")
    monkeypatch.setattr(ultrabench, "__file__", str(installed / "__init__.py"))
    assert checkout.commit() is None
    assert checkout.difference() == b""


def test_a_package_outside_any_clone_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    monkeypatch.setattr(ultrabench, "__file__", str(tmp_path / "__init__.py"))
    assert checkout.commit() is None
    assert checkout.difference() == b""


def test_variables_of_a_git_hook_do_not_lead_astray(clone, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    git(other, "commit", "--quiet", "--allow-empty", "-m", "theirs")
    expected = checkout.commit()
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))
    assert checkout.commit() == expected


def test_without_git_nothing_is_known(clone, monkeypatch):
    monkeypatch.setenv("PATH", str(clone))
    assert checkout.commit() is None
    assert checkout.difference() == b""
