"""The plan of a sweep: every candidate, whether it runs, the reason if not, and the order of the runs."""

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any, NamedTuple

from ultrabench.errors import ConfigError
from ultrabench.hardware import GUESSED, Peak
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.result import RunResult
from ultrabench.run import AttemptKey, RunSpec, Workload, fill_in
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.grid import (
    broken_rules,
    layouts,
    refusal,
    require_countable,
    why_none,
    without_candidates,
)
from ultrabench.sweep.predict.memory import memory_constants
from ultrabench.sweep.predict.network import network
from ultrabench.sweep.predict.predict import LIKELY_OOM, Prediction, Predictor, too_large

CellKey = tuple[str, int]
"""Model name and number of nodes. Hardware and kernel are the same in the whole sweep."""
PRUNED = "memory"
"""The rule of valid layouts that are not run, because they are predicted to run out of memory."""
PARALLEL_FROM = 10_000
"""Number of candidates from which a plan is made by one process for each core; fewer take less than five seconds."""
PART = 250
"""Number of candidates that a process makes at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout of one model on one number of nodes, and whether it runs."""

    run_id: str
    spec: RunSpec
    rule: str | None = None
    """The first structural rule that rejects the layout, `kernel` when the kernel refuses it, or PRUNED."""
    reason: str | None = None
    predicted: Prediction | None
    """The prediction; None where a structural rule rejects the layout."""
    peak_flops_per_s: float | None = None
    """Peak rate of one rank, which mfu is relative to; None where it is unknown."""
    flops_formula: str
    """The formula that counts the FLOPs of a token."""

    @property
    def shape(self) -> ModelShape:
        """The shape of the model."""
        return self.spec.shape

    @property
    def layout(self) -> Layout:
        """The layout to be measured."""
        return self.spec.layout

    @property
    def nodes(self) -> int:
        """The number of nodes that the run uses."""
        return self.spec.nodes

    @property
    def cell(self) -> CellKey:
        """The cell that the candidate is ranked in."""
        return self.shape.name, self.nodes

    @property
    def valid(self) -> bool:
        """Whether no structural rule rejects the layout."""
        return self.rule in (None, "kernel", PRUNED)

    @property
    def runs(self) -> bool:
        """Whether the layout is valid, the kernel can train it, and it has a chance to fit into memory."""
        return self.rule is None

    @property
    def prediction(self) -> Prediction:
        """The prediction of a valid layout."""
        assert self.predicted is not None
        return self.predicted

    @property
    def fits(self) -> bool:
        """Whether the run is more likely to fit into memory than not."""
        return self.prediction.p_oom <= LIKELY_OOM

    @property
    def gpu_hours(self) -> float:
        """Predicted GPU hours of one run."""
        return self.prediction.duration_s * self.layout.world_size / 3600

    def tokens_per_s_per_gpu(self, result: RunResult) -> float:
        """Tokens per second per GPU in an ok result."""
        return self.spec.tokens_per_step / median(result.step_times_s) / self.layout.world_size

    def mfu(self, tokens_per_s_per_gpu: float) -> float | None:
        """The mfu at this token rate, a fraction; None where the peak rate is unknown."""
        if self.peak_flops_per_s is None:
            return None
        flops_per_token = self.shape.flops_per_token(self.spec.workload.seq_len, self.flops_formula)
        return tokens_per_s_per_gpu * flops_per_token / self.peak_flops_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All candidates of a sweep, those that run first.

    The runs are sorted by price, the cheapest first. Runs that are unlikely to fit into memory come after
    the others, sorted by memory, the smallest first. Those with a P(OOM) above `max_p_oom` are no runs.
    """

    config: SweepConfig
    candidates: tuple[Candidate, ...]

    @property
    def runs(self) -> tuple[Candidate, ...]:
        """The candidates that run."""
        return tuple(c for c in self.candidates if c.runs)

    @property
    def cells(self) -> dict[CellKey, list[Candidate]]:
        """CellKey -> its runs in the order of the plan."""
        return by_cell(self.runs)

    def summary(self) -> dict[str, Any]:
        """The document of `sweep plan --json`."""
        rejected = Counter(c.rule for c in self.candidates if not c.valid)
        refused = Counter(c.reason for c in self.candidates if c.rule == "kernel")
        of_cells = by_cell(self.candidates)
        cells = [
            {"model": shape.name, "nodes": nodes} | _counts(of_cells.get((shape.name, nodes), []))
            for shape in self.config.models
            for nodes in sorted(set(self.config.axes.nodes))
        ]
        config, workload, per_node = self.config, self.config.workload, self.config.hardware.gpus_per_node
        found = [(c.nodes, c.layout) for c in self.candidates]
        none = without_candidates(config.axes, per_node, workload, found)
        return {
            "sweep": config.name,
            "hardware": config.hardware.name,
            "seq_len": workload.seq_len,
            "gbs": workload.gbs,
            "precision": config.kernel.precision,
            "kernel": config.kernel.name,
            **_counts(self.candidates),
            "rejected": dict(sorted(rejected.items())),
            "refused_by_kernel": dict(sorted(refused.items())),
            "without_candidates": [dict(zip(("axis", "value", "reason"), row, strict=True)) for row in none],
            "cells": cells,
        }


def by_cell(candidates: Iterable[Candidate]) -> dict[CellKey, list[Candidate]]:
    """CellKey -> its candidates among these, in their order."""
    found: dict[CellKey, list[Candidate]] = {}
    for candidate in candidates:
        found.setdefault(candidate.cell, []).append(candidate)
    return found


def _counts(candidates: Sequence[Candidate]) -> dict[str, int]:
    return {
        "candidates": len(candidates),
        "valid": sum(c.valid for c in candidates),
        "runs": sum(c.runs for c in candidates),
        "pruned": sum(c.rule == PRUNED for c in candidates),
        "predicted_to_fit": sum(c.runs and c.fits for c in candidates),
    }


def make_plan(
    config: SweepConfig,
    *,
    core_flops_per_s: float | None = None,
    cores: int = 2,
    advance: Callable[[int, int], None] = lambda done, of: None,
) -> Plan:
    """The plan of a sweep: all candidates with reasons and predictions, in the order in which they run.

    Args:
        core_flops_per_s: measured rate of a CPU core; needed only for hardware without a rate in its file.
        cores: number of CPU cores of the host.
        advance: gets the number of candidates that are done and of all, a few times a second.

    Raises:
        ConfigError: the axes give no candidate.
    """
    require_countable(config.axes, len(config.models))
    parts = [*_parts(config, core_flops_per_s, cores)]
    of, found = sum(len(part.layouts) for part in parts), list[Candidate]()
    if not of:
        none = why_none(config.axes, config.hardware.gpus_per_node, config.workload)
        raise ConfigError(f"no candidate: {none}; choose divisors")
    with contextlib.ExitStack() as stack:
        each: Callable[..., Iterable[list[Candidate]]] = map
        if of >= PARALLEL_FROM:
            ignored = signal.SIGINT, signal.SIG_IGN  # Ctrl-C reaches this process, which ends the others
            pool = ProcessPoolExecutor(
                len(os.sched_getaffinity(0)), get_context("fork"), signal.signal, ignored
            )
            stack.callback(pool.shutdown, cancel_futures=True)
            each = pool.map
        for some in each(partial(_candidates, config), parts):
            found += some
            advance(len(found), of)
    if config.kernel.command:  # an unknown word is reported now, not later on the nodes
        fill_in(found[0].spec, AttemptKey(found[0].run_id, 0, 0), config.measure)
    # sorted() is stable: runs of equal price keep the order of the grid, so equal input gives an equal plan.
    runs = sorted((c for c in found if c.runs), key=_order)
    return Plan(config=config, candidates=(*runs, *(c for c in found if not c.runs)))


def _order(run: Candidate) -> tuple[bool, float]:
    """Sort key: GPU hours of a run that fits; a run that does not fit comes later, sorted by memory."""
    return (False, run.gpu_hours) if run.fits else (True, run.prediction.memory_share)


class _Part(NamedTuple):
    """Some layouts of one model on one number of nodes."""

    shape: ModelShape
    nodes: int
    peak: Peak
    workload: Workload
    layouts: list[Layout]


def _parts(config: SweepConfig, core_flops_per_s: float | None, cores: int) -> Iterator[_Part]:
    """All layouts of the grid, in its order."""
    per_node = config.hardware.gpus_per_node
    for shape in config.models:
        for nodes in sorted(set(config.axes.nodes)):
            peak = config.hardware.peak(config.kernel.precision, nodes, core_flops_per_s, cores)
            # A probe trains nothing, so its batch is one sequence for each rank on any number of nodes.
            probes = config.kernel.kind == "probe"
            workload = replace(config.workload, gbs=nodes * per_node) if probes else config.workload
            of_cell = [*layouts(config.axes, nodes * per_node, per_node, workload)]
            for at in range(0, len(of_cell), PART):
                yield _Part(shape, nodes, peak, workload, of_cell[at : at + PART])


def _candidates(config: SweepConfig, part: _Part) -> list[Candidate]:
    """The candidates of a part of the grid."""
    per_node, measured = config.hardware.gpus_per_node, config.kernel.kind != "probe"
    place = {"nodes": part.nodes, "gpus_per_node": per_node}
    predicts, found = predictor(config, part.nodes, part.peak), list[Candidate]()
    for layout in part.layouts:
        rule, reason = next(_rejections(config, layout, part.shape), (None, None))
        spec = RunSpec(shape=part.shape, workload=part.workload, layout=layout, kernel=config.kernel, **place)
        prediction = predicts.predict(spec) if rule in (None, "kernel") else None
        if prediction and rule is None and prediction.p_oom > config.max_p_oom:
            rule, reason = PRUNED, too_large(prediction, prediction.p_oom)
        candidate = Candidate(
            run_id=spec.run_id,
            spec=spec,
            rule=rule,
            reason=reason,
            predicted=prediction,
            peak_flops_per_s=part.peak.flops_per_s if measured and part.peak.source != GUESSED else None,
            flops_formula=config.measure.flops_formula,
        )
        found.append(candidate)
    return found


def predictor(config: SweepConfig, nodes: int, peak: Peak) -> Predictor:
    """What predicts the runs of a sweep on this number of nodes, whose links are those of the data sheet."""
    profile = config.profile
    return Predictor(
        hardware=config.hardware,
        peak=peak,
        measure=config.measure,
        profile=profile,
        memory=memory_constants(profile.framework, profile.memory),
        links=network(config.hardware, nodes),
    )


def _rejections(config: SweepConfig, layout: Layout, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Each rule that rejects a layout, with its reason; the rule is `kernel` where the kernel refuses it."""
    hardware, listed = config.hardware, config.axes.layout.get("gas", (layout.gas,))
    yield from broken_rules(layout, shape)
    if layout.gas not in listed:
        yield "gas_not_listed", f"gas={layout.gas} is not in sweep.gas={list(listed)}"
    if reason := refusal(config.kernel, layout, shape, config.workload.seq_len, hardware.device, hardware):
        yield "kernel", reason
