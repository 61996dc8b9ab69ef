"""What a rank of our own kernel holds as a forward ends or a backward begins, beside the micro-batch at work.

The symbols are those of `ultrabench_memory`.
"""

from collections.abc import Iterable
from operator import mul
from typing import NamedTuple

from ultrabench.sweep.predict.micro_batch import MicroBatch
from ultrabench.sweep.predict.pipeline import Turn, turns
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
    several = len(stages) > 1
    receives, sends = cut.pp > 1 and (several or rank < cut.pp - 1), several or rank > 0
    # All losses of afab share one gradient of the head's weights, which the first backward takes.
    loss = m.whole_hidden + m.table_kept * (not is_afab)
    # Bytes of a micro-batch: first those that a stage keeps of it, then those between the halves of its backward.
    counted_bytes = [m.kept_by(cut.shape, p.stage) + loss * p.stage.has_head for p in stages]
    counted_bytes += [m.halfway(cut.shape, p.stage, p.stage.first_layer) for p in stages]
    # The forward of another stage needs less than its backward.
    matters = [p.stage.has_head or m.forward(cut.shape, p.stage) > 0 for p in stages]
    heaviest = dict[tuple[object, ...], tuple[float, State]]()
    for turn in turns(cut.pp, gas, cut.virtual_stages, cut.pp_schedule, rank):
        chunk, is_forward, is_first = turn.chunk, turn.is_forward, not turn.backward_phase[turn.chunk]
        if is_forward and not matters[chunk]:
            continue
        p, copied, after_backward = stages[chunk], 0, turn.after_backward[chunk]
        if is_forward and cut.zero_stage == 3:  # a backward leaves layers gathered, and a forward norm and head
            copied = p.first.whole if after_backward else p.top_gather
        other_weights, other_gradients = _of_others(cut, m.word, stages, turn) if several else (0.0, 0.0)
        sums = 0.0 if is_first else p.sums_bytes(cut.reduces_each)
        handling = Handling(
            m.word, cut.zero_stage == 3, cut.reduces_each, cut.reduces_after, sums > 0,
            turn.is_last or cut.reduces_each, turn.is_last or cut.frees_each,
            cut.zero_stage == 3 and not after_backward, _halves(cut, p),
        )  # fmt: skip
        is_drained = is_afab and not is_first
        task = (p,) if is_forward else (p, is_drained, handling)
        for counts in turn.counts:
            in_flight = counts[chunk]
            # The gradient that came, and what was sent and may be waited for: under afab until the step ends.
            answered = gas - in_flight if is_afab else int(not is_first)
            messages = receives * (1 + answered * (is_afab or in_flight > 1)) + sends * answered
            activations = sum(map(mul, counts, counted_bytes)) - counted_bytes[chunk] + m.hidden * messages
            if is_forward and (cut.frees_each or (is_first and in_flight == 1)):
                copied = p.gathered_last
            beside = activations + other_weights + other_gradients + is_forward * (sums + m.word * copied)
            if task not in heaviest or heaviest[task][0] < beside:
                heaviest[task] = beside, State(
                    p, activations, is_drained, is_forward, copied * (cut.shards > 1), sums, handling,
                    other_weights, other_gradients,
                )  # fmt: skip
    return [state for _, state in heaviest.values()]


def _halves(cut: Cut, p: StageParams) -> bool:
    """Whether backward of a stage computes gradients of inputs and of weights apart."""
    return cut.pp_schedule == "zbv" and not p.stage.has_embedding


def _of_others(cut: Cut, word: int, stages: tuple[StageParams, ...], turn: Turn) -> tuple[float, float]:
    """The bytes of gathered parameters and of gradients of the rank's stages that are not at work."""
    weights = gradients = 0.0
    for number, (p, backward_phase) in enumerate(zip(stages, turn.backward_phase, strict=True)):
        if number == turn.chunk:
            continue
        if backward_phase:
            gradients += 4 * (p.whole.shard if backward_phase == 2 else p.whole.whole)
            gradients += word * p.whole.whole * (word == 2 and _halves(cut, p))
        if backward_phase < 2 and cut.zero_stage == 3:
            weights += word * (p.whole.whole - p.first.whole if turn.after_backward[number] else p.last.whole)
        elif backward_phase < 2:
            weights += word * p.whole.whole
    return weights, gradients
