"""The memory of Megatron-LM's training by published formulas; nothing here was measured.

Symbols: n parameters of the rank, h hidden size, q and kv widths of all queries and all keys, f feed-forward width,
T tokens of a micro-batch.
"""

from dataclasses import dataclass

from ultrabench.allowed import NonNegative, require_allowed
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.stages import split_stages
from ultrabench.sweep.predict.stage_memory import FORWARD, MemoryLimit, StageMemory, in_flight


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronMemory:
    """The constants of Megatron-LM's memory."""

    logits: NonNegative
    """Bytes for each logit: the product, its copy in fp32, softmax and gradient."""
    fragmentation: NonNegative
    """The part of the activations that the allocator holds beyond them."""
    base_bytes: NonNegative
    """Bytes that the allocator holds in any run."""
    limit: MemoryLimit

    def __post_init__(self) -> None:
        require_allowed(self, "memory.")


def megatron_layer_bytes(
    shape: ModelShape, layout: Layout, seq_len: int, *, is_sparse: bool = False
) -> tuple[float, float]:
    """Bytes that a layer keeps of one micro-batch: without and with its recomputation.

    With sequence parallelism, flash attention and SwiGLU each of T/tp tokens keeps in bf16 the inputs of both norms
    and their outputs (4 h), q, k, v and the output of attention (2 q + 2 kv), gate, up and their product (3 f).
    That is the inventory of arXiv 2205.05198, section 4.1, for this layer and without dropout. selective and
    attention compute core attention again, of which flash attention keeps nothing. full keeps the input, h.
    """
    tokens = layout.mbs * seq_len / layout.cp / layout.tp
    h, width = shape.hidden_size, shape.moe_intermediate_size
    ffn = 3 * shape.intermediate_size
    if is_sparse:  # the rows of the chosen experts, and what experts and shared experts keep of them
        ffn = shape.num_experts_per_tok * (h + 3 * width) + 3 * shape.n_shared_experts * width
    numbers = 4 * h + 2 * shape.q_width + 2 * shape.kv_width + ffn
    recomputed = (numbers - shape.hidden_size) / layout.full_every if layout.full_every else 0.0
    return 2 * tokens * numbers, 2 * tokens * (numbers - recomputed)


def megatron_memory(spec: RunSpec, c: MegatronMemory) -> tuple[StageMemory, ...]:
    """The memory of each rank of the pipeline axis at the end of forward.

    Static bytes are 18 n, or 6 n + 12 n / dp with the distributed optimizer (zero_stage 1 and above), which shards
    experts among the ranks that hold the same ones; they are not cut by tp (expert_tensor_parallel_size=1). Beside the
    micro-batches in flight there are the logits or, under recomputation, all activations of one layer.
    """
    shape, layout = spec.shape, spec.layout
    dense = megatron_layer_bytes(shape, layout, spec.workload.seq_len)
    sparse = megatron_layer_bytes(shape, layout, spec.workload.seq_len, is_sparse=True)
    logits = c.logits * layout.mbs * spec.workload.seq_len / layout.cp / layout.tp * shape.vocab_size
    memory = list[StageMemory]()
    for rank, stage in enumerate(split_stages(shape, layout.pp)):
        experts = stage.num_expert_params(shape) / layout.ep
        rest = (stage.num_params(shape) - stage.num_expert_params(shape)) / layout.tp
        num_sparse = shape.num_sparse_layers(stage.first_layer, stage.num_layers)
        kept = dense[1] * (stage.num_layers - num_sparse) + sparse[1] * num_sparse
        activations, head = in_flight(layout, rank) * kept, logits if stage.has_head else 0.0
        whole, of_layer = sparse if num_sparse else dense
        buffers = whole if of_layer < whole else 0.0
        reserve = c.base_bytes + c.fragmentation * activations
        n, optimizer = rest + experts, 12 * rest / layout.zero_shards + 12 * experts / layout.expert_shards
        state = 2 * n, 4 * n, optimizer
        memory.append(StageMemory(rank, FORWARD, *state, activations, head, buffers, reserve))
    return tuple(memory)
