"""What a rank of our own kernel holds as a forward ends or a backward begins, beside the micro-batch at work.

The symbols are those of `ultrabench_memory`.
"""

from collections.abc import Iterable
from operator import mul
from typing import NamedTuple

from ultrabench.sweep.predict.micro_batch import MicroBatch
from ultrabench.sweep.predict.pipeline import loads
from ultrabench.sweep.predict.stage_params import Cut, StageParams, params_of_rank


class Handling(NamedTuple):
    """How a backward of a stage treats weights and gradients."""

    word: int
    """Bytes of a number in forward and backward."""
    is_zero3: bool
    sums_shards: bool
    """Whether the sums of gradients of earlier micro-batches are shards, since each micro-batch reduces its own."""
    reduces_after: bool
    """Whether gradients are reduced after the backward instead of during it."""
    has_sums: bool
    """Whether an earlier micro-batch has left sums of gradients."""
    reduces: bool
    """Whether this backward reduces gradients."""
    frees: bool
    """Whether this backward frees parameters."""
    regathers: bool
    """Whether ZeRO-3 has freed the layers' parameters, so that backward gathers each one again."""
    halves: bool
    """Whether this backward leaves the gradients of weights to another one, and still has those of the last one in w."""


class State(NamedTuple):
    """What a rank holds as a forward ends or a backward begins, in bytes, beside what that micro-batch keeps."""

    params: StageParams
    """The stage at work."""
    activations: float
    """What other micro-batches keep, and messages."""
    is_drained: bool
    """Whether an earlier backward took the gradient of the head's weights that all micro-batches share."""
    is_forward: bool
    copied: int
    """Parameters that this forward gathered last, which are still in the buffer of the gather, too."""
    sums: float
    """Sums of the stage's gradients of earlier micro-batches."""
    handling: Handling
    other_weights: float
    """Gathered parameters of the rank's other stages."""
    other_gradients: float
    """Gradients of the rank's other stages."""


def states_of_rank(cut: Cut, gas: int, m: MicroBatch, rank: int) -> Iterable[State]:
    """The states of a rank among which is that of its peak, for the first `gas` micro-batches of a step.

    Of those in which a stage of these sizes does the same, it is the one with most beside that stage.
    """
    stages, is_afab = params_of_rank(cut, rank), cut.pp_schedule == "afab"
    kinds, several, is_zero3 = [*dict.fromkeys(stages)], len(stages) > 1, cut.zero_stage == 3
    receives, sends = cut.pp > 1 and (several or rank < cut.pp - 1), several or rank > 0
    # All losses of afab share one gradient of the head's weights, which the first backward takes.
    loss = m.whole_hidden + m.table_kept * (not is_afab)
    kept = [m.kept_by(cut.shape, p.stage) + loss * p.stage.has_head for p in kinds]
    activation_bytes = kept + [m.halfway(cut.shape, p.stage, p.stage.first_layer) for p in kinds]
    gradient_bytes, weight_bytes = _bytes_of_others(cut, m.word, kinds)
    load_bytes, number = activation_bytes + gradient_bytes + weight_bytes, len(activation_bytes)
    heaviest = dict[tuple[object, ...], tuple[float, State]]()
    places = tuple(map(kinds.index, stages))
    for work, of_work in loads(cut.pp, gas, cut.virtual_stages, cut.pp_schedule, rank, places):
        kind, is_forward, is_first, is_last, after_backward = work
        p = kinds[kind]
        if is_forward and not (p.stage.has_head or m.forward(cut.shape, p.stage)):
            continue  # it needs less than the backward
        sums = 0.0 if is_first else p.sums_bytes(cut.reduces_each)
        handling = Handling(
            m.word, is_zero3, cut.reduces_each, cut.reduces_after, sums > 0, is_last or cut.reduces_each,
            is_last or cut.frees_each, is_zero3 and not after_backward, _halves(cut, p),
        )  # fmt: skip
        is_drained = is_afab and not is_first
        task = (p,) if is_forward else (p, is_drained, handling)
        for load in of_work:
            in_flight = load[-1]
            # The gradient that came, and what was sent and may be waited for: under afab until the step ends.
            answered = gas - in_flight if is_afab else int(not is_first)
            messages = receives * (1 + answered * (is_afab or in_flight > 1)) + sends * answered
            is_alone = cut.frees_each or (is_first and in_flight == 1)
            copied = is_forward * _copied(cut, p, is_alone, after_backward)
            fixed = m.hidden * messages - kept[kind]
            beside = sum(map(mul, load, load_bytes), fixed) + is_forward * (sums + m.word * copied)
            if task not in heaviest or heaviest[task][0] < beside:
                heaviest[task] = beside, State(
                    p, sum(map(mul, load, activation_bytes), fixed), is_drained, is_forward,
                    copied, sums, handling,
                    sum(map(mul, load[2 * number :], weight_bytes)), sum(map(mul, load[number:], gradient_bytes)),
                )  # fmt: skip
    return [state for _, state in heaviest.values()]


def _copied(cut: Cut, p: StageParams, is_alone: bool, after_backward: bool) -> int:
    """Parameters that a forward gathered last. A backward leaves layers gathered, and a forward norm and head."""
    if cut.shards == 1:
        return 0
    if is_alone:
        return p.gathered_last
    return (p.first.whole if after_backward else p.top_gather) * (cut.zero_stage == 3)


def _halves(cut: Cut, p: StageParams) -> bool:
    """Whether backward of a stage computes gradients of inputs and of weights apart."""
    return cut.pp_schedule == "zbv" and not p.stage.has_embedding


def _bytes_of_others(cut: Cut, word: int, kinds: list[StageParams]) -> tuple[list[int], list[int]]:
    """The bytes of gradients and of gathered parameters of stages that are not at work, in the order of a `Load`."""
    halves = [word * p.whole.whole * (word == 2 and _halves(cut, p)) for p in kinds]
    reduced = [4 * p.whole.shard + half for p, half in zip(kinds, halves, strict=True)]
    gradients = reduced + [4 * (p.whole.whole - p.whole.shard) for p in kinds]
    if cut.zero_stage < 3:
        return gradients, [word * p.whole.whole for p in kinds] + [0] * len(kinds)
    after_forward = [word * p.last.whole for p in kinds]
    return gradients, after_forward + [word * (p.whole.whole - p.first.whole - p.last.whole) for p in kinds]
