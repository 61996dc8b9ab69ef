"""Data parallelism and ZeRO: fully_shard around every layer and around the rest, at any degree.

The stages differ only in the mesh axis that dp lies on and in when they gather and reduce. With
G groups (the layers of this stage, and the rest) and gas micro-batches, a step moves

| stage | all-gathers | reduce-scatters | all-reduces |
|---|---|---|---|
| 3 | 2*G*gas | G*gas | 0 |
| 2 | G | G*gas | 0 |
| 1 | G | G | 0 |
| 0 | 0 | 0 | G |

Under a pipeline the schedule reduces once a step: stage 3 gathers G*(1+gas) times and
reduce-scatters G times, stages 1 and 0 are as above. The ranks of a context-parallel ring hold other
tokens of the same parameters, so the axis of dp spans dp*cp ranks.
"""

from itertools import pairwise

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ultrabench.kernel.model import Decoder

MASTER_DTYPE = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}
"""Precision -> dtype of parameters, gradients and optimizer states."""
COMPUTE_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
"""Precision -> dtype of forward and backward."""


def apply_dp(model: Decoder, mesh: DeviceMesh, zero_stage: int, precision: str) -> None:
    """Wraps `model` in place, a group for each layer and one for the rest.

    It is wrapped at degree 1, too, since that gives bf16 compute on fp32 masters.
    """
    axes = ("dp_replicate", "dp_shard") if mesh["dp_replicate"].size() > 1 else ("dp_shard",)
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = list(model.layers.values())
    for module in (*layers, model):
        fully_shard(module, mesh=mesh[axes], reshard_after_forward=zero_stage == 3, mp_policy=policy)
    for layer, following in pairwise(layers):
        # Asked for as soon as the layer before begins, not when it has launched all its work.
        assert isinstance(layer, FSDPModule)
        layer.set_modules_to_forward_prefetch([following])  # type: ignore[list-item]


def begin_microbatch(model: FSDPModule, zero_stage: int, *, last: bool) -> None:
    """Says before a micro-batch whether its backward reduces gradients and frees parameters."""
    model.set_requires_gradient_sync(last or zero_stage >= 2)
    model.set_reshard_after_backward(last or zero_stage == 3)
