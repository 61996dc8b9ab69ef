"""Which jobs are planned, what agents read of them, and what they cost."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.allocations import PLAN, jobs_of, key_of, open_sweep, todo_of, told
from tests.unit.allocations import made_of as allocations_of
from ultrabench.hardware import DEVICE_KINDS
from ultrabench.launchers.allocate import array_groups
from ultrabench.result import Status
from ultrabench.store.events import AllocationEnded, LeadingAgent, Start
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.sweep.running import price
from ultrabench.sweep.running.attempts import AttemptsLeft

ONE, TWO = sorted(price.controls(PLAN).values(), key=lambda run: run.nodes)
HOUR = 3600.0
START_S = DEVICE_KINDS["cpu"].allocation_start_s


def others(nodes, count):
    """Runs of a size that are not its control."""
    return [r for r in PLAN.runs if r.nodes == nodes and r not in (ONE, TWO)][:count]


@pytest.fixture
def sweep(tmp_path):
    return open_sweep(tmp_path, pack=2)


def drafts_of(sweep, runs, state=None, untried=(), max_limit_s=9e9):
    """The jobs that are planned where these runs are due."""
    todo = AttemptsLeft(todo=tuple(map(todo_of, runs)), num_waiting=0, untried_node_counts=frozenset(untried))
    return [*price.planned_jobs(sweep.plan, todo, state or SweepState(), max_limit_s)]


def keys(draft):
    return [t.key for t in draft.attempts]


def test_every_allocation_begins_with_its_control_in_a_new_repeat(sweep):
    drafts = drafts_of(sweep, [*others(1, 4), *others(2, 1)])
    assert [(d.nodes, d.control, keys(d)[0], len(d.attempts)) for d in drafts] == [
        (1, ONE.run_id, key_of(ONE, 1), 3), (1, ONE.run_id, key_of(ONE, 2), 3), (2, TWO.run_id, key_of(TWO, 1), 2)
    ]  # fmt: skip


@pytest.mark.parametrize("runs", [others(1, 1), []])
def test_a_control_that_is_to_be_done_anyway_goes_first_and_once(sweep, runs):
    (draft,) = drafts_of(sweep, [*runs, ONE])
    assert keys(draft) == [key_of(ONE), *map(key_of, runs)]
    assert draft.control == ONE.run_id


def test_repeats_of_controls_known_from_anywhere_are_not_taken_again(sweep):
    state = told(SweepState(), ONE, Status.OK, repeat=4)
    state.allocations["n1-a.0"] = AllocationState(name="n1-a.0", tasks=(key_of(ONE, 6),))
    assert [keys(d)[0].repeat for d in drafts_of(sweep, others(1, 4), state)] == [7, 8]


@pytest.mark.parametrize("launcher", [{"control": False, "pack": 2}, {"pack": 1}])
def test_without_a_control_nothing_is_added(tmp_path, launcher):
    drafts = drafts_of(open_sweep(tmp_path, **launcher), others(1, 3))
    assert [key for d in drafts for key in keys(d)] == [*map(key_of, others(1, 3))]
    assert {d.control for d in drafts} == {None}


@pytest.mark.parametrize(("untried", "nodes"), [((), [1, 1, 2, 2]), ((2,), [1, 1, 2]), ((1, 2), [1, 2])])
def test_of_an_untried_size_only_one_is_submitted(sweep, untried, nodes):
    assert [d.nodes for d in drafts_of(sweep, [*others(1, 4), *others(2, 4)], untried=untried)] == nodes


def test_limit_and_price_hold_for_the_control_too(sweep):
    (draft,) = drafts_of(sweep, others(1, 2))
    hours = [run.gpu_hours for run in (ONE, *others(1, 2))]
    assert draft.gpu_hours == pytest.approx(START_S * 2 / HOUR + sum(hours))
    (short,) = drafts_of(sweep, others(1, 2), max_limit_s=180.0)
    assert short.limit_s == 180.0 < draft.limit_s


# submissions


def draft(run, limit_s):
    return price.PlannedJob(
        attempts=(todo_of(run),), control=None, limit_s=limit_s, gpu_hours=1.0, interval=(1.0, 1.0)
    )


@given(
    sizes=st.lists(st.tuples(st.sampled_from((ONE, TWO)), st.sampled_from((300.0, 600.0))), max_size=20),
    max_jobs=st.integers(1, 7),
)
def test_one_submission_holds_what_is_alike(sizes, max_jobs):
    """In the order of the jobs, and in as few submissions as an array may be long."""
    chosen = [draft(*size) for size in sizes]
    arrays = array_groups(chosen, max_jobs)
    assert sum(map(len, arrays)) == len(chosen)
    for nodes, limit_s in product((1, 2), (300.0, 600.0)):
        alike = [a for a in arrays if (a[0].nodes, a[0].limit_s) == (nodes, limit_s)]
        jobs = [job for array in alike for job in array]
        assert [*map(id, jobs)] == [id(job) for job in chosen if (job.nodes, job.limit_s) == (nodes, limit_s)]
        assert len(alike) == -(-len(jobs) // max_jobs)
        assert max(map(len, alike), default=0) <= max_jobs


def test_what_the_agents_of_an_array_read(sweep):
    allocations = allocations_of(sweep, jobs_of(sweep)[:1] * 3)
    token = allocations[0].name.rpartition(".")[0]
    assert [a.name for a in allocations] == [f"{token}.{n}" for n in range(3)]
    assert token.startswith("n1-")
    first = allocations[0]
    assert first.control == first.tasks[0].run_id == ONE.run_id
    assert (first.nodes, first.gpus_per_node, first.kernel_digest) == (1, 2, "digest")
    assert (first.sweep_dir, first.work_dir) == (str(sweep.folder.path), str(Path.cwd()))
    assert (first.preflight, first.window, first.git_commit) == (True, None, None)
    assert all(task.limit_s <= first.limit_s for task in first.tasks)
    assert not first.folder.exists()
    assert allocations_of(sweep, jobs_of(sweep)[:1])[0].name.rpartition(".")[0] != token


@pytest.mark.parametrize(("control", "converted"), [(ONE, True), (others(1, 1)[0], False)])
def test_the_best_of_another_allocation_is_converted_by_the_same_control_layout(sweep, control, converted):
    state = SweepState(allocations={"a": AllocationState(name="a", nodes=1, control=control.run_id)})
    for run in {ONE.run_id: ONE, control.run_id: control}.values():
        told(state, run, Status.OK, allocation="a")
    (allocation,) = allocations_of(sweep, drafts_of(sweep, others(1, 2)[1:], state))
    assert allocation.control == ONE.run_id
    assert [task.best_step_time_s is not None for task in allocation.tasks] == [True, True]
    assert [task.best_control_ratio is not None for task in allocation.tasks] == [converted] * 2


# what is committed


def add_allocation(state, name, run, *ends):
    """Adds an allocation of which each start ended after (elapsed_s, held_s)."""
    jobs = [Start(job_id="57_0", restart=n) for n in range(len(ends))]
    state.allocations[name] = AllocationState(
        name=name, nodes=run.nodes, tasks=(key_of(run),),
        ends={
            job: AllocationEnded(allocation=name, job=job, reason="", elapsed_s=elapsed_s, held_s=held_s)
            for job, (elapsed_s, held_s) in zip(jobs, ends, strict=True)
        },
    )  # fmt: skip
    return state


PREDICTED = TWO.gpu_hours + START_S * 4 / HOUR


@pytest.mark.parametrize(
    ("ends", "alive", "seen_s", "hours"),
    [
        ([(HOUR, None)], False, None, 4.0),
        ([(0.5 * HOUR, None), (HOUR, None)], False, None, 6.0),
        ([], True, None, PREDICTED),
        ([(HOUR, None)], True, None, 4.0),  # requeued: at least what it held
        # The setup of a job is paid for, too, though no agent of it has said a word.
        ([], True, 0.1, PREDICTED), ([], True, HOUR, 4.0),
        # After its end what was seen last is the least that it held, until the batch system has told.
        ([], False, HOUR, 4.0), ([(0.5 * HOUR, None)], False, HOUR, 4.0),
        ([(0.5 * HOUR, 0.75 * HOUR)], False, HOUR, 3.0),
    ],
)  # fmt: skip
def test_what_ended_costs_what_it_held_and_what_is_open_what_is_predicted(ends, alive, seen_s, hours):
    state = add_allocation(add_allocation(SweepState(), "n2-a.0", TWO, *ends), "n2-b.0", TWO, (HOUR, None))
    held_s = {} if seen_s is None else {"n2-a.0": seen_s}
    used = price.committed_gpu_hours(PLAN, state, ("n2-a.0",) if alive else (), held_s)
    assert used == pytest.approx(4.0 + hours)


def test_runs_that_are_no_longer_planned_are_paid_for_all_the_same():
    state = add_allocation(SweepState(), "n2-a.0", TWO, (HOUR, None))
    narrow = replace(PLAN, candidates=tuple(others(1, 2)))
    assert price.committed_gpu_hours(narrow, state, ("n2-a.0",)) == pytest.approx(4.0)
    assert price.committed_gpu_hours(PLAN, SweepState(), ("nobody",)) == 0.0


def test_the_next_allocation_is_priced_with_what_the_ones_before_took_beyond_their_runs(sweep):
    (free,), state = drafts_of(sweep, others(1, 1)), SweepState()
    for n, held_s in enumerate((100.0, 160.0, 9000.0)):
        name = f"n1-{n}.0"
        add_allocation(state, name, ONE, (10.0, held_s))
        state.allocations[name].agents = (LeadingAgent(host="gpu01", job=Start(job_id="57_0")),)
        told(state, ONE, Status.OK, n, allocation=name, duration_s=40.0)
    add_allocation(state, "n1-never.0", ONE, (0.0, None))  # no agent of it has started: it tells nothing
    (priced,) = drafts_of(sweep, others(1, 1), state)
    assert priced.gpu_hours - free.gpu_hours == pytest.approx((120.0 - START_S) * 2 / HOUR)
