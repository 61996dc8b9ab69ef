"""How the ranks of tensor parallelism hold each parameter of a model, as the modules of the model say it.

A module states in its dict `cuts` the cut of each layer that it has: `{"q": COLUMNS, "out": ROWS, "q_norm": OF_HEADS}`.
A name with a dot, such as `out.bias`, is that of a single parameter. Cuts, copies, sums of gradients, checksums and
checkpoints follow from it, so that a new module needs no change elsewhere.
"""

from typing import NamedTuple

from torch import nn

from ultrabench.tensor_parallel import kv_copies

NEVER, WITH_SEQUENCE_PARALLEL, ALWAYS = "never", "with sequence parallelism", "always"
"""When the gradient of a parameter is a summand on each rank of tp, which has tokens or heads of its own."""


class Cut(NamedTuple):
    """How the ranks of tp hold a parameter, and what its gradient is on each of them."""

    dim: int | None = None
    """The dim along which it is cut, over tp, or over ep for experts; None if every rank of tp holds all of it."""
    num_heads: int | None = None
    """Number of key/value heads to which its rows belong, if several ranks may hold the same head."""
    is_vocabulary: bool = False
    """Whether it has a row for each token of the vocabulary, which may be padded."""
    summed: str = NEVER
    """When its gradient is summed over tp."""


COLUMNS, ROWS = Cut(0), Cut(1)
"""A linear layer that is cut along its outputs, with its bias, or along its inputs."""
EXPERTS = Cut(0)
"""Rows of experts, which are cut over ep."""
VOCABULARY = Cut(0, is_vocabulary=True)
OF_TOKENS, OF_HEADS = Cut(summed=WITH_SEQUENCE_PARALLEL), Cut(summed=ALWAYS)
"""What a rank holds whole and applies to tokens, which sequence parallelism divides, or to its own heads."""


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """The cut of each parameter of a model, by its name.

    Raises:
        KeyError: a module does not say how a layer of it is cut.
    """
    cut_by_name = dict[str, Cut]()
    for name, _ in model.named_parameters():
        *path, layer_name, param_name = name.split(".")
        cuts: dict[str, Cut] = model.get_submodule(".".join(path)).cuts  # type: ignore[assignment]
        cut_by_name[name] = cuts.get(f"{layer_name}.{param_name}") or cuts[layer_name]
    return cut_by_name


def num_tp_copies(cut: Cut, tp: int) -> int:
    """Number of ranks of tp that hold the same part of a parameter."""
    if cut.dim is None:
        return tp
    return kv_copies(cut.num_heads, tp) if cut.num_heads else 1
