"""The acceptance run of a cluster: it tests on one and two nodes what a large sweep relies on.

doctor.json records it; a large sweep on a cluster without one gets a warning.
"""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from ultrabench import checkout
from ultrabench.errors import ClusterError, ConfigError, UltrabenchError, counted
from ultrabench.launchers.choose import choose_launcher
from ultrabench.launchers.doctor import acceptance_checks
from ultrabench.launchers.doctor.acceptance_checks import Outcome
from ultrabench.launchers.doctor.check import Check, CheckStatus, failed
from ultrabench.launchers.launcher import Launcher, Say
from ultrabench.launchers.open_sweep import OpenSweep, open_sweep
from ultrabench.launchers.reconcile import Reconciler
from ultrabench.launchers.settle import interrupt, open_allocations
from ultrabench.layout import AXES
from ultrabench.record import to_dict
from ultrabench.store.folder import SweepFolder, write_whole
from ultrabench.store.state import SweepState
from ultrabench.sweep.config.load import config_from_tree
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import Candidate, Plan, make_plan, require_runs
from ultrabench.sweep.plan_table import write_plan
from ultrabench.sweep.running.price import SAFE_SHARE, committed_gpu_hours

Word = tuple[str, object]
"""An axis or a property of a layout, and its value."""
GPU_HOURS = 3.0
"""Largest number of GPU hours that an acceptance run may use."""
LAYOUTS = 12
TOO_MUCH = 3.0
"""A run that is predicted to need this many times the memory of a rank certainly does not fit."""

ALONE = {"nodes": [1], "tp": [1], "pp": [1], "cp": [1], "zero_stage": [0]}
"""The sweep axes of plain data parallelism on one node."""
SCHEMA_VERSION = 1
MANY_NODES = 8
"""A launch on more nodes than this gives a warning if its cluster has not passed an acceptance run."""


def run_acceptance(config: SweepConfig, say: Say) -> list[Check]:
    """Performs the acceptance run and writes doctor.json; returns its checks in order.

    Raises:
        ConfigError: an acceptance run of this configuration is impossible.
        ClusterError: the cluster cannot be used; doctor.json records this too.
    """
    if config.kernel.kind != "embedded":
        raise ConfigError(f"kernel={config.kernel.name} with --deep, which trains; use kernel=embedded")
    run = _Acceptance(config, say)
    lines = {"same loss": run.same_loss, "out of memory": run.out_of_memory, "published speed": run.speed}
    checks: list[Check] = []
    for name, line in lines.items():
        say(f"acceptance run: {name}")
        try:
            checks.append(line().named(name))
        except ClusterError as error:
            run.write([*checks, failed(str(error), "mend that, then try again").named(name)])
            raise
    say(f"wrote {run.write(checks)}")
    return checks


class _Acceptance:
    """One acceptance run, with a method for each check; its sweeps share one budget."""

    def __init__(self, config: SweepConfig, say: Say) -> None:
        self._config, self._say = config, functools.cache(say)  # says nothing twice
        self._folder = acceptance_folder(config) / time.strftime("%Y%m%d-%H%M%S")
        self._published = acceptance_checks.published(config)  # an error in this file must cost no GPU time
        self._left_gpu_hours = GPU_HOURS

    @functools.cached_property
    def layouts(self) -> Outcome:
        """The runs of different layouts; the first access makes them."""
        return self._run(self._variant("layouts", {}), _differing)

    def write(self, checks: Sequence[Check]) -> Path:
        """Writes doctor.json; returns its path."""
        return write_acceptance(self._config, checks, self._folder, GPU_HOURS - self._left_gpu_hours)

    def same_loss(self) -> Check:
        """Checks that every layout has the same loss as one GPU."""
        mbs, batch = max(self._config.axes.layout["mbs"]), self._config.workload.gbs
        alone = ALONE | {"mbs": [mbs], "gas": [batch // mbs]}
        one = self._run(self._variant("one", alone, hardware={"gpus_per_node": 1}), lambda plan: plan.runs)
        return acceptance_checks.check_losses(one, self.layouts)

    def out_of_memory(self) -> Check:
        """Checks that a run whose micro-batches do not fit is recognised as out of memory, and confirmed."""
        mbs, share = 1, 0.0
        while share <= TOO_MUCH:
            batch = {"mbs": [mbs], "gas": [1], "gbs": mbs * self._config.hardware.gpus_per_node}
            config = self._variant("memory", ALONE | batch)
            share, mbs = make_plan(config).candidates[0].prediction.memory_share, 2 * mbs
        return acceptance_checks.check_memory(self._run(config, lambda plan: plan.runs))

    def speed(self) -> Check:
        """Checks that the speed is close to the published speed on this hardware, if there is one."""
        if (known := self._published) is None:
            return acceptance_checks.check_speed(None, self.layouts)
        config = self._variant("published", known.axes, models=[known.model])
        return acceptance_checks.check_speed(known, self._run(config, known.choose))

    def _variant(self, name: str, sweep: dict[str, Any], **groups: Any) -> SweepConfig:
        """The configuration as the sweep `name`; `sweep` and `groups` replace only the values they name."""
        tree = self._config.resolved
        groups |= {"sweep": sweep}
        changed = {k: {**tree[k], **v} if isinstance(v, dict) else v for k, v in groups.items()}
        return config_from_tree({**tree, **changed, "name": name, "results_dir": str(self._folder)})

    def _run(self, config: SweepConfig, choose: Callable[[Plan], Sequence[Candidate]]) -> Outcome:
        """Runs the chosen runs of a sweep to their end; if it is interrupted, all its jobs are ended.

        Raises:
            ClusterError: the cluster or this machine cannot be used.
        """
        folder = SweepFolder(Path(config.results_dir) / config.name)
        launcher, plan, left = choose_launcher(config, folder), make_plan(config), self._left_gpu_hours
        require_runs(plan)
        sweep = open_sweep(plan, reuse="any", warn=self._say, say=self._say, max_gpu_hours=left)
        sweep.plan = replace(sweep.plan, candidates=tuple(choose(sweep.plan)))
        write_plan(sweep.plan.candidates, folder.plan)
        runs = {run.run_id for run in sweep.plan.runs}

        def show(state: SweepState, alive: frozenset[str]) -> None:
            ended = len({k.run_id for k, a in state.attempts.items() if a.result} & runs)
            self._say(f"{config.name}: {ended} of {counted(len(runs), 'run')}")

        reconciler = Reconciler(sweep, launcher, show, left, self._say)
        try:
            state = reconciler.run()
        except BaseException:
            self._end(sweep, launcher)
            raise
        # A sweep that uses only some GPUs of a node holds the whole node.
        held = self._config.hardware.gpus_per_node / config.hardware.gpus_per_node
        self._left_gpu_hours -= held * committed_gpu_hours(sweep.plan, state, ())
        return Outcome(folder=folder, runs=sweep.plan.runs, state=state, stopped=reconciler.stopped)

    def _end(self, sweep: OpenSweep, launcher: Launcher) -> None:
        """Ends all jobs of a sweep; a job that is being submitted at this moment will run nothing."""
        try:
            for name, held in open_allocations(sweep.state()).items():
                if not held.agents:
                    sweep.give_up(name)
            interrupt(sweep, launcher)
        except (UltrabenchError, OSError) as error:
            self._say(f"cannot end the jobs of {sweep.folder.path}: {error}")


def _differing(plan: Plan) -> Sequence[Candidate]:
    """At most LAYOUTS runs that certainly fit into memory, equally many for each number of nodes."""
    fitting = [run for run in plan.runs if run.prediction.memory_share <= SAFE_SHARE]
    sizes = sorted({run.nodes for run in fitting})
    each = ([run for run in fitting if run.nodes == nodes] for nodes in sizes)
    return [run for runs in each for run in pairwise_sample(runs, LAYOUTS // len(sizes))]


def pairwise_sample(runs: Sequence[Candidate], count: int) -> tuple[Candidate, ...]:
    """At most `count` of `runs`, chosen so that they cover many values and pairs of values of the axes.

    Each choice is the run that adds the most new values and pairs; among equal runs it is the first. A fault
    of a form of parallelism shows where it is used alone or together with one other form, so a small
    selection should cover the pairs.
    """
    left, chosen, seen = list(runs), list[Candidate](), set[tuple[Word, Word]]()
    while left and len(chosen) < count:
        best = max(left, key=lambda run: len(_pairs(run) - seen))  # max() keeps the first of equals
        left.remove(best)
        chosen.append(best)
        seen |= _pairs(best)
    return tuple(chosen)


def _pairs(run: Candidate) -> set[tuple[Word, Word]]:
    layout = run.layout
    words: list[Word] = [(name, getattr(layout, name)) for name in AXES if name not in ("dp", "mbs", "gas")]
    words += [("dp > 1", layout.dp > 1), ("mbs > 1", layout.mbs > 1), ("gas > 1", layout.gas > 1)]
    return {*combinations_with_replacement(words, 2)}


def acceptance_folder(config: SweepConfig) -> Path:
    """The folder RESULTS_DIR/doctor-CLUSTER-HARDWARE of doctor.json and of the sweeps of acceptance runs."""
    return Path(config.results_dir).absolute() / f"doctor-{config.cluster}-{config.hardware.name}"


def write_acceptance(config: SweepConfig, checks: Sequence[Check], sweeps: Path, gpu_hours: float) -> Path:
    """Writes doctor.json, which replaces an older one; returns its path.

    Args:
        sweeps: the folder with the sweeps of this acceptance run.
        gpu_hours: the GPU hours that these sweeps used.
    """
    document = {
        "schema_version": SCHEMA_VERSION,
        "passed": not any(c.status is CheckStatus.FAIL for c in checks),
        "cluster": config.cluster,
        "hardware": to_dict(config.hardware),
        "nodes": sorted(config.axes.nodes),
        "launcher": config.launcher.name,
        "time": time.time(),
        "gpu_hours": round(gpu_hours, 4),
        "kernel_digest": config.kernel.digest(),
        "git_commit": checkout.commit(),
        "sweeps": str(sweeps),
        "checks": [to_dict(check) for check in checks],
    }
    path = acceptance_folder(config) / "doctor.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(document, indent=1) + "\n")
    return path


def not_accepted(config: SweepConfig) -> str | None:
    """The warning for a large sweep on a cluster that has passed no acceptance run; None in other cases."""
    most, folder = max(config.axes.nodes), acceptance_folder(config)
    if config.launcher.name == "local" or config.hardware.simulated or most <= MANY_NODES:
        return None
    found = "has no acceptance run"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        document = json.loads((folder / "doctor.json").read_text())
        if document["passed"] and max(document["nodes"]) > 1:
            return None
        if not document["passed"]:
            bad = [c["name"] for c in document["checks"] if c["status"] == CheckStatus.FAIL]
            found = f"failed its acceptance run ({', '.join(bad)})"
    names = f"cluster={config.cluster} hardware={config.hardware.name}"
    return (
        f"sweep.nodes up to {most}, and {names} {found} in {folder}; at most 3 GPU hours on two nodes: "
        f"ultrabench doctor --deep launcher=slurm {names}"
    )
