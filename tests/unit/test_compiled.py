"""What is counted of compiled layers."""

import torch

from ultrabench.kernel.compile import GraphCounter
from ultrabench.kernel.dryrun.counts import ExecutedFlops


def test_one_graph_serves_equal_layers_and_its_products_are_counted() -> None:
    """Counting neither compiles anew nor runs eagerly; layers of another shape need a graph of their own."""
    counter, x = GraphCounter("aot_eager"), torch.ones(4, 8)
    layers = [torch.nn.Linear(8, width, bias=False) for width in (8, 8, 16)]
    compiled = [torch.compile(layer.forward, backend=counter, fullgraph=True) for layer in layers]
    graphs = list[int]()
    for layer in compiled:
        layer(x)
        graphs.append(counter.graphs)
    with ExecutedFlops() as executed:
        compiled[0](x)
    assert graphs == [1, 1, 2]
    assert (counter.graphs, executed.flops) == (2, 2 * 4 * 8 * 8)
