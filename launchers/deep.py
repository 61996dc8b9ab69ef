"""The acceptance run of a cluster: what has to be true of it before a large sweep, tried on one and two nodes."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ultrabench.errors import ClusterError, ConfigError
from ultrabench.launchers.acceptance import place, write_verdict
from ultrabench.launchers.check import Check, failed
from ultrabench.launchers.published import judge_speed, published
from ultrabench.launchers.trial import Outcome, Say, Trials, variant
from ultrabench.launchers.trial_verdict import judge_losses, judge_memory
from ultrabench.sweep.config import SweepConfig
from ultrabench.sweep.control import SAFE_SHARE
from ultrabench.sweep.cover import cover
from ultrabench.sweep.plan import Candidate, Plan, make_plan

GPU_HOURS = 3.0
"""The most that an acceptance run may take."""
LAYOUTS = 12
TOO_MUCH = 3.0
"""Times the memory of a rank by prediction: that cannot fit, however rough the prediction."""


def accept(config: SweepConfig, say: Say) -> list[Check]:
    """The lines of the acceptance run, in order; doctor.json is written.

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
    """One acceptance run; a method for each line."""

    def __init__(self, config: SweepConfig, say: Say) -> None:
        self._config, self._hardware = config, config.hardware
        self._most = max(config.axes.nodes)
        self._folder = place(config) / time.strftime("%Y%m%d-%H%M%S")
        self._trials = Trials(GPU_HOURS, config.hardware.gpus_per_node, say)
        self._published = published(config)  # before anything has been spent
        self._layouts: Outcome | None = None

    def write(self, checks: Sequence[Check]) -> Path:
        """Writes doctor.json; its path."""
        spent = GPU_HOURS - self._trials.left_gpu_hours
        return write_verdict(self._config, checks, self._folder, spent)

    def same_loss(self) -> Check:
        """Every layout has the loss of one GPU."""
        mbs, batch = max(self._config.axes.mbs), self._config.workload.gbs
        alone = _replicas(1) | {"mbs": [mbs], "gas": [batch // mbs]}
        one = self._trials.run(self._variant("one", alone, hardware={"gpus_per_node": 1}), _all)
        self._layouts = self._trials.run(self._variant("layouts", {}), _differing)
        return judge_losses(one, self._layouts)

    def out_of_memory(self) -> Check:
        """What does not fit is told as such, and for sure."""
        return judge_memory(self._trials.run(self._too_large(), _all))

    def speed(self) -> Check:
        """As fast as others were on this hardware, where that is known."""
        known = self._published
        if known is None:
            return judge_speed(None, self._layouts)
        config = self._variant("published", known.axes, models=[known.model])
        return judge_speed(known, self._trials.run(config, known.choose))

    def _variant(self, name: str, sweep: dict[str, Any], **groups: Any) -> SweepConfig:
        return variant(self._config, name, self._folder, sweep=sweep, **groups)

    def _too_large(self) -> SweepConfig:
        """One run on one node whose micro-batches cannot fit."""
        mbs = 1
        while True:
            batch = {"mbs": [mbs], "gas": [1], "gbs": mbs * self._hardware.gpus_per_node}
            config = self._variant("memory", _replicas(1) | batch)
            needs = make_plan(config).candidates[0].prediction.peak_mem_bytes
            if needs > TOO_MUCH * self._hardware.rank_mem_bytes:
                return config
            mbs *= 2


def _replicas(nodes: int) -> dict[str, Any]:
    """The axes of plain data parallelism."""
    return {"nodes": [nodes], "tp": [1], "pp": [1], "cp": [1], "zero_stage": [0]}


def _all(plan: Plan) -> Sequence[Candidate]:
    return plan.runs


def _differing(plan: Plan) -> Sequence[Candidate]:
    """LAYOUTS of those that surely fit, as many on each number of nodes; fewer where there are no more."""
    limit = SAFE_SHARE * plan.config.hardware.rank_mem_bytes
    fitting = [run for run in plan.runs if run.prediction.peak_mem_bytes <= limit]
    sizes = sorted({run.nodes for run in fitting})
    return [r for n in sizes for r in cover([f for f in fitting if f.nodes == n], LAYOUTS // len(sizes))]
