"""The kinds of attention that a layer may have: sizes, and the parameters,
FLOPs and kept numbers that follow from them.

Field names are those of a Hugging Face `config.json` where it has them. h is the hidden size of the model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Protocol

from ultrabench.allowed import Count, Positive, Size, between, one_of, require_allowed
from ultrabench.errors import ConfigError
from ultrabench.layer_products import COLUMNS, ROWS, WHOLE, Channels, Product, Vector

FLOPS_FORMULAS = ("palm", "megatron", "masked")
"""Which positions a formula counts for the attention of a token.

palm counts all (PaLM, arXiv 2204.02311, appendix B), as torchtitan and nanotron do. megatron counts the half that the
causal mask leaves (num_floating_point_operations of Megatron-LM). masked counts those that the mask of each layer
leaves: causal, and within its window, its chunk or the choice of its index.
"""
KV_HEADS = "num_key_value_heads"
"""Name of the size of grouped-query attention that ranks of tensor parallelism need not divide: they may copy heads."""
CHUNK = 64
"""Tokens of a chunk in the fused operators of linear attention (flash-linear-attention),
which keep a matrix for each."""


def doubled_positions(seq_len: int, formula: str, num_masked: float) -> float:
    """Twice the positions to which a token attends on average by a formula; `num_masked` is what the mask leaves."""
    return {"palm": 2 * seq_len, "megatron": seq_len, "masked": 2 * num_masked}[formula]


def windowed_positions(seq_len: int, window: int | None, diagonal: int = 1) -> float:
    """Mean number of positions in a causal window: w - w*(w - diagonal)/(2s).

    Args:
        window: None means that all earlier positions are in it.
        diagonal: 0 leaves out the half position by which the sum over tokens exceeds the integral.
    """
    width = min(seq_len, window or seq_len)
    return width - width * (width - diagonal) / (2 * seq_len)


def chunked_positions(seq_len: int, chunk: int, diagonal: int = 1) -> float:
    """Mean number of earlier positions in the chunk of a token; the last chunk may be shorter."""
    num_chunks, rest = divmod(seq_len, chunk)
    return (num_chunks * chunk * (chunk + diagonal) + rest * (rest + diagonal)) / (2 * seq_len)


class Attention(Protocol):
    """What every kind of attention says of itself."""

    @property
    def name(self) -> str:
        """What it is called in tables and messages."""

    def products(self, h: int) -> tuple[Product, ...]:
        """Its products of each token with weights, in the order in which forward computes them."""

    def vectors(self, h: int) -> tuple[Vector, ...]:
        """Its parameters beside the weights of products."""

    def core_flops(self, seq_len: int, formula: str, diagonal: int = 1) -> float:
        """FLOPs of its forward for a token beside the products with weights."""

    def kept(self, h: int) -> Channels:
        """The numbers of a token that it keeps for backward."""

    def exchanged_channels(self) -> int:
        """Numbers of a token that ranks of context parallelism exchange: keys and values."""

    @property
    def core_width(self) -> int:
        """Channels of a head, which decide how fast fused operators are; 0 for a state, whose operators are others."""

    @property
    def score_heads(self) -> int:
        """Heads that have a score for each pair of positions; 0 for a state."""

    def tp_sizes(self) -> dict[str, int]:
        """Name -> each size that the ranks of tensor parallelism divide among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQuery:
    """Attention of heads of queries, several of which share a head of keys and values (arXiv 2305.13245)."""

    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    attention_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    output_bias: bool = False
    """Whether the projection of the output has a bias."""
    qk_norm: Annotated[str, one_of("none", "head", "all", "l2")] = "none"
    """How queries and keys are normalised: in each head, over all heads together, or in each head without weights."""
    partial_rotary_factor: Annotated[float, between(0.0, 1.0)] = 1.0
    """Share of the channels of a head that are rotated; 0 means that positions are not used."""
    rope_theta: Positive = 10000.0
    """Base of the rotations."""
    sliding_window: Count | None = None
    """Number of positions that a token attends to, its own included; None means all earlier ones."""
    attention_chunk_size: Count | None = None
    """Size of the chunks of a sequence within which tokens attend; None means that there are none."""
    sinks: bool = False
    """Whether each head has a learned score to which attention may go instead of a position."""
    output_gate: Annotated[str, one_of("none", "head", "channel")] = "none"
    """Whether the output is multiplied by a sigmoid of the input, with one for each head or for each channel."""
    attention_multiplier: Positive | None = None
    """Factor of the scores; None means head_dim**-0.5."""
    attn_logit_softcapping: Positive | None = None
    """Bound c of the scores, which are c*tanh(score/c)."""

    def __post_init__(self) -> None:
        require_allowed(self, "grouped_query.")
        if self.num_attention_heads % self.num_key_value_heads:
            heads_text = f"num_attention_heads={self.num_attention_heads}"
            raise ConfigError(
                f"grouped_query.num_key_value_heads={self.num_key_value_heads} must divide {heads_text}"
            )
        if self.rotary_width % 2:
            factor_text = f"grouped_query.partial_rotary_factor={self.partial_rotary_factor:g}"
            raise ConfigError(
                f"{factor_text} rotates {self.rotary_width} channels of a head; they must be even"
            )
        if self.sliding_window and self.attention_chunk_size:
            raise ConfigError(
                "grouped_query has sliding_window and attention_chunk_size; give only one of them"
            )

    @property
    def name(self) -> str:
        """Its kind with what restricts the positions."""
        if self.sliding_window:
            return f"window {self.sliding_window:,}"
        if self.attention_chunk_size:
            return f"chunks of {self.attention_chunk_size:,}"
        return "full attention"

    @property
    def rotary_width(self) -> int:
        """Number of channels of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def head_widths(self) -> tuple[int, int]:
        """Widths of a head of queries and keys, and of a head of values."""
        return self.head_dim, self.head_dim

    @property
    def q_width(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def gate_width(self) -> int:
        """Number of gates of the output."""
        return {"none": 0, "head": self.num_attention_heads, "channel": self.q_width}[self.output_gate]

    def products(self, h: int) -> tuple[Product, ...]:
        """One product for queries, keys, values and gates together, and the projection of the output."""
        q, kv = self.q_width, self.kv_width
        inputs_width = q + 2 * kv + self.gate_width
        parts = (q, kv, kv, self.gate_width) if self.gate_width else (q, kv, kv)
        return Product(inputs_width, h, COLUMNS, (q + kv) / inputs_width, parts), Product(h, q, ROWS)

    def vectors(self, h: int) -> tuple[Vector, ...]:
        """Biases, weights of norms and sinks."""
        q, kv = self.q_width, self.kv_width
        norms = {"head": (Vector(self.head_dim),) * 2, "all": (Vector(q, True), Vector(kv, True))}
        biases = (Vector(q, True), Vector(kv, True), Vector(kv, True)) if self.attention_bias else ()
        output_bias = (Vector(h),) if self.output_bias else ()
        sinks = (Vector(self.num_attention_heads, True),) if self.sinks else ()
        return *norms.get(self.qk_norm, ()), *biases, *output_bias, *sinks

    def positions(self, seq_len: int, diagonal: int = 1) -> float:
        """Mean number of positions to which a token of a sequence attends."""
        if self.attention_chunk_size:
            return chunked_positions(seq_len, self.attention_chunk_size, diagonal)
        return windowed_positions(seq_len, self.sliding_window, diagonal)

    def core_flops(self, seq_len: int, formula: str, diagonal: int = 1) -> float:
        """4 FLOPs for each pair of a token and a position, in each channel of the queries: scores and values."""
        return 2 * self.q_width * doubled_positions(seq_len, formula, self.positions(seq_len, diagonal))

    def kept(self, h: int) -> Channels:
        """q, k and v, what their norms got, the output; with gates these and the gated output, too."""
        q, kv = self.q_width, self.kv_width
        gated = self.gate_width + q if self.gate_width else 0
        return Channels(2 * q + 2 * kv + (q + kv) * (self.qk_norm != "none") + gated)

    def exchanged_channels(self) -> int:
        """Keys and values of all heads."""
        return 2 * self.kv_width

    @property
    def core_width(self) -> int:
        """Channels of a head."""
        return self.head_dim

    @property
    def score_heads(self) -> int:
        """All heads."""
        return self.num_attention_heads

    def tp_sizes(self) -> dict[str, int]:
        """Heads, which ranks hold whole."""
        return {"num_attention_heads": self.num_attention_heads, KV_HEADS: self.num_key_value_heads}


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The scores by which a token chooses the positions to which it attends (DeepSeek-V3.2, arXiv 2512.02556)."""

    index_n_heads: Size
    index_head_dim: Size
    index_topk: Count
    """Number of positions that a token chooses."""

    def __post_init__(self) -> None:
        require_allowed(self, "index.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention, whose keys and values follow from few channels (DeepSeek-V2, arXiv 2405.04434)."""

    num_attention_heads: Size
    q_lora_rank: Size | None = None
    """Width of the latent from which queries follow; None means that they follow from the input."""
    kv_lora_rank: Size
    """Width of the latent from which keys and values follow."""
    qk_nope_head_dim: Size
    """Channels of a head of queries and keys that are not rotated."""
    qk_rope_head_dim: Size
    """Channels of a head that are rotated; all heads share those of the keys."""
    v_head_dim: Size
    attention_bias: bool = False
    """Whether the projections to the latents and that of the output have biases."""
    rope_theta: Positive = 10000.0
    attention_multiplier: Positive | None = None
    """Factor of the scores; None means the width of a head of queries to the power -0.5."""
    index: Index | None = None

    def __post_init__(self) -> None:
        require_allowed(self, "latent.")
        if self.index and self.q_lora_rank is None:
            raise ConfigError("latent.index needs q_lora_rank, since its queries follow from that latent")

    @property
    def name(self) -> str:
        """Its kind."""
        return f"latent, {self.index.index_topk:,} of an index" if self.index else "latent attention"

    @property
    def qk_head_dim(self) -> int:
        """Width of a head of queries and of keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def head_widths(self) -> tuple[int, int]:
        """Widths of a head of queries and keys, and of a head of values."""
        return self.qk_head_dim, self.v_head_dim

    def products(self, h: int) -> tuple[Product, ...]:
        """Down to the latents, which is done whole by each rank, up to the heads, the index, and the output."""
        num_heads, q_rank, kv_rank = self.num_attention_heads, self.q_lora_rank, self.kv_lora_rank
        return tuple(
            product
            for product in (
                q_rank and Product(q_rank, h, WHOLE),
                Product(num_heads * self.qk_head_dim, q_rank or h, COLUMNS, 1.0),
                Product(kv_rank + self.qk_rope_head_dim, h, WHOLE),
                Product(num_heads * (self.qk_nope_head_dim + self.v_head_dim), kv_rank, COLUMNS),
                *self._index_products(h),
                Product(h, num_heads * self.v_head_dim, ROWS),
            )
            if product
        )

    def _index_products(self, h: int) -> Iterator[Product]:
        """Queries, the one head of keys and the weights of the heads of the index."""
        if self.index:
            num_heads, head_dim = self.index.index_n_heads, self.index.index_head_dim
            yield Product(num_heads * head_dim, self.q_lora_rank or h, WHOLE)
            yield Product(head_dim, h, WHOLE)
            yield Product(num_heads, h, WHOLE)

    def vectors(self, h: int) -> tuple[Vector, ...]:
        """The norms of the latents and of the keys of the index, and biases."""
        q_rank, kv_rank = self.q_lora_rank or 0, self.kv_lora_rank
        norms = (
            Vector(q_rank),
            Vector(kv_rank),
            *((Vector(2 * self.index.index_head_dim),) if self.index else ()),
        )
        biases = (
            (Vector(q_rank), Vector(kv_rank + self.qk_rope_head_dim), Vector(h))
            if self.attention_bias
            else ()
        )
        return *norms, *biases

    def core_flops(self, seq_len: int, formula: str, diagonal: int = 1) -> float:
        """2 FLOPs for each pair in each channel of queries and of values; an index scores all pairs before."""
        topk = self.index.index_topk if self.index else None
        num_masked = windowed_positions(seq_len, topk, diagonal)
        pair_flops = self.num_attention_heads * (self.qk_head_dim + self.v_head_dim)
        core_flops = pair_flops * doubled_positions(seq_len, formula, num_masked)
        if self.index is None:
            return core_flops
        index_flops = self.index.index_n_heads * (self.index.index_head_dim + 1)
        num_causal = windowed_positions(seq_len, None, diagonal)
        return core_flops + index_flops * doubled_positions(seq_len, formula, num_causal)

    def kept(self, h: int) -> Channels:
        """Latents before and after their norms, both times with the channels of keys that are rotated, q, k, v and the
        output, and what an index scores with.
        """
        q_rank, kv_rank = self.q_lora_rank or 0, self.kv_lora_rank
        latents = 2 * (q_rank + kv_rank + self.qk_rope_head_dim)
        heads = 2 * self.num_attention_heads * (self.qk_head_dim + self.v_head_dim)
        index = (self.index.index_n_heads + 1) * (self.index.index_head_dim + 1) if self.index else 0
        return Channels(heads, latents + index)

    def exchanged_channels(self) -> int:
        """Keys and values of all heads."""
        return self.num_attention_heads * (self.qk_head_dim + self.v_head_dim)

    @property
    def core_width(self) -> int:
        """Channels of a head of values, the narrower one."""
        return min(self.qk_head_dim, self.v_head_dim)

    @property
    def score_heads(self) -> int:
        """All heads."""
        return self.num_attention_heads

    def tp_sizes(self) -> dict[str, int]:
        """Heads, which ranks hold whole."""
        return {"num_attention_heads": self.num_attention_heads}


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Linear attention by the gated delta rule (arXiv 2412.06464), with a short convolution before it."""

    linear_num_key_heads: Size
    linear_num_value_heads: Size
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_conv_kernel_dim: Size = 4
    """Tokens that the convolution sees."""

    def __post_init__(self) -> None:
        require_allowed(self, "linear.")
        if self.linear_num_value_heads % self.linear_num_key_heads:
            heads_text = f"linear_num_value_heads={self.linear_num_value_heads}"
            raise ConfigError(
                f"linear.linear_num_key_heads={self.linear_num_key_heads} must divide {heads_text}"
            )

    @property
    def name(self) -> str:
        """Its kind."""
        return "linear attention"

    @property
    def key_width(self) -> int:
        """Width of all heads of keys, and of queries."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_width(self) -> int:
        """Width of all heads of values."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: those of queries, keys and values."""
        return 2 * self.key_width + self.value_width

    def products(self, h: int) -> tuple[Product, ...]:
        """Queries, keys, values and gates with rate and decay of each head; the output."""
        outputs = self.conv_width + self.value_width + 2 * self.linear_num_value_heads
        return Product(outputs, h, COLUMNS, 0.5), Product(h, self.value_width, ROWS)

    def vectors(self, h: int) -> tuple[Vector, ...]:
        """The convolution, two decays of each head, and the norm of the output in each head."""
        conv = Vector(self.linear_conv_kernel_dim * self.conv_width, True)
        return conv, Vector(2 * self.linear_num_value_heads, True), Vector(self.linear_value_head_dim)

    def core_flops(self, seq_len: int, formula: str, diagonal: int = 1) -> float:
        """The convolution, and 7 FLOPs for each number of the state: decay, reading, writing and the output."""
        num_heads = self.linear_num_value_heads
        state_flops = 7 * num_heads * self.linear_key_head_dim * self.linear_value_head_dim
        return float(state_flops + 2 * self.linear_conv_kernel_dim * self.conv_width)

    def kept(self, h: int) -> Channels:
        """Inputs and outputs of the convolution, queries and keys of each head, gates, a row of the matrix of a chunk
        for each head, and the output before and after its norm.
        """
        num_heads, value_width = self.linear_num_value_heads, self.value_width
        of_heads = num_heads * (2 * self.linear_key_head_dim + 4 + CHUNK)
        return Channels(2 * self.conv_width + of_heads + 3 * value_width)

    def exchanged_channels(self) -> int:
        """None, since only states pass from rank to rank."""
        return 0

    @property
    def core_width(self) -> int:
        """0: it has a state."""
        return 0

    @property
    def score_heads(self) -> int:
        """0: it has a state."""
        return 0

    def tp_sizes(self) -> dict[str, int]:
        """Heads, which ranks hold whole."""
        return {
            "linear_num_key_heads": self.linear_num_key_heads,
            "linear_num_value_heads": self.linear_num_value_heads,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """A state space layer, Mamba 2 (arXiv 2405.21060)."""

    mamba_num_heads: Size
    mamba_head_dim: Size
    n_groups: Size
    """Number of groups of heads that share inputs and outputs of the state."""
    ssm_state_size: Size
    """Numbers of the state for each channel of a head."""
    conv_kernel: Size = 4
    """Tokens that the convolution sees."""
    use_conv_bias: bool = True
    """Whether the convolution has biases."""
    use_bias: bool = False
    """Whether the projections have biases."""

    def __post_init__(self) -> None:
        require_allowed(self, "state_space.")
        if self.mamba_num_heads % self.n_groups:
            heads_text = f"mamba_num_heads={self.mamba_num_heads}"
            raise ConfigError(f"state_space.n_groups={self.n_groups} must divide {heads_text}")

    @property
    def name(self) -> str:
        """Its kind."""
        return "state space"

    @property
    def width(self) -> int:
        """Width of all heads together."""
        return self.mamba_num_heads * self.mamba_head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: those of the heads, and inputs and outputs of the state of each group."""
        return self.width + 2 * self.n_groups * self.ssm_state_size

    def products(self, h: int) -> tuple[Product, ...]:
        """What the convolution gets, gates and the time step of each head; the output."""
        outputs = self.width + self.conv_width + self.mamba_num_heads
        return Product(outputs, h, COLUMNS, 1.0), Product(h, self.width, ROWS)

    def vectors(self, h: int) -> tuple[Vector, ...]:
        """The convolution, three numbers of each head, the norm of the output, and biases."""
        conv = Vector(self.conv_width * (self.conv_kernel + self.use_conv_bias), True)
        input_bias = self.width + self.conv_width + self.mamba_num_heads
        biases = (Vector(input_bias, True), Vector(h)) if self.use_bias else ()
        return conv, Vector(3 * self.mamba_num_heads, True), Vector(self.width, True), *biases

    def core_flops(self, seq_len: int, formula: str, diagonal: int = 1) -> float:
        """The convolution, and 5 FLOPs for each number of the state: decay, writing and the output."""
        return float(5 * self.width * self.ssm_state_size + 2 * self.conv_kernel * self.conv_width)

    def kept(self, h: int) -> Channels:
        """Inputs of the convolution, gates and time steps, and the output before and after its norm."""
        return Channels(3 * self.width + self.conv_width + self.mamba_num_heads)

    def exchanged_channels(self) -> int:
        """None, since only states pass from rank to rank."""
        return 0

    @property
    def core_width(self) -> int:
        """0: it has a state."""
        return 0

    @property
    def score_heads(self) -> int:
        """0: it has a state."""
        return 0

    def tp_sizes(self) -> dict[str, int]:
        """Heads and groups, which ranks hold whole."""
        return {"mamba_num_heads": self.mamba_num_heads, "n_groups": self.n_groups}
