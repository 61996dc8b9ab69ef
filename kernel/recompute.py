"""Makes backward compute parts of each layer again, so that forward need not keep their results.

full: a layer keeps only its input, and backward runs its forward again (arXiv 1604.06174).
selective: a layer keeps the outputs of matrix products, attention and collectives, and backward computes the
cheap rest (norms, rotations, activation functions, casts) again.
"""

from collections.abc import Callable
from inspect import ismethod
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ultrabench.kernel.compat import EXPENSIVE, uncompiled
from ultrabench.kernel.cp import RING_FORWARD
from ultrabench.kernel.model import Decoder


def apply_recompute(model: Decoder, recompute: str) -> None:
    """Makes the layers of `model` recompute, in place; `apply_dp`, which gathers parameters, comes later."""
    if recompute == "none":
        return
    # Dynamo would take torch's `noop_context_fn` for a selection that keeps everything.
    options = {"context_fn": _selection} if recompute == "selective" else {}
    for layer in model.layers.values():
        vars(layer).update(forward=_recomputed(layer.forward, options), recompute=recompute)


def _recomputed(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """`function`, whose results backward computes again; a closure, since Dynamo skips functools.partial."""

    def again(*args: Any) -> Any:
        # There is no dropout, so the state of random generators need not be kept.
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **options)

    return again


def _selection() -> Any:
    """Two contexts, for forward and for its repetition, that keep the results of the operators in EXPENSIVE."""
    return create_selective_checkpoint_contexts(_keep)  # type: ignore[no-untyped-call]


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in EXPENSIVE or op is RING_FORWARD
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_of(layer: Any) -> str:
    """What a layer recomputes, by the wrapper around its forward."""
    return "none" if ismethod(uncompiled(layer.forward)) else str(layer.recompute)
