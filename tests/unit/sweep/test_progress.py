import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.unit.allocations import PLAN, key_of, predicted, told
from ultrabench.cli.sweep.live import counts_line, panel
from ultrabench.cli.sweep.status import Snapshot, status_view
from ultrabench.result import Status
from ultrabench.store.events import AllocationEnded, Launched, LeadingAgent, Start
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.sweep.running.progress import gpu_hours, progress_of
from ultrabench.sweep.running.standings import measured_rates, standings_of

RUNS = PLANNED = PLAN.runs
ONE = next(r for r in RUNS if r.nodes == 1)
TWO = next(r for r in RUNS if r.nodes == 2)
GPUS = PLAN.config.hardware.gpus_per_node
ENDS = (None, *(s for s in Status if s not in (Status.SKIPPED, Status.REJECTED)))
HOUR = 3600.0


def held(nodes=1, starts_s=(HOUR,), held_s=None, **fields):
    """An allocation whose starts each ended after so many seconds."""
    end = AllocationEnded(allocation="a", reason="", source="agent", held_s=held_s)
    ends = {Start(restart=n): replace(end, elapsed_s=seconds) for n, seconds in enumerate(starts_s)}
    return AllocationState(name="a", nodes=nodes, ends=ends, **fields)


LAUNCHED = Launched(generation=1, config=PLAN.config.resolved)


def standing(*attempts, old=None):
    state = SweepState(launched=LAUNCHED, allocations={"over": held()})
    for repeat, attempt, status in attempts:
        ended = None if status in (None, "no result") else Status(status)
        where = {"allocation": "over"} if status == "no result" else {}
        told(state, ONE, ended, repeat, attempt, cause="killed" if status == "crash" else None, **where)
    return progress_of("s", PLANNED, state, "cuda", old)


@pytest.mark.parametrize(
    ("attempts", "status"),
    [
        ([], "pending"), ([(0, 0, None)], "running"), ([(0, 0, "oom"), (0, 1, "oom")], "oom"),
        ([(0, 0, "crash"), (0, 1, None)], "running"), ([(0, 0, "hang"), (0, 1, "ok")], "ok"),
        ([(0, 0, "ok"), (1, 0, "crash")], "ok"), ([(0, 0, "crash"), (1, 0, "ok"), (2, 0, None)], "ok"),
        ([(0, 0, "crash"), (3, 0, "lost")], "lost"), ([(0, 0, "crash"), (1, 0, None)], "running"),
        ([(0, 0, "cancelled")], "cancelled"), ([(0, 0, "crash"), (0, 1, "preempted")], "preempted"),
        ([(0, 0, "no result")], "lost"),
    ],
)  # fmt: skip
def test_one_ok_repeat_stands_for_a_run_else_the_latest(attempts, status):
    now = standing(*attempts)
    rest = {"pending": len(PLANNED) - 1}
    assert now.by_status == ({"pending": len(PLANNED)} if status == "pending" else {status: 1} | rest)
    assert sum(now.by_nodes[ONE.nodes].values()) == sum(r.nodes == ONE.nodes for r in PLANNED)
    assert [r.run_id for r, _ in now.running] == ([ONE.spec.run_id] if status == "running" else [])
    assert [r.run_id for r, _ in now.failures] == ([ONE.spec.run_id] if status in ("lost", "oom") else [])
    retries = {status: 1} if status in ("lost", "cancelled", "preempted") else {}  # by the next launch
    assert (now.left, now.retried_by_status) == (len(PLANNED) - (status in ("ok", "oom")), retries)
    assert [key.run_id for key in now.pause_by_key] == [ONE.run_id] * len(retries)
    assert now.attempts == len(attempts)


def test_a_failed_run_is_settled_when_no_further_attempt_follows():
    killed = [(0, n, "crash") for n in range(2)]
    assert standing(*killed[:1]).pause_by_key == {key_of(ONE): 30.0}
    assert ONE.run_id in standing(*killed).settled
    lost = [(0, n, "lost") for n in range(6)]
    assert standing(*lost).pause_by_key == {key_of(ONE, attempt=5): 0.0}, "by the next launch"
    assert ONE.run_id in standing(*lost, old=frozenset()).settled, "this launch gives it up"


def test_running_layouts_have_their_step_time_and_the_sweep_its_rate():
    state = SweepState()
    for n, run in enumerate(PLANNED[:4]):
        told(state, run, Status.OK if n < 3 else None)
        state.attempts[run.run_id, 0, 0].time = 1000.0 + 60 * n
    last = state.attempts[PLANNED[3].run_id, 0, 0]
    last.phase, last.steps, last.step_time_s = "warmup", 7, 0.25
    now = progress_of("s", PLANNED, state, "cuda")
    assert now.runs_per_hour == 60
    (running,) = now.as_json()["running"]
    assert (running["phase"], running["steps"], running["step_time_s"]) == ("warmup", 7, 0.25)
    text = "\n".join(str(part) for part in panel(now, is_active=True).renderables)
    assert "ETA" not in text  # no run has told its duration
    timed = replace(now, eta_s=556.0)
    assert ", ETA 9m16s, lately 60 runs an hour," in str(counts_line(timed, is_active=True))
    assert f"warmup, 7 steps of 0.25 s, predicted {PLANNED[3].prediction.step_time_s:.3g} s" in text
    state.attempts[PLANNED[0].run_id, 0, 0].time = state.attempts[PLANNED[1].run_id, 0, 0].time = -9000.0
    assert progress_of("s", PLANNED, state, "cuda").runs_per_hour is None, "the others began long ago"


def test_runs_no_longer_planned_do_not_count():
    state = told(SweepState(), ONE, Status.OK)
    rest = [r for r in PLANNED if r.run_id != ONE.spec.run_id]
    now = progress_of("s", rest, state, "cuda")
    assert now.by_status == {"pending": len(rest)}
    assert measured_rates(rest, state, "cuda") == {}
    assert now.eta_s is None


ATTEMPTS = st.tuples(st.sampled_from(RUNS), st.integers(0, 2), st.integers(0, 2), st.sampled_from(ENDS))


@given(ends=st.lists(ATTEMPTS, max_size=12))
def test_every_planned_run_is_counted_once(ends):
    state = SweepState()
    for run, repeat, attempt, status in ends:
        told(state, run, status, repeat, attempt, duration_s=1.0)
    now = progress_of("s", PLANNED, state, "cuda")
    assert sum(now.by_status.values()) == now.runs == len(PLANNED)
    assert sum(sum(counts.values()) for counts in now.by_nodes.values()) == len(PLANNED)
    oks = {k.run_id for k, a in state.attempts.items() if a.result and a.result.status == Status.OK}
    assert now.by_status.get("ok", 0) == len(oks)
    assert set(measured_rates(PLANNED, state, "cuda")) == oks
    nodes = {r.run_id: r.nodes for r in RUNS}
    hours = sum(nodes[k.run_id] * GPUS / 3600 for k, a in state.attempts.items() if a.result)
    assert now.useful_gpu_hours + now.wasted_gpu_hours == pytest.approx(hours)


def test_gpu_hours_by_hand():
    state = SweepState(allocations={"a": held(), "b": replace(held(2, (2 * HOUR,)), name="b")})
    told(state, ONE, Status.OK, duration_s=0.5 * HOUR, allocation="a")
    told(state, ONE, Status.HANG, attempt=1, duration_s=0.25 * HOUR, allocation="a")
    told(state, TWO, Status.OK, duration_s=1.5 * HOUR, allocation="b")
    wasted = {"hang": pytest.approx(GPUS * 0.25), "between_runs": pytest.approx(GPUS * (0.25 + 2 * 0.5))}
    assert gpu_hours(state, GPUS) == (pytest.approx(GPUS * (0.5 + 2 * 1.5)), wasted)


AGENTS = (LeadingAgent(host="gpu01"),)


@pytest.mark.parametrize(
    "ends", [("oom", "crash"), ("hang", "crash"), ("crash", "hang"), ("crash", "ok"), ("lost", "oom")]
)
def test_status_and_standings_name_one_status_of_a_run(ends):
    state = SweepState(launched=LAUNCHED, allocations={"over": held()})
    for repeat, status in enumerate(ends):
        told(state, ONE, Status(status), repeat, 0, **({"step_times_s": (1.0,)} if status == "ok" else {}))
    (shown,) = progress_of("s", PLANNED, state, "cuda").by_status.keys() - {"pending"}
    ((standing_of_run,),) = standings_of(PLANNED, state, "cuda").values()
    assert shown == standing_of_run.outcome


@pytest.mark.parametrize(
    ("allocation", "run_s", "between"),
    [
        # Of a run that vanished with its nodes nobody told how long it took.
        (held(2), None, 2.0),
        # An end that nobody timed counts to the limit if agents had started.
        (held(starts_s=(None,), limit_s=7200), None, 0.0), (held(starts_s=(None,), limit_s=7200, agents=AGENTS), None,
            2.0),
        # An allocation was never shorter than its runs.
        (held(starts_s=()), HOUR, 0.0), (held(starts_s=(0.0,)), HOUR, 0.0), (held(starts_s=(10.0,)), HOUR, 0.0),
        # Every start of a job holds nodes, and the batch system counts the setup before the agents, too.
        (held(starts_s=(HOUR, 0.5 * HOUR)), HOUR, 0.5), (held(held_s=1.25 * HOUR), HOUR, 0.25),
    ],
)  # fmt: skip
def test_what_an_allocation_held_beside_its_run(allocation, run_s, between):
    state = SweepState(allocations={"a": allocation})
    status = Status.OK if run_s else Status.LOST
    told(state, ONE, status, allocation="a", duration_s=run_s)
    wasted = {"between_runs": pytest.approx(between * GPUS)} if between else {}
    assert gpu_hours(state, GPUS) == (GPUS * (run_s or 0) / HOUR, wasted)


def test_the_rest_is_scaled_by_what_was_measured():
    planned = [predicted(r, duration_s=10.0) for r in PLANNED]
    state = told(SweepState(), RUNS[0], Status.OK, duration_s=30.0)
    assert progress_of("s", planned, state, "cuda").eta_s == pytest.approx(30.0 * (len(planned) - 1))


def preflighted(name, time_s, **warnings):
    """An allocation whose preflight found these warnings: host -> checks."""
    health = {host: {"warn": {check: {"GPU 0": 2}}} if check else {} for host, check in warnings.items()}
    nodes = [{"host": host, "health": facts} for host, facts in health.items()]
    return AllocationState(name=name, submitting_at=time_s, preflight={"nodes": nodes})


def test_the_health_of_nodes_is_warned_of_once_for_each_check():
    ecc, limit = "ECC errors in its life", "power limit"
    old, new = preflighted("b", 1.0, n1=limit, n2=ecc), preflighted("a", 2.0, n1=ecc, n3=limit, n4=None)
    now = progress_of("s", PLANNED, SweepState(allocations={"a": new, "b": old}), "cuda")
    lines = [
        "n1 and 1 other node: ECC errors in its life (GPU 0: 2 errors); limit: no uncorrected errors in "
        "the life of a GPU; "
        "remedy: watch the GPU; have it replaced if new errors appear",
        "n3: power limit (GPU 0: 2 W below); limit: not below the GPU's default; "
        "remedy: have the default restored, or set hardware.power_limit_w= for predictions",
    ]
    assert [*now.node_warnings] == lines
    page = io.StringIO()
    Console(file=page, width=1000).print(status_view(Snapshot(now, "done")))
    assert [line for line in page.getvalue().splitlines() if "warning" in line] == [
        f"warning: {line}" for line in lines
    ]
