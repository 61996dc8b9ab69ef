"""Tensor parallelism on plain tensors, with or without sequence parallelism, put around a plain decoder.

Shapes: as in model.py; s is the S/tp tokens of a rank, h its columns of a weight, T all tokens (B*S) in one dim.

Column-parallel: Y = X W, W = [W_1, ..., W_tp], so rank i holds Y_i. Row-parallel: W is cut along its input,
every rank holds a summand of Y, and the sum is scattered over the tokens. Between the blocks each rank
holds B*S/tp tokens, on which it computes norms and residuals (arXiv 2205.05198, section 4.2.2). They are cut as
they lie in memory, so that a tensor B x S/tp x H has the tokens of a part of the batch, not of each sequence.

Forward of a layer gathers B*S*H elements over tp before attention and before the feed-forward, and
reduce-scatters as many after each. Gathered tokens are not kept: backward gathers them again, while it
computes the gradient of the input, and scatters this one while it computes those of the weights. So a layer
costs 6 all-gathers and 4 reduce-scatters of B*S*H elements.

Without sequence parallelism each rank holds all B*S tokens between the blocks (arXiv 1909.08053, section 3). Nothing is
gathered, and an all-reduce takes the place of each reduce-scatter: two in forward of a layer and two in backward.

Latent attention gathers the latents of all tokens instead of tokens, and its heads read channels of them: each weight
has channels of its own. The projections to latents are products of a rank's own tokens with whole weights.

Biases are added to the products of a rank with its own columns. Each rank has all tokens there,
so that its gradients of them are complete.

In fp8 factors are rounded after they are gathered, and the summands of a rank are added up in bf16.
The products of a rank without tp are then those here, too: it gathers and sums nothing.

The gradient of what each rank holds whole, such as a norm's weight, is a sum over the tokens of all ranks of tp, which
is made once a step; without sequence parallelism only that of the norms of q and k is one, over the heads of all ranks.

If tp does not divide the vocabulary, embedding and head have more rows than there are tokens, as `padded_vocab_size`
says. These rows are 0, the loss masks their logits, and they are no part of the parameters that a rank trains.

If there are more ranks than key/value heads, neighbouring ranks hold copies of a head, each for the query heads of its
own. The gradients of the copies are summands, which are summed once a step over these ranks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ultrabench.kernel import products
from ultrabench.kernel.compat import all_gather, all_reduce, process_group, reduce_scatter, wait
from ultrabench.kernel.compile import as_operator
from ultrabench.kernel.cut import ALWAYS, WITH_SEQUENCE_PARALLEL, Cut, cuts_of, num_tp_copies
from ultrabench.kernel.loss import HeadGradient, head_loss
from ultrabench.kernel.mesh import Part, dp_part, is_expert, local_shard
from ultrabench.kernel.model import Block, Decoder, Embedding, column_products, part_products, part_widths
from ultrabench.tensor_parallel import padded_vocab_size

TokenMove = Callable[[Tensor], Callable[[], Tensor]]
"""Starts to move a tensor between the ranks, and returns a function that waits for the result."""


def _rank_size(cut: Cut, full_size: int, tp: int) -> int:
    """What a rank holds of `full_size` rows or columns of a weight with this cut."""
    if cut.is_vocabulary:
        full_size = padded_vocab_size(full_size, tp)
    return full_size * num_tp_copies(cut, tp) // tp


@dataclass(slots=True)
class TensorParallel:
    """The ranks of the tp axis, and how they compute; schedules that split backward say which
    gradients it must compute.
    """

    group: dist.ProcessGroup
    sequence_parallel: bool = True
    fp8: bool = False
    """Whether the factors of products are rounded to 8 bits."""
    wants_input_grads: bool = True
    """Whether backward computes the gradients of what products get, which the stage before needs."""
    wants_weight_grads: bool = True
    """Whether backward computes the gradients of weights."""

    def gather(self, x_BsH: Tensor) -> Callable[[], Tensor]:
        """Starts to gather the tokens of all ranks; returns a function that waits for them, B x S x H."""
        if not self.sequence_parallel or self.group.size() == 1:
            return lambda: x_BsH
        pending_x = all_gather(x_BsH.contiguous(), self.group)
        return lambda: wait(pending_x).view(len(x_BsH), -1, x_BsH.shape[-1])

    def scatter(self, x_BSH: Tensor) -> Callable[[], Tensor]:
        """Starts to sum over the ranks; returns a function that waits for this rank's tokens, B x S/tp x H."""
        if self.group.size() == 1:
            return lambda: x_BSH
        if not self.sequence_parallel:
            return partial(wait, all_reduce(x_BSH, self.group))
        parts_by_rank = x_BSH.reshape(self.group.size() * len(x_BSH), -1, x_BSH.shape[-1])
        return partial(wait, reduce_scatter(parts_by_rank, self.group))


def _empty_gradients(x_BsH: Tensor, _: Any, weights: Sequence[Tensor], *options: Any) -> list[Tensor]:
    *_, wants_input_grads, wants_weight_grads = options
    return [t.new_empty(t.shape) for t in (*[x_BsH] * wants_input_grads, *[*weights] * wants_weight_grads)]


@as_operator(_empty_gradients)
def _columns_backward(
    x_BsH: Tensor,
    output_grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    group_name: str,
    shares_input: bool,
    sequence_parallel: bool,
    fp8: bool,
    wants_input_grads: bool,
    wants_weight_grads: bool,
) -> list[Tensor]:
    """`_column_gradients` of a TensorParallel with the options from sequence_parallel on.

    A compiler that saw what it does would keep the tokens that forward has gathered, and scatter last.
    """
    options = sequence_parallel, fp8, wants_input_grads, wants_weight_grads
    tp_ranks = TensorParallel(process_group(group_name), *options)
    return _column_gradients(tp_ranks, x_BsH, output_grads, weights, shares_input)


def _column_gradients(
    tp_ranks: TensorParallel,
    x_BsH: Tensor,
    output_grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    shares_input: bool,
) -> list[Tensor]:
    """The gradient of this rank's tokens, then those of the weights, of which backward may want only one or the other.

    With `shares_input` all weights have multiplied all channels of the tokens, else those of `part_products`.

    It gathers the tokens while it computes the gradient of all tokens, and sums and scatters that one while it
    computes those of the weights.
    """
    wait_x = tp_ranks.gather(x_BsH) if tp_ranks.wants_weight_grads else None
    wait_grad_x, grads_TN = None, [grad.flatten(0, 1) for grad in output_grads]
    if tp_ranks.wants_input_grads:
        if shares_input:
            grad_TH = _input_gradient(tp_ranks, grads_TN, weights)
        else:
            pairs = zip(grads_TN[:-1], weights, strict=True)
            grad_parts = (_input_gradient(tp_ranks, [grad], [weight]) for grad, weight in pairs)
            grad_TH = torch.cat((*grad_parts, grads_TN[-1]), dim=-1)
        wait_grad_x = tp_ranks.scatter(grad_TH.view(len(output_grads[0]), -1, x_BsH.shape[-1]))
        del grad_TH
    grad_weights: list[Tensor] = []
    if wait_x is not None and shares_input:
        grad_weights = _weight_gradients(tp_ranks, grads_TN, wait_x().flatten(0, 1))
    elif wait_x is not None:
        x_parts = torch.split(wait_x().flatten(0, 1), part_widths(x_BsH, weights), dim=-1)
        for grad, x_part in zip(grads_TN[:-1], x_parts[:-1], strict=True):
            grad_weights += _weight_gradients(tp_ranks, [grad], x_part)
    return [*([] if wait_grad_x is None else [wait_grad_x()]), *grad_weights]


def _input_gradient(tp_ranks: TensorParallel, grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """The gradient of what this rank multiplied by several weights, T x H, a summand over tp.

    `grads` are the gradients of the outputs, T x N each, for weights N x H.
    """
    if tp_ranks.fp8:
        return products.input_gradient(grads, weights)
    grad_TH = torch.mm(grads[0], weights[0])
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        grad_TH.addmm_(grad, weight)
    return grad_TH


def _weight_gradients(tp_ranks: TensorParallel, grads: Sequence[Tensor], x_TH: Tensor) -> list[Tensor]:
    """The gradients of several weights by which this rank multiplied x, from those of the outputs."""
    if tp_ranks.fp8:
        return products.weight_gradients(grads, x_TH)
    return [torch.mm(grad.t(), x_TH) for grad in grads]


def _part_products(tp_ranks: TensorParallel, x_BSC: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """`part_products` in the precision of the products; no output is a view of x."""
    if not tp_ranks.fp8:
        *outputs, rest = part_products(x_BSC, *weights)
        return *outputs, rest.clone()
    *parts, rest = torch.split(x_BSC, part_widths(x_BSC, weights), dim=-1)
    first, *others = zip(parts, weights, strict=True)
    outputs = [] if others else [products.last_output(*first)]
    if others:
        outputs = [*products.outputs(*first), *(products.last_output(*other) for other in others)]
    return *outputs, rest.clone()


class _ColumnProducts(torch.autograd.Function):
    """Products of gathered tokens with several column-parallel weights, or of their channels with a weight each."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, tp_ranks: TensorParallel, shares_input: bool, x_BsH: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.tp_ranks, ctx.shares_input = tp_ranks, shares_input
        ctx.save_for_backward(x_BsH, *weights)
        x_BSH = tp_ranks.gather(x_BsH)()
        if not shares_input:
            return _part_products(tp_ranks, x_BSH, *weights)
        return (products.outputs if tp_ranks.fp8 else column_products)(x_BSH, *weights)

    @staticmethod
    def backward(ctx, *output_grads: Tensor):  # type: ignore[no-untyped-def]
        tp_ranks, (x_BsH, *weights) = ctx.tp_ranks, ctx.saved_tensors
        if tp_ranks.group.size() == 1:
            remaining_grads = iter(
                _column_gradients(tp_ranks, x_BsH, output_grads, weights, ctx.shares_input)
            )
        else:
            wanted_grads = tp_ranks.wants_input_grads, tp_ranks.wants_weight_grads
            options = (
                tp_ranks.group.group_name,
                ctx.shares_input,
                tp_ranks.sequence_parallel,
                tp_ranks.fp8,
                *wanted_grads,
            )
            remaining_grads = iter(_columns_backward(x_BsH, output_grads, weights, *options))
        grad_x = next(remaining_grads) if tp_ranks.wants_input_grads else None
        return (
            None,
            None,
            grad_x,
            *(remaining_grads if tp_ranks.wants_weight_grads else [None] * len(weights)),
        )


class _WholeProduct(torch.autograd.Function):
    """The product in 8 bits of a rank's own tokens with a weight that all ranks hold whole."""

    @staticmethod
    def forward(ctx, tp_ranks: TensorParallel, x_BsH: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.tp_ranks = tp_ranks
        ctx.save_for_backward(x_BsH, weight)
        return products.last_output(x_BsH, weight)

    @staticmethod
    def backward(ctx, grad_BsN: Tensor):  # type: ignore[no-untyped-def]
        tp_ranks, (x_BsH, weight) = ctx.tp_ranks, ctx.saved_tensors
        grads_TN, grad_x, grad_weight = [grad_BsN.flatten(0, 1)], None, None
        if tp_ranks.wants_input_grads:
            grad_x = products.input_gradient(grads_TN, [weight]).view_as(x_BsH)
        if tp_ranks.wants_weight_grads:
            (grad_weight,) = products.weight_gradients(grads_TN, x_BsH.flatten(0, 1))
        return None, grad_x, grad_weight


class _RowProduct(torch.autograd.Function):
    """The product with a row-parallel weight, summed over the ranks and scattered over the tokens."""

    @staticmethod
    def forward(ctx, tp_ranks: TensorParallel, x_BSh: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.tp_ranks = tp_ranks
        ctx.save_for_backward(x_BSh, weight)
        y_BSH = (products.last_output if tp_ranks.fp8 else functional.linear)(x_BSh, weight)
        return tp_ranks.scatter(y_BSH)()

    @staticmethod
    def backward(ctx, grad_BsH: Tensor):  # type: ignore[no-untyped-def]
        tp_ranks, (x_BSh, weight) = ctx.tp_ranks, ctx.saved_tensors
        grads_TN, grad_x, grad_weight = [tp_ranks.gather(grad_BsH)().flatten(0, 1)], None, None
        if tp_ranks.wants_input_grads:
            grad_x = _input_gradient(tp_ranks, grads_TN, [weight]).view_as(x_BSh)
        if tp_ranks.wants_weight_grads:
            (grad_weight,) = _weight_gradients(tp_ranks, grads_TN, x_BSh.flatten(0, 1))
        return None, grad_x, grad_weight


class _TokenExchange(torch.autograd.Function):
    """Gathers the tokens of all ranks, or sums and scatters them; backward does the opposite."""

    @staticmethod
    def forward(ctx, move: TokenMove, move_back: TokenMove, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.move_back = move_back
        return move(x)()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        return None, None, ctx.move_back(grad)()


def _look_up(tp_ranks: TensorParallel, embedding: Embedding, *tokens_BS: Tensor) -> tuple[Tensor, ...]:
    """The embeddings of this rank's tokens in each tensor of tokens."""
    return tuple(_look_up_tokens(tp_ranks, embedding.weight, tokens) for tokens in tokens_BS)


def _look_up_tokens(tp_ranks: TensorParallel, weight: Tensor, tokens_BS: Tensor) -> Tensor:
    """The embeddings of this rank's tokens: each rank looks up those it has rows of, the others count 0."""
    rows = tokens_BS - tp_ranks.group.rank() * len(weight)
    is_remote = (rows < 0) | (rows >= len(weight))
    x_BSH = functional.embedding(rows.masked_fill(is_remote, 0), weight).masked_fill(is_remote[..., None], 0)
    out: Tensor = _TokenExchange.apply(tp_ranks.scatter, tp_ranks.gather, x_BSH)  # type: ignore[no-untyped-call]
    return out


def _loss(
    tp_ranks: TensorParallel,
    vocab_size: int,
    x_BsH: Tensor,
    weight_VH: Tensor,
    targets_BS: Tensor,
    shared_gradient: HeadGradient | None,
    **head_loss_options: Any,
) -> Tensor:
    """The mean loss over all tokens, with V/tp rows of the head on this rank.

    `vocab_size` is V without padding. `head_loss_options` are the arguments to_gradient and loss_weight of `head_loss`.
    """
    x_BSH = _TokenExchange.apply(tp_ranks.gather, tp_ranks.scatter, x_BsH)  # type: ignore[no-untyped-call]
    group = tp_ranks.group
    return head_loss(x_BSH, weight_VH, targets_BS, shared_gradient, group, vocab_size, **head_loss_options)


def apply_tp(model: Decoder, tp_ranks: TensorParallel) -> None:
    """Cuts `model` over the tp axis, in place, and gives its blocks the products of its precision.

    The model has no values yet, so that cutting only makes its parameters smaller.
    With one rank there is nothing to cut.
    """
    if tp_ranks.group.size() == 1 and not tp_ranks.fp8:
        return
    for layer in model.layers.values():
        for block in layer.modules():
            if isinstance(block, Block):
                block.column_products = partial(_ColumnProducts.apply, tp_ranks, True)
                block.part_products = partial(_ColumnProducts.apply, tp_ranks, False)
                block.row_product = partial(_RowProduct.apply, tp_ranks)
                if tp_ranks.fp8:
                    block.whole_product = partial(_WholeProduct.apply, tp_ranks)
    if tp_ranks.group.size() == 1:
        return
    for name, cut in cuts_of(model).items():
        if cut.dim is not None and not is_expert(name):
            module_path, _, param_name = name.rpartition(".")
            module = model.get_submodule(module_path)
            param = module.get_parameter(param_name)
            sizes = list(param.shape)
            sizes[cut.dim] = _rank_size(cut, sizes[cut.dim], tp_ranks.group.size())
            setattr(module, param_name, nn.Parameter(param.detach().new_empty(sizes)))
    for embedding in (model.embedding, model.next_embedding):
        if embedding is not None:
            embedding.forward = partial(_look_up, tp_ranks, embedding)  # type: ignore[method-assign]
    if model.head is not None:
        model.head.loss = partial(_loss, tp_ranks, model.shape.vocab_size)
    model.tie()


def part_of(cut: Cut, param: Tensor, group: dist.ProcessGroup, vocab_size: int) -> Part:
    """The cuts that turn the full tensor into this rank's part of a parameter: over `group`, then over dp.

    `group` holds the ranks of tp, or those of ep for experts; `param` is already cut over it. A part has no padding, so
    that it may be smaller than `param`, or empty.
    """
    if cut.dim is None:
        return dp_part(param)
    part_index = group.rank() // num_tp_copies(cut, group.size())
    part = (cut.dim, part_index * param.shape[cut.dim], param.shape[cut.dim]), *dp_part(param)
    return _without_padding(part, vocab_size) if cut.is_vocabulary else part


def _without_padding(part: Part, vocab_size: int) -> Part:
    """The successive cuts of a tensor with one row for each token, from those of one with more rows."""
    cuts, num_rows = list[tuple[int, int, int]](), vocab_size
    for dim, start, length in part:
        cuts.append((dim, min(start, num_rows), min(length, max(num_rows - start, 0))))
        num_rows = cuts[-1][2]
    return tuple(cuts)


def sum_whole_gradients(
    params: Iterable[tuple[str, Tensor]], cuts: Mapping[str, Cut], tp_ranks: TensorParallel
) -> None:
    """Sums over tp the gradients of what its ranks hold whole, such as the weights of norm layers and routers.

    Each rank has other tokens, or for the norms of q and k other heads, so that its gradient is a summand.

    It is one all-reduce of (2*L*(H + D) + H)/shards elements on the stage with the final norm, and without + H on
    the others. L is the number of layers of the stage, and shards is zero_shards of the layout. Without the norms
    of q and k, which have D weights each, + D is left out. A router adds H times the number of experts.
    """
    summed = (WITH_SEQUENCE_PARALLEL, ALWAYS) if tp_ranks.sequence_parallel else (ALWAYS,)
    summand_grads = (param.grad for name, param in params if cuts[name].summed in summed)
    grads = [local_shard(grad) for grad in summand_grads if grad is not None]
    if tp_ranks.group.size() == 1 or not grads:
        return
    flat_grad = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat_grad, group=tp_ranks.group)
    for grad, grad_sum in zip(grads, torch.split(flat_grad, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(grad_sum.view_as(grad))


def sum_copied_gradients(
    params: Iterable[tuple[str, Tensor]], cuts: Mapping[str, Cut], kv_group: dist.ProcessGroup | None
) -> None:
    """Sums the gradients of key/value heads over the ranks that hold copies of them, in place; None if no rank does.

    It makes two all-reduces for each layer of the rank, of D*H/shards elements each, and two of D/shards with biases.
    All of them begin at once.
    """
    if kv_group is None:
        return
    kv_grads = (param.grad for name, param in params if cuts[name].num_heads)
    grads = (local_shard(grad) for grad in kv_grads if grad is not None)
    sums = [dist.all_reduce(grad, group=kv_group, async_op=True) for grad in grads if grad.numel()]
    for pending_sum in sums:
        assert pending_sum is not None
        pending_sum.wait()
