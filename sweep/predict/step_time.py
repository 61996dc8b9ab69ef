"""The time of one optimizer step in closed form, by part; docs/design/prediction.md derives each term.

Symbols: h, f, V are the sizes of the model, s is the sequence length; T = mbs*s/cp are the tokens of a
micro-batch on one rank, m = gas is the number of micro-batches, i the rank on the axis pp, t_i its time for one
micro-batch, forward and backward:

    t = (m*max(t_i) + bubble + t_pp + t_dp + t_optimizer + t_rest) * (1 + what the allocator loses)
"""

import math
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from ultrabench.hardware import Hardware, Peak
from ultrabench.kernel_config import ELEMENT_BYTES
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.stages import Stage, stages_by_rank
from ultrabench.sweep.predict.block_time import Blocks, Rates, Work, block_times, ring_parts_s, tp_hops_s
from ultrabench.sweep.predict.data_parallel import (
    ParamGroup,
    data_parallel,
    param_groups,
    reduces_and_gathers,
)
from ultrabench.sweep.predict.experts import busiest_share
from ultrabench.sweep.predict.network import Network
from ultrabench.sweep.predict.pipeline import waiting
from ultrabench.sweep.predict.time_constants import TimeConstants

NEARLY_FULL = 0.986
"""Share of a GPU's memory that an allocator can hold; an H100 reports 79.1 GiB, of which the context takes 1.1."""
FILLING = 0.002
"""Excess over that share at which 1 - 1/e of the largest loss is expected; in the runs it comes within 0.003."""


class StepTime(NamedTuple):
    """Seconds of one optimizer step by part; communication counts only where nothing hides it."""

    gemm: float
    """Matrix products of the slowest pipeline rank."""
    attention: float
    """Scores and values of attention on that rank."""
    memory_bound: float
    """Norms, activations, cross-entropy and the sum of gradients, whose time is that of the memory."""
    launch: float
    """What the GPU waits for its host to launch kernels."""
    tp: float
    """Collectives of tensor parallelism."""
    cp: float
    """Keys and values on their way round the ring."""
    ep: float
    """All-to-alls that bring tokens to their experts and back."""
    dp: float
    """Gradients and parameters between data-parallel ranks, beyond what computing hides."""
    pp: float
    """Exchanges between pipeline ranks, but for those that are made while ranks wait for the slowest one."""
    bubble: float
    """What the slowest rank waits while the pipeline fills and drains."""
    optimizer: float
    """Clipping and the update of parameters."""
    allocator: float
    """What ranks wait while an allocator without room for its reserve gives it back to the GPU."""
    rest: float
    """Everything else, once a step."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self)


class CommunicationRatios(NamedTuple):
    """Seconds of communication over seconds of the computing beside it; 0 for an axis that does not communicate.

    They are of one micro-batch on the slowest pipeline rank. Above 1, computing cannot hide the communication.
    Source: the Ultra-Scale Playbook, appendix A3, with the rates and efficiencies of this prediction.
    """

    dp: float
    """All its collectives over the backward, or the passes, beside which they are made."""
    tp: float
    """Its collectives over matrix products."""
    pp: float
    """The exchanges over forward and backward of the stages of the rank."""
    cp: float
    """The ring over attention."""
    ep: float
    """Its all-to-alls over matrix products."""

    @property
    def of_axes(self) -> dict[str, float]:
        """Axis -> its ratio, of the axes that communicate."""
        return {axis: ratio for axis, ratio in self._asdict().items() if ratio}


class _PipelineRank(NamedTuple):
    """What one rank of the axis pp computes; ranks that compute the same are one, with their `num_ranks`."""

    stages: int
    layers: int
    """Number of dense layers."""
    again: int
    """Number of these of which backward computes something again."""
    heads: int
    sparse: int
    """Number of layers with experts."""
    sparse_again: int
    """Number of these of which backward computes something again."""
    params: int
    """Number of parameters of these stages, before tp divides them, without experts."""
    expert_params: int
    """Number of parameters of all experts of these stages."""
    num_ranks: int = 1

    def times(self, layer: float, again: float, head: float, sparse: float, sparse_again: float) -> float:
        """The seconds of the blocks of this rank, from those of one block of each kind."""
        dense = layer * self.layers + again * self.again + head * self.heads
        return dense + (sparse * self.sparse + sparse_again * self.sparse_again) if self.sparse else dense


@lru_cache(maxsize=4096)
def _pipeline_ranks(
    shape: ModelShape, pp: int, pp_schedule: str, virtual_stages: int, recompute: str, ties_advance: bool
) -> tuple[_PipelineRank, ...]:
    layout = Layout(dp=1, pp=pp, pp_schedule=pp_schedule, virtual_stages=virtual_stages, recompute=recompute)
    interval = 0 if recompute == "none" else layout.full_every or 1
    all_stages = stages_by_rank(shape, layout, ties_advance=ties_advance)
    ranks = Counter(_pipeline_rank(shape, stages, interval) for stages in all_stages)
    return tuple(rank._replace(num_ranks=count) for rank, count in ranks.items())


def _pipeline_rank(shape: ModelShape, stages: tuple[Stage, ...], interval: int) -> _PipelineRank:
    numbers = [n for stage in stages for n in range(stage.first_layer, stage.first_layer + stage.num_layers)]
    sparse = Counter(map(shape.is_sparse, numbers))
    again = Counter(shape.is_sparse(n) for n in numbers if interval and (n + 1) % interval == 0)
    expert_params = sum(stage.num_expert_params(shape) for stage in stages)
    return _PipelineRank(
        stages=len(stages),
        layers=sparse[False],
        again=again[False],
        heads=sum(stage.has_head for stage in stages),
        sparse=sparse[True],
        sparse_again=again[True],
        params=sum(stage.num_params(shape) for stage in stages) - expert_params,
        expert_params=expert_params,
    )


class _Moves(NamedTuple):
    """Seconds of the memory for each parameter of the model in a micro-batch."""

    params: float
    expert_params: float

    def of(self, rank: _PipelineRank, times: float = 1.0) -> float:
        """The seconds of so many micro-batches of a rank."""
        return times * self.params * rank.params + times * self.expert_params * rank.expert_params


def _passes(
    ranks: tuple[_PipelineRank, ...], blocks: Blocks, move_s: _Moves, host_s: float, c: TimeConstants
) -> tuple[_PipelineRank, float, float, float]:
    """The slowest rank, and seconds of a micro-batch: of its GPU at work, of the rank, and of all ranks together.

    Those of a rank contain what its GPU waits for the host. `host_s` are the seconds of each layer on the host.
    """
    slowest, gpu_s, slowest_s, all_s = ranks[0], 0.0, 0.0, 0.0
    for rank in ranks:
        rank_gpu_s = rank.times(*blocks.whole) + move_s.of(rank)
        # A forward that is repeated is launched again; it is a third of forward and backward.
        rank_host_s = (rank.layers + rank.again / 3) * host_s + rank.stages * c.micro_batch_launch_s
        rank_host_s += (rank.sparse + rank.sparse_again / 3) * (host_s + c.sparse_launch_s)
        pass_s = _smooth_max(rank_gpu_s, rank_host_s, c.smooth_power)
        all_s += rank.num_ranks * pass_s
        if pass_s > slowest_s:
            slowest, gpu_s, slowest_s = rank, rank_gpu_s, pass_s
    return slowest, gpu_s, slowest_s, all_s


def _micro_batch(
    spec: RunSpec, hardware: Hardware, peak: Peak, network: Network, c: TimeConstants
) -> tuple[Work, Blocks, tuple[_PipelineRank, ...], _Moves]:
    """What a layer works on, the times of its blocks, what each pipeline rank holds, and seconds of its parameters."""
    layout, stream = spec.layout, hardware.hbm_bytes_per_s * c.hbm_efficiency
    shape, tp, recompute = spec.shape, layout.tp, layout.recompute
    word_bytes, tokens = ELEMENT_BYTES[spec.kernel.precision], layout.mbs * spec.workload.seq_len / layout.cp
    work = Work(
        shape,
        spec.workload.seq_len,
        tokens,
        tp,
        layout.sequence_parallel == "on",
        layout.cp,
        layout.cp_exchange,
        recompute,
        spec.compiles,
        word_bytes,
        layout.ep,
        busiest_share(spec.kernel, layout, shape),
    )
    blocks = block_times(work, network, _rates(spec, hardware, peak.flops_per_s, c), c)
    ranks = _pipeline_ranks(
        shape, layout.pp, layout.pp_schedule, layout.virtual_stages, recompute, c.ties_advance
    )
    moves = _Moves(c.accumulate_bytes / tp / stream, c.accumulate_bytes / layout.ep / stream)
    return work, blocks, ranks, moves


def _rates(spec: RunSpec, hardware: Hardware, peak: float, c: TimeConstants) -> Rates:
    """What a GPU reaches; with fp8, linear layers alone compute in it, the rest in bf16.

    A power limit slows down the clock of all products, not the memory.
    """
    peak *= hardware.clock_share
    stream, linear, cast_bytes = hardware.hbm_bytes_per_s * c.hbm_efficiency, peak * c.gemm_efficiency, 0.0
    if spec.kernel.precision == "fp8":
        linear, cast_bytes = peak * c.fp8_efficiency, c.fp8_cast_bytes
        cast_bytes *= c.compiled_traffic if spec.compiles else 1
        if bf16 := hardware.peak_flops_per_s.get("bf16"):  # CPUs have one rate
            peak = bf16 * hardware.clock_share
    return Rates(linear, peak * c.gemm_efficiency, peak * c.attention_efficiency, stream, cast_bytes)


def predict_step_time(
    spec: RunSpec,
    hardware: Hardware,
    peak: Peak,
    network: Network,
    constants: TimeConstants,
    memory_share: float = 0.0,
) -> StepTime:
    """The predicted time of one optimizer step of a run, by part.

    Args:
        memory_share: predicted peak with the reserve of the allocator, divided by the memory of a GPU.
    """
    layout, c, gas = spec.layout, constants, spec.layout.gas
    work, blocks, ranks, move_s = _micro_batch(spec, hardware, peak, network, c)
    stream = hardware.hbm_bytes_per_s * c.hbm_efficiency
    slowest, gpu_s, pass_s, all_s = _passes(ranks, blocks, move_s, _layer_launch_s(spec, network, c), c)
    mean_s = all_s / layout.pp  # a rank's share if none waited
    num_busy = gas * (1 - c.wait_shared * (1 - mean_s / pass_s))
    # Ranks exchange while they wait for the slowest one, on average for `waits_s`.
    exchanges_s = (gas + layout.pp - 1) * _exchange_s(spec, work, network, c)
    waits_s = num_busy * pass_s - gas * mean_s
    gemm, attention, memory_bound, tp_s, cp_s, ep_s = (
        num_busy * slowest.times(*seconds) for seconds in blocks[:-1]
    )
    groups = _param_groups(ranks, layout)
    layers = max(rank.layers + rank.sparse for rank in ranks)
    dp_total_s, passes, overlap = data_parallel(layout, groups, work.word, network, c)
    dp_s = max(dp_total_s - overlap * passes * pass_s, c.dp_exposed * dp_total_s)
    zero_s = c.zero_layer_s * layers * sum(reduces_and_gathers(layout)) / 2 if layout.zero_stage else 0.0
    update_s = sum(
        (c.optimizer_bytes / group.shards + c.clip_bytes) * group.params / stream for group in groups
    )
    times = StepTime(
        gemm=gemm,
        attention=attention,
        memory_bound=memory_bound + move_s.of(slowest, num_busy),
        launch=num_busy * (pass_s - gpu_s),
        tp=tp_s,
        cp=cp_s,
        ep=ep_s,
        dp=dp_s + zero_s,
        pp=max(0.0, exchanges_s - waits_s),
        bubble=(1 - c.wait_shared) * (all_s - pass_s) * waiting(layout) / max(1, layout.pp - 1),
        optimizer=update_s + c.optimizer_layer_s * layers,
        allocator=0.0,
        rest=c.rest_s,
    )
    excess = max(0.0, memory_share - NEARLY_FULL)
    return times._replace(allocator=-math.expm1(-excess / FILLING) * c.allocator_loss * times.total)


def _param_groups(ranks: tuple[_PipelineRank, ...], layout: Layout) -> tuple[ParamGroup, ...]:
    """The groups of parameters of the rank that holds most of each."""
    expert_params = max(rank.expert_params for rank in ranks) / layout.ep
    return param_groups(layout, max(rank.params for rank in ranks) / layout.tp, expert_params)


def communication_ratios(
    spec: RunSpec, hardware: Hardware, peak: Peak, network: Network, constants: TimeConstants
) -> CommunicationRatios:
    """The ratios of communication to computing of a run, hidden or not."""
    work, blocks, ranks, move_s = _micro_batch(spec, hardware, peak, network, constants)
    slowest = _passes(ranks, blocks, move_s, 0.0, constants)[0]
    gemm, attention, memory_bound, tp_s, _, ep_s = (slowest.times(*seconds) for seconds in blocks[:-1])
    compute_s = gemm + attention + memory_bound + move_s.of(slowest)
    groups = _param_groups(ranks, spec.layout)
    dp_s, passes, _ = data_parallel(spec.layout, groups, work.word, network, constants)
    ring_s = sum(ring_parts_s(work, network, constants)) if work.cp > 1 else 0.0
    return CommunicationRatios(
        dp=dp_s / (passes * compute_s),
        tp=tp_s / gemm,
        pp=_exchange_s(spec, work, network, constants) / compute_s,
        cp=ring_s / blocks.attention[0],
        ep=ep_s / gemm,
    )


def _smooth_max(a: float, b: float, power: float) -> float:
    """(a**p + b**p)**(1/p), which is the larger number where they differ much, and more than both where not."""
    low, high = (a, b) if a < b else (b, a)
    return high * math.pow(1 + math.pow(low / high, power), 1 / power) if high else 0.0


def _layer_launch_s(spec: RunSpec, links: Network, c: TimeConstants) -> float:
    """Seconds that the host needs for one layer, forward and backward."""
    tp = spec.layout.tp
    usual_s = c.layer_launch_tp_s if tp > 1 else c.layer_launch_s
    usual_s *= c.compiled_launch if spec.compiles else 1
    if spec.layout.recompute == "selective" and not spec.compiles:
        usual_s += c.selective_launch_s
    if spec.kernel.precision == "fp8" and not spec.compiles:
        usual_s += c.fp8_launch_s
    if not links.slow:
        return usual_s
    hops_s = c.tp_calls * tp_hops_s(tp, links, c)
    return max(usual_s, c.slow_layer_launch_s + tp * c.slow_layer_launch_tp_s + hops_s)


def _exchange_s(spec: RunSpec, work: Work, links: Network, c: TimeConstants) -> float:
    """Seconds in which pipeline ranks exchange the activations and gradients of one micro-batch."""
    layout, num_bytes = spec.layout, work.tokens * spec.shape.hidden_size * work.word / work.tp
    if layout.pp == 1:
        return 0.0
    if layout.world_size <= links.gpus_per_node:
        bytes_per_s, call_s = links.link_bytes_per_s * c.pp_link_efficiency, c.pp_call_s
    else:
        bytes_per_s = links.node_link_bytes_per_s * c.pp_node_link_efficiency
        call_s = c.pp_call_s + (c.pp_slow_call_s if links.slow else 0.0)
    return layout.virtual_stages * (call_s + 2 * num_bytes / bytes_per_s)
