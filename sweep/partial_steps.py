"""Which runs of a sweep are screened by parts of a step, and with how many micro-batches: `measure.partial_steps`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ultrabench.layout import Layout
from ultrabench.measure import PartialSteps
from ultrabench.partial_step import Slice
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.refusals import schedule_refusals

MIN_STEPS_RATIO = 3
"""With auto, a step has at least this many times as many micro-batches as g2, also as a wider slice has it; fewer
would save little."""

FEW_MICROBATCHES = "few_microbatches"
"""The rule of `WholeSteps` for steps of too few micro-batches."""

MEMORY_TOLERANCE = 0.01
"""Relative difference of the predicted peaks up to which parts need as much memory as whole steps: tokens of the batch
alone, which all are on the device."""


class WholeSteps(NamedTuple):
    """Why whole steps of a run are measured although measure.partial_steps asks for parts."""

    rule: str
    """What runs that are measured whole for the same reason have in common, such as `few_microbatches`."""
    reason: str
    """The rule with the numbers of this run."""


def partial_steps_of(config: SweepConfig) -> PartialSteps:
    """The value of measure.partial_steps that a sweep is measured by.

    Where the setting is null, it is auto in an adaptive sweep of our own kernel whose runs can be measured by parts,
    else off.
    """
    if config.measure.partial_steps is not None:
        return config.measure.partial_steps
    is_auto = config.strategy == "adaptive" and config.kernel.trains_itself
    return "auto" if is_auto and whole_steps_of_any_run(config) is None else "off"


def whole_steps_of_any_run(config: SweepConfig) -> WholeSteps | None:
    """Why all whole steps of the runs of a sweep are measured, whatever their layouts; None where these decide."""
    if not config.kernel.trains:
        return WholeSteps("kernel", f"kernel {config.kernel.name} trains nothing")
    if config.measure.checkpoint:
        return WholeSteps("checkpoint", "measure.checkpoint=true, which saves during whole steps")
    if config.trace:
        return WholeSteps("trace", "trace=true, which shows a whole step")
    return None


def slice_of(layout: Layout, partial_steps: PartialSteps) -> Slice | WholeSteps:
    """The slice by which a layout is screened, or why no part of a step stands for it."""
    if isinstance(partial_steps, str):
        return auto_slice(layout)
    return listed_slice(layout, *partial_steps)


def auto_slice(layout: Layout) -> Slice | WholeSteps:
    """The slice that `auto` chooses for a layout, or why it is measured whole.

    g1 is the least number of micro-batches from which on the time of a step is a straight line, and g2 twice that, or
    three times that after an interval that misses its target.
    """
    if layout.pp_schedule == "afab":
        return WholeSteps("afab", "afab keeps all micro-batches in memory")
    g1 = linear_from(layout)
    g2, third = 2 * g1, 3 * g1
    if layout.gas < MIN_STEPS_RATIO * g2:
        fact = f"gas={layout.gas} is less than {MIN_STEPS_RATIO} * g2 = {MIN_STEPS_RATIO * g2}"
        return WholeSteps(FEW_MICROBATCHES, fact)
    refusal = next((reason for size in (g1, g2, third) if (reason := size_refusal(layout, size))), None)
    can_widen = layout.gas >= MIN_STEPS_RATIO * third
    return refusal or Slice(g1=g1, g2=g2, third=third, wider=third if can_widen else None)


def listed_slice(layout: Layout, g1: int, g2: int) -> Slice | WholeSteps:
    """The slice of two listed sizes for a layout, or why it is measured whole.

    The third size is as far from g2 as g2 is from g1, but at most gas; a layout that runs g1 and g2 runs it, too.
    """
    if g2 >= layout.gas:
        return WholeSteps(FEW_MICROBATCHES, f"gas={layout.gas} is not more than g2={g2}")
    if refusal := size_refusal(layout, g1) or size_refusal(layout, g2):
        return refusal
    return Slice(g1=g1, g2=g2, third=min(2 * g2 - g1, layout.gas))


def by_two_starts(slice_: Slice) -> Slice:
    """The slice for a program whose steps all have the same size, which starts once for g1 and once for g2.

    What starts differ in makes its interval miss the target in any case, so that it is as wide as it may become. A
    third size would need a third start.
    """
    return replace(slice_, g2=slice_.wider or slice_.g2, third=None, wider=None, two_starts=True)


def linear_from(layout: Layout) -> int:
    """The smallest number of micro-batches from which on each further one adds the same time to a step.

    A single micro-batch sums no gradients, and a pipeline with fewer than pp is never full. Under interleaved, whose
    stages take turns after each round, it is two rounds; under zbv it is 2*pp-1 (arXiv 2401.10241, section 6).
    """
    if layout.pp_schedule == "interleaved":
        return 2 * round_size(layout)
    return 2 * layout.pp - 1 if layout.pp_schedule == "zbv" else max(2, layout.pp)


def round_size(layout: Layout) -> int:
    """The micro-batches after which the stages of a rank take turns under interleaved: torch cuts gas so."""
    return layout.gas // max(1, layout.gas // layout.pp)


def size_refusal(layout: Layout, size: int) -> WholeSteps | None:
    """Why a step of `size` micro-batches says nothing about one of the layout; None if it does."""
    reason = next(_size_refusals(layout, size), None)
    return WholeSteps("schedule", reason) if reason else None


def _size_refusals(layout: Layout, size: int) -> Iterator[str]:
    part = replace(layout, gas=size)
    yield from (f"a step of {size} micro-batches: {reason}" for reason in schedule_refusals(part))
    if size < (least_size := linear_from(layout)):
        pipeline_text = f"{layout.pp_schedule} with pp={layout.pp}" if layout.pp > 1 else "pp=1"
        yield f"{pipeline_text} needs {least_size} micro-batches; {size} given"
    if layout.pp_schedule == "interleaved" and round_size(part) != round_size(layout):
        rounds_text = f"rounds of {round_size(part)} micro-batches with gas={size}"
        yield f"interleaved would run {rounds_text}, and of {round_size(layout)} with gas={layout.gas}"
