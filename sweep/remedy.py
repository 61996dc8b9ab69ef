"""Plans of which nothing can run or fit, and what would make layouts fit into memory."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import GIB
from ultrabench.model_shape import ModelShape
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import PRUNED, Candidate, CellKey, Plan, by_cell, make_plan
from ultrabench.sweep.predict.predict import ADVISED_P_OOM, advisable

SETTINGS: tuple[dict[str, Any], ...] = (
    {"zero_stage": 3}, {"recompute": "full"}, {"zero_stage": 3, "recompute": "full"},
)  # fmt: skip
"""Axis -> the value that saves memory; the first of them that helps is named."""
MOST_NODES = 1024
"""Largest number of nodes that is tried."""


def require_runs(plan: Plan) -> Plan:
    """The plan, which has at least one run.

    Raises:
        ConfigError: every candidate is rejected; the message tells the rules, the most frequent one first. Where
            only memory is lacking, it tells what would fit.
    """
    if plan.runs:
        return plan
    if lacking := " | ".join(nothing_fits(plan)):
        raise ConfigError(f"{lacking}; max_p_oom=1 runs all of them nevertheless")
    examples = {c.rule: c.reason for c in reversed(plan.candidates)}
    rules = Counter(c.rule for c in plan.candidates).most_common()
    told = "; ".join(f"{number:,} by {rule}, such as {examples[rule]}" for rule, number in rules)
    found = counted(len(plan.candidates), "candidate")
    raise ConfigError(f"{found}, none can run: {told}; change the axes or the model")


def nothing_fits(
    plan: Plan, but: Collection[CellKey] = (), advised_p_oom: float = ADVISED_P_OOM
) -> Iterator[str]:
    """A line for each cell in which no layout is predicted to fit: its smallest layout, and what would help.

    Args:
        but: cells of which nothing has to be told.
        advised_p_oom: P(OOM) above which a layout is no help.
    """
    limit = plan.config.hardware.mem_bytes / GIB
    cells = by_cell(c for c in plan.candidates if c.runs or c.rule == PRUNED)
    for (model, nodes), found in sorted(cells.items()):
        if (model, nodes) not in but and not any(c.fits for c in found):
            smallest = min(found, key=lambda c: c.prediction.peak_mem_bytes)
            told = f"{model} on {counted(nodes, 'node')}: nothing is predicted to fit into {limit:.4g} GiB"
            helps = (
                " or ".join(remedies(plan.config, smallest.shape, nodes, advised_p_oom)) or "a smaller model"
            )
            yield f"{told}; the smallest layout is {_layout(smallest)}; what would fit: {helps}"


def remedies(config: SweepConfig, shape: ModelShape, nodes: int, advised_p_oom: float) -> Iterator[str]:
    """What to change so that a layout is sure enough to fit, each with the memory of the smallest such layout.

    First come settings of layouts on the same nodes, then the least of 2, 4, 8 and so on times the nodes, if need be
    with such settings.
    """
    layouts = config.axes.layout
    new = ({k: v for k, v in each.items() if v not in layouts[k]} for each in SETTINGS)
    settings = dict.fromkeys(tuple(each.items()) for each in new if each)
    for words in settings:
        if smallest := _smallest(config, shape, nodes, dict(words), advised_p_oom):
            yield f"{_words(words)} ({_layout(smallest)})"
            break
    most = list(settings)[-1:]  # with the one that saves most
    for more, words in product(range(1, (MOST_NODES // nodes).bit_length()), ((), *most)):
        if smallest := _smallest(config, shape, nodes << more, dict(words), advised_p_oom):
            yield f"{_words((('nodes', nodes << more), *words))} ({_layout(smallest)})"
            break


def _words(values: Iterable[tuple[str, Any]]) -> str:
    return " ".join(f"sweep.{axis}=[{value}]" for axis, value in values)


def _layout(run: Candidate) -> str:
    told = run.prediction
    return f"{run.layout.label()}, {told.peak_mem_bytes / GIB:,.1f} GiB, P(OOM) {100 * told.p_oom:.0f} %"


def _smallest(
    config: SweepConfig, shape: ModelShape, nodes: int, words: dict[str, Any], advised_p_oom: float
) -> Candidate | None:
    """The run of the smallest memory where axes have these values only; None where it has no room for its reserve."""
    least = {"mbs": min(config.axes.layout["mbs"])}  # larger micro-batches need no less memory
    layout = {**config.axes.layout, **{axis: (value,) for axis, value in (least | words).items()}}
    axes = replace(config.axes, nodes=(nodes,), layout=layout)
    try:
        runs = make_plan(replace(config, models=(shape,), axes=axes)).runs
    except ConfigError:
        return None
    smallest = min(runs, key=lambda run: run.prediction.peak_mem_bytes, default=None)
    return smallest if smallest and advisable(smallest.prediction, advised_p_oom) else None
