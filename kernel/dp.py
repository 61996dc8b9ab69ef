"""Data parallelism and ZeRO: fully_shard around embedding, layers, and norm with head, at any degree.

The values of zero_stage differ only in the mesh axis that dp lies on and in when they gather and reduce. With G
groups in a pipeline stage (the embedding, each of L layers, and norm with head) and gas micro-batches, a step
moves

| zero_stage | all-gathers | reduce-scatters | all-reduces |
|---|---|---|---|
| 3 | (G+L)*gas | G*gas | 0 |
| 2 | G | G*gas | 0 |
| 1 | G | G | 0 |
| 0 | 0 | 0 | G |

ZeRO-3 gathers a layer again for its backward. The head needs no second gather, since its backward follows its
forward, and the embedding none, since its backward reads no parameters. A tied embedding is one group with
norm and head, which stays gathered from forward to backward.

Under a pipeline gradients are reduced once a step. ZeRO-3 then gathers each layer 1+gas times, the embedding
gas times and the head once, and reduce-scatters G times; zero_stage 1 and 0 are as above.

The ranks of a context-parallel ring hold other tokens of the same parameters, so the shards and their replicas
are dp*cp ranks. With dp_shard below dp*cp the table counts calls among the shards along the mesh axis dp_shard;
G all-reduces a step along dp_replicate follow.

Gradients are summed over these ranks, and every loss is divided by the number of losses beforehand: a mean over the
ranks of a group would depend on how many they are, which differs between the groups of a model with experts.
"""

from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ultrabench.kernel.compat import reduce_gradients
from ultrabench.kernel.model import Decoder
from ultrabench.kernel.moe import SparseFeedForward
from ultrabench.kernel_config import EMBEDDED_PRECISIONS, PRECISIONS_16_BIT

MASTER_DTYPE = dict.fromkeys(EMBEDDED_PRECISIONS, torch.float32) | {"fp64": torch.float64}
"""Precision -> dtype of parameters, gradients and optimizer states."""
COMPUTE_DTYPE = MASTER_DTYPE | dict.fromkeys(PRECISIONS_16_BIT, torch.bfloat16)
"""Precision -> dtype of forward and backward."""


def apply_dp(
    model: Decoder, mesh: DeviceMesh, zero_stage: int, precision: str, expert_mesh: DeviceMesh | None = None
) -> None:
    """Wraps `model` in place, in the groups that the table of this module counts.

    It is wrapped at degree 1, too, since that gives bf16 compute on fp32 masters.

    Args:
        expert_mesh: the mesh of the experts of a sparse layer, which are a group beside the rest of the layer.
    """
    mp_policy = MixedPrecisionPolicy()
    if precision in PRECISIONS_16_BIT:
        master_dtype, compute_dtype = MASTER_DTYPE[precision], COMPUTE_DTYPE[precision]
        mp_policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=master_dtype)

    def make_group(*modules: nn.Module | None, reshards: bool, mesh: DeviceMesh = mesh) -> list[FSDPModule]:
        """Makes one group of the modules that are not None; returns a list of it, empty without modules.

        `reshards` says whether the gathered parameters are freed between forward and backward.
        """
        members = [module for module in modules if module is not None]
        if not members:
            return []
        replicate_axis, shard_axis = dp_axes = [
            axis for axis in mesh.mesh_dim_names or () if axis.endswith(("replicate", "shard"))
        ]
        has_replicas = mesh[replicate_axis].size() > 1
        has_reduce_hook = zero_stage == 0 and has_replicas
        fsdp_mesh = mesh[tuple(dp_axes)] if has_replicas and not has_reduce_hook else mesh[shard_axis]
        group = fully_shard(members, mesh=fsdp_mesh, reshard_after_forward=reshards, mp_policy=mp_policy)[0]
        if has_reduce_hook:  # torch sums over replicas of one shard only in a copy, which it divides by 1
            group.set_all_reduce_hook(partial(dist.all_reduce, group=mesh.get_group(replicate_axis)))
        elif fsdp_mesh.size() > 1:
            group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)
        return [group]

    reshards = zero_stage == 3
    layer_groups = list[list[FSDPModule]]()
    for layer in model.layers.values():
        expert_groups = list[FSDPModule]()
        if expert_mesh is not None and isinstance(ffn := layer.ffn, SparseFeedForward):
            expert_groups = make_group(ffn.experts, reshards=reshards, mesh=expert_mesh)
        for group in expert_groups:
            call_inside_experts(layer, group)
        layer_groups.append(make_group(layer, reshards=reshards) + expert_groups)
    embedding_groups = [] if model.is_tied else make_group(model.embedding, reshards=reshards)
    head_groups = [] if model.is_tied else make_group(*model.end_modules, reshards=False)
    # The root holds what no other group does: nothing, or a tied embedding with norm.
    root_groups = make_group(model, reshards=False)
    ordered_groups = [embedding_groups or root_groups, *layer_groups, *([head_groups] if head_groups else [])]
    for (group, *_), (next_group, *inner_groups) in pairwise(ordered_groups):
        # Each group requests the parameters of the next one as soon as it begins. Torch would request them in
        # forward only when all work of the group is launched, and in backward in an order that it guesses, which
        # is wrong where a pipeline mixes micro-batches.
        group.set_modules_to_forward_prefetch([next_group, *inner_groups])
    for previous_groups, (group, *inner_groups) in pairwise(ordered_groups):
        group.set_modules_to_backward_prefetch(previous_groups)
        for inner_group in inner_groups:
            # With an empty list torch would guess; what it has gathered already it does not gather again.
            inner_group.set_modules_to_backward_prefetch([inner_group])
    root_groups[0].set_modules_to_backward_prefetch(ordered_groups[-1])
    for embedding_group in embedding_groups:
        embedding_group.set_unshard_in_backward(False)
        # Naming itself requests nothing, since its gather is off.
        embedding_group.set_modules_to_backward_prefetch([embedding_group])


def call_inside_experts(layer: nn.Module, experts: FSDPModule) -> None:
    """Makes a call of the layer a call of its experts' module, whose hooks then are outside a compiled layer.

    So the experts are gathered before the layer, and their gradients are reduced after its backward.
    """
    assert isinstance(experts, nn.Module)
    experts.forward = layer.forward
    layer.forward = lambda *args: experts(*args)


def begin_microbatch(model: FSDPModule, zero_stage: int, *, is_last: bool, overlap: bool) -> None:
    """Sets before a micro-batch whether its backward reduces gradients and frees parameters.

    With `overlap` gradients are reduced beside backward, otherwise after it by `end_microbatch`.
    """
    model.set_requires_gradient_sync(overlap and must_reduce(zero_stage, is_last=is_last))
    model.set_requires_all_reduce(is_last)
    model.set_reshard_after_backward(is_last or zero_stage == 3)


def end_microbatch(model: FSDPModule, zero_stage: int, *, is_last: bool, overlap: bool) -> None:
    """Reduces gradients after the backward of a micro-batch, where it has not reduced them itself."""
    if must_reduce(zero_stage, is_last=is_last) and not overlap:
        model.set_requires_gradient_sync(True)
        reduce_gradients(model)


def must_reduce(zero_stage: int, *, is_last: bool) -> bool:
    """Whether the gradients of a micro-batch are reduced: ZeRO stages 2 and 3 keep only shards of their sums."""
    return is_last or zero_stage >= 2
