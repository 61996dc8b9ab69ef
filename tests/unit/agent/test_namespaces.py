"""Agents in and outside a container share /tmp, and one of them sees the other's processes."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ultrabench.processes import (
    TAG_VARIABLE,
    clean_up_after_the_dead,
    orphaned,
    own_tag,
    pid_namespace,
    start_time,
)

INSIDE = """
import os, subprocess, sys
from ultrabench.processes import TAG_VARIABLE, clean_up_after_the_dead, make_scratch, own_tag
clean_up_after_the_dead()
scratch = make_scratch()
env = {**os.environ, TAG_VARIABLE: own_tag("a", 0)}
rank = subprocess.Popen(["sleep", "1000"], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
print(scratch, flush=True)
sys.stdin.read()
assert rank.poll() is None, "somebody killed it"
assert scratch.is_dir(), "somebody removed it"
rank.kill()
rank.wait()
scratch.rmdir()
"""
UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc")


@pytest.fixture(scope="module")
def namespaces():
    if subprocess.run([*UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("this user may not make PID namespaces")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_neither_side_takes_the_other_for_dead(namespaces, folder):
    outside = folder / f"ultrabench-{os.getpid()}-{start_time(os.getpid())}-{pid_namespace()}-abc"
    outside.mkdir()
    agent = subprocess.Popen(
        [*UNSHARE, sys.executable, "-c", INSIDE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    scratch = Path(agent.stdout.readline().strip())
    assert scratch.name.split("-")[3] != str(pid_namespace())
    clean_up_after_the_dead()
    agent.communicate()
    assert agent.returncode == 0
    assert outside.is_dir()


def test_a_foreign_proc_is_refused(namespaces):
    code = "from ultrabench.processes import pid_namespace; pid_namespace()"
    done = subprocess.run(
        ["unshare", "--pid", "--fork", sys.executable, "-c", code], capture_output=True, text=True
    )
    assert "ClusterError: /proc shows another PID namespace" in done.stderr


def test_the_dead_of_this_namespace_are_cleaned_up(folder):
    dead = subprocess.Popen(["true"])
    dead.wait()
    scratch = folder / f"ultrabench-{dead.pid}-1-{pid_namespace()}-abc"
    scratch.mkdir()
    tag = f"a:0:{dead.pid}:1:{pid_namespace()}"
    left = subprocess.Popen(["sleep", "1000"], env={**os.environ, TAG_VARIABLE: tag})
    clean_up_after_the_dead()
    assert left.wait(10) < 0
    assert not scratch.exists()


@pytest.mark.parametrize(
    "tag", ["", "a", "a:0:1:1", "a:0:x:1:1", "a:0:1:1:x", "a:0:1:1:1:1", f"a:0:1:1:{2**63}"]
)
def test_a_tag_of_another_form_or_namespace_is_nobodys_orphan(tag):
    assert not orphaned(tag)


def test_the_own_tag_is_alive():
    assert not orphaned(own_tag("a", 0))
