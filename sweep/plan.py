"""The plan of a sweep: every candidate, whether it runs, why not, and in which order."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import rank_peak
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec, Workload, fill_in
from ultrabench.support import refusal
from ultrabench.sweep.config import SweepConfig
from ultrabench.sweep.grid import layouts, not_listed, require_countable, why_none
from ultrabench.sweep.predict import Prediction, predict
from ultrabench.sweep.predict_probe import predict_probe
from ultrabench.sweep.rules import first_broken


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout of one model on one number of nodes, and what is decided about it."""

    shape: ModelShape
    nodes: int
    layout: Layout
    rule: str | None
    """The first structural rule that rejects it, or `kernel` when the kernel refuses it."""
    reason: str | None
    prediction: Prediction
    spec: RunSpec

    @cached_property
    def run_id(self) -> str:
        """Of its spec; hashed once, since a running sweep asks for it all the time."""
        return self.spec.run_id

    @property
    def valid(self) -> bool:
        """No structural rule rejects it."""
        return self.rule is None or self.rule == "kernel"

    @property
    def runs(self) -> bool:
        """It is worth running and the kernel can."""
        return self.rule is None

    @property
    def fits(self) -> bool:
        """Its predicted memory is within that of a rank."""
        return self.prediction.memory_share <= 1

    def duration_s(self, steps: int) -> float:
        """Predicted wall-clock seconds of a run of `steps` steps; what does not fit ends at its start."""
        return self.prediction.start_s + steps * self.prediction.step_time_s * self.fits

    def gpu_hours(self, steps: int) -> float:
        """Predicted price of a run of `steps` steps."""
        return self.duration_s(steps) * self.layout.world_size / 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All candidates of a sweep, the runs first.

    Of the runs the cheapest is first; those whose predicted memory is too large come last, the smallest first.
    """

    config: SweepConfig
    candidates: tuple[Candidate, ...]

    @property
    def steps(self) -> int:
        """Steps a run is priced at."""
        measure = self.config.measure
        return measure.warmup_steps + (measure.min_steps + measure.max_steps) // 2

    @property
    def runs(self) -> tuple[Candidate, ...]:
        """The candidates that run."""
        return tuple(c for c in self.candidates if c.runs)

    def summary(self) -> dict[str, Any]:
        """The document of `sweep plan --json`."""
        rejected = Counter(c.rule for c in self.candidates if not c.valid)
        refused = Counter(c.reason for c in self.candidates if c.valid and not c.runs)
        cells = []
        for shape in self.config.models:
            for nodes in sorted(set(self.config.axes.nodes)):
                cell = [c for c in self.candidates if c.shape is shape and c.nodes == nodes]
                cells.append(
                    {
                        "model": shape.name,
                        "nodes": nodes,
                        "candidates": len(cell),
                        "valid": sum(c.valid for c in cell),
                        "runs": sum(c.runs for c in cell),
                        "predicted_to_fit": sum(c.runs and c.fits for c in cell),
                    }
                )
        return {
            "sweep": self.config.name,
            "candidates": len(self.candidates),
            "valid": sum(c.valid for c in self.candidates),
            "rejected": dict(sorted(rejected.items())),
            "refused_by_kernel": dict(sorted(refused.items())),
            "runs": len(self.runs),
            "predicted_to_fit": sum(c.fits for c in self.runs),
            "cells": cells,
        }


def make_plan(config: SweepConfig, *, core_flops_per_s: float | None = None, cores: int = 2) -> Plan:
    """Enumerates, rejects with reasons, predicts and orders.

    Args:
        core_flops_per_s: measured rate of a CPU core; only hardware without a table rate needs it.

    Raises:
        ConfigError: the axes give no candidate.
    """
    require_countable(config.axes, len(config.models))
    found: list[Candidate] = []
    probes = config.kernel.kind == "probe"
    for shape in config.models:
        for nodes in sorted(set(config.axes.nodes)):
            peak = rank_peak(
                config.hardware,
                config.kernel.precision,
                nodes=nodes,
                core_flops_per_s=core_flops_per_s,
                cores=cores,
            )
            gpus = nodes * config.hardware.gpus_per_node
            # A probe trains nothing: one sequence a rank, on any number of nodes.
            workload = replace(config.workload, gbs=gpus) if probes else config.workload
            for layout in layouts(config.axes, gpus, workload):
                prediction = (
                    predict_probe(config.hardware, nodes)
                    if probes
                    else predict(
                        layout,
                        shape,
                        config.hardware,
                        seq_len=config.workload.seq_len,
                        precision=config.kernel.precision,
                        nodes=nodes,
                        peak=peak,
                    )
                )
                found.append(_candidate(config, shape, nodes, layout, workload, prediction))
    if not found:
        raise why_none(config.axes, config.hardware.gpus_per_node, config.workload)
    if config.kernel.command:
        fill_in(found[0].spec, 0, 0, config.measure)  # names a wrong word now, not on the nodes
    steps = Plan(config=config, candidates=()).steps
    # sorted() is stable: equal prices keep the order of the grid, so the same input plans the same.
    runs = sorted((c for c in found if c.runs), key=lambda c: _order(c, steps))
    return Plan(config=config, candidates=(*runs, *(c for c in found if not c.runs)))


def _order(run: Candidate, steps: int) -> tuple[bool, float]:
    """Price in GPU hours; of what does not fit, the memory."""
    return (False, run.gpu_hours(steps)) if run.fits else (True, run.prediction.memory_share)


def _candidate(
    config: SweepConfig,
    shape: ModelShape,
    nodes: int,
    layout: Layout,
    workload: Workload,
    prediction: Prediction,
) -> Candidate:
    broken = first_broken(layout, shape)
    if broken is None and (reason := not_listed(config.axes, layout)):
        broken = ("gas_not_listed", reason)
    if broken is None:
        reason = refusal(config.kernel, layout, shape, config.workload.seq_len)
        broken = None if reason is None else ("kernel", reason)
    return Candidate(
        shape=shape,
        nodes=nodes,
        layout=layout,
        rule=broken[0] if broken else None,
        reason=broken[1] if broken else None,
        prediction=prediction,
        spec=RunSpec(
            shape=shape,
            workload=workload,
            layout=layout,
            kernel=config.kernel,
            nodes=nodes,
            gpus_per_node=config.hardware.gpus_per_node,
        ),
    )


def require_runs(plan: Plan) -> None:
    """Raises when nothing of the plan can run.

    Raises:
        ConfigError: every candidate is rejected; says by which rule first.
    """
    if plan.runs:
        return
    counts = Counter((c.rule, c.reason) for c in plan.candidates)
    (_, reason), number = counts.most_common(1)[0]
    raise ConfigError(
        f"{counted(len(plan.candidates), 'candidate')}, none can run; {number} because {reason}: change the axes"
    )
