"""Rotations of queries and keys: frequencies, how a rope_scaling stretches them, and what it multiplies.

Shapes: S positions, R rotated channels of a head, which the first channels are.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ultrabench.layer_type import LayerType
from ultrabench.model_shape import ModelShape, RopeScaling


class Rotation(NamedTuple):
    """How the heads of a layer are rotated."""

    base: float
    """The rope_theta of the layer."""
    width: int
    """R."""
    scaling: RopeScaling | None = None


def rotation_of(shape: ModelShape, kind: LayerType) -> Rotation:
    """The rotation of the layers of a type; all types of a model have the same scaling."""
    if kind.latent is not None:
        return Rotation(kind.latent.rope_theta, kind.latent.qk_rope_head_dim, shape.rope_scaling)
    assert kind.grouped_query is not None
    return Rotation(kind.grouped_query.rope_theta, kind.grouped_query.rotary_width, shape.rope_scaling)


def rope_frequencies(rotation: Rotation, even_channels: Tensor) -> Tensor:
    """The angle by which each pair of channels is rotated from one position to the next, R/2, in radians.

    They are theta^(-2i/R). A scaling divides those with few turns in the original context by its factor, and keeps
    those with many. Between both, llama3 goes linearly in the number of turns, and yarn in the number of the pair.

    Args:
        even_channels: 0, 2, ... R-2.
    """
    frequency = rotation.base ** (-even_channels / rotation.width)
    if (scaling := rotation.scaling) is None:
        return frequency
    if scaling.rope_type == "yarn":
        first, last = _yarn_bounds(rotation.base, rotation.width, scaling)
        unscaled_share = 1 - (even_channels / 2 - first) / (last - first)
    else:
        assert scaling.low_freq_factor is not None
        assert scaling.high_freq_factor is not None
        turns = frequency * scaling.original_max_position_embeddings / (2 * math.pi)
        unscaled_share = (turns - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
    return torch.lerp(frequency / scaling.factor, frequency, unscaled_share.clamp(0, 1))


def _yarn_bounds(base: float, width: int, scaling: RopeScaling) -> tuple[float, float]:
    """The pairs of channels up to which, and from which on, yarn keeps and divides frequencies.

    They turn beta_fast and beta_slow times in the original context (arXiv 2309.00071, section 3.2).
    """
    context = scaling.original_max_position_embeddings
    first, last = (
        width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    return first, last if last != first else last + 0.001


def _log_factor(scaling: RopeScaling, weight: float) -> float:
    """1 + weight * log(factor) / 10 (arXiv 2309.00071, section 3.4)."""
    return 1 + 0.1 * weight * math.log(scaling.factor)


def table_factor(rotation: Rotation) -> float:
    """What yarn multiplies rotated queries and keys by."""
    scaling = rotation.scaling
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _log_factor(scaling, scaling.mscale) / _log_factor(scaling, scaling.mscale_all_dim)
    return _log_factor(scaling, 1.0)


def score_factor(rotation: Rotation) -> float:
    """What yarn multiplies all scores of latent attention by: the square of what mscale_all_dim gives.

    Source: DeepseekV3Attention of transformers.
    """
    scaling = rotation.scaling
    return _log_factor(scaling, scaling.mscale_all_dim) ** 2 if scaling else 1.0


def rope_tables(
    positions: Sequence[range], rotation: Rotation, x: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The cosine and sine of the rotation of every position, S x 1 x R/2 each (arXiv 2104.09864).

    They have the dtype and the device of `x`. Their angles are computed in `dtype`, by default in at least fp32.
    """
    angle_dtype, factor = dtype or torch.promote_types(x.dtype, torch.float32), table_factor(rotation)
    even_channels = torch.arange(0, rotation.width, 2, device=x.device, dtype=angle_dtype)
    chunks = [torch.arange(c.start, c.stop, device=x.device, dtype=angle_dtype) for c in positions]
    angle = torch.outer(torch.cat(chunks), rope_frequencies(rotation, even_channels))[:, None, :]
    return (angle.cos() * factor).to(x.dtype), (angle.sin() * factor).to(x.dtype)


def rotate(x_BSND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with each pair (i, i + R/2) of the first R channels of every head rotated by the angle of its position."""
    half_1, half_2, *unrotated = torch.split(x_BSND, cos.shape[-1], dim=-1)
    return torch.cat((half_1 * cos - half_2 * sin, half_2 * cos + half_1 * sin, *unrotated), dim=-1)


def rotate_pairs(x_BSND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with each pair (2i, 2i + 1) of the last R channels of every head rotated by the angle of its position.

    The first numbers of all pairs come before the second ones. Queries and keys have this order alike, so that scores
    do not depend on it.
    """
    rotary_width = 2 * cos.shape[-1]
    unrotated, pairs = torch.split(x_BSND, [x_BSND.shape[-1] - rotary_width, rotary_width], dim=-1)
    evens, odds = pairs[..., ::2], pairs[..., 1::2]
    return torch.cat((unrotated, evens * cos - odds * sin, odds * cos + evens * sin), dim=-1)
