"""The fold of journals: what lines say of attempts, allocations and the sweep, whatever their order and damage."""

import json
import operator
import tempfile
from collections import defaultdict
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import journals, written
from ultrabench.errors import SweepFolderError
from ultrabench.record import raw_json, to_dict
from ultrabench.result import STOPPED, RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store import events
from ultrabench.store.events import NAMES, Cancel, Pause, Start, decode, encode, with_checksum
from ultrabench.store.journal import JournalReader, read_journal
from ultrabench.store.state import Fold, final_attempts, fold

KEY = AttemptKey("aaaa", 0, 0)
NAME = KEY._asdict()


def ended(status, source="agent", name=NAME):
    kind, times = (events.Result, (0.1,)) if status == "ok" else (events.Failed, ())
    cause = STOPPED if status == "cancelled" else None
    result = RunResult(status=Status(status), step_times_s=times, cause=cause)
    return kind(**name, source=source, result=result)


def folded(*events):
    """The state after these events, each the first line of a writer of its own."""
    return fold(written(event, writer=f"w{n}") for n, event in enumerate(events))


def read(files, warn=lambda message: None):
    """The lines of files given as bytes, read by a real JournalReader."""
    with tempfile.TemporaryDirectory() as folder:
        for n, data in enumerate(files):
            (Path(folder) / f"{n}.jsonl").write_bytes(data)
        return list(read_journal(Path(folder), warn))


def text(lines):
    return b"".join(map(encode, lines))


@given(files=journals(), random=st.randoms(use_true_random=False))
def test_order_repetition_and_files_do_not_matter(files, random):
    lines = [line for file in files for line in file]
    state, parts, growing = fold(lines), defaultdict(list), Fold()
    for line in lines:
        parts[random.randrange(3)].append(line)
    repeated = read(map(text, parts.values()))
    by_place = operator.attrgetter("writer", "seq", "checksum")
    assert sorted(repeated, key=by_place) == sorted(lines, key=by_place)
    repeated += [random.choice(lines) for _ in lines]
    random.shuffle(repeated)
    assert fold(repeated) == state
    while repeated:
        growing.add([repeated.pop() for _ in range(random.randint(1, len(repeated)))])
    assert growing.state == state == growing.add(lines)


@given(files=journals(), data=st.data())
def test_losing_the_ends_of_files_invents_nothing(files, data):
    """A launcher that has read less knows no result, end, start or job that it would not know later."""
    lines, statuses = [line for file in files for line in file], defaultdict(set)
    for line in lines:
        if isinstance(line.event, events.Result):
            statuses[line.event.key].add(line.event.result.status)
    cut_files = [f[: data.draw(st.integers(0, len(f)))] for f in map(text, files)]
    full, cut = fold(lines), fold(read(cut_files))
    assert set(cut.attempts) <= set(full.attempts)
    for key, attempt in cut.attempts.items():
        assert attempt.result is None or attempt.result.status in statuses[key]
        assert attempt.ok is None or full.attempts[key].ok is not None
    for name, less in cut.allocations.items():
        whole = full.allocations[name]
        assert less.start <= whole.start
        assert set(less.ends) <= set(whole.ends)
        assert set(less.agents) <= set(whole.agents)
        assert (less.job is None) or (whole.job is not None)
        assert bool(less.preflight) <= bool(whole.preflight)


@given(files=journals(most_writers=1), data=st.data())
def test_a_torn_last_line_is_read_once_it_is_whole(files, data):
    *whole, last = files[0] or [written(Cancel(generation=1))]
    line, warnings = encode(last), []
    torn = line[: data.draw(st.integers(0, len(line) - 1))]
    with tempfile.TemporaryDirectory() as folder:
        reader = JournalReader(Path(folder), warnings.append)
        for content, new in ((text(whole) + torn, whole), (text(whole) + line, [last])):
            (Path(folder) / "w.jsonl").write_bytes(content)
            assert [*reader.poll()] == new
        assert [*reader.poll()] == warnings == []


JOB = Start(job_id="57_0", restart=1)
RUN = events.Claimed(**NAME, allocation="n1", job=JOB, spec=raw_json({"nodes": 1}), predicted={"x": 1})
EVERY_EVENT = [
    RUN, events.Started(**NAME, allocation="n1", scratch="/a"), events.Phase(**NAME, name="init", at=1.0),
    ended("crash"), ended("ok"),
    events.Reread(**NAME, generation=1, patterns={"step_line": "x"}, result=RunResult(status=Status.OK)),
    events.AllocationPlanned(allocation="n1", nodes=1, limit_s=1.0, tasks=(KEY,), control="aaaa", by={"user": "ann"}),
    events.Submitting(allocation="n1", token="t"), events.Submitted(allocation="n1", job={"pid": 1}),
    events.Adopted(allocation="n1", job={"pid": 1}), events.Preflight(allocation="n1", found={"probe": {}}),
    events.AllocationStarted(allocation="n1", agent=events.LeadingAgent(host="gpu01", job=JOB)),
    events.AllocationEnded(allocation="n1", reason="all tasks done", job=JOB, elapsed_s=1.0, held_s=3.0),
    events.Launched(generation=1, config={}, retry=(KEY,)), Pause(generation=1), Cancel(generation=1),
    events.Copied(copy_of="c0ffee00", allocations=("n1", "n2")),
]  # fmt: skip
JUNK = [
    None, "x", -1, 0.5, [], [1], [[1]], {}, {"status": "fine"}, True, "7" * 40, float("nan"), float("inf"),
]  # fmt: skip
GOOD = ended("ok", name={"run_id": "good", "repeat": 0, "attempt": 0})


def test_every_kind_of_event_is_damaged_below():
    assert {type(event) for event in EVERY_EVENT} == set(NAMES)


@pytest.mark.parametrize("event", EVERY_EVENT, ids=lambda e: NAMES[type(e)])
def test_a_damaged_field_breaks_nothing(event):
    line = written(event)
    with_variant_env = replace(event, spec={}) if NAMES[type(event)] == "claimed" else event
    values = to_dict(with_variant_env) | json.loads(encode(line))
    del values["crc"]
    assert encode(written(decode(with_checksum(json.dumps(values).encode()).strip()).event)) == encode(line)
    damaged = [{k: v for k, v in values.items() if k != field} for field in values]
    damaged += [values | {field: junk} for field in values.keys() - {"v"} for junk in JUNK]
    damaged += [values | {"v": junk} for junk in (None, "x", [], {})]
    for variant in damaged:
        line = with_checksum(json.dumps(variant).encode())
        state = fold(read([line + line, text([written(GOOD)])]))
        assert final_attempts(state)["good", 0].result.status == Status.OK
        assert [str(key) for key in state.attempts if key.run_id == "good"] == ["good.0.0"]
        for allocation in state.allocations.values():
            assert isinstance(allocation.ended, str | None)
            assert isinstance(allocation.held_s, float | int)
            assert all(isinstance(node, str) for end in allocation.ends.values() for node in end.avoid)


@pytest.mark.parametrize("corrupt", [
    b"{", b"\x00\xff\xfe", b"null", b"7", b'"text"', b"[]", b"{}", b'{"v": "one"}', b'{"v": 1}',
    b'{"v":2,"writer":"w","seq":Infinity,"time":0,"event":"cancel","generation":1}',
    b'{"v":1e999,"writer":"w","seq":0,"time":0,"event":"cancel","generation":1}',
    b'{"v":2,"writer":"w","seq":0,"time":0,"event":"cancel"}', b"[" * 100_000 + b"]" * 100_000,
    b'{"v":2,"writer":"w","seq":0,"time":0,"event":"cancel","generation":1,"more":'
    + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"v":2,"writer":"w","seq":0,"time":0,"event":"allocation_ended","allocation":"n1","reason":"x","held_s":-1}',
])  # fmt: skip
def test_a_corrupt_line_is_skipped_with_a_warning(corrupt):
    before, after = written(Cancel(generation=1)), written(ended("ok"), seq=1)
    line, warnings = with_checksum(corrupt) if corrupt.startswith(b'{"v":') else corrupt + b"\n", []
    assert read([text([before]) + line + text([after])], warnings.append) == [before, after]
    assert len(warnings) == 1
    assert "0.jsonl:2: skipped a corrupt line (" in warnings[0]


def test_what_later_versions_write():
    cancel = {"v": 2, "writer": "w", "seq": 0, "time": 0.0, "event": "cancel", "generation": 1}
    newer = [cancel | {"because": {"of": "rain"}}, cancel | {"event": "defragmented", "level": 3}]
    warnings = []
    lines = read([b"".join(with_checksum(json.dumps(e).encode()) for e in newer)], warnings.append)
    assert ([line.event for line in lines], warnings) == ([Cancel(generation=1)], [])
    with pytest.raises(SweepFolderError, match=r"0\.jsonl has schema 3; .* up to 2: upgrade ultrabench"):
        read([json.dumps(cancel | {"v": 3}).encode() + b"\n"])


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    [
        (("ok", "agent"), ("crash", "agent")), (("ok", "agent"), ("node_fail", "slurm")),
        (("ok", "agent"), ("lost", "launcher")), (("crash", "agent"), ("node_fail", "slurm")),
        (("crash", "agent"), ("lost", "launcher")), (("node_fail", "slurm"), ("lost", "launcher")),
        (("hang", "agent"), ("timeout", "somebody")), (("node_fail", "slurm"), ("cancelled", "agent")),
        (("cancelled", "agent"), ("lost", "launcher")),
    ],
)  # fmt: skip
def test_who_is_believed(stronger, weaker):
    """Whoever writes first, and whatever the clocks say."""
    for results in ((stronger, weaker), (weaker, stronger)):
        lines = [written(ended(*words), writer=f"w{n}", time=float(n)) for n, words in enumerate(results)]
        assert fold(lines).attempts[KEY].result.status == stronger[0]


def test_what_the_latest_launch_has_read_again_counts():
    reported, first, second = ended("ok"), *(
        events.Reread(**NAME, generation=n, patterns={"step_line": str(n)},
            result=RunResult(status=Status.INVALID, reason=str(n)))
        for n in (1, 2)
    )  # fmt: skip
    for history in permutations((reported, first, second)):
        attempt = folded(*history).attempts[KEY]
        assert (attempt.result.reason, attempt.reread.patterns) == ("2", {"step_line": "2"})
        assert attempt.reported.status == Status.OK


def launched(generation, *retry):
    return events.Launched(generation=generation, config={}, retry=retry)


RESUMED = Pause(generation=2, on=False)


@pytest.mark.parametrize(("history", "paused", "cancelled"), [
    ((launched(1), Cancel(generation=2)), False, True),
    ((launched(2), Cancel(generation=1)), False, False),
    ((launched(3), Cancel(generation=3)), False, True),
    ((Pause(generation=1), launched(2)), True, False),
    ((Pause(generation=1), launched(1), RESUMED), False, False),
    ((Pause(generation=2), RESUMED), True, False),
])  # fmt: skip
def test_a_later_launch_lifts_a_cancel_and_no_pause(history, paused, cancelled):
    state = folded(*history)
    assert (state.paused, state.cancelled) == (paused, cancelled)
    assert state.generation == max(event.generation for event in history)


def test_the_latest_launch_counts_and_every_retry_is_remembered():
    other = AttemptKey("bbbb", 1, 2)
    state = folded(launched(3, other), launched(1, KEY), launched(2))
    assert (state.launched.generation, state.retried) == (3, {KEY, other})


def test_what_an_attempt_says_of_itself():
    phases = (events.Phase(**NAME, name=name) for name in ("warmup", "measure"))
    history = (RUN, events.Started(**NAME, allocation="n1", scratch="/node"), *phases)
    attempt = fold(written(event, seq=n, time=7.0) for n, event in enumerate(history)).attempts[KEY]
    assert (attempt.allocation, attempt.spec_as(dict), attempt.predicted) == ("n1", {"nodes": 1}, {"x": 1})
    assert (attempt.started, attempt.scratch, attempt.phase) == (True, "/node", "measure")
    assert (attempt.job, attempt.time, attempt.result) == (JOB, 7.0, None)


def test_the_ok_attempt_stands_for_its_repeat():
    hang, ok, crash = (ended(s, name={**NAME, "attempt": n}) for n, s in enumerate(("hang", "ok", "crash")))
    assert final_attempts(folded(hang, ok, crash))["aaaa", 0].key.attempt == 1
    assert final_attempts(folded(hang, crash))["aaaa", 0].key.attempt == 2


# allocations


def start(restart, job_id="57_0"):
    agent = events.LeadingAgent(host="gpu01", job=Start(job_id=job_id, restart=restart))
    return events.AllocationStarted(allocation="n1", agent=agent)


def end(restart, reason="all tasks done", elapsed_s=None, *, source="agent", job_id="57_0", **fields):
    job = Start(job_id=job_id, restart=restart)
    return events.AllocationEnded(
        allocation="n1", source=source, job=job, reason=reason, elapsed_s=elapsed_s, **fields
    )


def gone(restart, reason, elapsed_s=None, **fields):
    return end(restart, reason, elapsed_s, source="launcher", **fields)


def held(restart, held_s):
    return end(restart, "its nodes are free", source="slurm", held_s=held_s)


def planned(limit_s=600.0, **fields):
    return events.AllocationPlanned(allocation="n1", nodes=1, limit_s=limit_s, tasks=(KEY,), **fields)


def state_of(*history):
    """The allocation of these events, the same in whatever order they are read and whoever wrote them."""
    orders = [*permutations(history)] if len(history) < 6 else [history, history[::-1]]
    states = [
        fold(written(e, writer=f"w{n}") for n, e in enumerate(order)).allocations["n1"] for order in orders
    ]
    assert all(state == states[0] for state in states)
    return states[0]


ENDS = {
    "a start that has not ended lives": ([start(0)], None),
    "what was planned may live": ([planned()], None),
    "a start that is over": ([start(0), gone(0, "preempted")], "preempted"),
    "a requeued job lives again": ([start(0), gone(0, "preempted"), start(1)], None),
    "and ends again": ([start(0), gone(0, "preempted"), start(1), end(1, "done")], "done"),
    "a late word on an earlier start": ([start(1), gone(0, "vanished")], None),
    "restarts are numbers, not words": ([start(2), start(10), end(2)], None),
    # It was submitted twice, since an answer got lost: the other job runs nothing, and ends when it likes.
    "a second job": ([start(0), end(0, job_id="61_0")], None),
    "a second job that others report": ([start(0), gone(0, "CANCELLED", job_id="61_0")], None),
    "the first of two jobs": ([start(0), gone(0, "CANCELLED", job_id="61_0"), end(0, "done")], "done"),
    "restarts of a second job are its own": ([start(0), end(1, job_id="61_0")], None),
    "local processes have no job": ([start(1), end(1, "done", job_id="")], "done"),
    "of an earlier start without a job": ([start(1), end(0, job_id="")], None),
    "its own end comes first": ([start(0), end(0, "another", job_id=""), end(0, "done")], "done"),
    "before agents have started any end ends it": ([planned(), gone(0, "unknown", job_id="")], "unknown"),
    "and agents are believed": (
        [planned(), gone(0, "unknown", job_id=""), end(3, "no time left")],
        "no time left",
    ),
    "agents are believed about their end": ([end(0, "no time left"), gone(0, "unknown")], "no time left"),
    "the batch system is not asked for a reason": ([start(0), end(0, "done"), held(0, 1.0)], "done"),
}


@pytest.mark.parametrize(("history", "reason"), ENDS.values(), ids=ENDS)
def test_the_end_of_the_latest_start_of_its_job_ends_an_allocation(history, reason):
    assert state_of(*history).ended == reason


UNTIMED = gone(0, "vanished")


@pytest.mark.parametrize(("history", "held_s", "timed"), [
    ([start(0)], 0.0, False),
    ([start(0), gone(0, "preempted", 10.0), start(1), end(1, "done", 5.0)], 15.0, False),
    ([end(0, "no time left", 7.0), gone(0, "unknown")], 7.0, False),
    # The batch system counts the setup before the agents and the clean-up after them, and launchers may have
    # looked before the last node was free, so the longest time counts.
    ([start(0), end(0, "done", 100.0), held(0, 120.0), held(0, 130.0), held(0, None)], 130.0, True),
    ([start(0), *(held(0, s) for s in (120.0, 130.0, 90.0)), end(0, "done", 100.0), held(1, 5.0)], 135.0, True),
    # Suspended agents do not notice that their nodes run other jobs; Slurm does not count that time.
    ([start(0), end(0, "done", 100.0), held(0, 40.0)], 40.0, True),
    # A budget must hold: what nodes were held for unseen counts as all that it may have been.
    ([planned(), UNTIMED], 0.0, False),
    ([planned(), gone(0, "vanished", 0.0)], 0.0, False),
    ([planned(), start(0), UNTIMED], 600.0, False),
    ([planned(), start(0), gone(0, "vanished", 0.0)], 0.0, False),
    ([planned(), start(0), gone(0, "vanished", 12.5)], 12.5, False),
    ([planned(), start(0), UNTIMED, held(0, 45.0)], 45.0, True),
])  # fmt: skip
def test_nodes_were_held_as_long_as_the_batch_system_or_else_the_agents_say(history, held_s, timed):
    """For an end that nobody timed, it is the limit once agents had started."""
    state = state_of(*history)
    assert (state.held_s, state.timed) == (held_s, timed)


def test_what_an_allocation_says_of_itself():
    by = {"user": "ann", "cluster": "big", "host": "login1"}
    submitted = events.Submitted(allocation="n1", job={"pid": 7})
    history = [events.Submitting(allocation="n1"), submitted, planned(60.0, by=by)]
    state = fold(written(event, seq=n) for n, event in enumerate(history)).allocations["n1"]
    assert (state.nodes, state.limit_s, state.tasks, state.by) == (1, 60.0, (KEY,), by)
    assert (state.submission, state.job, state.ended, state.control) == (("w", 0), {"pid": 7}, None, None)
    assert (state.submitting_at, state_of(planned()).submitting_at) == (written(submitted).time, None)
    assert state_of(planned(control="aaaa")).control == "aaaa"
    restarted = state_of(start(0), start(1), end(0), end(1, avoid=("gpu01",)), gone(1, "vanished"))
    assert (restarted.start, len(restarted.agents)) == (Start(job_id="57_0", restart=1), 2)
    assert (set(restarted.ends), restarted.end.source) == ({Start(job_id="57_0"), restarted.start}, "agent")
    assert restarted.end.avoid == ("gpu01",)


def test_the_preflight_of_the_latest_start_counts():
    first, second = (
        events.Preflight(allocation="n1", restart=n, found={"nodes": [{"host": f"gpu{n}"}]}) for n in range(2)
    )
    assert state_of(first, second).preflight == {"nodes": [{"host": "gpu1"}]}
