"""Compiles the layers of a model with torch.compile, and counts the graphs that this takes.

The layers of a rank have the same code, shapes and options, so that the graph of the first one serves all of
them; with recompute=everyN there are two kinds of layers, and a graph for each. Hooks of fully_shard stay
outside. A layer that does not fit into one graph is an error, because its rest would run eagerly without a sign.
"""

from typing import Any

import torch

from ultrabench.kernel.compat import compiler_of
from ultrabench.kernel.model import Decoder


class GraphCounter:
    """A backend of torch.compile that counts the graphs which it is given to compile, and their calls.

    All layers must share one, because graphs of different backends are kept apart.
    """

    def __init__(self, backend: str) -> None:
        """`backend` is a name that torch.compile knows: inductor, or aot_eager for checks."""
        self.graphs, self.calls, self._backend = 0, 0, backend

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        """Compiles a graph with its backward."""
        self.graphs += 1
        compiled = compiler_of(self._backend)(graph, inputs, **options)

        def counted(*args: Any) -> Any:
            self.calls += 1
            return compiled(*args)

        return counted


def apply_compile(model: Decoder, backend: GraphCounter) -> None:
    """Compiles each layer of `model`, in place, with its recomputation and its collectives."""
    for layer in model.layers.values():
        layer.forward = torch.compile(layer.forward, backend=backend, fullgraph=True)
