"""A small sweep of an acceptance run: chosen runs of a plan, followed to their end, with a fault or without."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ultrabench.claim import give_up
from ultrabench.errors import UltrabenchError, counted
from ultrabench.folder import SweepFolder
from ultrabench.launchers.allocate import committed_gpu_hours
from ultrabench.launchers.choose import choose_launcher
from ultrabench.launchers.follow import Follower, interrupt, open_allocations
from ultrabench.launchers.launcher import Launcher
from ultrabench.launchers.prepare import OpenSweep, open_sweep
from ultrabench.result import RunResult
from ultrabench.run import Task
from ultrabench.state import AttemptKey, AttemptState, SweepState, final_attempts
from ultrabench.sweep.config import SweepConfig, config_from_tree
from ultrabench.sweep.plan import Candidate, Plan
from ultrabench.sweep.plan_table import write_plan

Choose = Callable[[Plan], Sequence[Candidate]]
Say = Callable[[str], None]
ENDLESS = 10**6
"""Steps of a run that somebody else has to end; its time limit does when nobody else can."""


def variant(config: SweepConfig, name: str, folder: Path, **groups: Any) -> SweepConfig:
    """`config` as the sweep `name` in `folder`, with other values in some of its groups, or another list."""
    tree = config.resolved
    changed = {k: {**tree[k], **v} if isinstance(v, dict) else v for k, v in groups.items()}
    return config_from_tree({**tree, **changed, "name": name, "results_dir": str(folder)})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a trial."""

    folder: SweepFolder
    runs: Sequence[Candidate]
    state: SweepState
    stopped: str | None
    """Why it ended before everything was done."""

    def attempt(self, run: Candidate, number: int = 0) -> AttemptState | None:
        """That attempt of the first repeat."""
        return self.state.attempts.get(AttemptKey(run.run_id, 0, number))

    def result(self, run: Candidate) -> RunResult | None:
        """How the run ended after all its attempts; None when it never did."""
        final = final_attempts(self.state).get((run.run_id, 0))
        return final.result if final else None

    def why(self, run: Candidate) -> str:
        """In words how it ended."""
        result = self.result(run)
        label = f"{run.layout.label()} on {run.nodes} node{'s' * (run.nodes > 1)}"
        if result is None:
            return f"{label} has not run{f': {self.stopped}' if self.stopped else ''}"
        return f"{label}: {result.status.value}{f', {result.reason}' if result.reason else ''}"

    def see(self, run: Candidate) -> str:
        """The command that shows everything about it."""
        place = f"--sweep {self.folder.word} --results-dir {shlex.quote(str(self.folder.path.parent))}"
        return f"ultrabench sweep show {run.run_id} {place}"


def endless(task: Task) -> Task:
    """The task without an end of its own."""
    measure = replace(task.measure, min_steps=ENDLESS, max_steps=ENDLESS, race=None)
    return replace(task, measure=measure)


class Trials:
    """The sweeps of one acceptance run, which share a budget and what is known of this machine."""

    def __init__(self, max_gpu_hours: float, gpus_per_node: int, say: Say) -> None:
        """`gpus_per_node`: what a node has, since one that uses less of it is held all the same."""
        self.left_gpu_hours = max_gpu_hours
        self._gpus_per_node, self._say = gpus_per_node, say
        self._environment: dict[str, Any] | None = None

    def run(
        self, config: SweepConfig, choose: Choose, *, alter: Callable[[Task], Task] = lambda task: task,
        cancel: int | None = None,
    ) -> Outcome:  # fmt: skip
        """Follows the chosen runs to their end; whatever ends it early, nothing of it runs on.

        Args:
            alter: what is done to an attempt before it is submitted.
            cancel: number of the run whose allocation is cancelled while its first attempt is measured.

        Raises:
            ClusterError: the cluster, or this machine, cannot be used.
        """
        folder = SweepFolder(Path(config.results_dir) / config.name)
        launcher = choose_launcher(config, folder)
        sweep = open_sweep(
            config, reuse="any", warn=self._say, say=self._say, max_gpu_hours=self.left_gpu_hours,
            environment=self._environment,
        )  # fmt: skip
        self._environment, sweep.alter = sweep.environment, alter
        sweep.plan = replace(sweep.plan, candidates=tuple(choose(sweep.plan)))
        write_plan(sweep.plan, folder.plan)
        target = None if cancel is None else AttemptKey(sweep.plan.runs[cancel].run_id, 0, 0)
        watch = _Watch(sweep, launcher, target, self._say)
        follower = Follower(sweep, launcher, watch.look, self.left_gpu_hours, self._say)
        try:
            state = follower.run()
        except BaseException:
            self._end(sweep, launcher)
            raise
        held = self._gpus_per_node / config.hardware.gpus_per_node
        self.left_gpu_hours -= held * committed_gpu_hours(sweep.plan, state, ())
        return Outcome(folder=folder, runs=sweep.plan.runs, state=state, stopped=follower.stopped)

    def _end(self, sweep: OpenSweep, launcher: Launcher) -> None:
        """Ends all jobs of a sweep; one that is just being submitted will run nothing."""
        state = sweep.state()
        try:
            for name in open_allocations(state):
                if not state.allocations[name].agents:
                    give_up(sweep.folder.claims, name)
            interrupt(sweep, launcher)
        except (UltrabenchError, OSError) as error:
            self._say(f"cannot end the jobs of {sweep.folder.path}: {error}")


class _Watch:
    """Tells how far a trial has come, and cancels the allocation of one attempt when that is being measured."""

    def __init__(self, sweep: OpenSweep, launcher: Launcher, target: AttemptKey | None, say: Say) -> None:
        self._launcher, self._target, self._say = launcher, target, say
        self._name, self._runs = sweep.config.name, {run.run_id for run in sweep.plan.runs}
        self._ended = 0

    def look(self, state: SweepState, alive: frozenset[str]) -> None:
        ended = len({k.run_id for k, a in state.attempts.items() if a.result} & self._runs)
        if ended > self._ended:
            self._ended = ended
            self._say(f"{self._name}: {ended} of {counted(len(self._runs), 'run')}")
        attempt = state.attempts.get(self._target) if self._target else None
        held = state.allocations.get(attempt.allocation or "") if attempt else None
        if attempt and held and attempt.phase == "measure":
            self._target = None
            self._launcher.cancel({held.name: held})
