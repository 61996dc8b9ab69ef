"""A small sweep of an acceptance run: it runs some runs of a plan to their end."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ultrabench.errors import UltrabenchError, counted
from ultrabench.launchers.choose import choose_launcher
from ultrabench.launchers.launcher import Launcher
from ultrabench.launchers.open_sweep import OpenSweep, open_sweep
from ultrabench.launchers.reconcile import Reconciler
from ultrabench.launchers.settle import interrupt, open_allocations
from ultrabench.result import RunResult
from ultrabench.store.claim import give_up
from ultrabench.store.folder import SweepFolder
from ultrabench.store.state import SweepState, final_attempts
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.config import SweepConfig, config_from_tree
from ultrabench.sweep.plan import Plan, make_plan, require_runs
from ultrabench.sweep.plan_table import write_plan
from ultrabench.sweep.price import committed_gpu_hours

Choose = Callable[[Plan], Sequence[Candidate]]
Say = Callable[[str], None]


def variant(config: SweepConfig, name: str, folder: Path, **groups: Any) -> SweepConfig:
    """`config` as the sweep `name` in `folder`, with other values in some of its groups, or another list."""
    tree = config.resolved
    changed = {k: {**tree[k], **v} if isinstance(v, dict) else v for k, v in groups.items()}
    return config_from_tree({**tree, **changed, "name": name, "results_dir": str(folder)})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a sweep of an acceptance run."""

    folder: SweepFolder
    runs: Sequence[Candidate]
    state: SweepState
    stopped: str | None
    """Why it ended before everything was done."""

    def result(self, run: Candidate) -> RunResult | None:
        """How the run ended after all its attempts; None when it never did."""
        final = final_attempts(self.state).get((run.run_id, 0))
        return final.result if final else None

    def why(self, run: Candidate) -> str:
        """In words how it ended."""
        result = self.result(run)
        label = f"{run.layout.label()} on {counted(run.nodes, 'node')}"
        if result is None:
            return f"{label} has not run{f': {self.stopped}' if self.stopped else ''}"
        return f"{label}: {result.status.value}{f', {result.reason}' if result.reason else ''}"

    def see(self, run: Candidate) -> str:
        """The command that shows everything about it."""
        place = f"--sweep {self.folder.word} --results-dir {shlex.quote(str(self.folder.path.parent))}"
        return f"ultrabench sweep show {run.run_id} {place}"


class AcceptanceSweeps:
    """The sweeps of one acceptance run, which share a budget and what is known of this machine."""

    def __init__(self, max_gpu_hours: float, gpus_per_node: int, say: Say) -> None:
        """`gpus_per_node`: GPUs of a node; a sweep that uses fewer of them holds the whole node."""
        self.left_gpu_hours = max_gpu_hours
        self._gpus_per_node, self._say = gpus_per_node, say
        self._environment: dict[str, Any] | None = None

    def run(self, config: SweepConfig, choose: Choose) -> Outcome:
        """Runs the chosen runs to their end; if it is ended early, nothing of it goes on.

        Raises:
            ClusterError: the cluster, or this machine, cannot be used.
        """
        folder = SweepFolder(Path(config.results_dir) / config.name)
        launcher = choose_launcher(config, folder)
        plan = make_plan(config)
        require_runs(plan)
        sweep = open_sweep(
            plan, reuse="any", warn=self._say, say=self._say, max_gpu_hours=self.left_gpu_hours,
            environment=self._environment,
        )  # fmt: skip
        self._environment = sweep.environment
        sweep.plan = replace(sweep.plan, candidates=tuple(choose(sweep.plan)))
        write_plan(sweep.plan.candidates, folder.plan)
        told = _Told(config.name, sweep.plan, self._say)
        reconciler = Reconciler(sweep, launcher, told.show, self.left_gpu_hours, self._say)
        try:
            state = reconciler.run()
        except BaseException:
            self._end(sweep, launcher)
            raise
        held = self._gpus_per_node / config.hardware.gpus_per_node
        self.left_gpu_hours -= held * committed_gpu_hours(sweep.plan, state, ())
        return Outcome(folder=folder, runs=sweep.plan.runs, state=state, stopped=reconciler.stopped)

    def _end(self, sweep: OpenSweep, launcher: Launcher) -> None:
        """Ends all jobs of a sweep; a job that is just being submitted will run nothing."""
        state = sweep.state()
        try:
            for name in open_allocations(state):
                if not state.allocations[name].agents:
                    give_up(sweep.folder.claims, name)
            interrupt(sweep, launcher)
        except (UltrabenchError, OSError) as error:
            self._say(f"cannot end the jobs of {sweep.folder.path}: {error}")


class _Told:
    """Says how many runs of a sweep have ended, when that has changed."""

    def __init__(self, name: str, plan: Plan, say: Say) -> None:
        self._name, self._say = name, say
        self._runs, self._ended = {run.run_id for run in plan.runs}, 0

    def show(self, state: SweepState, alive: frozenset[str]) -> None:
        ended = len({k.run_id for k, a in state.attempts.items() if a.result} & self._runs)
        if ended > self._ended:
            self._ended = ended
            self._say(f"{self._name}: {ended} of {counted(len(self._runs), 'run')}")
