"""Faults of decoder, initial values and data: a layout has them, and the process with which it is compared, too."""

from dataclasses import replace

import torch

from tests.parity.fault import changed, planted
from ultrabench.kernel import data, model


@planted(model, "rotate")
def no_rope(right):
    """Queries and keys are not rotated."""
    return lambda x, cos, sin: x


@planted(model, "rotate")
def neighbours_rotate(right):
    """The pairs that rotate together are (2i, 2i + 1) instead of (i, i + D/2)."""

    def rotate(x, cos, sin):
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    return rotate


@planted(model, "rope_frequencies")
def no_rope_scaling(right):
    """The llama3 scaling of the rotation is ignored."""
    return lambda shape, half: right(replace(shape, rope_scaling=None), half)


@planted(model, "rope_frequencies")
def fixed_rope_theta(right):
    """The base of the rotation is always 10,000."""
    return lambda shape, half: right(replace(shape, rope_theta=10000.0), half)


def sdpa_with(change):
    """For `functional`: attention of changed arguments."""

    def instead_of(right):
        def attention(q, k, v, **options):
            tensors, more = change(q, k, v)
            return right.scaled_dot_product_attention(*tensors, **(options | more))

        return changed(right, scaled_dot_product_attention=attention)

    return instead_of


@planted(model, "functional")
def not_causal(right):
    """Each token attends to all tokens."""
    return sdpa_with(lambda q, k, v: ((q, k, v), {"is_causal": False}))(right)


@planted(model, "functional")
def wrong_scale(right):
    """Scores of attention are divided by D instead of its root."""
    return sdpa_with(lambda q, k, v: ((q, k, v), {"scale": 1 / q.shape[-1]}))(right)


@planted(model, "functional")
def reordered_groups(right):
    """Query head n reads key head n mod K instead of n K / N."""

    def tiled(q, k, v):
        return (q, *(t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v))), {"enable_gqa": False}

    return sdpa_with(tiled)(right)


@planted(model, "functional")
def gelu(right):
    """The activation function is GELU instead of SiLU."""
    return changed(right, silu=right.gelu)


@planted(model.RmsNorm, "__init__")
def fixed_eps(right):
    """The eps of all norms is 1e-6, whatever the shape says."""
    return lambda self, width, eps: right(self, width, 1e-6)


@planted(model.RmsNorm, "forward")
def no_qk_norm(right):
    """Queries and keys are not normalised."""
    return lambda self, x: x if x.dim() == 4 else right(self, x)


@planted(model.FeedForward, "forward")
def gate_for_up(right):
    """The activation function is applied to `up` instead of `gate`."""

    def forward(self, x):
        up, gate = self.columns(x, self.gate.weight, self.up.weight)
        return self.row(model.functional.silu(gate) * up, self.down.weight)

    return forward


@planted(model.Decoder, "tie")
def not_tied(right):
    """Embedding and head are two parameters although the shape ties them."""
    return lambda self: None


@planted(model.Decoder, "initial_value")
def keys_like_queries(right):
    """Keys of a layer start with the values of its queries."""
    return lambda self, name, *args: right(self, name.replace("attention.k", "attention.q"), *args)


@planted(model.Decoder, "initial_value")
def all_layers_alike(right):
    """All layers start with the values of the first."""

    def initial_value(self, name, *args):
        return right(self, ".".join("0" if part.isdigit() else part for part in name.split(".")), *args)

    return initial_value


@planted(model.Decoder, "initial_value")
def wide_values(right):
    """Initial values are ten times too large."""
    return lambda self, name, *args: right(self, name, *args) * 10


@planted(data, "sample")
def same_sample(right):
    """All samples of a step are the same."""
    return lambda seed, step, index, *args: right(seed, step, 0, *args)


@planted(data, "sample")
def same_data(right):
    """All steps train on the same tokens."""
    return lambda seed, step, *args: right(seed, 1, *args)


@planted(data, "load")
def copied_targets(right):
    """A target is the token itself instead of the next one."""

    def load(*args):
        inputs, _ = right(*args)
        return inputs, inputs

    return load
