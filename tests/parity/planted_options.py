"""Faults by which an option is ignored: training is correct or nearly so."""

from dataclasses import replace

import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.parity.fault import planted
from ultrabench.kernel import pp, step


@planted(step, "apply_recompute")
def no_recompute(right):
    """Layers keep everything."""
    return lambda *_: None


@planted(step, "apply_recompute")
def full_for_selective(right):
    """Layers keep only their input, whatever is asked for."""
    return lambda decoder, layout: right(decoder, replace(layout, recompute="full"))


@planted(pp, "SCHEDULES")
def other_schedule(right):
    """Under 1f1b all forwards run first."""
    return right | {"1f1b": right["afab"]}


@planted(step, "apply_dp")
def gathered_parameters(right):
    """Parameters stay gathered after forward."""
    return lambda decoder, mesh, zero_stage, *more: right(decoder, mesh, 1, *more)


@planted(step, "apply_dp")
def shards_everywhere(right):
    """All ranks of dp share the parameters, where dp_shard says how many do."""

    def apply_dp(decoder, mesh, *args):
        names = ("dp_replicate", "dp_shard")
        right(decoder, init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=names), *args)

    return apply_dp


@planted(step, "begin_microbatch")
def zero2_as_1(right):
    """Gradients are reduced in the last micro-batch only."""
    return lambda decoder, zero_stage, *, last: right(decoder, min(zero_stage, 1), last=last)


@planted(step, "apply_dp")
def no_bf16(right):
    """Layers compute in the precision of the optimizer."""
    return lambda decoder, mesh, zero_stage, precision: right(decoder, mesh, zero_stage, "fp32")


@planted(step, "apply_compile")
def no_compile(right):
    """Layers are marked as compiled, but torch compiles nothing."""
    return lambda decoder, _: [
        setattr(layer, "forward", torch.compiler.disable(layer.forward)) for layer in decoder.layers.values()
    ]


@planted(step, "apply_attention")
def any_attention(right):
    """Torch chooses the implementation of attention."""
    return lambda *_: None


@planted(step, "apply_attention")
def plain_attention(right):
    """The plain implementation of attention runs, which keeps all scores."""
    return lambda decoder, _, group: right(decoder, "math", group)


@planted(step, "load")
def half_the_micro_batches(right):
    """Half of the samples train, and each of them reduces gradients."""
    begin = step.begin_microbatch
    step.begin_microbatch = lambda decoder, zero_stage, **_: begin(decoder, zero_stage, last=True)
    return lambda indices, *args: right(indices[: len(indices) // 2], *args)
