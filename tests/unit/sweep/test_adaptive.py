"""A sweep with the adaptive strategy: what is due next, when a cell is over, and why the rest is left out."""

import json
from dataclasses import replace
from itertools import chain

from tests.sweep_folder import attempted, ended, make_folder, write
from ultrabench.analysis.results.collect import collect
from ultrabench.cli.sweep.live import counts_line
from ultrabench.cli.sweep.show import show_run
from ultrabench.hardware import Peak
from ultrabench.launchers.open_sweep import sweep_json_of
from ultrabench.record import canonical_json
from ultrabench.result import NOT_STARTED, Status
from ultrabench.store.events import Launched
from ultrabench.store.state import AllocationState, AttemptState, SweepState
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan, predictor
from ultrabench.sweep.predict.network import network
from ultrabench.sweep.running.attempts import next_attempts, unpromising_reasons
from ultrabench.sweep.running.price import price_of
from ultrabench.sweep.running.progress import progress_of

WORDS = ("sweep=playbook", "sweep.models=[8B]", "measure.confirm=1", "kernel=megatron", "profile=nanotron")
PLAN = make_plan(load_config([*WORDS, "sweep.nodes=[8]", "sweep.batch=3", "launcher=local"]))
EXHAUSTIVE = replace(PLAN, config=replace(PLAN.config, strategy="exhaustive"))


def state_of(runs, plan=PLAN):
    """The state in which these runs took 1.1 times the predicted time, or had not enough memory if that is likely."""
    state = SweepState(launched=Launched(generation=1, config=plan.config.resolved))
    for todo in runs:
        prediction = todo.candidate.prediction
        ok = ended(step_times_s=(1.1 * prediction.step_time_s,) * 6)
        result = ended(Status.OOM, confirmed=True) if prediction.p_oom > 0.5 else ok
        state.attempts[todo.key] = AttemptState(key=todo.key, result=result)
    return state


def search(plan=PLAN):
    """The attempts of a whole sweep, in the batches in which they were proposed."""
    batches, attempts = [], []
    while todo := next_attempts(plan, state_of(attempts)).todo:
        batches.append(todo)
        attempts += todo
        assert len(attempts) < 60, "the search does not end"
    return batches, attempts


def test_a_cell_is_over_after_few_runs_and_the_rest_has_reasons():
    batches, attempts = search()
    assert {len(batch) for batch in batches[:-1]} == {3}
    assert 2 <= len(attempts) <= len(PLAN.runs) / 5
    best = min((r for r in PLAN.runs if r.fits), key=lambda run: run.prediction.step_time_s)
    assert attempts[0].candidate.run_id == best.run_id
    state, tried = state_of(attempts), {t.key.run_id for t in attempts}
    reasons = unpromising_reasons(PLAN.runs, state)
    assert tried.isdisjoint(reasons)
    assert all(reason.startswith(("not promising: ", "predicted ")) for reason in reasons.values())
    now = progress_of("s", PLAN.runs, state, "cuda")
    counts, ends = now.by_status, {run.run_id for run in PLAN.runs}
    assert (now.to_go, now.left, now.skipped.keys()) == (0, 0, ends - tried)
    assert "pending" not in counts
    assert counts["skipped"] == len(PLAN.runs) - len(attempts)
    begun = progress_of("s", PLAN.runs, state_of(batches[0]), "cuda")
    assert 0 < begun.to_go <= len(attempts) < begun.by_status["pending"] == begun.left
    assert f", about {begun.to_go} to go" in str(counts_line(begun, is_active=True))
    state.launched = Launched(generation=2, config={"sweep": {"strategy": "exhaustive"}})
    now = progress_of("s", PLAN.runs, state, "cuda")
    assert now.to_go == now.left == len(PLAN.runs) - len(attempts)


def test_a_cell_waits_for_its_batch_and_every_launch_proposes_the_same():
    batches, _ = search()
    first, second = batches[:2]
    assert next_attempts(PLAN, SweepState()).todo == first
    state = state_of(first[:1])
    state.allocations["a"] = AllocationState(name="a", nodes=8, tasks=tuple(t.key for t in first))
    decision = next_attempts(PLAN, state, frozenset({"a"}))
    assert decision.todo == ()
    assert decision.num_waiting == 2
    assert next_attempts(PLAN, state_of(first)).todo == second


def test_strategies_can_change_in_the_middle_and_nothing_runs_twice():
    batches, attempts = search()
    state = state_of(batches[0])
    keys = {t.key for t in next_attempts(EXHAUSTIVE, state).todo}
    assert keys.isdisjoint(state.attempts)
    assert {key.run_id for key in keys | state.attempts.keys()} >= {t.key.run_id for t in attempts}
    whole = state_of(next_attempts(EXHAUSTIVE, SweepState()).todo)
    assert all(todo.key.attempt for todo in next_attempts(PLAN, whole).todo)


def test_a_failed_run_is_tried_again_before_the_cell_goes_on():
    first = next_attempts(PLAN, SweepState()).todo
    state = state_of(first)
    state.attempts[first[0].key] = AttemptState(key=first[0].key, result=ended(Status.NODE_FAIL))
    assert [t.key for t in next_attempts(PLAN, state).todo] == [first[0].key._replace(attempt=1)]


LARGE = make_plan(load_config([*WORDS, "sweep.nodes=[64]", "sweep.batch=3"]))
ONE_BY_ONE = replace(LARGE, config=replace(LARGE.config, batch=1))


def probed(name, job, *rates):
    """An allocation of 64 nodes whose all-reduce and all-gather have these bus bandwidths in bytes/s."""
    pairs = zip(("allreduce", "allgather"), rates, strict=True)
    collectives = {kind: {"all": [{"bytes": 2**28, "busbw_bytes_per_s": rate}]} for kind, rate in pairs}
    preflight = {"probe": {"collectives": collectives}}
    return AllocationState(name=name, nodes=64, job={"job_id": f"{job}_0"}, preflight=preflight)


SLOW = probed("a", 7, 13e9, 6.5e9)


def on_links(*allocations, runs=()):
    """The state after these runs with these allocations."""
    state = state_of(runs, LARGE)
    state.launched = Launched(generation=1, config=json.loads(canonical_json(LARGE.config.resolved)))
    state.allocations = {allocation.name: allocation for allocation in allocations}
    return state


def test_a_cell_is_searched_with_the_links_that_its_allocations_have_measured():
    states = on_links(), on_links(SLOW)
    sheet, measured = (next_attempts(ONE_BY_ONE, state).todo[0].candidate for state in states)
    fits = [run for run in LARGE.runs if run.fits]
    assert sheet == min(fits, key=lambda run: run.prediction.step_time_s)
    predicts = predictor(LARGE.config, 64, Peak(flops_per_s=sheet.peak_flops_per_s, source=""))
    predicts = replace(predicts, links=network(LARGE.config.hardware, 64, 13e9, 6.5e9))
    assert measured == min(fits, key=lambda run: predicts.predict(run.spec).step_time_s) != sheet


def test_the_latest_three_allocations_count_in_any_order_of_the_journal():
    runs = search(LARGE)[1]
    slow, older = probed("e", 10, 13e9, 6.5e9), [probed(f"d{job}", job, 177e9, 44e9) for job in (7, 8, 9)]
    probes = [*older, slow, probed("c", 11, 13e9, 6.5e9), probed("b", 12, 1e9, 0.5e9)]

    def searched(*allocations, **settings):
        begun, whole = on_links(*allocations, runs=runs[:2]), on_links(*allocations, runs=runs)
        whole.launched = replace(whole.launched, config=whole.config | settings)
        return next_attempts(LARGE, begun).todo, unpromising_reasons(LARGE.runs, whole)

    sheet, measured = searched(), searched(slow)
    assert sheet[0] != measured[0]
    assert sheet[1] != measured[1]
    assert all(searched(*order) == measured for order in (probes, probes[::-1], probes[3:] + older))
    older_version = searched(slow, hardware={"gpu": "H100-SXM"})[1]
    assert older_version == sheet[1], "a launch of an older version told less"


def test_the_price_is_that_of_the_runs_that_are_expected_whatever_links_were_measured():
    (runs, hours), (all_runs, all_hours) = (price_of(p).runs[PLAN.runs[0].cell] for p in (PLAN, EXHAUSTIVE))
    assert 2 <= runs < all_runs / 5
    assert 0 < hours < all_hours / 5
    attempts = [t.candidate for job in price_of(ONE_BY_ONE, on_links(SLOW)).jobs for t in job.attempts]
    assert len({run.run_id for run in attempts}) > 1
    assert all(run in LARGE.runs for run in attempts)


def test_rows_and_show_tell_why_a_run_was_left_out(tmp_path, capsys):
    folder = make_folder(tmp_path, sweep_json_of(PLAN.config, {}), PLAN.candidates)
    runs = [todo.candidate for todo in search()[1]]
    times = [(1.1 * run.prediction.step_time_s,) * 6 for run in runs]
    attempts = [attempted(run.spec, ended(step_times_s=t)) for run, t in zip(runs, times, strict=True)]
    write(folder, Launched(generation=1, config=PLAN.config.resolved), *chain(*attempts))
    skipped = [row for row in collect([folder], print).to_pylist() if row["status"] == "skipped"]
    assert len(skipped) > len(PLAN.runs) / 2
    assert all(row["reason"].startswith(("not promising: ", "predicted ")) for row in skipped)
    show_run(skipped[0]["run_id"], str(tmp_path), as_json=False, results_dir=tmp_path)
    assert skipped[0]["reason"] in capsys.readouterr().out


def test_a_search_whose_usual_container_does_not_start_goes_on_with_the_other_one():
    words = ("sweep.nodes=[8]", "sweep.batch=3", "launcher=slurm", "+sweep.container=[a.sif,b.sif]")
    command = "launcher.srun=['--container-image={container}']"
    plan = make_plan(load_config([*WORDS, *words, command]))
    first_todo = next_attempts(plan, state_of((), plan)).todo
    assert {t.candidate.runtime for t in first_todo} == {("a.sif", None)}
    state = state_of((), plan)
    unstarted = ended(Status.LOST, cause=NOT_STARTED)
    state.attempts[first_todo[0].key] = AttemptState(key=first_todo[0].key, result=unstarted)
    todo = next_attempts(plan, state).todo
    assert [t.key.attempt for t in todo if t.candidate.runtime == ("a.sif", None)] == [1]
    assert sum(t.candidate.runtime == ("b.sif", None) for t in todo) == 3
    reasons = unpromising_reasons(plan.runs, state)
    assert "no job of container=a.sif has started an agent" in set(reasons.values())
