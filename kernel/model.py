"""The plain decoder, which is the specification that every form of parallelism must reproduce.

Shapes: B micro-batch, S sequence, H hidden, N heads, K key-value heads, D head width, F feed-forward width,
V vocabulary; the suffix of a tensor's name is its shape (`x_BSH`).
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ultrabench import feed_forward_type
from ultrabench.attention_type import GroupedQuery, Latent
from ultrabench.feed_forward_type import Experts
from ultrabench.kernel.activation import activate
from ultrabench.kernel.compat import kept_linear
from ultrabench.kernel.cut import COLUMNS, OF_HEADS, OF_TOKENS, ROWS, VOCABULARY, Cut
from ultrabench.kernel.loss import HeadGradient, head_loss
from ultrabench.kernel.mesh import Part, is_expert, is_norm, part_view
from ultrabench.kernel.moe import Route, Routing, SparseFeedForward
from ultrabench.kernel.rope import rope_tables, rotate, rotate_pairs, rotation_of, score_factor
from ultrabench.layer_type import LayerType
from ultrabench.model_shape import ModelShape
from ultrabench.routing import LEARNED_ROUTING
from ultrabench.stages import Stage

INIT_STD = 0.02
"""Standard deviation of the initial values of every matrix, and of biases, which would hide a fault if they were 0."""
LATENT_NORM_EPS = 1e-6
"""Eps of the norms of latents, whatever rms_norm_eps is: the default of DeepseekV3RMSNorm in transformers."""
TIED_PARAMETER_NAME = "embedding.weight"
"""The parameter from whose name the values of a copy of the embedding are drawn, on whichever rank it is."""
NEXT_EMBEDDING_NAME = "next_embedding.weight"
"""The copy of the embedding on the last stage of a pipeline, for the tokens that modules behind the last layer get."""
PREDICT_WEIGHT = 0.3
"""Weight of the mean loss of the modules that predict one more token each, beside that of the model itself: that of
DeepSeek-V3 for most of its training (arXiv 2412.19437, section 4.2)."""


class _RmsNormFunction(torch.autograd.Function):
    """Computes y = x * rstd(x) * w, and keeps x, w and one number per token for backward.

    The decomposition of torch on CPUs keeps two full-precision copies of x instead.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # type: ignore[no-untyped-def]
        x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (x_wide * rstd).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def]
        x, weight, rstd = ctx.saved_tensors
        normed_x = x.to(rstd.dtype) * rstd
        grad_weight = (grad_y * normed_x).sum(dim=tuple(range(grad_y.dim() - 1)))
        grad_x = grad_y.to(rstd.dtype) * weight
        grad_x -= normed_x.mul_((grad_x * normed_x).mean(-1, keepdim=True))
        return grad_x.mul_(rstd).to(x.dtype), grad_weight.to(weight.dtype), None


class RmsNorm(nn.Module):
    """Root-mean-square normalisation of the last dim, computed in at least fp32 (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The normalised x, with its shape and dtype."""
        if x.is_cuda:  # on GPUs torch has one kernel, which keeps as little
            return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        y: Tensor = _RmsNormFunction.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return y


def causal_attention(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
    """The attention of each query to its own and earlier positions, B x N x S x D."""
    has_gqa = q_BNSD.shape[1] != k_BKSD.shape[1]
    return functional.scaled_dot_product_attention(q_BNSD, k_BKSD, v_BKSD, is_causal=True, enable_gqa=has_gqa)


def column_products(x_BSH: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """The products of x with several weights; tensor parallelism cuts these weights along their output.

    Selective recomputation keeps every second one, from the first on.
    """
    return tuple(
        (functional.linear if i % 2 else kept_linear)(x_BSH, weight) for i, weight in enumerate(weights)
    )


def part_widths(x: Tensor, weights: Sequence[Tensor]) -> list[int]:
    """The channels of x that each of several weights multiplies, and those that remain."""
    widths = [weight.shape[1] for weight in weights]
    return [*widths, x.shape[-1] - sum(widths)]


def part_products(x_BSC: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """The products of successive channels of x with a weight each, then the channels that remain.

    Tensor parallelism cuts these weights along their output. Selective recomputation keeps the first one of several.
    """
    *parts, rest = torch.split(x_BSC, part_widths(x_BSC, weights), dim=-1)
    is_kept = len(weights) > 1
    products = (
        (kept_linear if i == 0 and is_kept else functional.linear)(part, weight)
        for i, (part, weight) in enumerate(zip(parts, weights, strict=True))
    )
    return *products, rest


class Block(nn.Module):
    """Products with several weights, something between, and a product with one weight."""

    cuts: dict[str, Cut]
    """Name of each layer of the block -> how tensor parallelism cuts it."""
    column_products: Callable[..., tuple[Tensor, ...]]
    part_products: Callable[..., tuple[Tensor, ...]]
    whole_product: Callable[[Tensor, Tensor], Tensor]
    """A product of the tokens of a rank with a weight that all ranks of tensor parallelism hold whole."""
    row_product: Callable[[Tensor, Tensor], Tensor]
    """The last product; tensor parallelism cuts its weight along its input."""

    def __init__(self) -> None:
        super().__init__()
        self.column_products, self.part_products = column_products, part_products
        self.whole_product = self.row_product = functional.linear

    @property
    def linear_layers(self) -> list[nn.Linear]:
        """The layers with whose weights the block multiplies each token."""
        return [layer for layer in self.children() if isinstance(layer, nn.Linear)]


class Attention(Block):
    """Causal self-attention of any kind."""

    core: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The attention function, over all tokens of a sequence or around a ring of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.core = causal_attention


class GroupedQueryAttention(Attention):
    """Causal self-attention with grouped keys and values."""

    def __init__(self, sizes: GroupedQuery, hidden_size: int, eps: float) -> None:
        super().__init__()
        has_bias, self.head_width = sizes.attention_bias, sizes.head_dim
        self.q = nn.Linear(hidden_size, sizes.q_width, bias=has_bias)
        self.k = nn.Linear(hidden_size, sizes.kv_width, bias=has_bias)
        self.v = nn.Linear(hidden_size, sizes.kv_width, bias=has_bias)
        self.out = nn.Linear(sizes.q_width, hidden_size, bias=False)
        self.norm_across_heads, has_norms = sizes.qk_norm == "all", sizes.qk_norm != "none"
        widths = (sizes.q_width, sizes.kv_width) if self.norm_across_heads else (sizes.head_dim,) * 2
        self.q_norm, self.k_norm = (RmsNorm(width, eps) if has_norms else None for width in widths)
        kv_columns = COLUMNS._replace(num_heads=sizes.num_key_value_heads)
        self.cuts = {
            "q": COLUMNS,
            "k": kv_columns,
            "v": kv_columns,
            "out": ROWS,
            "q_norm": OF_HEADS,
            "k_norm": OF_HEADS,
        }

    def _heads(self, projection: Tensor, norm: RmsNorm | None) -> Tensor:
        """The heads of queries, keys or values, B x S x N x D, from their projection B x S x N*D.

        `norm` normalises each head by itself, or all heads of a token together.
        """
        x_BSND = projection.view(*projection.shape[:-1], -1, self.head_width)
        if norm is None:
            return x_BSND
        normed_x: Tensor = norm(projection if self.norm_across_heads else x_BSND)
        return normed_x.view_as(x_BSND)

    def forward(self, x_BSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The x_BSH after attention; the number of heads comes from the projections, which may be shards."""
        projections = self.q, self.k, self.v
        products = self.column_products(x_BSH, *(projection.weight for projection in projections))
        if self.q.bias is not None:
            products = tuple(y + projection.bias for y, projection in zip(products, projections, strict=True))
        q, k, v = map(self._heads, products, (self.q_norm, self.k_norm, None))
        q_BNSD, k_BKSD = (rotate(heads, cos, sin).transpose(1, 2) for heads in (q, k))
        attended_BNSD = self.core(q_BNSD, k_BKSD, v.transpose(1, 2))
        return self.row_product(attended_BNSD.transpose(1, 2).flatten(2), self.out.weight)


def own_memory(view: Tensor) -> Tensor:
    """A copy of a view, which does not keep the rest of the tensor that it is a view of."""
    return view.contiguous()


class LatentAttention(Attention):
    """Causal self-attention whose keys and values, and perhaps queries, follow from a few channels: latents.

    Heads of queries and keys have qk_nope_head_dim channels, then qk_rope_head_dim that are rotated, of which all
    heads share those of the keys (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Each rank of tensor parallelism computes the latents of its own tokens with whole weights. What its heads get of
    the tokens of all ranks are the normed latents and the rotated channels of the keys, in one tensor.
    """

    def __init__(self, sizes: Latent, hidden_size: int, score_factor: float = 1.0) -> None:
        """`score_factor` multiplies all scores, beside what their usual scale or attention_multiplier does."""
        super().__init__()
        if sizes.attention_multiplier is not None:  # attention itself divides by the root of their width
            score_factor *= sizes.attention_multiplier * sizes.qk_head_dim**0.5
        self.score_factor = score_factor
        self.sizes, has_bias, num_heads = sizes, sizes.attention_bias, sizes.num_attention_heads
        q_width, self.q_a, self.q_a_norm = num_heads * sizes.qk_head_dim, None, None
        if sizes.q_lora_rank:
            self.q_a = nn.Linear(hidden_size, sizes.q_lora_rank, bias=has_bias)
            self.q_a_norm = RmsNorm(sizes.q_lora_rank, LATENT_NORM_EPS)
            self.q_b = nn.Linear(sizes.q_lora_rank, q_width, bias=False)
        else:
            self.q = nn.Linear(hidden_size, q_width, bias=False)
        self.kv_a = nn.Linear(hidden_size, sizes.kv_lora_rank + sizes.qk_rope_head_dim, bias=has_bias)
        self.kv_a_norm = RmsNorm(sizes.kv_lora_rank, LATENT_NORM_EPS)
        self.kv_b = nn.Linear(
            sizes.kv_lora_rank, num_heads * (sizes.qk_nope_head_dim + sizes.v_head_dim), bias=False
        )
        self.out = nn.Linear(num_heads * sizes.v_head_dim, hidden_size, bias=has_bias)
        whole_names = "q_a", "q_a_norm", "kv_a", "kv_a_norm", "out.bias"
        self.cuts = (
            dict.fromkeys(whole_names, OF_TOKENS)
            | dict.fromkeys(("q", "q_b", "kv_b"), COLUMNS)
            | {"out": ROWS}
        )

    def _latent(self, x_BSH: Tensor, projection: nn.Linear) -> Tensor:
        """The product of a rank's own tokens with the weight of a projection to latents, with its bias."""
        y = self.whole_product(x_BSH, projection.weight)
        return y if projection.bias is None else y + projection.bias

    def _projections(self, x_BSH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries of all heads, their keys without rotated channels with their values, and the rotated channels."""
        sizes = self.sizes
        kv_latent, k_rope = torch.split(
            self._latent(x_BSH, self.kv_a), [sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1
        )
        normed_kv = self.kv_a_norm(kv_latent)
        if self.q_a is None or self.q_a_norm is None:
            kv, k_rope = self.part_products(torch.cat((normed_kv, k_rope), dim=-1), self.kv_b.weight)
            (q,) = self.column_products(x_BSH, self.q.weight)
            return q, kv, k_rope
        normed_q = self.q_a_norm(self._latent(x_BSH, self.q_a))
        latents = torch.cat((normed_q, normed_kv, k_rope), dim=-1)
        q, kv, k_rope = self.part_products(latents, self.q_b.weight, self.kv_b.weight)
        return q, kv, k_rope

    def forward(self, x_BSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The x_BSH after attention; the number of heads comes from the projections, which may be shards."""
        sizes = self.sizes
        q, kv, k_rope = self._projections(x_BSH)
        q_BSND = rotate_pairs(q.view(*q.shape[:-1], -1, sizes.qk_head_dim), cos, sin)
        if self.score_factor != 1:
            q_BSND = q_BSND * self.score_factor
        kv_BSND = kv.view(*kv.shape[:-1], -1, sizes.qk_nope_head_dim + sizes.v_head_dim)
        k_nope, v = torch.split(kv_BSND, [sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1)
        shared_k = rotate_pairs(k_rope.unsqueeze(2), cos, sin).expand(-1, -1, k_nope.shape[2], -1)
        k_BSND = torch.cat((k_nope, shared_k), dim=-1)
        heads = (t.transpose(1, 2) for t in (q_BSND, k_BSND, own_memory(v)))
        attended_BSND = self.core(*heads).transpose(1, 2)
        y_BSH = self.row_product(attended_BSND.flatten(2), self.out.weight)
        return y_BSH if self.out.bias is None else y_BSH + self.out.bias


class FeedForward(Block):
    """down(act(gate(x)) * up(x)) (arXiv 2002.05202), or down(act(up(x))) without a gate."""

    cuts = {"gate": COLUMNS, "up": COLUMNS, "down": ROWS}  # noqa: RUF012  one for all blocks

    def __init__(
        self, sizes: feed_forward_type.FeedForward | Experts, hidden_size: int, ffn_width: int
    ) -> None:
        """`sizes` says the activation, and whether there is a gate."""
        super().__init__()
        self.hidden_act = sizes.hidden_act
        self.gate = nn.Linear(hidden_size, ffn_width, bias=False) if sizes.gated else None
        self.up = nn.Linear(hidden_size, ffn_width, bias=False)
        self.down = nn.Linear(ffn_width, hidden_size, bias=False)

    def forward(self, x_BSH: Tensor, _: Route | None = None) -> Tensor:
        """The x_BSH that the block adds to the residual; only a sparse layer has a route."""
        if self.gate is None:
            (up,) = self.column_products(x_BSH, self.up.weight)
            return self.row_product(activate(self.hidden_act, up), self.down.weight)
        gate, up = self.column_products(x_BSH, self.gate.weight, self.up.weight)
        return self.row_product(activate(self.hidden_act, gate) * up, self.down.weight)


def attention_of(shape: ModelShape, kind: LayerType) -> Attention:
    """The attention of a layer of this type."""
    if kind.latent is not None:
        return LatentAttention(kind.latent, shape.hidden_size, score_factor(rotation_of(shape, kind)))
    assert kind.grouped_query is not None, "no plan accepts a layer of this type"
    return GroupedQueryAttention(kind.grouped_query, shape.hidden_size, shape.rms_norm_eps)


def feed_forward_of(kind: LayerType, hidden_size: int) -> "FeedForward | SparseFeedForward":
    """The feed-forward block of a layer of this type."""
    if kind.experts is not None:
        return sparse_feed_forward(kind.experts, hidden_size)
    assert kind.feed_forward is not None, "no plan accepts a layer of this type"
    return FeedForward(kind.feed_forward, hidden_size, kind.feed_forward.intermediate_size)


def sparse_feed_forward(experts: Experts, hidden_size: int) -> SparseFeedForward:
    """The feed-forward block of a sparse layer, with the shared experts as one block."""
    shared_width = experts.shared_expert_intermediate_size
    shared_experts = FeedForward(experts, hidden_size, shared_width) if shared_width else None
    return SparseFeedForward(experts, hidden_size, shared_experts)


class Layer(nn.Module):
    """One decoder layer: attention, then feed-forward, each on normalised input and added to the residual."""

    cuts = {"attention_norm": OF_TOKENS, "ffn_norm": OF_TOKENS}  # noqa: RUF012  one for all layers

    def __init__(self, shape: ModelShape, layer_number: int) -> None:
        """`layer_number` counts the layers of the whole model from 0."""
        super().__init__()
        h, eps, kind = shape.hidden_size, shape.rms_norm_eps, shape.layer(layer_number)
        self.attention_norm = RmsNorm(h, eps)
        self.attention = attention_of(shape, kind)
        self.ffn_norm = RmsNorm(h, eps)
        self.ffn = feed_forward_of(kind, h)

    @property
    def num_products(self) -> int:
        """Number of the weights of its blocks, each of which makes one product in forward."""
        return sum(len(block.linear_layers) for block in self.modules() if isinstance(block, Block))

    def forward(self, x_BSH: Tensor, cos: Tensor, sin: Tensor, *route: Route | None) -> Tensor:
        """The x_BSH after this layer; layers of a model with experts get the route of the tokens."""
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH), cos, sin)
        out: Tensor = x_BSH + self.ffn(self.ffn_norm(x_BSH), *route)
        return out


class Embedding(nn.Embedding):
    """The table of the vectors of tokens."""

    def forward(self, *tokens_BS: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """The vectors B x S x H of each tensor of tokens."""
        return tuple(super(Embedding, self).forward(tokens) for tokens in tokens_BS)


class TokenJoin(nn.Module):
    """Joins the hidden state of each position with the embedding of a later token."""

    cuts = {"hidden_norm": OF_TOKENS, "embedding_norm": OF_TOKENS, "projection": OF_TOKENS}  # noqa: RUF012  one for all

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        h, eps = shape.hidden_size, shape.rms_norm_eps
        self.hidden_norm, self.embedding_norm = RmsNorm(h, eps), RmsNorm(h, eps)
        self.projection = nn.Linear(2 * h, h, bias=False)

    def forward(self, x_BSH: Tensor, embedded_BSH: Tensor) -> Tensor:
        """The x_BSH that the layer of a module gets."""
        joined = torch.cat((self.hidden_norm(x_BSH), self.embedding_norm(embedded_BSH)), dim=-1)
        out: Tensor = self.projection(joined)
        return out


class PredictModule(nn.Module):
    """What predicts one more token beside a layer, which is among those of the model (arXiv 2412.19437, section 2.2).

    Module k of D joins what the module before gives at a position with the embedding of the k-th token after it, and
    predicts the token after that. The first one gets what the head of the model gets.
    """

    cuts = {"norm": OF_TOKENS}  # noqa: RUF012  one for all

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.join, self.norm = TokenJoin(shape), RmsNorm(shape.hidden_size, shape.rms_norm_eps)


class Head(nn.Linear):
    """The product with the weights of the vocabulary."""

    loss: Callable[..., Tensor]
    """The loss from x_BSH, weights and targets; tensor parallelism cuts these weights along the vocabulary."""
    shared_gradient: HeadGradient | None
    """The sum of this head's gradients over micro-batches, for a schedule that runs all forwards first; else None."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape.hidden_size, shape.vocab_size, bias=False)
        self.loss, self.shared_gradient = head_loss, None

    def forward(
        self,
        x_BSH: Tensor,
        targets_BS: Tensor | None = None,
        predictions: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> Tensor:
        """The mean loss if it gets targets, otherwise the logits B x S x V.

        `predictions` has what each module that predicts one more token gives the head, with the targets. A second call
        would be a second forward for fully_shard.
        """
        if targets_BS is None:
            return super().forward(x_BSH)
        loss = self.loss(x_BSH, self.weight, targets_BS, self.shared_gradient)
        for predicted_x, later_targets in predictions:
            options = {"loss_weight": PREDICT_WEIGHT / len(predictions)}
            loss = loss + self.loss(predicted_x, self.weight, later_targets, self.shared_gradient, **options)
        return loss


class Decoder(nn.Module):
    """The blocks of one pipeline stage; if there is only one stage, it is the whole model.

    On every stage parameters have the names of the whole model, so that the seed of a name gives the same
    values in every layout.
    """

    cuts = {  # noqa: RUF012  one for all stages
        "embedding": VOCABULARY, "head": VOCABULARY, "norm": OF_TOKENS, "next_embedding": VOCABULARY,
    }  # fmt: skip
    route: Callable[[Tensor], Route | None]
    """The route of the tokens of a micro-batch to their experts; None if the routers choose."""

    def __init__(
        self, shape: ModelShape, stage: Stage, positions: Sequence[range], routing_name: str = LEARNED_ROUTING
    ) -> None:
        """`positions` are those of a sequence that this rank holds; `routing_name` says how tokens choose experts."""
        super().__init__()
        self.shape, self.positions = shape, positions
        self.routing = Routing(routing_name, shape, positions)
        self.route = self.routing.route
        layer_numbers = range(stage.first_layer, stage.first_layer + stage.num_layers)
        hidden_size = shape.hidden_size
        num_modules = shape.num_nextn_predict_layers if stage.has_head else 0
        predict_numbers = range(shape.num_hidden_layers, shape.num_hidden_layers + num_modules)
        self.embedding = Embedding(shape.vocab_size, hidden_size) if stage.has_embedding else None
        self.layers = nn.ModuleDict({str(n): Layer(shape, n) for n in (*layer_numbers, *predict_numbers)})
        self.rotations = {number: rotation_of(shape, shape.layer(int(number))) for number in self.layers}
        self.norm = RmsNorm(hidden_size, shape.rms_norm_eps) if stage.has_norm else None
        self.head = Head(shape) if stage.has_head else None
        self.predict = nn.ModuleDict({str(n): PredictModule(shape) for n in predict_numbers})
        needs_copy = num_modules > 0 and not stage.has_embedding
        self.next_embedding = Embedding(shape.vocab_size, hidden_size) if needs_copy else None
        self.tie()

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head are one parameter: the shape ties them and both are in this stage."""
        return self.shape.tie_word_embeddings and None not in (self.embedding, self.head)

    def tie(self) -> None:
        """Makes embedding and head one parameter, if both are in this stage and the shape ties them."""
        if self.is_tied:
            self.head.weight = self.embedding.weight  # type: ignore[union-attr]
        elif self.shape.tie_word_embeddings and self.next_embedding is not None:
            self.next_embedding.weight = self.head.weight  # type: ignore[union-attr]

    @property
    def embedding_copies(self) -> list[nn.Module]:
        """The modules of this stage that hold the embedding, or the copy of it that the last stage has."""
        return [module for module in (self.embedding, self.copy_of_last_stage()) if module is not None]

    def copy_of_last_stage(self) -> nn.Module | None:
        """The module whose weight is a copy of the embedding on the last stage of a pipeline; None elsewhere."""
        return self.head if self.shape.tie_word_embeddings else self.next_embedding

    @property
    def end_modules(self) -> list[nn.Module]:
        """The modules of this stage behind its layers, in the order in which forward calls each of them once."""
        parts: list[nn.Module] = [part for module in self.predict.values() for part in module.children()]
        return [m for m in (self.norm, self.next_embedding, *parts, self.head) if m is not None]

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """The output of this stage for tokens (B x S) or for the x_BSH of the previous stage.

        The last stage returns the mean loss if it gets targets, otherwise the logits B x S x V; other stages
        return x_BSH. Targets are B x S, or B x S x (1 + D) for the next token and D more, which D modules predict.
        """
        later_targets: list[Tensor] = []
        if targets is not None and self.predict:
            targets, *later_targets = targets.unbind(-1)
        next_tokens = [targets, *later_targets[:-1]] if later_targets else []
        embedded: Sequence[Tensor] = ()
        if self.embedding is not None:
            x, *embedded = self.embedding(x, *next_tokens)
        tables = {r: rope_tables(self.positions, r, x) for r in dict.fromkeys(self.rotations.values())}
        route: tuple[Any, ...] = (self.route(x),) if self.shape.num_experts else ()

        def run_layer(number: str, x: Tensor) -> Tensor:
            out: Tensor = self.layers[number](x, *tables[self.rotations[number]], *route)
            return out

        for number in self.layers:
            x = x if number in self.predict else run_layer(number, x)
        x = x if self.norm is None else self.norm(x)
        if self.head is None:
            return x
        if self.next_embedding is not None and next_tokens:
            embedded = self.next_embedding(*next_tokens)
        predictions, predicted_x = [], x
        for number, embedded_x, module_targets in zip(self.predict, embedded, later_targets, strict=False):
            module = self.predict[number]
            assert isinstance(module, PredictModule)
            predicted_x = module.norm(run_layer(number, module.join(predicted_x, embedded_x)))
            predictions.append((predicted_x, module_targets))
        out: Tensor = self.head(x, targets, predictions) if predictions else self.head(x, targets)
        return out

    def initial_value(
        self, name: str, full_shape: torch.Size, seed: int, device: torch.device, part: Part = ()
    ) -> Tensor:
        """The `part` of the initial value of the parameter `name` in fp32, which depends only on the seed and the name.

        Each expert draws its values by a name of its own, so that only the experts in the first cut of `part` are
        drawn. Expert parameters have two dims, of which the first holds the rows of all experts.
        """
        if is_expert(name):
            (_, start, length), *further_cuts = part or ((0, 0, full_shape[0]),)
            expert_shape = torch.Size((full_shape[0] // self.shape.num_experts, full_shape[1]))
            experts = range(start // expert_shape[0], (start + length) // expert_shape[0])
            values = [self._full_value(f"{name}.{n}", expert_shape, seed, device) for n in experts]
            return part_view(torch.cat(values), tuple(further_cuts))
        return part_view(self._full_value(name, full_shape, seed, device), part)

    def _full_value(self, name: str, full_shape: torch.Size, seed: int, device: torch.device) -> Tensor:
        if is_norm(name):
            return torch.ones(full_shape, device=device, dtype=torch.float32)
        if name == copy_name(self.shape):
            name = TIED_PARAMETER_NAME
        seed_digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(seed_digest[:7], "big"))
        normal_values = torch.randn(full_shape, generator=generator, device=device, dtype=torch.float32)
        return normal_values.mul_(INIT_STD)


def copy_name(shape: ModelShape) -> str | None:
    """The parameter that is a copy of the embedding on the last stage of a pipeline; None if there is none.

    A head that is the embedding serves as the copy for modules that predict more tokens, too.
    """
    if shape.tie_word_embeddings:
        return "head.weight"
    return NEXT_EMBEDDING_NAME if shape.num_nextn_predict_layers else None


def cross_entropy(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    """The mean loss over the tokens of a micro-batch, in at least fp32; `head_loss` must give the same."""
    wide_logits_BSV = logits_BSV.to(torch.promote_types(logits_BSV.dtype, torch.float32))
    return functional.cross_entropy(wide_logits_BSV.flatten(0, 1), targets_BS.flatten())
