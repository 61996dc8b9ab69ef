"""What backward computes anew instead of keeping it, layer by layer.

full: a layer keeps its input only, and runs forward once more (arXiv 1604.06174).
selective: the outputs of matrix products, attention and collectives are kept, and the cheap rest
(norms, rotations, activation functions, casts) is computed anew.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ultrabench.kernel.compat import EXPENSIVE
from ultrabench.kernel.model import Decoder


def _keep(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def apply_recompute(model: Decoder, recompute: str) -> None:
    """Has the layers of `model` recompute, in place; inside of what gathers their parameters."""
    if recompute == "none":
        return
    # No dropout here, so the state of random generators need not be kept.
    again: Callable[..., Any] = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if recompute == "selective":
        again = partial(again, context_fn=partial(create_selective_checkpoint_contexts, _keep))
    for layer in model.layers.values():
        layer.forward = partial(again, layer.forward)


def apply_compile(model: Decoder, backend: str) -> None:
    """Compiles each layer of `model`, in place."""
    for layer in model.layers.values():
        layer.compile(backend=backend)
