import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import journals, lines_of
from ultrabench.errors import SweepFolderError
from ultrabench.record import canonical_json
from ultrabench.result import Status
from ultrabench.run import AttemptKey
from ultrabench.store import state as fold_of_lines
from ultrabench.store.events import Cancel, LeadingAgent
from ultrabench.store.journal import JournalReader, read_journal
from ultrabench.store.state import final_attempts

KEY = AttemptKey("aaaa", 0, 0)
NAME = {"run_id": "aaaa", "repeat": 0, "attempt": 0}


def event(kind, *, writer="w", seq=0, **values):
    return {"v": 1, "writer": writer, "seq": seq, "time": 0.0, "event": kind, **values}


def ended(status, source="agent", *, writer="w", seq=0, name=NAME, **more):
    kind = "result" if status == "ok" else "failed"
    return event(kind, writer=writer, seq=seq, **name, source=source, result={"status": status, **more})


def fold(events):
    """The state after events given as JSON objects or as lines that were read."""
    return fold_of_lines.fold(
        line for e in events for line in (lines_of([e]) if isinstance(e, dict) else [e])
    )


def lines(events):
    return b"".join(canonical_json(e).encode() + b"\n" for e in events)


def read(files, warn=lambda message: None):
    """The events of files given as bytes, read by a real JournalReader."""
    with tempfile.TemporaryDirectory() as folder:
        for n, data in enumerate(files):
            (Path(folder) / f"{n}.jsonl").write_bytes(data)
        return list(read_journal(Path(folder), warn))


@given(files=journals(), random=st.randoms(use_true_random=False))
def test_order_does_not_matter(files, random):
    events = [e for file in files for e in file]
    state = fold(events)
    random.shuffle(events)
    assert fold(events) == state


@given(files=journals(), data=st.data())
def test_saying_it_twice_does_not_matter(files, data):
    events = [e for file in files for e in file]
    again = data.draw(st.lists(st.sampled_from(events))) if events else []
    assert fold([*again, *events, *again]) == fold(events)


@given(files=journals(), random=st.randoms(use_true_random=False))
def test_the_split_over_files_does_not_matter(files, random):
    events = [e for file in files for e in file]
    parts = [[], [], []]
    for e in events:
        random.choice(parts).append(e)
    assert fold(read([lines(part) for part in parts])) == fold(events)


@given(files=journals())
def test_events_survive_their_files(files):
    events = [e for file in files for e in file]
    found = read([lines(file) for file in files])
    assert sorted(found, key=str) == sorted(lines_of(events), key=str)


@given(files=journals(), data=st.data())
def test_losing_the_ends_of_files_never_invents_a_result(files, data):
    events = [e for file in files for e in file]
    said = {}
    for e in events:
        if "result" in e:
            said.setdefault(AttemptKey(e["run_id"], e["repeat"], e["attempt"]), []).append(e)
    cut_files = [lines(file) for file in files]
    cut_files = [f[: data.draw(st.integers(0, len(f)))] for f in cut_files]
    full, cut = fold(events), fold(read(cut_files))
    assert set(cut.attempts) <= set(full.attempts)
    for key, attempt in cut.attempts.items():
        if attempt.result is None:
            continue
        assert attempt.result.status in [e["result"]["status"] for e in said[key]]
        if attempt.result.status == Status.OK:
            assert full.attempts[key].result.status == Status.OK


@given(files=journals(most_writers=1), data=st.data())
def test_a_torn_last_line_equals_the_journal_without_it(files, data):
    *whole, last = files[0] or [event("cancel", generation=1)]
    line = lines([last])
    torn = line[: data.draw(st.integers(0, len(line) - 1))]
    warnings = []
    assert fold(read([lines(whole) + torn], warnings.append)) == fold(whole)
    assert warnings == []


def test_a_torn_last_line_is_read_once_it_is_whole(tmp_path):
    line = lines([event("cancel", generation=1)])
    path = tmp_path / "w.jsonl"
    reader = JournalReader(tmp_path)
    path.write_bytes(line[:20])
    assert list(reader.poll()) == []
    path.write_bytes(line)
    assert [type(e.event) for e in reader.poll()] == [Cancel]
    assert list(reader.poll()) == []


@pytest.mark.parametrize(
    "corrupt", [b"{", b"\x00\xff\xfe", b"null", b"7", b'"text"', b"[]", b"{}", b'{"v": "one"}', b'{"v": 1}']
)
def test_a_corrupt_line_is_skipped_with_a_warning(corrupt):
    before, after = event("cancel", seq=0, generation=1), ended("ok", seq=1)
    warnings = []
    found = read([lines([before]) + corrupt + b"\n" + lines([after])], warnings.append)
    assert [line.seq for line in found] == [0, 1]
    assert len(warnings) == 1
    assert warnings[0].startswith("0.jsonl: skipped a corrupt line")


EACH_EVENT = [
    event("claimed", **NAME, allocation="n1", spec={"nodes": 1}, predicted={}),
    event("started", **NAME, allocation="n1", scratch="/a"),
    event("phase", **NAME, name="init"),
    ended("crash", reason="said"),
    ended("ok", step_times_s=[0.1]),
    event("allocation_planned", allocation="n1", nodes=1, limit_s=1.0, tasks=[list(KEY)]),
    event("submitting", allocation="n1", token="t"),
    event("submitted", allocation="n1", job={"pid": 1}),
    event("adopted", allocation="n1", job={"pid": 1}),
    event("allocation_started", allocation="n1", agent={"node": 0}),
    event("allocation_ended", allocation="n1", reason="all tasks done"),
    event("config", generation=1, config={}, retry=[list(KEY)]),
    event("pause", generation=1, on=True),
    event("cancel", generation=1),
]
JUNK = [None, "x", -1, 0.5, [], [1], [[1]], {}, {"status": "fine"}, True, "7" * 40]
GOOD = ended("ok", writer="good", name={"run_id": "good", "repeat": 0, "attempt": 0})


def breaks_nothing(damaged):
    """A damaged event, alone and beside a good one, in a file."""
    state = fold(read([lines([damaged]), lines([GOOD])]))
    finals = final_attempts(state)
    assert finals["good", 0].result.status == Status.OK
    assert [str(key) for key in state.attempts if key.run_id == "good"] == ["good.0.0"]


@pytest.mark.parametrize("whole", EACH_EVENT, ids=lambda e: e["event"])
def test_an_event_that_lacks_a_field_breaks_nothing(whole):
    for field in whole:
        breaks_nothing({k: v for k, v in whole.items() if k != field})


@pytest.mark.parametrize("whole", EACH_EVENT, ids=lambda e: e["event"])
def test_an_event_with_nonsense_in_a_field_breaks_nothing(whole):
    for field in whole:
        for junk in JUNK if field != "v" else [None, "x", [], {}]:
            breaks_nothing({**whole, field: junk})


@pytest.mark.parametrize("lacking", ["run_id", "repeat", "attempt", "result"])
def test_a_damaged_event_leaves_the_others_alone(lacking):
    damaged = ended("ok", name={"run_id": "bbbb", "repeat": 0, "attempt": 0}, seq=1)
    del damaged[lacking]
    state = fold([damaged, ended("ok")])
    assert set(state.attempts) == {KEY}
    assert state.attempts[KEY].result.status == Status.OK


def test_a_newer_schema_is_refused():
    with pytest.raises(SweepFolderError, match=r"0\.jsonl has schema 3; .* up to 2: upgrade it"):
        read([lines([{**event("cancel", generation=1), "v": 3}])])


def test_events_and_fields_of_later_versions_are_ignored():
    later = event("cancel", generation=1, because={"of": "rain"})
    found = read([lines([later, event("defragmented", seq=1, level=3)])])
    assert fold(found) == fold([event("cancel", generation=1)])


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("stronger", "weaker"),
    [
        (("ok", "agent"), ("crash", "agent")),
        (("ok", "agent"), ("node_fail", "slurm")),
        (("ok", "agent"), ("lost", "launcher")),
        (("crash", "agent"), ("node_fail", "slurm")),
        (("crash", "agent"), ("lost", "launcher")),
        (("node_fail", "slurm"), ("lost", "launcher")),
        (("hang", "agent"), ("timeout", "somebody")),
    ],
)
def test_who_is_believed(stronger, weaker, first):
    events = [ended(*stronger, writer=f"w{first}"), ended(*weaker, writer=f"w{1 - first}")]
    assert fold(events).attempts[KEY].result.status == stronger[0]
    assert fold(events[::-1]).attempts[KEY].result.status == stronger[0]


def test_time_stamps_decide_nothing():
    events = [ended("ok"), ended("lost", "launcher", writer="x")]
    early = [{**events[0], "time": 1.0}, {**events[1], "time": 9e9}]
    late = [{**events[0], "time": 9e9}, {**events[1], "time": 1.0}]
    assert fold(early).attempts[KEY].result == fold(late).attempts[KEY].result


def config(generation, **values):
    return event("config", writer=f"c{generation}", generation=generation, config={}, **values)


@pytest.mark.parametrize(
    ("config_at", "cancel_at", "cancelled"), [(1, 2, True), (2, 1, False), (5, 4, False)]
)
def test_a_later_launch_lifts_a_cancel_an_earlier_does_not(config_at, cancel_at, cancelled):
    state = fold([event("cancel", generation=cancel_at), config(config_at)])
    assert state.cancelled is cancelled
    assert state.generation == max(config_at, cancel_at)


def test_a_launch_does_not_lift_a_pause():
    pause, resume = (event("pause", seq=n, generation=n + 1, on=n == 0) for n in range(2))
    assert fold([pause, config(2)]).paused is True
    assert fold([pause, config(1), resume]).paused is False


def test_the_latest_config_counts():
    state = fold([config(3, reuse="c"), config(1, reuse="a"), config(2, reuse="b")])
    assert state.launched.reuse == "c"


def test_every_retry_is_remembered():
    other = AttemptKey("bbbb", 1, 2)
    state = fold([config(1, retry=[list(KEY)]), config(2), config(3, retry=[list(other)])])
    assert state.retried == {KEY, other}


def test_what_an_attempt_says_of_itself():
    state = fold(
        [
            event("claimed", **NAME, allocation="n1", spec={"nodes": 1}, predicted={"x": 1}),
            event("started", seq=1, **NAME, allocation="n1", scratch="/node/local"),
            event("phase", seq=2, **NAME, name="warmup"),
            event("phase", seq=3, **NAME, name="measure"),
        ]
    )
    attempt = state.attempts[KEY]
    assert (attempt.allocation, attempt.spec, attempt.predicted) == ("n1", {"nodes": 1}, {"x": 1})
    assert (attempt.started, attempt.scratch, attempt.phase) == (True, "/node/local", "measure")
    assert attempt.result is None


def test_what_an_allocation_says_of_itself():
    agents = [{"node": n, "pid": 10 + n} for n in range(2)]
    state = fold(
        [
            event("allocation_planned", allocation="n2", nodes=2, limit_s=60, tasks=[list(KEY)]),
            event("submitting", seq=1, allocation="n2"),
            event("submitted", seq=2, allocation="n2", job={"pid": 7}),
            *(event("allocation_started", writer=f"a{n}", allocation="n2", agent=agents[n]) for n in (1, 0)),
        ]
    )
    held = state.allocations["n2"]
    assert (held.nodes, held.limit_s, held.tasks) == (2, 60.0, (KEY,))
    assert (held.submission[1], held.job, held.ended) == (1, {"pid": 7}, None)
    assert held.agents == tuple(LeadingAgent(**agent) for agent in agents)
    over = fold([event("allocation_ended", allocation="n2", reason="all tasks done")])
    assert over.allocations["n2"].ended == "all tasks done"


def test_the_ok_attempt_stands_for_its_repeat():
    def attempt(n, status):
        return ended(status, seq=n, name={**NAME, "attempt": n})

    events = [attempt(0, "hang"), attempt(1, "ok"), attempt(2, "crash")]
    assert final_attempts(fold(events))["aaaa", 0].key.attempt == 1
    assert final_attempts(fold([events[0], events[2]]))["aaaa", 0].key.attempt == 2
