"""The time of one optimizer step in closed form, by part; docs/prediction.md derives each term.

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
from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.stages import stages_by_rank
from ultrabench.sweep.predict.data_parallel import data_parallel, reduces_and_gathers
from ultrabench.sweep.predict.network import Network
from ultrabench.sweep.predict.pipeline import waiting
from ultrabench.sweep.predict.time_constants import TimeConstants

BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}
"""Precision -> bytes of one number."""
NARROW_HEAD = 128
"""Width of a head from which attention reaches its full rate."""
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

    @property
    def of_axes(self) -> dict[str, float]:
        """Axis -> its ratio, of the axes that communicate."""
        return {axis: ratio for axis, ratio in self._asdict().items() if ratio}


class _PipelineRank(NamedTuple):
    """What one rank of the axis pp computes; ranks that compute the same are one, with their `num_ranks`."""

    stages: int
    layers: int
    again: int
    """Number of layers of which backward computes something again."""
    heads: int
    params: int
    """Number of parameters of these stages, before tp divides them."""
    num_ranks: int = 1


@lru_cache(maxsize=4096)
def _pipeline_ranks(
    shape: ModelShape, pp: int, pp_schedule: str, virtual_stages: int, recompute: str, ties_advance: bool
) -> tuple[_PipelineRank, ...]:
    layout = Layout(dp=1, pp=pp, pp_schedule=pp_schedule, virtual_stages=virtual_stages, recompute=recompute)
    interval = 0 if recompute == "none" else layout.full_every or 1
    ranks = Counter(
        _PipelineRank(
            stages=len(stages),
            layers=sum(stage.num_layers for stage in stages),
            again=sum(stage.num_recomputed(interval) for stage in stages),
            heads=sum(stage.has_head for stage in stages),
            params=sum(stage.num_params(shape) for stage in stages),
        )
        for stages in stages_by_rank(shape, layout, ties_advance=ties_advance)
    )
    return tuple(rank._replace(num_ranks=count) for rank, count in ranks.items())


class _Work(NamedTuple):
    """What decides the time of a layer for one micro-batch, beside hardware and framework."""

    shape: ModelShape
    seq_len: int
    tokens: float
    """Tokens of a micro-batch on one rank, before tp divides them."""
    tp: int
    sequence_parallel: bool
    cp: int
    cp_exchange: str
    recompute: str
    compiled: bool
    word: int
    """Bytes of one number."""


class _Parts(NamedTuple):
    """Seconds of one layer or of the head, for one micro-batch."""

    gemm: float
    attention: float
    memory_bound: float
    tp: float
    cp: float


_Block = tuple[_Parts, _Parts, _Parts]
"""The times of a layer, what recomputation adds to them, and the times of the head."""


@lru_cache(maxsize=65536)
def _block(work: _Work, links: Network, peak: float, stream: float, c: TimeConstants) -> _Block:
    """The times of the blocks that `work` describes; `stream` is the rate of the memory that kernels reach."""
    shape, tokens, tp, h = work.shape, work.tokens, work.tp, work.shape.hidden_size
    q, kv, f, logits = shape.q_width, shape.kv_width, shape.intermediate_size, shape.vocab_size / tp
    qkv = _gemm_s(tokens, (q + 2 * kv) / tp, h, peak, c)
    up, down = _gemm_s(tokens, 2 * f / tp, h, peak, c), _gemm_s(tokens, h, f / tp, peak, c)
    forward = qkv + _gemm_s(tokens, h, q / tp, peak, c) + up + down
    attention = _attention_s(work, peak, c)
    head_norms = c.head_norm_bytes * (q + kv) * shape.qk_norm
    own = tokens / tp if work.sequence_parallel else tokens  # tokens of the residual stream and of norms
    traffic = (own * c.hidden_bytes * h + tokens / tp * (c.ffn_bytes * f + head_norms)) / stream
    traffic *= c.compiled_traffic if work.compiled else 1
    call = _tp_call_s(tokens * h * work.word, tp, links, c)
    kept_down = down if tp == 1 else 0.0
    gemm_again = attention_again = tp_again = 0.0
    if work.recompute == "attention":
        attention_again = attention
    elif work.recompute == "selective":
        gemm_again = forward - kept_down - qkv * (q + kv) / (q + 2 * kv) - up / 2
        attention_again, tp_again = attention * (1 - 1 / work.cp), call * c.tp_recompute_calls / 2
    elif work.recompute != "none":
        gemm_again, attention_again, tp_again = forward - kept_down, attention, call * c.tp_recompute_calls
    moved_again = traffic * (c.recompute_traffic - 1) * (gemm_again > 0)
    return (
        _Parts(3 * forward, 3.5 * attention, traffic, call * c.tp_calls, _ring_s(work, 3.5 * attention, links, c)),
        _Parts(gemm_again, attention_again, moved_again, tp_again, 0.0),
        _Parts(3 * _gemm_s(tokens, logits, h, peak, c), 0.0, c.logit_bytes * tokens * logits / stream, call * c.tp_end_calls, 0.0),
    )  # fmt: skip


def _gemm_s(m: float, n: float, k: float, peak: float, c: TimeConstants) -> float:
    """Seconds of a product of M x K and K x N: 2MNK / (peak * e * M/(M+m0) * N/(N+n0) * K/(K+k0))."""
    return 2 * (m + c.gemm_m0) * (n + c.gemm_n0) * (k + c.gemm_k0) / (peak * c.gemm_efficiency)


def _attention_s(work: _Work, peak: float, c: TimeConstants) -> float:
    """Seconds of the forward of attention in one layer: 4 FLOPs for each pair of tokens and query channel.

    A token attends to s/2 tokens on average, and to w (1 - w/(2s)) within a window of w tokens.
    """
    shape = work.shape
    window = min(work.seq_len, shape.sliding_window or work.seq_len)
    pairs = window * (1 - window / (2 * work.seq_len)) * work.tokens
    narrow = math.pow(min(1.0, shape.head_width / NARROW_HEAD), c.attention_width_power)
    return 4 * shape.q_width / work.tp * pairs / (peak * c.attention_efficiency * narrow)


def _tp_call_s(size: float, tp: int, links: Network, c: TimeConstants) -> float:
    """Seconds of an all-gather or reduce-scatter of `size` bytes over tp ranks."""
    if tp == 1:
        return 0.0
    moved = (tp - 1) / tp * size
    if tp <= links.gpus_per_node:
        return c.tp_call_s + moved / (links.link_bytes_per_s * c.tp_link_efficiency)
    node = links.node_link_bytes_per_s * links.gpus_per_node * c.tp_node_link_efficiency
    return _tp_hops_s(tp, links, c) + moved / node


def _tp_hops_s(tp: int, links: Network, c: TimeConstants) -> float:
    """Seconds of a collective over tp ranks on several nodes beside its transfer; 0 inside a node."""
    return (tp - 1) * (c.tp_hop_s + c.tp_probe_hops * links.hop_s) if tp > links.gpus_per_node else 0.0


def _ring_s(work: _Work, attention: float, links: Network, c: TimeConstants) -> float:
    """Seconds for which a ring of cp ranks waits for keys and values in one layer.

    Keys and values travel cp - 1 times in forward and as often in backward, and their gradients cp times, while
    each rank computes attention with the part that it has. What is gathered instead arrives before attention, and its
    gradients are summed after it.
    """
    if work.cp == 1:
        return 0.0
    calls_s, moves_s = _ring_parts_s(work, links, c)
    hidden_s = attention * (1 - 1 / work.cp) if work.cp_exchange == "ring" else 0.0
    return calls_s + max(0.0, moves_s - hidden_s)


def _ring_parts_s(work: _Work, links: Network, c: TimeConstants) -> tuple[float, float]:
    """Seconds of the calls of a ring in one layer, and those in which its keys, values and gradients travel."""
    inside = work.cp * work.tp <= links.gpus_per_node
    rate = links.link_bytes_per_s if inside else links.node_link_bytes_per_s
    size, calls = 2 * work.shape.kv_width / work.tp * work.tokens * work.word, 3.0 * work.cp - 2
    moves = calls
    if work.cp_exchange == "allgather":  # in forward and in backward; gradients are summed in 4 bytes
        calls, moves = 3.0, (work.cp - 1) * (2 + 4 / work.word)
    return calls * c.tp_call_s, moves * size / (rate * c.tp_link_efficiency)


def _passes(
    ranks: tuple[_PipelineRank, ...], block: _Block, move_s: float, host_s: float, c: TimeConstants
) -> tuple[_PipelineRank, float, float, float]:
    """The slowest rank, and seconds of a micro-batch: of its GPU at work, of the rank, and of all ranks together.

    Those of a rank contain what its GPU waits for the host. `move_s` are the seconds of each parameter, `host_s` those
    of each layer on the host.
    """
    layer_s, again_s, head_s = map(sum, block)
    slowest, gpu_s, slowest_s, all_s = ranks[0], 0.0, 0.0, 0.0
    for rank in ranks:
        gpu = layer_s * rank.layers + again_s * rank.again + head_s * rank.heads + move_s * rank.params
        # A forward that is repeated is launched again; it is a third of forward and backward.
        host = (rank.layers + rank.again / 3) * host_s + rank.stages * c.micro_batch_launch_s
        pass_s = _smooth_max(gpu, host, c.smooth_power)
        all_s += rank.num_ranks * pass_s
        if pass_s > slowest_s:
            slowest, gpu_s, slowest_s = rank, gpu, pass_s
    return slowest, gpu_s, slowest_s, all_s


def _micro_batch(
    spec: RunSpec, hardware: Hardware, peak: Peak, network: Network, c: TimeConstants
) -> tuple[_Work, _Block, tuple[_PipelineRank, ...], float]:
    """What a layer works on, the times of its blocks, what each pipeline rank holds, and seconds of each parameter."""
    layout, stream = spec.layout, hardware.hbm_bytes_per_s * c.hbm_efficiency
    shape, tp, recompute = spec.shape, layout.tp, layout.recompute
    word_bytes, tokens = BYTES[spec.kernel.precision], layout.mbs * spec.workload.seq_len / layout.cp
    work = _Work(
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
    )
    block = _block(work, network, peak.flops_per_s, stream, c)
    ranks = _pipeline_ranks(
        shape, layout.pp, layout.pp_schedule, layout.virtual_stages, recompute, c.ties_advance
    )
    return work, block, ranks, c.accumulate_bytes / tp / stream


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
    work, block, ranks, move_s = _micro_batch(spec, hardware, peak, network, c)
    stream = hardware.hbm_bytes_per_s * c.hbm_efficiency
    slowest, gpu_s, pass_s, all_s = _passes(ranks, block, move_s, _layer_launch_s(spec, network, c), c)
    even = all_s / layout.pp  # a rank's share if none waited
    busy = gas * (1 - c.wait_shared * (1 - even / pass_s))
    # Ranks exchange while they wait for the slowest one, on average for `waits_s`.
    exchanges_s = (gas + layout.pp - 1) * _exchange_s(spec, work, network, c)
    waits_s = busy * pass_s - gas * even
    gemm, attention, memory_bound, tp_s, cp_s = (
        busy * (a * slowest.layers + b * slowest.again + d * slowest.heads)
        for a, b, d in zip(*block, strict=True)
    )
    params = max(rank.params for rank in ranks) / layout.tp
    layers = max(rank.layers for rank in ranks)
    dp_total_s, passes, overlap = data_parallel(spec, params, work.word, network, c)
    dp_s = max(dp_total_s - overlap * passes * pass_s, c.dp_exposed * dp_total_s)
    zero_s = c.zero_layer_s * layers * sum(reduces_and_gathers(layout)) / 2 if layout.zero_stage else 0.0
    update_s = (c.optimizer_bytes / layout.zero_shards + c.clip_bytes) * params / stream
    times = StepTime(
        gemm=gemm,
        attention=attention,
        memory_bound=memory_bound + busy * move_s * slowest.params,
        launch=busy * (pass_s - gpu_s),
        tp=tp_s,
        cp=cp_s,
        dp=dp_s + zero_s,
        pp=max(0.0, exchanges_s - waits_s),
        bubble=(1 - c.wait_shared) * (all_s - pass_s) * waiting(layout) / max(1, layout.pp - 1),
        optimizer=update_s + c.optimizer_layer_s * layers,
        allocator=0.0,
        rest=c.rest_s,
    )
    excess = max(0.0, memory_share - NEARLY_FULL)
    return times._replace(allocator=-math.expm1(-excess / FILLING) * c.allocator_loss * times.total)


def communication_ratios(
    spec: RunSpec, hardware: Hardware, peak: Peak, network: Network, constants: TimeConstants
) -> CommunicationRatios:
    """The ratios of communication to computing of a run, hidden or not."""
    work, block, ranks, move_s = _micro_batch(spec, hardware, peak, network, constants)
    slowest = _passes(ranks, block, move_s, 0.0, constants)[0]
    gemm, attention, memory_bound, tp_s, _ = (
        a * slowest.layers + b * slowest.again + d * slowest.heads for a, b, d in zip(*block, strict=True)
    )
    compute_s = gemm + attention + memory_bound + move_s * slowest.params
    params = max(rank.params for rank in ranks) / work.tp
    dp_s, passes, _ = data_parallel(spec, params, work.word, network, constants)
    ring_s = sum(_ring_parts_s(work, network, constants)) if work.cp > 1 else 0.0
    return CommunicationRatios(
        dp=dp_s / (passes * compute_s),
        tp=tp_s / gemm,
        pp=_exchange_s(spec, work, network, constants) / compute_s,
        cp=ring_s / block[0].attention,
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
    if not links.slow:
        return usual_s
    hops = c.tp_calls * _tp_hops_s(tp, links, c)
    return max(usual_s, c.slow_layer_launch_s + tp * c.slow_layer_launch_tp_s + hops)


def _exchange_s(spec: RunSpec, work: _Work, links: Network, c: TimeConstants) -> float:
    """Seconds in which pipeline ranks exchange the activations and gradients of one micro-batch."""
    layout, size = spec.layout, work.tokens * spec.shape.hidden_size * work.word / work.tp
    if layout.pp == 1:
        return 0.0
    if layout.world_size <= links.gpus_per_node:
        rate, call = links.link_bytes_per_s * c.pp_link_efficiency, c.pp_call_s
    else:
        rate = links.node_link_bytes_per_s * c.pp_node_link_efficiency
        call = c.pp_call_s + (c.pp_slow_call_s if links.slow else 0.0)
    return layout.virtual_stages * (call + 2 * size / rate)
