"""Counts what other products would save an eager layer of llama3-8b in bf16, forward and backward; see measured.md."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves

from ultrabench.kernel import tp
from ultrabench.kernel.compat import storage_of
from ultrabench.kernel.dryrun.counts import Observer
from ultrabench.kernel.model import Layer
from ultrabench.sweep.config.load import load_model

FORMS = ("as it is", "addmm", "cat qkv", "cat gate-up", "packed qkv", "packed gate-up", "fp32", "fp32 addmm")


class Work(Observer):  # type: ignore[no-untyped-call]
    """Counts products, other kernels, and the bytes that they read and write."""

    products = others = nbytes = 0

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Counts `func` unless it only makes views or empty tensors."""
        ins, outs = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in ((args, kwargs), out))
        is_view = {id(storage_of(t)) for t in outs} <= {id(storage_of(t)) for t in ins}
        if "empty" in func.__name__ or (is_view and not func._schema.is_mutable):
            return
        self.products += func.__name__.startswith(("mm", "addmm"))
        self.others += not func.__name__.startswith(("mm", "addmm"))
        read = {(id(storage_of(t)), t.storage_offset(), t.shape): t for t in ins}.values()
        self.nbytes += sum(t.nbytes for t in (*read, *outs))


def add_in_products(_: Any, grads: list[Tensor], x: Tensor) -> list[None]:
    """Adds gradients of weights to sums in fp32. Only CUDA has this operator, but its shapes are known everywhere."""
    for grad in grads:
        total = torch.empty(grad.shape[1], x.shape[1], dtype=torch.float32)
        torch.ops.aten.addmm.dtype_out(total, grad.t(), x, torch.float32, out=total)
    return [None] * len(grads)


def count(form: str, tokens: int) -> str:
    """A row of the table. The forms fp32 add gradients to those of an earlier micro-batch."""
    shape, kept, work = load_model("llama3-8b"), dict[int, Tensor](), Work()
    layer, ranks = Layer(shape, 0), tp.TensorParallel(SimpleNamespace(size=lambda: 1))  # type: ignore[arg-type]
    tp._weight_gradients = add_in_products if form == "fp32 addmm" else OF_WEIGHTS  # type: ignore[assignment]
    attention, ffn, params = layer.attention, layer.ffn, [*layer.parameters()]
    for name, block, parts in (("qkv", attention, "qkv"), ("gate-up", ffn, ("gate", "up"))):
        sizes = [len(getattr(block, part).weight) for part in parts]
        if form == f"cat {name}":
            block.column_products = lambda x, *w, sizes=sizes: linear(x, torch.cat(w)).split(sizes, -1)
        elif form == f"packed {name}":
            block.packed = nn.Parameter(torch.empty(sum(sizes), shape.hidden_size))
            block.column_products = lambda x, *_, w=block.packed, sizes=sizes: linear(x, w).split(sizes, -1)
        elif "addmm" in form:
            block.column_products, block.row_product = (
                partial(f.apply, ranks) for f in (tp._Columns, tp._Row)
            )
    x = torch.empty(1, tokens, shape.hidden_size, requires_grad=True)
    angles = [torch.empty(tokens, 1, shape.head_width // 2) for _ in range(2)]
    with work:
        with saved_tensors_hooks(lambda t: kept.update({id(storage_of(t)): t}) or t, lambda t: t):
            out = layer(x, *angles)
        out.backward(torch.empty_like(out))
        for param in params:
            if "fp32" in form and param.grad is not None:
                torch.empty_like(param, dtype=torch.float32).add_(param.grad)
    owned = {id(storage_of(param)) for param in layer.parameters()}
    mib = sum(storage_of(t).nbytes() for key, t in kept.items() if key not in owned) / 2**20
    return f"| {form} | {tokens} | {work.products} | {work.others} | {work.nbytes / 1e9:.2f} | {mib:.0f} |"


if __name__ == "__main__":
    torch.set_default_dtype(torch.bfloat16)
    OF_WEIGHTS = tp._weight_gradients
    with FakeTensorMode():
        print("\n".join(count(form, tokens) for tokens in (2048, 8192) for form in FORMS))
