"""Files of an allocation, and the window in which its runs may begin."""

import json
import stat
import time
from dataclasses import replace

import pytest

from tests.configs import refused
from tests.unit.allocations import first_allocations, open_sweep
from ultrabench.errors import SweepFolderError
from ultrabench.store.allocation import PROBE_LIMIT_S, is_in_window, read_allocation


@pytest.fixture
def allocation(tmp_path):
    return first_allocations(open_sweep(tmp_path / "a sweep"))[0]


def test_what_is_written_is_what_agents_read(allocation):
    for _ in range(2):  # a requeue or a second submission writes the same again
        allocation.write()
        assert read_allocation(allocation.folder) == allocation
    path = allocation.folder / "allocation.json"
    content = json.loads(path.read_text())
    for added_later in ("git_commit", "preflight", "control", "window"):
        del content[added_later]
    path.write_text(json.dumps(content))
    assert read_allocation(allocation.folder) == replace(allocation, preflight=False, control=None)


@pytest.mark.parametrize("traced", [False, True])
def test_tasks_of_version_0_2_0_are_read(allocation, traced):
    allocation.write()
    path = allocation.folder / "allocation.json"
    values = json.loads(path.read_text())
    for task in values["tasks"]:
        del task["traced"]
        task["profile"] = traced
    path.write_text(json.dumps(values))
    assert [task.traced for task in read_allocation(allocation.folder).tasks] == [traced] * len(
        values["tasks"]
    )


def test_the_secret_is_for_one_user_and_one_allocation(allocation):
    secrets = []
    for variant in (allocation, replace(allocation, name="n1-other.0")):
        variant.write()
        assert stat.S_IMODE((variant.folder / "secret").stat().st_mode) == 0o600
        secrets.append((variant.folder / "secret").read_text())
    assert [len(secret) for secret in secrets] == [32, 32]
    assert secrets[0] != secrets[1]
    assert secrets[0] not in (allocation.folder / "allocation.json").read_text()


def test_the_probe_is_a_task_under_minus_one(allocation):
    probe = allocation.task(-1)
    assert (probe.probe, probe.limit_s) == (True, PROBE_LIMIT_S)
    assert probe.spec.layout.world_size == allocation.nodes * allocation.gpus_per_node
    assert probe.key not in {task.key for task in allocation.tasks}
    assert allocation.name in probe.run_id
    assert [allocation.task(n) for n in range(len(allocation.tasks))] == list(allocation.tasks)
    assert not any(task.probe for task in allocation.tasks)


def test_the_probe_of_a_users_program_is_forked_from_ours(allocation):
    first = allocation.tasks[0]
    kernel = replace(first.spec.kernel, name="mine", kind="command", command=("python", "train.py"))
    theirs = replace(first, spec=replace(first.spec, kernel=kernel))
    assert (first.forked, theirs.forked) == (True, False)
    assert replace(allocation, tasks=(theirs,)).probe.forked


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "7", "null", '"x"', "{}", '{"name": 7}', '{"nme": "x"}']
)
def test_what_cannot_be_read_is_told_in_one_line(tmp_path, text):
    if text is not None:
        (tmp_path / "allocation.json").write_text(text)
    with refused("allocation.json", SweepFolderError):
        read_allocation(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def far_from_utc():
    """The local time of this host, at which windows are given, is that of Los Angeles."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "PST8PDT,M3.2.0,M11.1.0")
        time.tzset()
        yield
    time.tzset()


def at(text, seconds=0):
    """Seconds since 1970 at a local time of a day without a change of clocks, eight hours behind UTC."""
    return 1768348800 + 3600 * (8 + int(text[:2])) + 60 * int(text[3:]) + seconds  # of 2026-01-14


@pytest.mark.parametrize(
    ("window", "now", "seconds", "expected"),
    [
        ("09:15-17:30", "09:14", 59, False), ("09:15-17:30", "09:15", 0, True), ("09:15-17:30", "17:29", 59, True),
        ("09:15-17:30", "17:30", 0, False), ("19:00-07:00", "18:59", 59, False), ("19:00-07:00", "19:00", 0, True),
        ("19:00-07:00", "06:59", 59, True), ("19:00-07:00", "07:00", 0, False), ("19:00-07:00", "00:00", 0, True),
        ("00:00-00:00", "23:59", 59, True), (None, "03:00", 0, True),
    ],
)  # fmt: skip
def test_runs_begin_from_the_first_minute_of_a_window_and_not_in_the_last(window, now, seconds, expected):
    assert is_in_window(window, at(now, seconds)) is expected
