"""A first estimate of a layout's memory and step time, in closed form and without calibration.

The estimate orders runs, sizes allocations and scales deadlines; it never rejects a layout.
"""

from dataclasses import dataclass

from ultrabench.device_rates import OPERATIONS, ProbeSettings, crossing_share, long_probe
from ultrabench.hardware import Hardware, Peak
from ultrabench.layout import Layout
from ultrabench.measure import Measure
from ultrabench.run import RunSpec
from ultrabench.stages import Stage, stages_by_rank

BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}
"""Precision -> bytes of one number."""
SUSTAINED_GEMM = 0.5
"""Fraction of the peak that the matrix products of a whole step reach."""
LINK_EFFICIENCY = 0.7
"""Fraction of a link's bandwidth that collectives reach."""
LAYER_FLOOR_S = 0.002
"""Seconds that Python needs to launch one layer's forward and backward; tensor parallelism doubles them."""
RANK_START_S = {"cuda": 20.0, "cpu": 0.6}
"""Device type -> seconds from the start of a run to its first step; on CPUs, for each rank of the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted memory and time of one run."""

    step_time_s: float
    peak_mem_bytes: int
    """Memory of the rank that needs most."""
    memory_share: float
    """peak_mem_bytes divided by the memory that a rank has."""
    duration_s: float
    """Seconds of a whole run. A run that does not fit into memory has only the seconds of its start."""


def predict(spec: RunSpec, hardware: Hardware, peak: Peak, measure: Measure) -> Prediction:
    """The predicted memory and time of a run that is measured as `measure` says."""
    begin_s = start_s(hardware, spec.nodes)
    if spec.kernel.kind == "probe":
        settings = long_probe(hardware.device, 0, 1)
        begin_s += 2 * settings.device_s
        memory, time_s = 3.0 * max(settings.sizes_bytes), probe_step_time_s(spec, hardware, settings)
    else:
        ranks, layer = stages_by_rank(spec.shape, spec.layout), activation_bytes(spec)
        memory = max(
            sum(static_bytes(stage, spec) + held_bytes(stage, rank, spec.layout, layer) for stage in stages)
            for rank, stages in enumerate(ranks)
        )
        time_s = step_time_s(ranks, spec, hardware, peak)
    return Prediction(
        step_time_s=time_s,
        peak_mem_bytes=int(memory),
        memory_share=memory / hardware.mem_bytes,
        duration_s=begin_s + measure.priced_s(time_s) * (memory <= hardware.mem_bytes),
    )


def start_s(hardware: Hardware, nodes: int) -> float:
    """Seconds from the start of a run to its first step; on CPUs they grow with the ranks of a host."""
    ranks_on_host = hardware.gpus_per_node * (nodes if hardware.simulated else 1)
    return RANK_START_S[hardware.device] * (ranks_on_host if hardware.device == "cpu" else 1)


def static_bytes(stage: Stage, spec: RunSpec) -> float:
    """Parameters, gradients and optimizer state of one rank of `stage`, in bytes.

    n = parameters of the stage / tp. Master weights and Adam's two moments (12 n in fp32) are
    sharded from ZeRO-1 on, gradients (4 n) from ZeRO-2 on; the working copy (2 n in bf16, 4 n in
    fp32) stays whole below ZeRO-3, which holds two gathered layers at a time.
    """
    layout, shape, word = spec.layout, spec.shape, BYTES[spec.kernel.precision]
    master = max(word, 4)
    n = stage.num_params(shape) / layout.tp
    shards = layout.zero_shards
    state, grads, working = 3 * master * n, master * n, word * n
    if layout.zero_stage >= 1:
        state /= shards
    if layout.zero_stage >= 2:
        grads /= shards
    if layout.zero_stage == 3:
        unit = max(shape.layer_params, shape.embedding_params if stage.has_embedding else 0)
        working = min(working, 2 * word * unit / layout.tp)
    return state + grads + working


def in_flight(layout: Layout, pp_rank: int) -> float:
    """Largest number of micro-batches whose activations a rank keeps at once, for each of its stages.

    It is min(gas, pp - rank) under 1F1B, gas under AFAB and min(gas, pp) under ZBV. With v stages on a rank,
    the 2*(pp - rank - 1) + (v-1)*pp + 1 forwards of its warm-up (arXiv 2104.04473) are divided by v.
    """
    if layout.pp == 1:
        return 1
    most: float = layout.pp - pp_rank
    if layout.pp_schedule == "afab":
        most = layout.gas
    elif layout.pp_schedule == "zbv":
        most = layout.pp
    elif layout.virtual_stages > 1:
        warm_up = 2 * (layout.pp - pp_rank - 1) + (layout.virtual_stages - 1) * layout.pp + 1
        most = warm_up / layout.virtual_stages
    return min(layout.gas, most)


def activation_bytes(spec: RunSpec) -> tuple[float, float]:
    """Bytes of activations that a rank keeps of one layer and micro-batch: without and with recomputation.

    T = mbs*seq_len/cp tokens. With flash attention, sequence parallelism and two bytes for each number, a
    layer keeps 4*h for the inputs and outputs of its norms, q, k, v and the output of attention, q and k once
    more where they are normalised, and 4*f, for each of T/tp tokens. The logits are left out, because only one
    chunk of them exists at a time (see `kernel/loss.py`).

    A layer that is recomputed in full keeps its input, h. A selective one keeps its input, the products q, v and
    gate, the output of attention, and with tp > 1 both sums over tp. Core attention alone saves next to nothing.
    Backward holds everything of the one layer that it computes again.
    """
    layout, shape = spec.layout, spec.shape
    h, f = shape.hidden_size, shape.intermediate_size
    scale = BYTES[spec.kernel.precision] / 2
    tokens = layout.mbs * spec.workload.seq_len / layout.cp
    qkv = shape.q_width + 2 * shape.kv_width
    normed = (shape.q_width + shape.kv_width) * shape.qk_norm
    whole = 4 * h + qkv + normed + shape.q_width + 4 * f
    selected = (3 if layout.tp > 1 else 1) * h + 2 * shape.q_width + shape.kv_width + f
    kept = h if layout.full_every else {"selective": selected}.get(layout.recompute, whole)
    number = scale * 2 * tokens / layout.tp
    return number * whole, number * kept


def held_bytes(stage: Stage, pp_rank: int, layout: Layout, layer: tuple[float, float]) -> float:
    """Bytes of activations that one rank of `stage` keeps for backward, `layer` being its `activation_bytes`."""
    whole, kept = layer
    again = recomputed_layers(stage, layout)
    held = in_flight(layout, pp_rank) * (stage.num_layers * whole - again * (whole - kept))
    return held + (whole - kept) / layout.virtual_stages * (again > 0)


def recomputed_layers(stage: Stage, layout: Layout) -> int:
    """Number of layers of `stage` of which backward computes something again."""
    if layout.recompute == "none":
        return 0
    every, last = layout.full_every or 1, stage.first_layer + stage.num_layers
    return last // every - stage.first_layer // every


def recomputed_work(spec: RunSpec) -> tuple[float, int]:
    """What backward computes again in one layer: FLOPs for each token, and collectives over tp.

    full: a forward of the layer, of which the last product is left out at tp=1, since nothing needs its result.
    selective: the products with k, out and up, with tp > 1 also down, and in a ring all parts of attention but one.
    """
    layout, shape = spec.layout, spec.shape
    attention = shape.attention_flops(spec.workload.seq_len) / 3
    down = shape.hidden_size * shape.intermediate_size
    products = shape.hidden_size * (shape.kv_width + shape.q_width) + down * (2 if layout.tp > 1 else 1)
    if layout.full_every:
        return 2 * (shape.layer_matmul_params - (0 if layout.tp > 1 else down)) + attention, 4
    work = {"selective": (2 * products + attention * (1 - 1 / layout.cp), 2), "attention": (attention, 0)}
    return work.get(layout.recompute, (0.0, 0))


def step_time_s(ranks: list[tuple[Stage, ...]], spec: RunSpec, hardware: Hardware, peak: Peak) -> float:
    """Seconds of one optimizer step.

    t = gas*max_i(t_i) + (sum_i(t_i) - max_i(t_i)) / v + t_dp + t_optimizer, with t_i the time of one
    micro-batch on pipeline rank i. The slowest rank sets the pace. The second term is the bubble of
    filling and draining the pipeline, which is v times smaller with v stages on a rank. t_dp gathers parameters
    and reduces gradients among s shards, and all-reduces 4 n / s bytes among r replicas.
    """
    layout, shape, word = spec.layout, spec.shape, BYTES[spec.kernel.precision]
    tokens = layout.mbs * spec.workload.seq_len / layout.cp
    attention = shape.attention_flops(spec.workload.seq_len)
    tp_inside = layout.tp <= hardware.gpus_per_node
    tp_link = (hardware.link_bytes_per_s if tp_inside else hardware.node_link_bytes_per_s) * LINK_EFFICIENCY
    # Sequence parallelism: 4 all-gathers and 4 reduce-scatters per layer are waited for. The 2 that gather
    # tokens again in backward run beside products.
    tp_call_s = (layout.tp - 1) / layout.tp * tokens * shape.hidden_size * word / tp_link
    floor = LAYER_FLOOR_S * (2 if layout.tp > 1 else 1)
    flops_again, calls_again = recomputed_work(spec)
    per_rank = []
    for stages in ranks:
        layers = sum(stage.num_layers for stage in stages)
        matmul = sum(stage.matmul_params(shape) for stage in stages)
        again = sum(recomputed_layers(stage, layout) for stage in stages)
        flops = tokens * (6 * matmul + layers * attention + again * flops_again) / layout.tp
        compute = flops / (SUSTAINED_GEMM * peak.flops_per_s) + (8 * layers + calls_again * again) * tp_call_s
        per_rank.append(max(compute, (layers + len(stages)) * floor))
    slowest = max(per_rank)
    bubble = (sum(per_rank) - slowest) / layout.virtual_stages
    params = max(sum(stage.num_params(shape) for stage in stages) for stages in ranks) / layout.tp
    shards = layout.zero_shards
    replicas = max(1, layout.dp * layout.cp // shards)  # a layout that a rule rejects may have none
    gathers = layout.gas if layout.zero_stage == 3 else 1
    sharded = 2 * (shards - 1) / shards * params * (4 + word * (gathers - 1))
    replicated = 2 * (replicas - 1) / replicas * params / shards * 4
    inside, outside = hardware.link_bytes_per_s, hardware.node_link_bytes_per_s
    dp_link = inside if spec.nodes == 1 else outside
    in_node = shards * layout.tp <= hardware.gpus_per_node and layout.dp_shard
    dp_s = sharded / (inside if in_node else dp_link) + replicated / dp_link
    optimizer = 30 * params / shards / hardware.hbm_bytes_per_s
    return layout.gas * slowest + bubble + dp_s / LINK_EFFICIENCY + optimizer


def probe_step_time_s(spec: RunSpec, hardware: Hardware, settings: ProbeSettings) -> float:
    """Seconds of one step of a probe.

    A step runs every operation in every size, over all ranks and inside the nodes. It takes
    t = calls * sum(S * f) / link, with the shares f and the sizes S of `ultrabench.device_rates`.
    """
    inside, link = hardware.gpus_per_node, hardware.link_bytes_per_s
    scopes = [(inside, link)]
    if spec.nodes > 1:
        scopes.append((inside * spec.nodes, min(link, hardware.node_link_bytes_per_s)))
    return sum(
        settings.calls * size * crossing_share(name, ranks) / (rate * LINK_EFFICIENCY)
        for ranks, rate in scopes
        for name in OPERATIONS
        for size in settings.sizes_bytes
    )
