"""The activations of feed-forward blocks, and their gradients, by the names of a shape's `hidden_act`."""

from torch import Tensor
from torch.nn import functional

from ultrabench.kernel.compat import gelu_backward, silu_backward

_GELU_APPROXIMATIONS = {"gelu": "none", "gelu_tanh": "tanh"}
"""Name of a GELU (arXiv 1606.08415) -> torch's word for how it is computed."""


def activate(name: str, x: Tensor) -> Tensor:
    """The activation `name` of x; relu2 keeps relu(x) for backward in place of x."""
    if name == "silu":
        return functional.silu(x)
    if name == "relu2":
        return functional.relu(x).square()
    return functional.gelu(x, approximate=_GELU_APPROXIMATIONS[name])


def input_gradient(name: str, grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x from that of `activate(name, x)`."""
    if name == "silu":
        return silu_backward(grad, x)  # type: ignore[no-any-return]
    if name == "relu2":
        return grad * (2 * functional.relu(x))
    return gelu_backward(grad, x, approximate=_GELU_APPROXIMATIONS[name])  # type: ignore[no-any-return]
