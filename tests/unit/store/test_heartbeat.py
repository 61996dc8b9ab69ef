import os
import socket
import subprocess
import time

import pytest

from ultrabench.store.events import Cancel
from ultrabench.store.folder import MISSED_TOUCHES, SIGN_OF_LIFE_S, SweepFolder, living_launchers
from ultrabench.store.journal import JournalWriter

HERE = socket.gethostname().split(".")[0]
LATE_S = MISSED_TOUCHES * SIGN_OF_LIFE_S


@pytest.fixture
def folder(tmp_path):
    made = SweepFolder(tmp_path)
    made.create()
    return made


def follows(folder, host, pid, age_s=0.0, token="0123abcd"):
    """The journal of a launcher, touched so long ago."""
    path = folder.journal / f"launcher-{host}-{pid}-{token}.jsonl"
    path.write_text("")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def ended_process():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_the_one_who_asks_does_not_count(folder):
    own = JournalWriter(folder.journal, "launcher")
    own.write(Cancel(generation=1))
    assert living_launchers(folder, own.path) == []
    assert living_launchers(folder) == [f"process {os.getpid()} on {HERE}"]


def test_on_this_host_the_process_has_to_exist(folder):
    follows(folder, HERE, ended_process())
    assert living_launchers(folder) == []
    follows(folder, HERE, os.getppid())
    assert living_launchers(folder) == [f"process {os.getppid()} on {HERE}"]


@pytest.mark.parametrize(
    ("age_s", "lives"), [(0, True), (LATE_S - 5, True), (LATE_S + 1, False), (9e6, False)]
)
def test_elsewhere_the_time_of_the_journal_tells(folder, age_s, lives):
    follows(folder, "node-17-b", 4711, age_s)
    assert living_launchers(folder) == ["process 4711 on node-17-b"] * lives


def test_the_clock_of_the_file_server_counts_for_one_who_follows(folder):
    """Files get their times from a server whose clock is an hour behind."""
    own = follows(folder, HERE, os.getpid(), 3600)
    other = follows(folder, "login2", 8, 3600 + 20)
    assert living_launchers(folder, own) == ["process 8 on login2"]
    os.utime(other, (time.time() - 3600 - LATE_S - 1,) * 2)
    assert living_launchers(folder, own) == []


def test_agents_and_commands_do_not_follow(folder):
    for role in ("agent", "pause", "cancel"):
        JournalWriter(folder.journal, role).write(Cancel(generation=1))
    assert living_launchers(folder) == []


@pytest.mark.parametrize(
    "name", ["launcher-.jsonl", "launcher-a.jsonl", "launcher-a-1.jsonl", "launcher--x-.jsonl"]
)
def test_a_file_of_another_name_or_that_vanishes_is_passed_over(folder, name):
    (folder.journal / name).write_text("")
    (folder.journal / "launcher-gone-7-0123abcd.jsonl").symlink_to("nowhere")
    follows(folder, "login2", 8)
    living = living_launchers(folder)
    assert "process 8 on login2" in living
    assert "process 7 on gone" not in living
