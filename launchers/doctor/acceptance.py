"""The acceptance run of a cluster: it tries on one and two nodes what a large sweep relies on."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ultrabench.errors import ClusterError, ConfigError
from ultrabench.launchers.doctor.acceptance_file import acceptance_folder, write_acceptance
from ultrabench.launchers.doctor.acceptance_sweep import AcceptanceSweeps, Outcome, Say, variant
from ultrabench.launchers.doctor.check import Check, failed, passed
from ultrabench.launchers.doctor.published import check_speed, published
from ultrabench.result import Status
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.config import SweepConfig
from ultrabench.sweep.control import SAFE_SHARE
from ultrabench.sweep.losses import TOLERANCE
from ultrabench.sweep.pairwise_sample import pairwise_sample
from ultrabench.sweep.plan import Plan, make_plan

GPU_HOURS = 3.0
"""Largest number of GPU hours that an acceptance run may take."""
LAYOUTS = 12
TOO_MUCH = 3.0
"""A run whose predicted memory is this many times that of a rank cannot fit, however rough the prediction."""


def run_acceptance(config: SweepConfig, say: Say) -> list[Check]:
    """The checks of the acceptance run, in order; writes doctor.json.

    Raises:
        ConfigError: the configuration cannot be tried like this.
        ClusterError: the cluster cannot be used; doctor.json says so, too.
    """
    if config.kernel.kind != "embedded":
        raise ConfigError(f"kernel={config.kernel.name} with --deep, which trains; use kernel=embedded")
    run = _Acceptance(config, say)
    lines: dict[str, Callable[[], Check]] = {
        "same loss": run.same_loss, "out of memory": run.out_of_memory, "published speed": run.speed,
    }  # fmt: skip
    checks: list[Check] = []
    for name, line in lines.items():
        say(f"acceptance run: {name}")
        try:
            checks.append(line())
        except ClusterError as error:
            run.write([*checks, failed(name, str(error), "mend that, then try again")])
            raise
    say(f"wrote {run.write(checks)}")
    return checks


class _Acceptance:
    """One acceptance run, with a method for each check."""

    def __init__(self, config: SweepConfig, say: Say) -> None:
        self._config, self._hardware = config, config.hardware
        self._most = max(config.axes.nodes)
        self._folder = acceptance_folder(config) / time.strftime("%Y%m%d-%H%M%S")
        self._sweeps = AcceptanceSweeps(GPU_HOURS, config.hardware.gpus_per_node, say)
        self._published = published(config)  # before anything has been spent
        self._layouts: Outcome | None = None

    def write(self, checks: Sequence[Check]) -> Path:
        """Writes doctor.json; its path."""
        spent = GPU_HOURS - self._sweeps.left_gpu_hours
        return write_acceptance(self._config, checks, self._folder, spent)

    def same_loss(self) -> Check:
        """Every layout has the loss of one GPU."""
        mbs, batch = max(self._config.axes.layout["mbs"]), self._config.workload.gbs
        alone = _replicas(1) | {"mbs": [mbs], "gas": [batch // mbs]}
        one = self._sweeps.run(self._variant("one", alone, hardware={"gpus_per_node": 1}), _all)
        self._layouts = self._sweeps.run(self._variant("layouts", {}), _differing)
        return check_losses(one, self._layouts)

    def out_of_memory(self) -> Check:
        """A run that does not fit is recognised as out of memory, and confirmed."""
        return check_memory(self._sweeps.run(self._too_large(), _all))

    def speed(self) -> Check:
        """The speed is that of others on this hardware, where that is known."""
        known = self._published
        if known is None:
            return check_speed(None, self._layouts)
        config = self._variant("published", known.axes, models=[known.model])
        return check_speed(known, self._sweeps.run(config, known.choose))

    def _variant(self, name: str, sweep: dict[str, Any], **groups: Any) -> SweepConfig:
        return variant(self._config, name, self._folder, sweep=sweep, **groups)

    def _too_large(self) -> SweepConfig:
        """One run on one node whose micro-batches cannot fit."""
        mbs = 1
        while True:
            batch = {"mbs": [mbs], "gas": [1], "gbs": mbs * self._hardware.gpus_per_node}
            config = self._variant("memory", _replicas(1) | batch)
            if make_plan(config).candidates[0].prediction.memory_share > TOO_MUCH:
                return config
            mbs *= 2


def _replicas(nodes: int) -> dict[str, Any]:
    """The axes of plain data parallelism."""
    return {"nodes": [nodes], "tp": [1], "pp": [1], "cp": [1], "zero_stage": [0]}


def _all(plan: Plan) -> Sequence[Candidate]:
    return plan.runs


def _differing(plan: Plan) -> Sequence[Candidate]:
    """At most LAYOUTS runs that surely fit, the same number for each number of nodes."""
    fitting = [run for run in plan.runs if run.prediction.memory_share <= SAFE_SHARE]
    sizes = sorted({run.nodes for run in fitting})
    return [
        r for n in sizes for r in pairwise_sample([f for f in fitting if f.nodes == n], LAYOUTS // len(sizes))
    ]


def check_losses(one: Outcome, layouts: Outcome) -> Check:
    """Whether every layout has the loss that one GPU has."""
    alone, runs = one.result(one.runs[0]), layouts.runs
    if alone is None or alone.loss_final is None:
        return failed("same loss", f"one GPU alone: {one.why(one.runs[0])}", f"see {one.see(one.runs[0])}")
    wanted, allowed = alone.loss_final, TOLERANCE[one.runs[0].spec.kernel.precision]
    off: dict[str, float] = {}
    for run in runs:
        result = layouts.result(run)
        if result is None or result.status != Status.OK or result.loss_final is None:
            return failed("same loss", layouts.why(run), f"see {layouts.see(run)}")
        off[run.run_id] = abs(result.loss_final - wanted) / abs(wanted)
    worst = max(runs, key=lambda run: off[run.run_id])
    of = f"at step {alone.loss_step}: {wanted:.6f}; largest difference {off[worst.run_id]:.1g}, allowed {allowed:g}"
    wrong = [run for run in runs if off[run.run_id] > allowed]
    if not wrong:
        return passed("same loss", f"{len(runs)} layouts have the loss of one GPU {of}")
    told = f"{len(wrong)} of {len(runs)} layouts, such as {worst.layout.label()}, have not the loss of one GPU {of}"
    remedy = (
        f"a GPU or a link that computes wrongly, or a bug of torch: compare hosts in {layouts.see(worst)}"
    )
    return failed("same loss", told, remedy)


def check_memory(outcome: Outcome) -> Check:
    """Whether a lack of memory is recognised as such, and confirmed."""
    run = outcome.runs[0]
    result, needs = outcome.result(run), run.prediction.peak_mem_bytes / 2**30
    if result and result.status == Status.OOM and result.confirmed:
        return passed("out of memory", f"{run.layout.label()}, predicted {needs:.0f} GiB: {result.reason}")
    told = outcome.why(run) + (", but not confirmed" if result and result.status == Status.OOM else "")
    remedy = f"GPUs have to be free, and of the memory that hardware= says; see {outcome.see(run)}"
    return failed("out of memory", f"predicted {needs:.0f} GiB: {told}", remedy)
