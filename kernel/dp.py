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
reduce-scatters G times, stages 1 and 0 are as above.
"""

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

    Also at degree 1: the wrapping is what gives bf16 compute on fp32 masters, and what brings
    gradients of tensor-parallel norms into the placement of their parameters.
    """
    axes = ("dp_replicate", "dp_shard") if mesh["dp_replicate"].size() > 1 else ("dp_shard",)
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh[axes], reshard_after_forward=zero_stage == 3, mp_policy=policy)


def begin_microbatch(model: FSDPModule, zero_stage: int, *, last: bool) -> None:
    """Says before a micro-batch whether its backward reduces gradients and frees parameters."""
    model.set_requires_gradient_sync(last or zero_stage >= 2)
    model.set_reshard_after_backward(last or zero_stage == 3)
