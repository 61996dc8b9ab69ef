"""The memory of nanotron's training, with constants that are fitted to measured runs.

Symbols: n parameters of the rank, h hidden size, f feed-forward width, V vocabulary, a heads, l layers of the rank,
T tokens of a micro-batch, w micro-batches in flight. Weights are bf16; sums of gradients, masters and moments fp32.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple

from ultrabench.allowed import Count, NonNegative, one_of, require_allowed
from ultrabench.run import RunSpec
from ultrabench.stages import Stage, split_stages
from ultrabench.sweep.predict.stage_memory import (
    BACKWARD,
    FORWARD,
    OPTIMIZER,
    MemoryLimit,
    StageMemory,
    in_flight,
)
from ultrabench.tensor_parallel import added_params, padded_vocab_size

VERSIONS = ("latest", "run-ahead", "before-fix", "old")
"""The versions of nanotron and its environment, latest first, that the Ultra-Scale Playbook was measured with."""
MAX_AHEAD_FORWARDS = 28
"""Largest number of forwards of a layer by which the host is ahead of the device; a backward counts as two of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NanotronMemory:
    """The constants of nanotron's memory; bytes are for each number, token or parameter that the name says."""

    layer_hidden: NonNegative
    """Bytes for each token and hidden channel that a layer keeps for backward: norms, q, k, v,
    residual, eager copies."""
    layer_ffn: NonNegative
    """Bytes for each token and feed-forward channel that a layer keeps."""
    work_hidden: NonNegative
    """Temporary bytes for each token and hidden channel in the backward of a layer."""
    work_ffn: NonNegative
    """Temporary bytes for each token and feed-forward channel in the backward of a layer."""
    work_gathered: NonNegative
    """Temporary bytes for each hidden channel of each token that tensor parallelism gathers."""
    work_embedding: NonNegative
    """Temporary bytes for each hidden channel of each token on the rank with the embedding."""
    logits: NonNegative
    """Bytes for each logit: the product, its copy in fp32, softmax and gradient."""
    gathered: NonNegative
    """Bytes for each hidden channel, layer and gathered token that runs of some versions do not free in time."""
    run_ahead: NonNegative
    """Memory that tp allocates before the device needs it in the version run-ahead, as a share of the activations."""
    backward_slack: NonNegative
    """The part of all temporary bytes that the allocator cannot use again in backward."""
    optimizer_slack: NonNegative
    """The part of all temporary bytes that the allocator still holds when the optimizer runs."""
    base_bytes: NonNegative
    """Bytes that the allocator holds in any run."""
    vocab_multiple: Count = 1
    """The padded vocabulary is a multiple of this times tp: make_vocab_size_divisible_by of nanotron."""
    latest_limit: MemoryLimit
    """The limit of the memory of runs in the versions latest and old."""
    before_fix_limit: MemoryLimit
    """The limit of runs in the version before-fix."""
    run_ahead_limit: MemoryLimit | None = None
    """The limit of runs in the version run-ahead; None: latest_limit."""
    version: Annotated[str, one_of(*VERSIONS)] = "latest"
    """What is predicted: latest, or what older measurements were made with.

    before-fix and old cut stages by an older rule. In old, runs without a pipeline keep gathered tokens; in
    run-ahead, runs with a pipeline do so for the micro-batches in flight beyond two. Neither keeps those of more
    layers than the host is ahead of the device.
    """

    def __post_init__(self) -> None:
        require_allowed(self, "memory.")

    @property
    def ties_advance(self) -> bool:
        """Whether stages are cut by the rule of later versions."""
        return self.version in ("latest", "run-ahead")

    @property
    def limit(self) -> MemoryLimit:
        """When runs of this version fail."""
        older_limits = {"before-fix": self.before_fix_limit, "run-ahead": self.run_ahead_limit}
        return older_limits.get(self.version) or self.latest_limit


class _MicroBatch(NamedTuple):
    """Bytes of one micro-batch on a rank."""

    layer: float
    """What a layer keeps for backward."""
    work: float
    """Temporary bytes in the backward of a layer."""
    embedding: float
    """Further temporary bytes on the rank with the embedding."""
    logits: float
    gathered: float
    """Gathered tokens that a layer keeps in some versions."""


def _micro_batch_bytes(spec: RunSpec, c: NanotronMemory) -> _MicroBatch:
    shape, layout = spec.shape, spec.layout
    h, f, tp = shape.hidden_size, shape.intermediate_size, layout.tp
    tokens = layout.mbs * spec.workload.seq_len / layout.cp
    rank_tokens, is_gathering = tokens / tp, tp > 1
    layer = rank_tokens * (c.layer_hidden * h + c.layer_ffn * f + 4 * shape.num_attention_heads)
    work = rank_tokens * (c.work_hidden * h + c.work_ffn * f) + is_gathering * c.work_gathered * h * tokens
    if full_every := layout.full_every:  # a layer that is computed again keeps its input
        dropped = layer - 2 * h * rank_tokens
        layer, work = layer - dropped / full_every, work + dropped
    logits = c.logits * rank_tokens * padded_vocab_size(shape.vocab_size, tp, c.vocab_multiple)
    gathered = is_gathering * c.gathered * h * tokens
    return _MicroBatch(layer, work, c.work_embedding * h * tokens, logits, gathered)


def nanotron_memory(spec: RunSpec, c: NanotronMemory) -> tuple[StageMemory, ...]:
    """The memory of each rank of the pipeline axis.

    The peak is the largest of three phases. At the end of forward all micro-batches in flight are alive, with the
    logits or the work of a layer. In backward one of them is gone, and without DDP 2 n of bf16 gradients have come.
    In the optimizer ZeRO-1 makes 4 n to gather parameters. Static bytes are 18 n, 20 n with the bf16 buckets of DDP
    (ZeRO-0 with dp > 1), or 6 n + 12 n / dp with ZeRO-1, which nanotron has in place of higher stages.
    """
    batch_bytes = _micro_batch_bytes(spec, c)
    layout = spec.layout
    stages = split_stages(spec.shape, layout.pp, ties_advance=c.ties_advance, pp_layout=layout.pp_layout)
    return tuple(_rank_memory(spec, c, batch_bytes, stage) for stage in stages)


def _rank_memory(spec: RunSpec, c: NanotronMemory, batch_bytes: _MicroBatch, stage: Stage) -> StageMemory:
    """The memory of the rank of one stage; all values but numbers of something are bytes."""
    layout, pp_rank = spec.layout, stage.index
    added = added_params(spec.shape, stage, layout.tp, c.vocab_multiple)
    tp_params = stage.num_params(spec.shape) + added
    n, num_shards = tp_params / layout.tp, layout.zero_shards
    num_in_flight = in_flight(layout, pp_rank)
    batch_kept = batch_bytes.layer * stage.num_layers
    activations, gathered_tokens = num_in_flight * batch_kept, 0.0
    if c.version == "old" and layout.pp == 1:
        num_forwards: float = min(MAX_AHEAD_FORWARDS, stage.num_layers)
        num_forwards = num_forwards if layout.gas == 1 else (num_forwards + MAX_AHEAD_FORWARDS) / 2
        gathered_tokens = batch_bytes.gathered * num_forwards
    elif c.version == "run-ahead" and layout.pp > 1:
        num_forwards = min(MAX_AHEAD_FORWARDS, stage.num_layers * max(0.0, num_in_flight - 2))
        gathered_tokens = batch_bytes.gathered * num_forwards + c.run_ahead * batch_kept * (layout.tp > 1)
    work = batch_bytes.work + (batch_bytes.embedding if stage.has_embedding else 0.0)
    logits = batch_bytes.logits if stage.has_head and batch_bytes.logits > work else 0.0
    grads, late_grads = (6 * n, 0.0) if num_shards == 1 < layout.dp * layout.cp else (4 * n, 2 * n)
    gathered_params = 4 * n if num_shards > 1 else 0.0
    # What each phase holds beyond the static bytes, and what the allocator holds besides.
    forward_end = activations + (logits or work)
    backward = late_grads + activations - batch_kept + work
    temporary = forward_end + gathered_tokens
    backward_unfreed = gathered_tokens * (layout.pp > 1) + c.backward_slack * temporary
    optimizer_phase = gathered_params + c.optimizer_slack * temporary
    reserved = c.base_bytes + max(forward_end + gathered_tokens, backward + backward_unfreed, optimizer_phase)
    weights, optimizer = 2 * n, 12 * n / num_shards
    if forward_end >= backward and forward_end >= gathered_params:
        buffers = 0.0 if logits else work
        parts = weights, grads, optimizer, activations, logits, buffers, reserved - forward_end
        return StageMemory(pp_rank, FORWARD, *parts)
    if backward >= gathered_params:
        left_activations = activations - batch_kept
        parts = weights, grads + late_grads, optimizer, left_activations, 0.0, work, reserved - backward
        return StageMemory(pp_rank, BACKWARD, *parts)
    parts = weights, grads, optimizer, 0.0, 0.0, gathered_params, reserved - gathered_params
    return StageMemory(pp_rank, OPTIMIZER, *parts)
