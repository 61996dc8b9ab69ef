"""Which launchers follow a sweep now, by the leases that they renew."""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace

import pytest

from ultrabench.errors import ClusterError
from ultrabench.processes import own_name, start_time
from ultrabench.record import to_dict
from ultrabench.store import lease as lease_module
from ultrabench.store.folder import SweepFolder
from ultrabench.store.lease import LAPSE_S, Lease, LeaseHolder, lives, living_launchers

HERE = socket.gethostname().split(".")[0]
HOLDER = LeaseHolder(host="login2", boot_id="another", pid_namespace=1, pid=4711, start_ticks=1, user="ann")


@pytest.fixture
def folder(tmp_path):
    sweep_folder = SweepFolder(tmp_path)
    sweep_folder.create()
    sweep_folder.leases.mkdir()
    return sweep_folder


@pytest.fixture
def here():
    """A holder on this host and in this namespace, but without a process."""
    boot_id, namespace = lease_module._boot_id(), lease_module._own_namespace()
    return replace(HOLDER, host=HERE, boot_id=boot_id, pid_namespace=namespace)


def raiser(error):
    def fail():
        raise error

    return fail


def leave(folder, holder, age_s=0.0, name="launcher-x"):
    """The lease of a launcher, renewed so long ago."""
    path = folder.leases / f"{name}.json"
    path.write_text(json.dumps(to_dict(holder)))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_a_lease_names_its_holder_until_it_is_released(folder):
    lease = Lease(folder, "launcher-a")
    (holder,) = living_launchers(folder)
    assert str(holder) == f"process {os.getpid()} on {HERE}"
    assert (holder.user, holder.start_ticks) == (own_name(), start_time(os.getpid()))
    assert living_launchers(folder, lease) == []
    assert lives(folder, "launcher-a")
    lease.release()
    assert living_launchers(folder) == []
    assert not lives(folder, "launcher-a")


def test_a_lease_that_nobody_holds_ends(folder):
    lease = Lease(folder, "launcher-a")
    del lease
    gc.collect()
    assert [*folder.leases.glob("*.json")] == []


@pytest.mark.parametrize(("age_s", "is_alive"), [(0, True), (LAPSE_S - 20, True), (LAPSE_S + 1, False)])
def test_of_a_process_elsewhere_the_renewals_tell(folder, age_s, is_alive):
    """On another host, in another namespace, or before the host started again, a pid means nothing."""
    leave(folder, replace(HOLDER, pid=os.getpid(), start_ticks=start_time(os.getpid())), age_s)
    assert [*map(str, living_launchers(folder))] == [f"process {os.getpid()} on login2"] * is_alive


def test_a_process_that_is_seen_lives_however_old_its_lease(folder, here):
    """As while the disk with the results does not answer."""
    leave(folder, replace(here, pid=os.getpid(), start_ticks=start_time(os.getpid())), 100 * LAPSE_S)
    assert len(living_launchers(folder)) == 1


def test_a_process_that_is_surely_gone_follows_nothing(folder, here):
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    leave(folder, replace(here, pid=ended.pid))
    assert living_launchers(folder) == []
    leave(folder, replace(here, pid=os.getpid(), start_ticks=1))  # another process has its pid now
    assert living_launchers(folder) == []


@pytest.mark.parametrize(("age_s", "is_alive"), [(0, True), (LAPSE_S + 1, False)])
def test_a_process_that_proc_hides_is_not_taken_for_dead(folder, here, monkeypatch, age_s, is_alive):
    """/proc mounted with hidepid shows nothing of other users."""
    monkeypatch.setattr(lease_module, "start_time", lambda pid: None)
    leave(folder, replace(here, pid=os.getpid()), age_s)
    assert len(living_launchers(folder)) == is_alive


def test_a_suspended_launcher_lapses_although_it_is_seen(folder, here):
    process = subprocess.Popen(["sleep", "60"])
    try:
        process.send_signal(signal.SIGSTOP)
        while lease_module.state_of(process.pid) != "T":
            time.sleep(0.01)
        holder = replace(here, pid=process.pid, start_ticks=start_time(process.pid))
        path = leave(folder, holder, LAPSE_S - 20)
        assert len(living_launchers(folder)) == 1
        os.utime(path, (time.time() - LAPSE_S - 1,) * 2)
        assert living_launchers(folder) == []
    finally:
        process.kill()
        process.wait()


def test_the_clock_of_the_file_server_counts(folder, monkeypatch):
    """The clock of this host is an hour ahead."""
    leave(folder, HOLDER)
    ahead_s = time.time() + 3600
    monkeypatch.setattr(lease_module.time, "time", lambda: ahead_s)
    assert len(living_launchers(folder, writes=True)) == 1


def test_a_lease_that_lapsed_while_its_disk_hung_stays_lapsed(folder, monkeypatch):
    lease = Lease(folder, "launcher-a")
    now_s = lease_module._seconds_since_boot() + LAPSE_S + 1
    monkeypatch.setattr(lease_module, "_seconds_since_boot", lambda: now_s)
    lease.renew()
    assert lease.has_lapsed()
    lease.renew_lapsed()
    assert not lease.has_lapsed()


def test_where_proc_shows_another_namespace_pids_mean_nothing(folder, here, monkeypatch):
    monkeypatch.setattr(lease_module, "pid_namespace", raiser(ClusterError("/proc shows another namespace")))
    leave(folder, replace(here, pid=os.getpid(), start_ticks=1))
    assert len(living_launchers(folder)) == 1


@pytest.mark.parametrize(("age_s", "is_alive"), [(0, True), (LAPSE_S + 1, False)])
def test_of_a_lease_that_cannot_be_read_the_renewals_tell(folder, monkeypatch, age_s, is_alive):
    """A launcher of another user with a strict umask."""
    leave(folder, HOLDER, age_s)
    monkeypatch.setattr(lease_module.Path, "open", lambda self, mode: raiser(PermissionError(13, "denied"))())
    assert [*map(str, living_launchers(folder))] == ["a launcher on an unknown host"] * is_alive


def test_files_that_are_no_lease_are_passed_over(folder):
    for name, text in (("a", ""), ("b", "[]"), ("c", "{}"), ("d", '{"pid": "x"}'), ("e", "[" * 100_000)):
        (folder.leases / f"{name}.json").write_text(text)
    (folder.leases / "f.json").symlink_to("nowhere")
    (folder.leases / "g.json").mkdir()
    assert living_launchers(folder) == []
    leave(folder, HOLDER)
    assert len(living_launchers(folder)) == 1


def test_a_launcher_that_waits_renews_and_one_that_was_suspended_notices(folder):
    """A real process whose main thread does nothing but wait, as for sbatch."""
    script = textwrap.dedent(f"""
        import subprocess, sys
        from pathlib import Path
        from ultrabench.store import lease
        from ultrabench.store.folder import SweepFolder
        lease.RENEW_S, lease.LAPSE_S = 0.05, 1.0
        held = lease.Lease(SweepFolder(Path({str(folder.path)!r})), "launcher-a")
        print("held", flush=True)
        for word in iter(sys.stdin.readline, ""):
            print(held.has_lapsed(), flush=True)
    """)
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def has_lapsed():
            process.stdin.write("\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        assert process.stdout.readline() == "held\n"
        path = folder.leases / "launcher-a.json"
        first_s = path.stat().st_mtime_ns
        while path.stat().st_mtime_ns == first_s:
            time.sleep(0.01)
        assert has_lapsed() == "False"
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)
        process.send_signal(signal.SIGCONT)
        assert has_lapsed() == "True"
        process.stdin.close()
        process.wait()
    assert not path.exists()
