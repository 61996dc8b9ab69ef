from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.allocations import PLAN, jobs_of, open_sweep, todo_of, told
from tests.unit.allocations import made_of as allocations_of
from ultrabench.launchers.allocate import shapes
from ultrabench.result import Status
from ultrabench.run import AttemptKey
from ultrabench.store.allocation import read_allocation
from ultrabench.store.events import AllocationEnded, LeadingAgent, Start
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.sweep.running.attempts import AttemptsLeft
from ultrabench.sweep.running.price import (
    ALLOCATION_START_S,
    PlannedJob,
    committed_gpu_hours,
    controls,
    planned_jobs,
)

CONTROLS = {run.nodes: run.spec.run_id for run in controls(PLAN).values()}
HOUR = 3600.0
START_S = ALLOCATION_START_S["cpu"]


def decided(*todo, untried=()):
    return AttemptsLeft(todo=tuple(todo), waiting=0, untried=frozenset(untried))


def others(nodes, count):
    """Runs of a size that are not its control."""
    return [r for r in PLAN.runs if r.nodes == nodes and r.spec.run_id != CONTROLS[nodes]][:count]


def control(nodes):
    return next(r for r in PLAN.runs if r.spec.run_id == CONTROLS[nodes])


@pytest.fixture
def sweep(tmp_path):
    return open_sweep(tmp_path, pack=2)


def made_of(sweep, decision, state, max_limit_s=9e9):
    return [*planned_jobs(sweep.plan, decision, state, max_limit_s)]


def keys(draft):
    return [t.key for t in draft.attempts]


def test_every_allocation_begins_with_its_control_in_a_new_repeat(sweep):
    decision = decided(*(todo_of(r) for r in (*others(1, 4), *others(2, 1))))
    made = made_of(sweep, decision, SweepState())
    assert [d.nodes for d in made] == [1, 1, 2]
    assert [d.control for d in made] == [CONTROLS[1], CONTROLS[1], CONTROLS[2]]
    assert [keys(d)[0] for d in made] == [
        AttemptKey(CONTROLS[1], 1, 0), AttemptKey(CONTROLS[1], 2, 0), AttemptKey(CONTROLS[2], 1, 0)
    ]  # fmt: skip
    assert [len(d.attempts) for d in made] == [3, 3, 2]


@pytest.mark.parametrize("more", [others(1, 1), []])
def test_a_control_that_is_to_be_done_anyway_goes_first_and_once(sweep, more):
    (draft,) = made_of(sweep, decided(*map(todo_of, [*more, control(1)])), SweepState())
    assert keys(draft) == [AttemptKey(CONTROLS[1], 0, 0), *(todo_of(run).key for run in more)]
    assert draft.control == CONTROLS[1]


def test_repeats_of_controls_known_from_anywhere_are_not_taken_again(sweep):
    state = told(SweepState(), control(1), Status.OK, repeat=4)
    waiting = AttemptKey(CONTROLS[1], 6, 0)
    state.allocations["n1-a.0"] = AllocationState(name="n1-a.0", tasks=(waiting,))
    made = made_of(sweep, decided(*(todo_of(r) for r in others(1, 4))), state)
    assert [keys(d)[0].repeat for d in made] == [7, 8]


@pytest.mark.parametrize("launcher", [{"control": False, "pack": 2}, {"pack": 1}])
def test_without_a_control_nothing_is_added(tmp_path, launcher):
    todo = [todo_of(r) for r in others(1, 3)]
    made = made_of(open_sweep(tmp_path, **launcher), decided(*todo), SweepState())
    assert [key for d in made for key in keys(d)] == [t.key for t in todo]
    assert {d.control for d in made} == {None}


def test_of_an_untried_size_only_one_is_submitted(sweep):
    todo = [todo_of(r) for r in (*others(1, 4), *others(2, 4))]
    made = made_of(sweep, decided(*todo, untried={2}), SweepState())
    assert [d.nodes for d in made] == [1, 1, 2]
    made = made_of(sweep, decided(*todo, untried={1, 2}), SweepState())
    assert [d.nodes for d in made] == [1, 2]


def test_limit_and_price_hold_for_the_control_too(sweep):
    todo = [todo_of(r) for r in others(1, 2)]
    (draft,) = made_of(sweep, decided(*todo), SweepState())
    start = START_S * 2 / HOUR
    assert draft.gpu_hours == pytest.approx(start + sum(t.candidate.gpu_hours for t in draft.attempts))
    assert draft.gpu_hours > start + sum(t.candidate.gpu_hours for t in todo)
    (short,) = made_of(sweep, decided(*todo), SweepState(), 60.0)
    assert short.limit_s == 60.0 < draft.limit_s


@given(data=st.data())
def test_nothing_is_asked_for_twice_and_nothing_is_lost(data):
    state = SweepState()
    for run in PLAN.runs:
        for repeat in data.draw(st.sets(st.integers(0, 3), max_size=2)):
            told(state, run, data.draw(st.sampled_from((None, Status.OK, Status.LOST))), repeat)
    sweep = open_sweep("anywhere", pack=data.draw(st.sampled_from((None, 1, 2, 5))))
    sweep.accepts = data.draw(st.sampled_from((lambda result: True, lambda result: False)))
    made = jobs_of(sweep, state)
    chosen = [t.key for d in made for t in d.attempts]
    assert len(chosen) == len(set(chosen))
    done = {k for k, a in state.attempts.items() if a.result}
    assert not done & set(chosen)
    for draft in made:
        assert {t.candidate.cell for t in draft.attempts} == {draft.attempts[0].candidate.cell}
        assert draft.control in (None, draft.attempts[0].key.run_id)
        assert (draft.control is None) == (sweep.config.launcher.pack == 1)


# submissions


def draft(nodes, limit_s):
    run = control(nodes)
    return PlannedJob(attempts=(todo_of(run),), control=None, limit_s=limit_s, gpu_hours=1.0)


@given(
    words=st.lists(st.tuples(st.sampled_from((1, 2)), st.sampled_from((300.0, 600.0))), max_size=20),
    most=st.integers(1, 7),
)
def test_one_submission_holds_what_is_alike(words, most):
    chosen = [draft(*word) for word in words]
    arrays = shapes(chosen, most)
    assert sorted(id(d) for array in arrays for d in array) == sorted(id(d) for d in chosen)
    for array in arrays:
        assert 1 <= len(array) <= most
        assert len({(d.nodes, d.limit_s) for d in array}) == 1
        assert [chosen.index(d) for d in array] == sorted(chosen.index(d) for d in array)
    for word in set(words):
        own = [len(a) for a in arrays if (a[0].nodes, a[0].limit_s) == word]
        assert own == sorted(own, reverse=True)
        assert len(own) == -(-words.count(word) // most)


def test_what_the_agents_of_an_array_read(sweep):
    made = allocations_of(sweep, jobs_of(sweep)[:1] * 3)
    token = made[0].name.rpartition(".")[0]
    assert [a.name for a in made] == [f"{token}.{n}" for n in range(3)]
    assert token.startswith("n1-")
    first = replace(made[0], by={"user": "ann", "cluster": "big", "host": "login1"})
    assert first.control == first.tasks[0].run_id == CONTROLS[1]
    assert (first.nodes, first.gpus_per_node, first.kernel_digest) == (1, 2, "digest")
    assert (first.sweep_dir, first.work_dir) == (str(sweep.folder.path), str(Path.cwd()))
    assert (first.preflight, first.window, first.git_commit) == (True, None, None)
    assert all(task.limit_s <= first.limit_s for task in first.tasks)
    assert not first.folder.exists()
    first.write()
    assert read_allocation(first.folder) == first
    assert allocations_of(sweep, jobs_of(sweep)[:1])[0].name.rpartition(".")[0] != token


# what is committed


def held(state, name, run, *ends):
    """Adds an allocation of which each start ended after (elapsed_s, held_s)."""
    starts = {Start(job_id="57_0", restart=n): seconds for n, seconds in enumerate(ends)}
    state.allocations[name] = AllocationState(
        name=name, nodes=run.nodes, tasks=(AttemptKey(run.spec.run_id, 0, 0),),
        ends={
            start: AllocationEnded(allocation=name, job=start, reason="", elapsed_s=elapsed_s, held_s=held_s)
            for start, (elapsed_s, held_s) in starts.items()
        },
    )  # fmt: skip
    return state


TWO = control(2)
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
    state = held(held(SweepState(), "n2-a.0", TWO, *ends), "n2-b.0", TWO, (HOUR, None))
    seen = {} if seen_s is None else {"n2-a.0": seen_s}
    used = committed_gpu_hours(PLAN, state, ("n2-a.0",) if alive else (), seen)
    assert used == pytest.approx(4.0 + hours)


def test_runs_that_are_no_longer_planned_are_paid_for_all_the_same():
    state = held(SweepState(), "n2-a.0", TWO, (HOUR, None))
    narrow = replace(PLAN, candidates=tuple(others(1, 2)))
    assert committed_gpu_hours(narrow, state, ("n2-a.0",)) == pytest.approx(4.0)
    assert committed_gpu_hours(PLAN, SweepState(), ("nobody",)) == 0.0


def test_the_next_allocation_is_priced_with_what_the_ones_before_took_beyond_their_runs(sweep):
    one = control(1)
    todo = decided(todo_of(others(1, 1)[0]))
    (free,) = made_of(sweep, todo, SweepState())
    state = SweepState()
    for n, held_s in enumerate((100.0, 160.0, 9000.0)):
        name = f"n1-{n}.0"
        held(state, name, one, (10.0, held_s))
        state.allocations[name].agents = (LeadingAgent(host="gpu01", job=Start(job_id="57_0")),)
        told(state, one, Status.OK, n, allocation=name, duration_s=40.0)
    held(state, "n1-never.0", one, (0.0, None))  # no agent of it has started: it tells nothing
    (priced,) = made_of(sweep, todo, state)
    assert priced.gpu_hours - free.gpu_hours == pytest.approx((120.0 - START_S) * 1 * 2 / HOUR)
