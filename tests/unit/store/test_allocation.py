"""Files of an allocation, and the window in which its runs may begin."""

import json
import stat
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.configs import refused
from tests.unit.allocations import first_allocations, open_sweep
from ultrabench.errors import SweepFolderError
from ultrabench.store.allocation import PROBE_LIMIT_S, inside, read_allocation


@pytest.fixture
def allocation(tmp_path):
    return first_allocations(open_sweep(tmp_path / "a sweep"))[0]


def test_what_is_written_is_what_agents_read(allocation):
    allocation.write()
    assert read_allocation(allocation.folder) == allocation
    # A requeue or a second submission writes the same again.
    allocation.write()
    assert read_allocation(allocation.folder) == allocation


def test_the_secret_is_for_one_user_and_one_allocation(allocation):
    allocation.write()
    secret = allocation.folder / "secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    first = secret.read_text()
    assert len(first) == 32
    other = replace(allocation, name="n1-other.0")
    other.write()
    assert (other.folder / "secret").read_text() != first
    assert first not in (allocation.folder / "allocation.json").read_text()


def test_the_probe_is_a_task_under_minus_one(allocation):
    probe = allocation.task(-1)
    assert probe == allocation.probe
    assert (probe.probe, probe.forked, probe.limit_s) == (True, True, PROBE_LIMIT_S)
    assert probe.spec.layout.world_size == allocation.nodes * allocation.gpus_per_node
    assert probe.key not in {task.key for task in allocation.tasks}
    assert allocation.name in probe.run_id
    assert [allocation.task(n) for n in range(len(allocation.tasks))] == list(allocation.tasks)
    assert not any(task.probe for task in allocation.tasks)


def test_the_probe_of_a_users_program_is_forked_from_ours(allocation):
    first = allocation.tasks[0]
    kernel = replace(first.spec.kernel, name="mine", kind="command", command=("python", "train.py"))
    theirs = replace(first, spec=replace(first.spec, kernel=kernel))
    mixed = replace(allocation, tasks=(theirs,))
    assert not theirs.forked
    assert mixed.probe.forked
    assert not mixed.tasks[0].forked


def test_fields_added_later_may_be_missing(allocation):
    allocation.write()
    path = allocation.folder / "allocation.json"
    told = json.loads(path.read_text())
    for name in ("git_commit", "preflight", "control", "window"):
        del told[name]
    path.write_text(json.dumps(told))
    assert read_allocation(allocation.folder) == replace(allocation, preflight=False, control=None)


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "7", "null", '"x"', "{}", '{"name": 7}', '{"nme": "x"}']
)
def test_what_cannot_be_read_is_told_in_one_line(tmp_path, text):
    if text is not None:
        (tmp_path / "allocation.json").write_text(text)
    with refused("allocation.json", SweepFolderError):
        read_allocation(tmp_path)


DAY = 1440
MINUTES = st.integers(0, DAY - 1)


def clock(minute):
    return f"{minute // 60:02d}:{minute % 60:02d}"


def at(text, seconds=0):
    """Seconds since 1970 at a local time of a day without a change of clocks."""
    return time.mktime((2026, 1, 14, int(text[:2]), int(text[3:]), seconds, 0, 0, 0))


@pytest.mark.parametrize(
    ("window", "now", "seconds", "expected"),
    [
        ("09:00-17:00", "08:59", 59, False), ("09:00-17:00", "09:00", 0, True), ("09:00-17:00", "17:00", 0, False),
        ("19:00-07:00", "18:59", 59, False), ("19:00-07:00", "19:00", 0, True), ("19:00-07:00", "06:59", 59, True),
        ("19:00-07:00", "07:00", 0, False), ("00:00-00:00", "23:59", 59, True), (None, "03:00", 0, True),
    ],
)  # fmt: skip
def test_windows_by_hand(window, now, seconds, expected):
    assert inside(window, at(now, seconds)) is expected


@given(begin=MINUTES, end=MINUTES, now=MINUTES, seconds=st.integers(0, 59))
def test_a_window_and_its_reverse_share_the_day(begin, end, now, seconds):
    there, back = (inside(w, at(clock(now), seconds)) for w in (
        f"{clock(begin)}-{clock(end)}", f"{clock(end)}-{clock(begin)}"
    ))  # fmt: skip
    assert there is True if begin == end else there is not back


@pytest.fixture
def zone(request, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("TZ", request.param)
        time.tzset()
        yield request.param
    time.tzset()


@pytest.mark.parametrize(
    ("zone", "hour"),
    [("UTC0", 12), ("CET-1CEST,M3.5.0,M10.5.0/3", 13), ("PST8PDT,M3.2.0,M11.1.0", 4)],
    indirect=["zone"],
)
@pytest.mark.usefixtures("zone")
def test_the_time_is_that_of_this_host(hour):
    noon_utc = 1768392000  # of 2026-01-14
    assert inside(f"{hour:02d}:00-{hour:02d}:01", noon_utc)
    assert not inside(f"{hour:02d}:01-{hour:02d}:00", noon_utc)
