"""What a launch with other patterns makes of the results of a sweep and of their kept logs."""

from dataclasses import replace

import pytest

from tests.configs import refused
from tests.strategies import written
from ultrabench.agent.ranks.cleanup import LOG_TAIL_BYTES, join_tails
from ultrabench.cli.sweep.rereads import read_again
from ultrabench.record import raw_json, to_dict
from ultrabench.result import SLOWER, UNMEASURED, RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.events import AllocationPlanned, Claimed, Result, Submitting
from ultrabench.store.folder import SweepFolder
from ultrabench.store.state import fold
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running.attempts import has_old_patterns

OVERRIDES = [
    "kernel=command", "kernel.command=[x,'{tp}','{mbs}']", "model=tiny", "sweep.nodes=[1]", "sweep.tp=[1]",
    "sweep.pp=[1]",
    "sweep.gbs=8", "sweep.zero_stage=[0]", "sweep.mbs=[1,2,4]", "sweep.gas=null", "measure.warmup_steps=2",
    "measure.max_steps=6", "measure.min_steps=6",
]  # fmt: skip
OLD, NEW = (
    load_config([*OVERRIDES, rf"kernel.step_line='{word} (?P<seconds>\S+) s'"]) for word in ("took", "step")
)
RUNS = make_plan(OLD).runs
FAST, SLOW, CUT = range(3)
"""Runs: one that is measured, one that was stopped as slower than the first, and one whose log is not whole."""


def log(seconds, num_steps=8):
    return "".join(f"line {n} took 9 s, step {seconds} s\n" for n in range(num_steps))


def history(slow_s):
    """The events of three runs, of which one was stopped early; its steps take this time by the new pattern."""
    for run in RUNS:
        key = AttemptKey(run.run_id, 0, 0)._asdict()
        stopped = SLOWER if run is RUNS[SLOW] else "program"
        result = RunResult(
            status=Status.OK, measured_by="log", step_times_s=(9.0,) * 6, stopped=stopped, hostnames=("n0",)
        )
        yield Claimed(**key, allocation="n1", spec=raw_json(to_dict(run.spec)))
        yield Result(**key, allocation="n1", result=result)


@pytest.fixture(params=[5.0])
def sweep(tmp_path, request):
    """The folder of a sweep whose runs have kept logs, and its state."""
    folder = SweepFolder(tmp_path / "t")
    for number, text in enumerate((log(1.0), log(request.param, 4), log(1.0) + "x" * LOG_TAIL_BYTES)):
        run_folder = tmp_path / str(number)
        run_folder.mkdir()
        (run_folder / "rank0.log").write_text(text)
        join_tails(run_folder, folder.log_folder(AttemptKey(RUNS[number].run_id, 0, 0)), range(2))
    return folder, fold(written(event, seq=n) for n, event in enumerate(history(request.param)))


def results(state):
    return [state.attempts[AttemptKey(run.run_id, 0, 0)].result for run in RUNS]


def test_whole_logs_are_read_again_and_other_runs_repeated(sweep):
    folder, state = sweep
    assert read_again(OLD, folder, state, keep=False).line is None
    rereads = read_again(NEW, folder, state, keep=False)
    assert rereads.line == (
        "other kernel.step_line than before: 2 results read again in the kept logs; "
        "1 run measured again, since no kept log gives the steps"
    )
    new_state = rereads.apply(state)
    fast, slow, cut = results(new_state)
    assert (fast.status, fast.step_times_s, fast.stopped) == (Status.OK, (1.0,) * 6, "program")
    assert (slow.step_times_s, slow.stopped) == ((5.0,) * 2, SLOWER)
    assert (cut.status, cut.cause) == (Status.INVALID, UNMEASURED)
    old_ids = {a.key.run_id for a in new_state.attempts.values() if has_old_patterns(a, NEW.kernel)}
    assert old_ids == {RUNS[CUT].run_id}, "the only one that is tried again"
    assert results(read_again(OLD, folder, new_state, keep=False).apply(new_state)) == results(state)


def test_results_can_be_kept_as_they_were_read(sweep):
    folder, state = sweep
    rereads = read_again(NEW, folder, state, keep=True)
    assert (rereads.num_repeated, results(rereads.apply(state))[CUT]) == (0, results(state)[CUT])
    assert read_again(NEW, folder, rereads.apply(state), keep=False).events == ()


@pytest.mark.parametrize("sweep", [1.1], indirect=True)
def test_a_run_that_was_stopped_by_misread_times_is_repeated(sweep):
    folder, state = sweep
    rereads = read_again(NEW, folder, state, keep=False)
    assert (rereads.num_repeated, results(rereads.apply(state))[SLOW].cause) == (2, UNMEASURED)
    by_arrival = replace(NEW, kernel=replace(NEW.kernel, step_line="step"))
    assert read_again(by_arrival, folder, state, keep=False).num_repeated == 3


def test_jobs_with_the_earlier_patterns_end_first(sweep):
    folder, state = sweep
    plan = AllocationPlanned(allocation="n2", nodes=1, limit_s=9.0, tasks=(AttemptKey("other", 0, 0),))
    lines = [*history(5.0), plan, Submitting(allocation="n2")]
    state = fold(written(event, seq=n) for n, event in enumerate(lines))
    with refused("kernel.step_line differs from that of 1 run submitted earlier; wait until"):
        read_again(NEW, folder, state, keep=False)
