"""Compiles the layers of a model with torch.compile, and counts the graphs that this takes.

The layers of a rank have the same code, shapes and options, so that the graph of the first one serves all of
them; with recompute=everyN there are two kinds of layers, and a graph for each. Hooks of fully_shard stay
outside. A layer that does not fit into one graph is an error, because its rest would run eagerly without a sign.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch

from ultrabench.kernel.compat import compiler_of
from ultrabench.kernel.fp8 import count_scaled_products
from ultrabench.kernel.loss import logits_to_gradient
from ultrabench.kernel.model import Decoder

FUNCTION_BY_OPERATOR: dict[Any, Callable[..., Any]] = {}
"""Operator of ours, as compiled layers call it -> the function that it runs."""


def as_operator(empty_results: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function one operator for torch.compile, which then neither merges nor reorders what the function does.

    Eager layers call the function itself.

    Args:
        empty_results: returns tensors of the same shapes for the same arguments.
    """

    def register_operator(function: Callable[..., Any]) -> Callable[..., Any]:
        operator_name = function.__name__.lstrip("_")
        torch_operator = torch.library.custom_op(f"ultrabench::{operator_name}", function, mutates_args=())
        torch_operator.register_fake(empty_results)
        FUNCTION_BY_OPERATOR[getattr(torch.ops.ultrabench, operator_name).default] = function

        @wraps(function)
        def eager_or_compiled(*args: Any) -> Any:
            return (torch_operator if torch.compiler.is_compiling() else function)(*args)

        return eager_or_compiled

    return register_operator


class GraphCounter:
    """A backend of torch.compile that counts the graphs which it is given to compile, their calls,
    and the products of fp8 in these.

    All layers must share one, because graphs of different backends are kept apart.
    """

    def __init__(self, backend_name: str) -> None:
        """`backend_name` is a name that torch.compile knows: inductor, or aot_eager for checks."""
        self.num_graphs, self.num_calls, self.backend_name = 0, 0, backend_name
        self.scaled_products = Counter[str]()

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        """Compiles a graph with its backward."""
        self.num_graphs += 1
        graph_products = count_scaled_products(graph)
        compiled_graph = compiler_of(self.backend_name)(graph, inputs, **options)

        def counted_call(*args: Any) -> Any:
            self.num_calls += 1
            self.scaled_products.update(graph_products)
            return compiled_graph(*args)

        return counted_call


def apply_compile(model: Decoder, backend: GraphCounter) -> None:
    """Compiles each layer of `model`, in place, with its recomputation and its collectives.

    The gradient of the logits is compiled only into generated code, which then reads and writes them in 3 passes:
    without it torch.compile makes more copies of them than eager calls.
    """
    for layer in model.layers.values():
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
    if model.head is not None and backend.backend_name == "inductor":
        to_gradient = torch.compile(logits_to_gradient, fullgraph=True, dynamic=False)
        model.head.loss = partial(model.head.loss, to_gradient=to_gradient)
