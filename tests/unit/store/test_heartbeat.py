"""Which launchers follow a sweep now, by the names and the times of their journals."""

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
    sweep_folder = SweepFolder(tmp_path)
    sweep_folder.create()
    return sweep_folder


def follows(folder, host, pid, age_s=0.0, role="launcher"):
    """The journal of a launcher, touched so long ago."""
    path = folder.journal / f"{role}-{host}-{pid}-0123abcd.jsonl"
    path.write_text("")
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_the_one_who_asks_does_not_count(folder):
    writer = JournalWriter(folder.journal, "launcher")
    writer.write(Cancel(generation=1))
    assert living_launchers(folder, writer.path) == []
    assert living_launchers(folder) == [f"process {os.getpid()} on {HERE}"]


def test_on_this_host_the_process_has_to_exist(folder):
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    follows(folder, HERE, ended.pid)
    assert living_launchers(folder) == []


@pytest.mark.parametrize(
    ("age_s", "lives"), [(0, True), (LATE_S - 20, True), (LATE_S + 1, False), (9e6, False)]
)
def test_elsewhere_the_time_of_the_journal_tells(folder, age_s, lives):
    follows(folder, "node-17-b", 4711, age_s)
    assert living_launchers(folder) == ["process 4711 on node-17-b"] * lives


def test_the_clock_of_the_file_server_counts_for_one_who_follows(folder):
    """Files get their times from a server whose clock is an hour behind."""
    own_path = follows(folder, HERE, os.getpid(), 3600)
    other = follows(folder, "login2", 8, 3600 + 20)
    assert living_launchers(folder, own_path) == ["process 8 on login2"]
    os.utime(other, (time.time() - 3600 - LATE_S - 1,) * 2)
    assert living_launchers(folder, own_path) == []


def test_other_files_and_one_that_vanishes_are_passed_over(folder):
    for role in ("agent", "pause", "cancel"):
        follows(folder, "login2", 7, role=role)
    for name in ("launcher-.jsonl", "launcher-a.jsonl", "launcher-a-1.jsonl"):
        (folder.journal / name).write_text("")
    (folder.journal / "launcher-gone-7-0123abcd.jsonl").symlink_to("nowhere")
    follows(folder, "login2", 8)
    assert living_launchers(folder) == ["process 8 on login2"]
