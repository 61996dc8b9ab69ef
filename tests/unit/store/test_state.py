"""The fold of journals: what lines say of attempts and of the sweep, whatever their order and damage."""

import json
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import journals, written
from ultrabench.errors import SweepFolderError
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import (
    NAMES,
    Adopted,
    AllocationEnded,
    AllocationPlanned,
    AllocationStarted,
    Cancel,
    Claimed,
    Failed,
    Launched,
    LeadingAgent,
    Pause,
    Phase,
    Preflight,
    Result,
    Start,
    Started,
    Submitted,
    Submitting,
    decode,
    encode,
)  # fmt: skip
from ultrabench.store.journal import JournalReader, read_journal
from ultrabench.store.state import Fold, final_attempts, fold

KEY = AttemptKey("aaaa", 0, 0)
NAME = KEY._asdict()


def ended(status, source="agent", name=NAME):
    kind, times = (Result, (0.1,)) if status == "ok" else (Failed, ())
    return kind(**name, source=source, result=RunResult(status=Status(status), step_times_s=times))


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
    again = read(map(text, parts.values()))
    assert sorted(again, key=str) == sorted(lines, key=str)
    again += [random.choice(lines) for _ in lines]
    random.shuffle(again)
    assert fold(again) == state
    while again:
        growing.add([again.pop() for _ in range(random.randint(1, len(again)))])
    assert growing.state == state == growing.add(lines)


@given(files=journals(), data=st.data())
def test_losing_the_ends_of_files_never_invents_a_result(files, data):
    told = defaultdict(set)
    for line in (line for file in files for line in file):
        if isinstance(line.event, Result):
            told[line.event.key].add(line.event.result.status)
    cut_files = [f[: data.draw(st.integers(0, len(f)))] for f in map(text, files)]
    full, cut = fold(line for file in files for line in file), fold(read(cut_files))
    assert set(cut.attempts) <= set(full.attempts)
    for key, attempt in cut.attempts.items():
        assert attempt.result is None or attempt.result.status in told[key]
        if attempt.result is not None and attempt.result.status == Status.OK:
            assert full.attempts[key].result.status == Status.OK


@given(files=journals(most_writers=1), data=st.data())
def test_a_torn_last_line_equals_the_journal_without_it(files, data):
    *whole, last = files[0] or [written(Cancel(generation=1))]
    line, warnings = encode(last), []
    torn = line[: data.draw(st.integers(0, len(line) - 1))]
    assert fold(read([text(whole) + torn], warnings.append)) == fold(whole)
    assert warnings == []


def test_a_torn_last_line_is_read_once_it_is_whole(tmp_path):
    line, reader = encode(written(Cancel(generation=1))), JournalReader(tmp_path)
    for content, events in ((line[:20], []), (line, [Cancel(generation=1)]), (line, [])):
        (tmp_path / "w.jsonl").write_bytes(content)
        assert [found.event for found in reader.poll()] == events


JOB = Start(job_id="57_0", restart=1)
RUN = Claimed(**NAME, allocation="n1", job=JOB, spec={"nodes": 1}, predicted={"x": 1})
EVERY_EVENT = [
    RUN, Started(**NAME, allocation="n1", scratch="/a"), Phase(**NAME, name="init", at=1.0),
    ended("crash"), ended("ok"),
    AllocationPlanned(allocation="n1", nodes=1, limit_s=1.0, tasks=(KEY,), control="aaaa", by={"user": "ann"}),
    Submitting(allocation="n1", token="t"), Submitted(allocation="n1", job={"pid": 1}),
    Adopted(allocation="n1", job={"pid": 1}), Preflight(allocation="n1", found={"probe": {}}),
    AllocationStarted(allocation="n1", agent=LeadingAgent(host="gpu01", job=JOB)),
    AllocationEnded(allocation="n1", reason="all tasks done", job=JOB, elapsed_s=1.0, held_s=3.0),
    Launched(generation=1, config={}, retry=(KEY,)), Pause(generation=1), Cancel(generation=1),
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
    values = to_dict(event) | json.loads(encode(line))  # with all fields, which earlier versions wrote
    assert decode(json.dumps(values).encode()).event == line.event
    damaged = [{k: v for k, v in values.items() if k != field} for field in values]
    damaged += [values | {field: junk} for field in values.keys() - {"v"} for junk in JUNK]
    damaged += [values | {"v": junk} for junk in (None, "x", [], {})]
    for each in damaged:
        line = json.dumps(each).encode() + b"\n"
        state = fold(read([line + line, text([written(GOOD)])]))
        assert final_attempts(state)["good", 0].result.status == Status.OK
        assert [str(key) for key in state.attempts if key.run_id == "good"] == ["good.0.0"]
        for held in state.allocations.values():
            assert isinstance(held.ended, str | None)
            assert isinstance(held.held_s, float | int)
            assert all(isinstance(node, str) for end in held.ends.values() for node in end.avoid)


@pytest.mark.parametrize("corrupt", [
    b"{", b"\x00\xff\xfe", b"null", b"7", b'"text"', b"[]", b"{}", b'{"v": "one"}', b'{"v": 1}',
    b'{"v":2,"writer":"w","seq":Infinity,"time":0,"event":"cancel","generation":1}',
    b'{"v":1e999,"writer":"w","seq":0,"time":0,"event":"cancel","generation":1}',
    b'{"v":2,"writer":"w","seq":0,"time":0,"event":"cancel"}', b"[" * 100_000 + b"]" * 100_000,
    b'{"v":2,"writer":"w","seq":0,"time":0,"event":"cancel","generation":1,"more":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"v":2,"writer":"w","seq":0,"time":0,"event":"allocation_ended","allocation":"n1","reason":"x","held_s":-1}',
])  # fmt: skip
def test_a_corrupt_line_is_skipped_with_a_warning(corrupt):
    before, after = written(Cancel(generation=1)), written(ended("ok"), seq=1)
    warnings = []
    assert read([text([before]) + corrupt + b"\n" + text([after])], warnings.append) == [before, after]
    assert len(warnings) == 1
    assert "0.jsonl:2: skipped a corrupt line (" in warnings[0]


def test_what_later_versions_write():
    told = {"v": 2, "writer": "w", "seq": 0, "time": 0.0, "event": "cancel", "generation": 1}
    more = [told | {"because": {"of": "rain"}}, told | {"event": "defragmented", "level": 3}]
    warnings = []
    found = read(["".join(json.dumps(e) + "\n" for e in more).encode()], warnings.append)
    assert ([line.event for line in found], warnings) == ([Cancel(generation=1)], [])
    with pytest.raises(SweepFolderError, match=r"0\.jsonl has schema 3; .* up to 2: upgrade it"):
        read([json.dumps(told | {"v": 3}).encode() + b"\n"])


@pytest.mark.parametrize(
    ("stronger", "weaker"),
    [
        (("ok", "agent"), ("crash", "agent")), (("ok", "agent"), ("node_fail", "slurm")),
        (("ok", "agent"), ("lost", "launcher")), (("crash", "agent"), ("node_fail", "slurm")),
        (("crash", "agent"), ("lost", "launcher")), (("node_fail", "slurm"), ("lost", "launcher")),
        (("hang", "agent"), ("timeout", "somebody")),
    ],
)  # fmt: skip
def test_who_is_believed(stronger, weaker):
    """Whoever writes first, and whatever the clocks say."""
    for events in ([ended(*stronger), ended(*weaker)], [ended(*weaker), ended(*stronger)]):
        for times in ((1.0, 9e9), (9e9, 1.0)):
            lines = [
                written(e, writer=f"w{n}", time=t) for n, (e, t) in enumerate(zip(events, times, strict=True))
            ]
            assert fold(lines).attempts[KEY].result.status == stronger[0]


def config(generation, **values):
    return Launched(generation=generation, config={}, **values)


@pytest.mark.parametrize(
    ("config_at", "cancel_at", "cancelled"), [(1, 2, True), (2, 1, False), (5, 4, False), (3, 3, True)]
)
def test_a_later_launch_lifts_a_cancel_an_earlier_does_not(config_at, cancel_at, cancelled):
    state = folded(Cancel(generation=cancel_at), config(config_at))
    assert (state.cancelled, state.generation) == (cancelled, max(config_at, cancel_at))


def test_a_launch_does_not_lift_a_pause():
    assert folded(Pause(generation=1), config(2)).paused
    assert not folded(Pause(generation=1), config(1), Pause(generation=2, on=False)).paused
    assert folded(Pause(generation=1, on=False), Pause(generation=1)).paused


def test_the_latest_launch_counts_and_every_retry_is_remembered():
    other = AttemptKey("bbbb", 1, 2)
    state = folded(config(3, retry=(other,)), config(1, retry=(KEY,)), config(2))
    assert (state.launched.generation, state.retried) == (3, {KEY, other})


def test_what_an_attempt_says_of_itself():
    said = (
        RUN, Started(**NAME, allocation="n1", scratch="/node"), *(
            Phase(**NAME, name=n) for n in ("warmup", "measure")
        ),
    )  # fmt: skip
    attempt = fold(written(event, seq=n, time=7.0) for n, event in enumerate(said)).attempts[KEY]
    assert (attempt.allocation, attempt.spec, attempt.predicted) == ("n1", {"nodes": 1}, {"x": 1})
    assert (attempt.started, attempt.scratch, attempt.phase) == (True, "/node", "measure")
    assert (attempt.job, attempt.time, attempt.result) == (JOB, 7.0, None)


def test_the_ok_attempt_stands_for_its_repeat():
    events = [ended(s, name={**NAME, "attempt": n}) for n, s in enumerate(("hang", "ok", "crash"))]
    assert final_attempts(folded(*events))["aaaa", 0].key.attempt == 1
    assert final_attempts(folded(events[0], events[2]))["aaaa", 0].key.attempt == 2
