"""The plain decoder: the specification that every form of parallelism must reproduce.

Shapes: B micro-batch, S sequence, H hidden, N heads, K key-value heads, D head width, F
feed-forward width, V vocabulary; a tensor's suffix spells its shape (`x_BSH`).
"""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn import functional

from ultrabench.kernel.loss import head_loss
from ultrabench.model_shape import ModelShape
from ultrabench.stages import Stage

INIT_STD = 0.02
"""Standard deviation of every initial matrix."""
TIED_NAME = "embedding.weight"
"""The name whose seed a tied lm_head takes, wherever its copy lives."""


class _RmsNorm(torch.autograd.Function):
    """y = x * rstd(x) * w, keeping x, w and one number a token for backward.

    Torch's own decomposition on CPUs keeps two full-precision copies of x instead.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[no-untyped-def]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (wide * rstd).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        x, weight, rstd = ctx.saved_tensors
        normed = x.to(rstd.dtype) * rstd
        wide = grad.to(rstd.dtype)
        scaled = wide * weight
        grad_x = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        grad_weight = (wide * normed).sum(dim=tuple(range(grad.dim() - 1)))
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class RmsNorm(nn.Module):
    """Root-mean-square normalisation of the last dim, in at least fp32 (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x_BSH: Tensor) -> Tensor:
        """The normalised x, same shape and dtype; of tokens spread over ranks, each its own."""
        if isinstance(x_BSH, DTensor) and isinstance(self.weight, DTensor):
            # The tokens of a rank give a summand of the weight's gradient.
            weight = self.weight.to_local(grad_placements=[Partial()])
            own = self._norm(x_BSH.to_local(), weight)
            return DTensor.from_local(own, x_BSH.device_mesh, x_BSH.placements, run_check=False)
        return self._norm(x_BSH, self.weight)

    def _norm(self, x_BSH: Tensor, weight: Tensor) -> Tensor:
        if x_BSH.is_cuda:  # one kernel there, which keeps as little
            return functional.rms_norm(x_BSH, x_BSH.shape[-1:], weight, self.eps)
        out: Tensor = _RmsNorm.apply(x_BSH, weight, self.eps)  # type: ignore[no-untyped-call]
        return out


def rope_tables(spans: Sequence[range], shape: ModelShape, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's rotation, S x 1 x D/2 each (arXiv 2104.09864)."""
    wide = torch.promote_types(like.dtype, torch.float32)
    half = torch.arange(0, shape.head_dim, 2, device=like.device, dtype=wide)
    position = torch.cat([torch.arange(s.start, s.stop, device=like.device, dtype=wide) for s in spans])
    angle = torch.outer(position, shape.rope_theta ** (-half / shape.head_dim))[:, None, :]
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x_BSND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with the pairs (i, i + D/2) of every head turned by their position's angle."""
    a, b = x_BSND.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def causal_attention(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    """What each query takes from its own and earlier positions, B x N x S x D."""
    grouped = q_BNSD.shape[1] != k_BKSD.shape[1]
    return functional.scaled_dot_product_attention(q_BNSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=grouped)


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values."""

    core: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Of all tokens of a sequence, or of those that this rank holds."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        h, kv_width = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.core = causal_attention
        self.q = nn.Linear(h, h, bias=False)
        self.k = nn.Linear(h, kv_width, bias=False)
        self.v = nn.Linear(h, kv_width, bias=False)
        self.out = nn.Linear(h, h, bias=False)

    def forward(self, x_BSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attended x_BSH; the number of heads is read from the projections, so shards fit."""
        q, k, v = (project(x_BSH).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v))
        q_BNSD, k_BKSD = (rotate(t, cos, sin).transpose(1, 2) for t in (q, k))
        mixed = self.core(q_BNSD, k_BKSD, v.transpose(1, 2))
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """The block's x_BSH, before the residual is added."""
        out: Tensor = self.down(functional.silu(self.gate(x_BSH)) * self.up(x_BSH))
        return out


class Layer(nn.Module):
    """One decoder layer: attention, then feed-forward, each normalised first and added."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, x_BSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The next x_BSH."""
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), cos, sin)
        out: Tensor = x_BSH + self.ffn(self.ffn_norm(x_BSH))
        return out


class Decoder(nn.Module):
    """The blocks of one pipeline stage; the only stage of a pipeline of one is the whole model.

    Names of parameters are those of the whole model on every stage, so that a name's seed gives
    the same values wherever it lives.
    """

    def __init__(self, shape: ModelShape, stage: Stage, seq_len: int) -> None:
        super().__init__()
        self.shape = shape
        self.spans: tuple[range, ...] = (range(seq_len),)
        """Positions of the tokens that this rank holds."""
        numbers = range(stage.first_layer, stage.first_layer + stage.num_layers)
        h = shape.hidden_size
        self.embedding = nn.Embedding(shape.vocab_size, h) if stage.has_embedding else None
        self.layers = nn.ModuleDict({str(n): Layer(shape) for n in numbers})
        self.norm = RmsNorm(h, shape.rms_norm_eps) if stage.has_norm else None
        self.head = nn.Linear(h, shape.vocab_size, bias=False) if stage.has_head else None
        self.tie()

    def tie(self) -> None:
        """Makes embedding and head one parameter where both live here and the shape says so."""
        if self.shape.tie_word_embeddings and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """What this stage makes of tokens (B x S) or of the previous stage's x_BSH.

        On the last stage the mean loss when it is given targets, else logits B x S x V; x_BSH
        elsewhere.
        """
        x = x if self.embedding is None else self.embedding(x)
        cos, sin = rope_tables(self.spans, self.shape, x)
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        x = x if self.norm is None else self.norm(x)
        if self.head is None:
            return x
        logits_or_loss: Tensor = (
            self.head(x) if targets_BS is None else head_loss(x, self.head.weight, targets_BS)
        )
        return logits_or_loss

    def initial_value(self, name: str, size: torch.Size, seed: int, device: torch.device) -> Tensor:
        """The full fp32 value that parameter `name` starts from; depends on seed and name only."""
        if name.endswith("norm.weight"):
            return torch.ones(size, device=device, dtype=torch.float32)
        if self.shape.tie_word_embeddings and name == "head.weight":
            name = TIED_NAME
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))
        unit = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
        return unit.mul_(INIT_STD)


def cross_entropy(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """Mean loss of a micro-batch's tokens, in at least fp32: what `head_loss` must equal."""
    wide = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    return functional.cross_entropy(wide.flatten(0, 1), targets_BS.flatten())
