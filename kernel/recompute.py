"""Makes backward compute parts of each layer again, so that forward need not keep their results.

full: a layer keeps only its input, and backward runs its forward again (arXiv 1604.06174); everyN does so with
every N-th layer of the model.
selective: a layer keeps the results that `keeps_result` of compat.py names and, if it is compiled, the whole output
of a ring or of attention that pads values; backward computes the rest again.
attention: backward runs attention again from q, k and v (arXiv 2205.05198, section 5).
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ultrabench.kernel.attention import PADDED_FORWARD
from ultrabench.kernel.compat import keeps_result, uncompiled_function
from ultrabench.kernel.cp import RING_FORWARD
from ultrabench.kernel.model import Decoder, Layer
from ultrabench.layout import Layout


def apply_recompute(model: Decoder, layout: Layout) -> None:
    """Makes the layers of `model` recompute, in place; `apply_dp`, which gathers parameters, comes later."""
    for layer_number, layer in _numbered_layers(model):
        recompute = _layer_recompute(layout, layer_number)
        if recompute == "attention":
            layer.attention.core = _with_recompute(layer.attention.core, recompute)
        elif recompute != "none":
            layer.forward = _with_recompute(layer.forward, recompute)  # type: ignore[method-assign]


def recompute_of(models: Iterable[Decoder], layout: Layout) -> str:
    """layout.recompute if every layer is wrapped as it says, else what the layers do, such as `full and none`."""
    applied_modes, requested_modes = list[str](), list[str]()
    for layer_number, layer in chain.from_iterable(map(_numbered_layers, models)):
        # In a model that fully_shard has wrapped, the module of the experts runs a sparse layer.
        layer_forward = getattr(layer.ffn, "experts", layer).forward
        layer_functions = uncompiled_function(layer_forward), layer.attention.core
        applied_modes.append(next((f.recompute for f in layer_functions if hasattr(f, "recompute")), "none"))
        requested_modes.append(_layer_recompute(layout, layer_number))
    return layout.recompute if applied_modes == requested_modes else " and ".join(sorted(set(applied_modes)))


def _numbered_layers(model: Decoder) -> Iterator[tuple[int, Layer]]:
    """The layers of a stage, with their numbers in the whole model."""
    for layer_number, layer in model.layers.items():
        assert isinstance(layer, Layer)
        yield int(layer_number), layer


def _layer_recompute(layout: Layout, layer_number: int) -> str:
    """What the layer `layer_number` computes again, counted from 0: none, attention, selective or full."""
    if layout.full_every:
        return "none" if (layer_number + 1) % layout.full_every else "full"
    return layout.recompute


def _with_recompute(function: Callable[..., Any], recompute: str) -> Callable[..., Any]:
    """`function`, whose results backward computes again; a closure, since Dynamo skips functools.partial."""
    # Dynamo would take torch's `noop_context_fn` for a selection that keeps everything.
    options: dict[str, Any] = {"context_fn": _selective_contexts} if recompute == "selective" else {}

    def recomputed_function(*args: Any) -> Any:
        # There is no dropout, so the state of random generators need not be kept.
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **options)

    vars(recomputed_function).update(recompute=recompute, __wrapped__=function)
    return recomputed_function


def _selective_contexts() -> Any:
    """Two contexts, for forward and for its repetition, that keep some results."""

    def choose_policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = operator in (RING_FORWARD, PADDED_FORWARD) or keeps_result(operator, *args, **kwargs)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose_policy)  # type: ignore[no-untyped-call]
