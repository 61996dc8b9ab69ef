"""The time of one optimizer step in closed form, by part; docs/design/prediction.md derives each term.

Symbols: h, f, V are the sizes of the model, s is the sequence length; T = mbs*s/cp are the tokens of a
micro-batch on one rank, m = gas is the number of micro-batches, i the rank on the axis pp, t_i its time for one
micro-batch, forward and backward:

    t = (m*max(t_i) + bubble + t_pp + t_dp + t_optimizer + t_rest) * (1 + what the allocator loses)
"""

import math
from collections import Counter
from functools import lru_cache
from operator import attrgetter, mul
from typing import NamedTuple

from ultrabench.hardware import SCALED_PRECISIONS, Hardware, Peak
from ultrabench.kernel_config import ELEMENT_BYTES
from ultrabench.layout import RANK_ORDER, GroupAxes, Layout, crosses_nodes
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.stages import Stage, stages_by_rank
from ultrabench.sweep.predict.block_time import (
    BlockTimes,
    LayerWork,
    Rates,
    SecondsByBlock,
    block_counts,
    block_times,
    ring_s,
    tp_call_s,
    tp_hops_s,
)
from ultrabench.sweep.predict.data_parallel import (
    ParamGroup,
    dp_time_and_overlap,
    num_reduces_and_gathers,
    param_groups,
)
from ultrabench.sweep.predict.experts import busiest_share
from ultrabench.sweep.predict.network import Network
from ultrabench.sweep.predict.pipeline import idle_micro_batches
from ultrabench.sweep.predict.profile import DividedRun
from ultrabench.sweep.predict.recompute_modules import modules_of
from ultrabench.sweep.predict.time_constants import TimeConstants
from ultrabench.tensor_parallel import added_params, adds_params, kinds_of_ranks

NEARLY_FULL = 0.986
"""Share of a GPU's memory that an allocator can hold; an H100 reports 79.1 GiB, of which the context takes 1.1."""
FILLING_SHARE = 0.002
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
    def by_axis(self) -> dict[str, float]:
        """Axis -> its ratio, of the axes that communicate."""
        return {axis: ratio for axis, ratio in self._asdict().items() if ratio}


class _PipelineRank(NamedTuple):
    """What one rank of the axis pp computes; ranks that compute the same are one, with their `num_ranks`."""

    num_stages: int
    num_layers: int
    counts: tuple[int, ...]
    """Numbers of its blocks in the order of `block_counts`; there is one head on the rank of the last stage."""
    num_launches: float
    """Layers without experts that its host launches: one with a single block is half a layer,
    a forward that is repeated a third."""
    num_sparse_launches: float
    """Layers with experts that its host launches, counted as those without experts."""
    num_params: int
    """Number of parameters of these stages, before tp divides them, without experts and with what tp adds to them."""
    num_expert_params: int
    """Number of parameters of all experts of these stages."""
    num_ranks: int = 1

    def sum_s(self, block_s: SecondsByBlock) -> float:
        """The seconds of the blocks of this rank, from those of one block of each kind."""
        seconds: float = sum(map(mul, block_s, self.counts))
        return seconds


class _Pipeline(NamedTuple):
    """The ranks of the axis pp, and what the largest of them holds."""

    ranks: tuple[_PipelineRank, ...]
    num_layers: int
    """Largest number of layers of a rank."""
    num_params: int
    """Largest number of parameters of a rank but those of experts."""
    num_expert_params: int


@lru_cache(maxsize=4096)
def _pipeline(
    shape: ModelShape,
    tp: int,
    pp: int,
    pp_schedule: str,
    virtual_stages: int,
    pp_layout: str,
    recompute: str,
    ties_advance: bool,
) -> _Pipeline:
    layout = Layout(
        dp=1,
        pp=pp,
        pp_schedule=pp_schedule,
        virtual_stages=virtual_stages,
        pp_layout=pp_layout,
        recompute=recompute,
    )
    interval = 0 if recompute == "none" else layout.full_every or 1
    stages_of_rank = stages_by_rank(shape, layout, ties_advance=ties_advance)
    rank_by_stages, num_by_rank = dict[tuple[object, ...], _PipelineRank](), Counter[_PipelineRank]()
    for stages in stages_of_rank:  # most ranks of a long pipeline compute the same
        key = tuple([_decisive(shape, stage, interval) for stage in stages])
        if key not in rank_by_stages:
            rank_by_stages[key] = _pipeline_rank(shape, stages, interval, tp)
        num_by_rank[rank_by_stages[key]] += 1
    return _Pipeline(
        ranks=tuple(rank._replace(num_ranks=count) for rank, count in num_by_rank.items()),
        num_layers=max(rank.num_layers for rank in num_by_rank),
        num_params=max(rank.num_params for rank in num_by_rank),
        num_expert_params=max(rank.num_expert_params for rank in num_by_rank),
    )


def _decisive(shape: ModelShape, stage: Stage, interval: int) -> tuple[object, ...]:
    """What decides the work of a stage, of which each layer number `interval` is computed again; 0: none."""
    start, end = stage.first_layer, stage.first_layer + stage.num_layers
    first_again = start % interval if interval else 0
    return shape.kind_numbers[start:end], first_again, stage.has_embedding, stage.has_norm, stage.has_head


def _pipeline_rank(shape: ModelShape, stages: tuple[Stage, ...], interval: int, tp: int) -> _PipelineRank:
    """The work of a rank with these stages, of which each layer number `interval` is computed again; 0: none.

    A module that predicts one more token is a layer of the last one's type and one more head.
    """
    layers = [n for stage in stages for n in range(stage.first_layer, stage.first_layer + stage.num_layers)]
    num_heads = sum(stage.has_head for stage in stages)
    predict_modules = [shape.num_hidden_layers - 1] * (num_heads * shape.num_nextn_predict_layers)
    kind_numbers, numbers = range(len(shape.kinds)), shape.kind_numbers
    num_by_number = Counter(numbers[n] for n in (*layers, *predict_modules))
    num_again_by_number = Counter(numbers[n] for n in layers if interval and (n + 1) % interval == 0)
    counts, again_counts = ([num[k] for k in kind_numbers] for num in (num_by_number, num_again_by_number))
    launches = [num + again / 3 for num, again in zip(counts, again_counts, strict=True)]
    launches_by_kind = [
        (n * kind.num_blocks / 2, kind) for n, kind in zip(launches, shape.kinds, strict=True)
    ]
    num_expert_params = sum(stage.num_expert_params(shape) for stage in stages)
    tp_params = sum(_num_tp_params(shape, stage, tp) for stage in stages)
    return _PipelineRank(
        num_stages=len(stages),
        num_layers=len(layers),
        counts=block_counts(num_heads * (1 + shape.num_nextn_predict_layers), counts, again_counts),
        num_launches=sum(num for num, kind in launches_by_kind if not kind.experts),
        num_sparse_launches=sum(num for num, kind in launches_by_kind if kind.experts),
        num_params=tp_params - num_expert_params,
        num_expert_params=num_expert_params,
    )


@lru_cache(maxsize=4096)  # schedules and recomputation share it
def _num_tp_params(shape: ModelShape, stage: Stage, tp: int) -> int:
    """Number of parameters of a stage that all ranks of tp together hold."""
    return stage.num_params(shape) + added_params(shape, stage, tp)


class _GradSums(NamedTuple):
    """Seconds in which memory adds a micro-batch's gradient of one parameter to the sum of those before."""

    per_param: float
    per_expert_param: float

    def of_rank(self, rank: _PipelineRank, num_passes: float = 1.0) -> float:
        """The seconds of this number of micro-batches on a rank."""
        param_s = num_passes * self.per_param * rank.num_params
        return param_s + num_passes * self.per_expert_param * rank.num_expert_params


def _rank_times(
    ranks: tuple[_PipelineRank, ...], blocks: "_Blocks", host_s: float, c: TimeConstants
) -> tuple[_PipelineRank, float, float, float]:
    """The slowest rank, and seconds of a micro-batch: of its GPU at work, of the rank, and of all ranks together.

    Those of a rank contain what its GPU waits for the host, which needs `host_s` seconds for each layer.
    """
    slowest, slowest_gpu_s, slowest_s, all_ranks_s = ranks[0], 0.0, 0.0, 0.0
    for rank in ranks:
        gpu_s = rank.sum_s(blocks.times.total) + blocks.grad_s.of_rank(rank)
        rank_host_s = rank.num_launches * host_s + rank.num_stages * c.micro_batch_launch_s
        rank_host_s += rank.num_sparse_launches * (host_s + c.sparse_launch_s)
        rank_s = _smooth_max(gpu_s, rank_host_s, c.smooth_power)
        all_ranks_s += rank.num_ranks * rank_s
        if rank_s > slowest_s:
            slowest, slowest_gpu_s, slowest_s = rank, gpu_s, rank_s
    return slowest, slowest_gpu_s, slowest_s, all_ranks_s


class _Blocks(NamedTuple):
    """The times of the blocks of a micro-batch, which do not depend on the pipeline."""

    work: LayerWork
    times: BlockTimes
    grad_s: _GradSums
    layer_host_s: float
    """Seconds that the host needs for one layer, forward and backward."""
    copies_heads: bool
    """Whether tp copies key/value heads or pads the vocabulary."""


def _blocks(spec: RunSpec, hardware: Hardware, peak: Peak, links: Network, c: TimeConstants) -> _Blocks:
    """The times of the blocks of a run."""
    layout, shape, tp = spec.layout, spec.shape, spec.layout.tp
    work = LayerWork(
        shape,
        spec.workload.seq_len,
        layout.mbs * spec.workload.seq_len / layout.cp,
        tp,
        layout.sequence_parallel == "on",
        layout.cp,
        layout.cp_exchange,
        layout.recompute,
        spec.compiles,
        ELEMENT_BYTES[spec.kernel.precision],
        layout.ep,
        busiest_share(spec.kernel, layout, shape),
        layout.group_axes("tp", rank_order=spec.kernel.rank_order),
        layout.group_axes("cp", rank_order=spec.kernel.rank_order),
        modules_of(spec),
    )
    times = block_times(work, links, _gpu_rates(spec, hardware, peak.flops_per_s, c), c)
    hbm_bytes_per_s = hardware.hbm_bytes_per_s * c.hbm_efficiency
    grad_s = _GradSums(*(c.accumulate_bytes / degree / hbm_bytes_per_s for degree in (tp, layout.ep)))
    return _Blocks(work, times, grad_s, _layer_launch_s(spec, links, c), adds_params(shape, tp))


def _pipeline_of(spec: RunSpec, *, copies_heads: bool, ties_advance: bool) -> _Pipeline:
    """The work of the pipeline ranks of a run."""
    layout = spec.layout
    return _pipeline(
        spec.shape,
        layout.tp if copies_heads else 1,  # else layouts share an entry of the cache
        layout.pp,
        layout.pp_schedule,
        layout.virtual_stages,
        layout.pp_layout,
        layout.recompute,
        ties_advance,
    )


def _gpu_rates(spec: RunSpec, hardware: Hardware, peak_flops: float, c: TimeConstants) -> Rates:
    """What a GPU reaches that has `peak_flops` FLOPs per second; with scaled precisions such as fp8 only linear layers
    use it, the rest bf16.

    A power limit slows down the clock of all products, not the memory.
    """
    peak_flops *= hardware.clock_share
    linear_flops, cast_bytes = peak_flops * c.gemm_efficiency, 0.0
    if spec.kernel.precision in SCALED_PRECISIONS:
        linear_flops, cast_bytes = peak_flops * c.fp8_efficiency, c.fp8_cast_bytes
        cast_bytes *= c.compiled_traffic if spec.compiles else 1
        if bf16_flops := hardware.peak_flops_per_s.get("bf16"):  # CPUs have one rate
            peak_flops = bf16_flops * hardware.clock_share
    hbm_bytes_per_s = hardware.hbm_bytes_per_s * c.hbm_efficiency
    product_flops = peak_flops * c.gemm_efficiency
    expert_flops = c.expert_efficiency * (linear_flops if c.fp8_experts else product_flops)
    attention_flops = peak_flops * c.attention_efficiency
    return Rates(linear_flops, product_flops, expert_flops, attention_flops, hbm_bytes_per_s, cast_bytes)


class _MicroBatch(NamedTuple):
    """The times of one micro-batch, which runs share that divide the batch or shard the parameters differently."""

    blocks: _Blocks
    pipeline: _Pipeline
    slowest: _PipelineRank
    slowest_gpu_s: float
    """Seconds for which the GPU of that rank is at work."""
    slowest_s: float
    all_ranks_s: float
    parts_s: tuple[float, ...]
    """Seconds of the blocks of that rank by part, as in `PartSeconds`."""


class _DataParallelTime(NamedTuple):
    """What of a step depends on the parameters of a rank, and on which ranks share them."""

    total_s: float
    num_passes: float
    hidden_share: float
    """These three are what `dp_time_and_overlap` returns."""
    num_calls: int
    """Reductions and gatherings of each layer under ZeRO."""
    update_s: float
    """Seconds of clipping and of the update."""
    pp_crosses_nodes: bool
    """Whether a pipeline leaves an NVLink domain."""


_BLOCK_AXES = ("tp", "cp", "mbs", "recompute", "sequence_parallel", "cp_exchange", "ep")
"""The axes that decide the times of the blocks of a micro-batch. pp_schedule decides whether they are compiled."""
_OF_BLOCKS = attrgetter(*_BLOCK_AXES)
_OF_MICRO_BATCH = attrgetter(*_BLOCK_AXES, "pp", "pp_schedule", "virtual_stages", "pp_layout")
"""Those and the axes that, with recompute, decide what each pipeline rank does with them."""
_OF_DATA_PARALLEL = attrgetter("dp", "tp", "pp", "cp", "ep", "zero_stage", "dp_shard", "dp_overlap")
"""The axes that decide how data parallelism and the optimizer share the work; with ZeRO-2 and 3 gas does, too."""


class MicroBatchTimes:
    """Times micro-batches with one set of constants on GPUs and links that runs on several numbers of nodes share."""

    def __init__(self, hardware: Hardware, peak: Peak, links: Network, constants: TimeConstants) -> None:
        self.hardware, self.peak, self.links, self.constants = hardware, peak, links, constants
        self._blocks = dict[tuple[object, ...], _Blocks]()
        self._micro_batches = dict[tuple[object, ...], _MicroBatch]()

    def of(self, spec: DividedRun) -> _MicroBatch:
        """The times of one micro-batch of a run."""
        kernel, layout = spec.kernel, spec.layout
        # In the usual order of ranks, dp and pp do not decide where those of tp and cp are.
        order = () if kernel.rank_order == RANK_ORDER else (*kernel.rank_order, layout.dp, layout.pp)
        compiles = kernel.compiles(layout.pp_schedule)
        of_kernel = kernel.precision, compiles, kernel.routing, order, modules_of(spec)
        key = spec.shape, spec.workload.seq_len, *of_kernel, *_OF_MICRO_BATCH(layout)
        if (micro_batch := self._micro_batches.get(key)) is None:
            blocks_key = spec.shape, spec.workload.seq_len, *of_kernel, *_OF_BLOCKS(layout)
            if (blocks := self._blocks.get(blocks_key)) is None:
                blocks = _blocks(spec, self.hardware, self.peak, self.links, self.constants)
                self._blocks[blocks_key] = blocks
            micro_batch = self._micro_batches[key] = self._new(spec, blocks)
        return micro_batch

    def _new(self, spec: DividedRun, blocks: _Blocks) -> _MicroBatch:
        """What `of` returns."""
        c = self.constants
        pipeline = _pipeline_of(spec, copies_heads=blocks.copies_heads, ties_advance=c.ties_advance)
        rank_times = _rank_times(pipeline.ranks, blocks, blocks.layer_host_s, c)
        slowest, slowest_gpu_s, slowest_s, all_ranks_s = rank_times
        parts_s = tuple([slowest.sum_s(block_s) for block_s in blocks.times[:-1]])
        return _MicroBatch(blocks, pipeline, slowest, slowest_gpu_s, slowest_s, all_ranks_s, parts_s)


@lru_cache(maxsize=64)
def micro_batch_times(
    hardware: Hardware, peak: Peak, links: Network, constants: TimeConstants
) -> MicroBatchTimes:
    """What times micro-batches on these GPUs and links; all that ask for the same ones share it."""
    return MicroBatchTimes(hardware, peak, links, constants)


class StepTimes:
    """Predicts step times on one cluster with one set of constants.

    Runs share what depends on a part of their layout: most layouts of a plan differ from others in few axes.
    """

    def __init__(self, hardware: Hardware, peak: Peak, links: Network, constants: TimeConstants) -> None:
        self.links, self.constants = links, constants
        self.hbm_bytes_per_s = hardware.hbm_bytes_per_s * constants.hbm_efficiency
        self._micro_batches = micro_batch_times(hardware, peak, links.without_all_ranks, constants)
        self._data_parallel_times = dict[tuple[object, ...], _DataParallelTime]()
        self._copied_heads_by_shards = dict[tuple[ModelShape, int, int, GroupAxes], list[float]]()

    def of(self, spec: DividedRun, memory_share: float = 0.0) -> StepTime:
        """The predicted time of one optimizer step of a run, by part.

        Args:
            memory_share: predicted peak with the reserve of the allocator, divided by the memory of a GPU.
        """
        layout, c, gas, zero_stage = spec.layout, self.constants, spec.layout.gas, spec.layout.zero_stage
        micro_batch = self._micro_batches.of(spec)
        slowest_s, all_ranks_s = micro_batch.slowest_s, micro_batch.all_ranks_s
        mean_rank_s = all_ranks_s / layout.pp  # a rank's share if none waited
        num_busy_passes = gas * (1 - c.wait_shared * (1 - mean_rank_s / slowest_s))
        # `num_busy_passes` passes of the slowest rank last as long as its GPU is busy; the others wait `waits_s` on
        # average, and pipeline ranks exchange meanwhile.
        blocks, pipeline = micro_batch.blocks, micro_batch.pipeline
        dp = self._data_parallel(spec, micro_batch)
        exchange_s = _exchange_s(layout, blocks.work, dp.pp_crosses_nodes, self.links, c)
        exchanges_s = (gas + layout.pp - 1) * exchange_s
        waits_s = num_busy_passes * slowest_s - gas * mean_rank_s
        gemm_s, attention_s, memory_bound_s, tp_s, cp_s, ep_s = micro_batch.parts_s
        dp_s = max(dp.total_s - dp.hidden_share * dp.num_passes * slowest_s, c.dp_exposed * dp.total_s)
        zero_host_s = c.zero_layer_s * pipeline.num_layers * dp.num_calls / 2
        if c.zero_rank_s:  # nothing hides the broadcasts, which follow the optimizer
            zero_host_s += c.zero_rank_s * layout.zero_shards
        pipeline_idle_s = (1 - c.wait_shared) * (all_ranks_s - slowest_s) * idle_micro_batches(layout)
        copied_s = 0.0
        if blocks.copies_heads:
            copied_s = self._copied_heads_s(spec, pipeline.ranks, blocks.work.tp_axes)
        parts_s = (
            num_busy_passes * gemm_s,
            num_busy_passes * attention_s,
            num_busy_passes * memory_bound_s + blocks.grad_s.of_rank(micro_batch.slowest, num_busy_passes),
            num_busy_passes * (slowest_s - micro_batch.slowest_gpu_s),
            num_busy_passes * tp_s + copied_s,
            num_busy_passes * cp_s,
            num_busy_passes * ep_s,
            dp_s + (zero_host_s if zero_stage else 0.0),
            max(0.0, exchanges_s - waits_s),
            pipeline_idle_s / max(1, layout.pp - 1),
            dp.update_s + c.optimizer_layer_s * pipeline.num_layers,
        )
        allocator_s = 0.0
        if memory_share > NEARLY_FULL:
            lost_share = -math.expm1((NEARLY_FULL - memory_share) / FILLING_SHARE) * c.allocator_loss
            allocator_s = lost_share * sum((*parts_s, 0.0, c.rest_s))
        return StepTime(*parts_s, allocator_s, c.rest_s)

    def _copied_heads_s(self, spec: RunSpec, ranks: tuple[_PipelineRank, ...], tp_axes: GroupAxes) -> float:
        """Seconds in which gradients of copied key/value heads are summed, once a step and beside nothing else."""
        key = spec.shape, spec.layout.tp, spec.layout.zero_shards, tp_axes
        if (layer_s := self._copied_heads_by_shards.get(key)) is None:
            layer_s = _copied_heads_of_layers_s(*key, self.links, self.constants)
            self._copied_heads_by_shards[key] = layer_s
        longest_s: float = max([sum(map(mul, layer_s, _of_kinds(rank.counts))) for rank in ranks])
        return longest_s

    def _data_parallel(self, spec: DividedRun, micro_batch: _MicroBatch) -> _DataParallelTime:
        """The times of data parallelism and of the optimizer of a run."""
        layout, order, element_bytes = (
            spec.layout,
            spec.kernel.rank_order,
            micro_batch.blocks.work.element_bytes,
        )
        gas = layout.gas if layout.zero_stage >= 2 else 1
        pipeline = micro_batch.pipeline
        params = pipeline.num_params, pipeline.num_expert_params
        key = params, element_bytes, order, gas, _OF_DATA_PARALLEL(layout)
        if (times := self._data_parallel_times.get(key)) is None:
            groups = _param_groups(pipeline, spec)
            times = self._data_parallel_times[key] = _DataParallelTime(
                *dp_time_and_overlap(layout, groups, element_bytes, self.links, self.constants),
                sum(num_reduces_and_gathers(layout)),
                self._update_s(groups),
                _pp_crosses_nodes(spec, self.links),
            )
        return times

    def _update_s(self, groups: tuple[ParamGroup, ...]) -> float:
        """Seconds of clipping and of the update of these parameters."""
        c = self.constants
        update_bytes = [(c.optimizer_bytes / g.num_shards + c.clip_bytes) * g.num_params for g in groups]
        return sum(num_bytes / self.hbm_bytes_per_s for num_bytes in update_bytes)


@lru_cache(maxsize=64)
def step_times(hardware: Hardware, peak: Peak, links: Network, constants: TimeConstants) -> StepTimes:
    """What predicts step times on a cluster; all that ask for the same cluster and constants share one."""
    return StepTimes(hardware, peak, links, constants)


def predict_step_time(
    spec: DividedRun,
    hardware: Hardware,
    peak: Peak,
    links: Network,
    constants: TimeConstants,
    memory_share: float = 0.0,
) -> StepTime:
    """The predicted time of one optimizer step of a single run, by part, as `StepTimes` predicts those of many."""
    return step_times(hardware, peak, links, constants).of(spec, memory_share)


def _param_groups(pipeline: _Pipeline, spec: RunSpec) -> tuple[ParamGroup, ...]:
    """The groups of parameters of the rank that holds most of each."""
    num_params = pipeline.num_params / spec.layout.tp
    num_expert_params = pipeline.num_expert_params / spec.layout.ep
    return param_groups(spec.layout, num_params, num_expert_params, spec.kernel.rank_order)


def _copied_heads_of_layers_s(
    shape: ModelShape, tp: int, shards: int, tp_axes: GroupAxes, links: Network, c: TimeConstants
) -> list[float]:
    """Seconds in which our kernel sums the gradients of the copied key/value heads of a layer of each type.

    They are an all-reduce for the keys and one for the values, each as long as two other collectives.
    """
    ((_, stride),) = tp_axes
    layer_s = list[float]()
    for kind, rank_kind in zip(shape.kinds, kinds_of_ranks(shape, tp), strict=True):
        attention, copied = kind.grouped_query, rank_kind.grouped_query
        if attention is None or copied is None or attention == copied:
            layer_s.append(0.0)
            continue
        num_copies = copied.num_key_value_heads // attention.num_key_value_heads
        rank_params = copied.kv_width / tp * (shape.hidden_size + copied.attention_bias)
        layer_s.append(4 * tp_call_s(4 * rank_params / shards, ((num_copies, stride),), links, c))
    return layer_s


def communication_ratios(
    spec: DividedRun, hardware: Hardware, peak: Peak, links: Network, constants: TimeConstants
) -> CommunicationRatios:
    """The ratios of communication to computing of a run, hidden or not."""
    blocks = _blocks(spec, hardware, peak, links, constants)
    pipeline = _pipeline_of(spec, copies_heads=blocks.copies_heads, ties_advance=constants.ties_advance)
    work, times = blocks.work, blocks.times
    slowest = _rank_times(pipeline.ranks, blocks, 0.0, constants)[0]
    gemm_s, attention_s, memory_s, tp_s, _, ep_s = (slowest.sum_s(part_s) for part_s in times[:-1])
    compute_s = gemm_s + attention_s + memory_s + blocks.grad_s.of_rank(slowest)
    groups = _param_groups(pipeline, spec)
    dp_s, num_passes, _ = dp_time_and_overlap(spec.layout, groups, work.element_bytes, links, constants)
    core_s, largest = max((seconds, n) for n, seconds in enumerate(_of_kinds(times.attention)))
    largest_attention = kinds_of_ranks(spec.shape, work.tp)[largest].attention
    cp_s = (
        sum(ring_s(work, largest_attention, links, constants)) if work.cp > 1 and largest_attention else 0.0
    )
    return CommunicationRatios(
        dp=dp_s / (num_passes * compute_s),
        tp=tp_s / gemm_s,
        pp=_exchange_s(spec.layout, work, _pp_crosses_nodes(spec, links), links, constants) / compute_s,
        cp=cp_s / core_s if core_s else 0.0,
        ep=ep_s / gemm_s,
    )


def _of_kinds(values: tuple[float, ...]) -> list[float]:
    """The values of the layers of each type among those of all blocks, which are in the order of `block_counts`."""
    first, _, _, *others = values
    return [first, *others[::2]]


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
    if spec.kernel.precision in SCALED_PRECISIONS and not spec.compiles:
        usual_s += c.fp8_launch_s
    if not links.slow:
        return usual_s
    tp_axes = spec.layout.group_axes("tp", rank_order=spec.kernel.rank_order)
    hops_s = c.tp_calls * tp_hops_s(tp_axes, links, c)
    return max(usual_s, c.slow_layer_launch_s + tp * c.slow_layer_launch_tp_s + hops_s)


def _pp_crosses_nodes(spec: RunSpec, links: Network) -> bool:
    """Whether a pipeline leaves an NVLink domain."""
    return crosses_nodes(spec.layout.group_axes("pp", rank_order=spec.kernel.rank_order), links.nvlink_gpus)


def _exchange_s(
    layout: Layout, work: LayerWork, pp_crosses_nodes: bool, links: Network, c: TimeConstants
) -> float:
    """Seconds in which pipeline ranks exchange the activations and gradients of one micro-batch."""
    if layout.pp == 1:
        return 0.0
    num_bytes = work.tokens * work.shape.hidden_size * work.element_bytes / work.tp
    if not pp_crosses_nodes:
        bytes_per_s, call_s = links.link_bytes_per_s * c.pp_link_efficiency, c.pp_call_s
    else:
        bytes_per_s = links.node_link_bytes_per_s * c.pp_node_link_efficiency
        call_s = c.pp_call_s + (c.pp_slow_call_s if links.slow else 0.0)
    return layout.virtual_stages * (call_s + 2 * num_bytes / bytes_per_s)
