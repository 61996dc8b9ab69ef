"""The memory of Megatron-LM's training by published formulas; nothing here was measured.

Symbols: n parameters of the rank, h hidden size, q and kv widths of all queries and all keys, f feed-forward width,
T tokens of a micro-batch.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ultrabench.allowed import NonNegative, require_allowed
from ultrabench.layer_type import LayerType
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.stages import stages_by_rank
from ultrabench.sweep.predict.recompute_modules import dropped_numbers, modules_of
from ultrabench.sweep.predict.stage_memory import DEVICE_BYTES, FORWARD, MemoryLimit, StageMemory, in_flight
from ultrabench.tensor_parallel import added_params, kinds_of_ranks, padded_vocab_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronMemory:
    """The constants of Megatron-LM's memory."""

    logits: NonNegative
    """Bytes for each logit: the product, its copy in fp32, softmax and gradient."""
    fragmentation: NonNegative
    """What the allocator holds beyond the activations, as a share of them."""
    base_bytes: NonNegative
    """Bytes that the allocator holds in any run."""
    device_bytes: NonNegative = DEVICE_BYTES
    """Bytes that a GPU holds beside the allocator: those of CUDA, its libraries and NCCL."""
    gradients: NonNegative = 4.0
    """Bytes of the sum of the gradients of each parameter."""
    gradients_fp16: NonNegative = 4.0
    """Bytes of the sum of the gradients of each parameter, with precision=fp16."""
    limit: MemoryLimit

    def __post_init__(self) -> None:
        require_allowed(self, "memory.")


def megatron_layer_bytes(
    shape: ModelShape, layout: Layout, seq_len: int, kind: LayerType, modules: frozenset[str] = frozenset()
) -> tuple[float, float]:
    """Bytes that a layer keeps for backward of one micro-batch: if it recomputes nothing, and as the layout says.

    With sequence parallelism, flash attention and SwiGLU each of T/tp tokens keeps in bf16 the inputs of both norms
    and their outputs (4 h), q, k, v and the output of attention (2 q + 2 kv), gate, up and their product (3 f).
    That is the inventory of arXiv 2205.05198, section 4.1, for this layer and without dropout. Without sequence
    parallelism each rank keeps the inputs and outputs of norms of all T tokens (section 4.2.1). selective and
    attention compute core attention again, of which flash attention keeps nothing. full keeps the input, h. What
    backward computes again of `modules` is not kept, either.
    """
    tokens, h = layout.mbs * seq_len / layout.cp / layout.tp, shape.hidden_size
    norm_copies = layout.tp if layout.sequence_parallel == "off" else 1
    norm_numbers = norm_copies * kind.norm_channels(h)
    kept_numbers = norm_numbers + _attention_numbers(kind, h, layout.tp) + _feed_forward_numbers(kind, h)
    if layout.full_every:
        left_out = (kept_numbers - norm_copies * h) / layout.full_every
    else:
        left_out = dropped_numbers(kind, h, modules, norm_copies)
    return 2 * tokens * kept_numbers, 2 * tokens * (kept_numbers - left_out)


def _attention_numbers(kind: LayerType, h: int, tp: int) -> int:
    """Numbers that attention keeps of each token of a rank, times tp for those that all ranks keep."""
    if kind.attention is None:
        return 0
    if (grouped := kind.grouped_query) is not None:
        return 2 * grouped.q_width + 2 * grouped.kv_width + 2 * grouped.gate_width
    cut_channels, whole_channels = kind.attention.kept(h)
    return cut_channels + tp * whole_channels


def _feed_forward_numbers(kind: LayerType, h: int) -> int:
    """Numbers that the feed-forward block keeps of each token; of experts those of the chosen ones, with their rows."""
    if (block := kind.feed_forward) is not None:
        return (3 if block.gated else 2) * block.intermediate_size
    if (experts := kind.experts) is None:
        return 0
    chosen_numbers = experts.num_experts_per_tok * experts.row_channels(h)
    return chosen_numbers + experts.kept_of_experts * experts.shared_expert_intermediate_size


class _RankCounts(NamedTuple):
    """What a rank of the pipeline axis holds of a model."""

    num_expert_params: int
    """Parameters of experts, before ep divides them."""
    num_tp_params: int
    """All other parameters, before tp divides them, with what tp adds to them."""
    num_by_kind: tuple[int, ...]
    """Layers of each type."""
    has_head: bool


@lru_cache(maxsize=4096)  # a plan asks for those of a few pipelines for each of its candidates
def _rank_counts(
    shape: ModelShape, tp: int, pp: int, pp_schedule: str, virtual_stages: int, pp_layout: str
) -> tuple[_RankCounts, ...]:
    """What each rank of the pipeline axis holds."""
    layout = Layout(dp=1, pp=pp, pp_schedule=pp_schedule, virtual_stages=virtual_stages, pp_layout=pp_layout)
    counts = list[_RankCounts]()
    for stages in stages_by_rank(shape, layout):
        num_expert_params = sum(stage.num_expert_params(shape) for stage in stages)
        num_params = sum(stage.num_params(shape) + added_params(shape, stage, tp) for stage in stages)
        num_by_kind = tuple(map(sum, zip(*(stage.num_by_kind(shape) for stage in stages), strict=True)))
        has_head = any(stage.has_head for stage in stages)
        counts.append(_RankCounts(num_expert_params, num_params - num_expert_params, num_by_kind, has_head))
    return tuple(counts)


@lru_cache(maxsize=4096)
def _bytes_by_kind(
    shape: ModelShape,
    seq_len: int,
    tp: int,
    cp: int,
    mbs: int,
    sequence_parallel: str,
    recompute: str,
    modules: frozenset[str],
) -> tuple[tuple[float, float], ...]:
    """What `megatron_layer_bytes` returns for each type of layer."""
    layout = Layout(dp=1, tp=tp, cp=cp, mbs=mbs, sequence_parallel=sequence_parallel, recompute=recompute)
    kinds = kinds_of_ranks(shape, tp)
    return tuple(megatron_layer_bytes(shape, layout, seq_len, kind, modules) for kind in kinds)


def megatron_memory(spec: RunSpec, c: MegatronMemory) -> tuple[StageMemory, ...]:
    """The memory of each rank of the pipeline axis at the end of forward.

    Static bytes are 18 n, or 6 n + 12 n / dp with the distributed optimizer (zero_stage 1 and above), which shards
    experts among the ranks that hold the same ones; they are not cut by tp (expert_tensor_parallel_size=1).
    Megatron-FSDP also shards the 4 n bytes of gradients (zero_stage 2) and the 2 n bytes of parameters (zero_stage 3),
    beside which the rank then has two whole layers. Beside the micro-batches in flight there are the logits or, under
    recomputation, all activations of one layer. With several stages on a rank the activations of a micro-batch are
    those of all its stages, as those of all are about alike.
    """
    shape, layout = spec.shape, spec.layout
    kinds = kinds_of_ranks(shape, layout.tp)
    of_layers = layout.tp, layout.cp, layout.mbs, layout.sequence_parallel, layout.recompute, modules_of(spec)
    gradient_bytes = c.gradients_fp16 if spec.kernel.precision == "fp16" else c.gradients
    bytes_by_kind = _bytes_by_kind(shape, spec.workload.seq_len, *of_layers)
    vocabulary = padded_vocab_size(shape.vocab_size, layout.tp)
    logit_bytes = c.logits * layout.mbs * spec.workload.seq_len / layout.cp / layout.tp * vocabulary
    stage_memories = list[StageMemory]()
    of_stages = layout.pp, layout.pp_schedule, layout.virtual_stages, layout.pp_layout
    for pp_rank, counts in enumerate(_rank_counts(shape, layout.tp, *of_stages)):
        expert_params = counts.num_expert_params / layout.ep
        other_params = counts.num_tp_params / layout.tp
        num_by_kind = counts.num_by_kind
        kept_bytes = sum(num * kept for num, (_, kept) in zip(num_by_kind, bytes_by_kind, strict=True))
        activation_bytes = in_flight(layout, pp_rank) * kept_bytes
        head_bytes = logit_bytes * counts.has_head
        present = [n for n, num in enumerate(num_by_kind) if num] or [0]
        largest = max(present, key=lambda n: (kinds[n].experts is not None, bytes_by_kind[n]))
        layer_bytes, kept_layer_bytes = bytes_by_kind[largest]
        buffer_bytes = layer_bytes if kept_layer_bytes < layer_bytes else 0.0
        reserve_bytes = c.base_bytes + c.fragmentation * activation_bytes
        shards = _Shards(other_params, expert_params, layout)
        num_layers = max(1, sum(num_by_kind))
        whole_layers_bytes = (
            2 * 2 * (other_params + expert_params) / num_layers if layout.zero_stage == 3 else 0.0
        )
        part_bytes = (
            2 * shards.params(3), gradient_bytes * shards.params(2), 12 * shards.params(1), activation_bytes,
            head_bytes, buffer_bytes + whole_layers_bytes, reserve_bytes,
        )  # fmt: skip
        stage_memories.append(StageMemory(pp_rank, FORWARD, *part_bytes))
    return tuple(stage_memories)


@dataclass(frozen=True, slots=True)
class _Shards:
    """The parameters of a rank, which ZeRO shards."""

    other_params: float
    expert_params: float
    layout: Layout

    def params(self, first_zero_stage: int) -> float:
        """The parameters of which the rank has a shard, if its ZeRO stage is this one or a higher one, or else all."""
        if self.layout.zero_stage < first_zero_stage:
            return self.other_params + self.expert_params
        return self.other_params / self.layout.zero_shards + self.expert_params / self.layout.expert_shards
