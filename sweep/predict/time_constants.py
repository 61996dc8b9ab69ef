"""The constants of the step time: what differs between training frameworks."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated

from ultrabench.allowed import NonNegative, between, require_allowed
from ultrabench.record import field_types
from ultrabench.run import RunSpec

Share = Annotated[float, between(0.0, 1.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeConstants:
    """How a training framework uses its hardware; the values, with their sources, are in configs/profiles/.

    A share or an efficiency is a fraction of the rate in the hardware's data sheet. A cost in bytes is divided
    by the rate of the memory. Seconds are those of forward and backward together unless told otherwise.

    The probe measures all-reduces and all-gathers of PROBE_BYTES over all ranks of an allocation before its runs.
    `Network` holds the measured bandwidths and the seconds of a hop that follow from them. Where nothing was measured,
    bandwidths follow from the data sheet, and a hop takes no time.
    """

    gemm_efficiency: Share
    """Share of the peak that a product of endlessly large matrices reaches."""
    gemm_m0: NonNegative
    """Rows M (tokens) at which a product reaches half of that; a product of M rows reaches M / (M + m0)."""
    gemm_n0: NonNegative
    """Columns N at which a product reaches half of its rate; one of N columns reaches N / (N + n0)."""
    gemm_k0: NonNegative
    """Inner size K at which a product reaches half of its rate; one of inner size K reaches K / (K + k0)."""
    attention_efficiency: Share
    """Share of the peak that flash attention reaches with heads of 128 channels and a causal mask."""
    attention_width_power: NonNegative
    """Exponent p of the rate of narrower heads, which is (width / 128)**p of that."""
    hidden_bytes: NonNegative
    """Memory traffic of norms, rotations and residuals, for each token and hidden channel of a layer."""
    ffn_bytes: NonNegative
    """Memory traffic of the activation of the feed-forward block, for each token and intermediate channel."""
    logit_bytes: NonNegative
    """Memory traffic of the cross-entropy for each logit."""
    hbm_efficiency: Share
    """Share of the memory's rate that such kernels reach."""
    compiled_traffic: NonNegative
    """Factor of hidden_bytes, ffn_bytes and fp8_cast_bytes where layers are compiled."""
    recompute_traffic: NonNegative
    """Factor of hidden_bytes and ffn_bytes in a layer that backward computes again."""
    accumulate_bytes: NonNegative
    """Memory traffic of adding the gradients of a micro-batch to those before, for each parameter."""
    smooth_power: NonNegative
    """Power p of the smooth maximum (a**p + b**p)**(1/p) of the time of the GPU and the time of its host."""
    layer_launch_s: NonNegative
    """Seconds that the host needs to launch the kernels of one layer without tensor parallelism."""
    layer_launch_tp_s: NonNegative
    """Seconds that the host needs to launch the kernels of one layer with tensor parallelism."""
    compiled_launch: NonNegative
    """Factor on layer_launch_s and layer_launch_tp_s where layers are compiled."""
    micro_batch_launch_s: NonNegative
    """Seconds that the host needs for a micro-batch beside its layers."""
    slow_layer_launch_s: NonNegative
    """Seconds that the host needs at least for a layer where links between nodes are slow (`Network.slow`).
    The terms of slow_layer_launch_tp_s and of the hops of tp are added to them; the usual launch time counts
    where it is longer."""
    slow_layer_launch_tp_s: NonNegative
    """Seconds for each of the tp ranks that are added to slow_layer_launch_s."""
    tp_calls: NonNegative
    """Collectives over tp that are waited for, in one layer; of 4 gathers and 4 sums some run beside products."""
    tp_end_calls: NonNegative
    """Collectives over tp that are waited for in embedding, head and loss together, in one micro-batch."""
    tp_recompute_calls: NonNegative
    """Collectives over tp that full recomputation adds in one layer."""
    tp_link_efficiency: Share
    """Share of the links in a node that collectives over tp reach."""
    tp_call_s: NonNegative
    """Seconds of a collective over tp beside its transfer."""
    tp_node_link_efficiency: Share
    """Share of the links of a node to others that collectives over tp reach when tp spans nodes."""
    tp_hop_s: NonNegative
    """Seconds of each of the tp - 1 hops of a collective over tp between nodes."""
    tp_probe_hops: NonNegative
    """Factor of the seconds of a hop that follow from the probe; the product is added to tp_hop_s for each hop."""
    dp_link_efficiency: Share
    """Share of the links' rate that collectives of data parallelism between nodes reach, before `dp_probe` or
    `dp_gather_probe` makes them slower."""
    dp_probe: NonNegative
    """Share of the time that the all-reduce of the probe would take for the gradients;
    it is added to their transfer."""
    dp_gather_probe: NonNegative
    """Share of the time that the all-gather of the probe would take for the parameters;
    it is added to their transfer."""
    dp_bucket_bytes: NonNegative
    """Bytes of gradients that ZeRO-0 reduces in one call; 0: calls take no time beside their transfers."""
    dp_bucket_hops: NonNegative
    """Factor of the time that each such call takes beside its transfer: its number of ranks times the seconds for each
    rank that an all-reduce of the probe took beside its transfer. It is divided by the square root of the fraction of a
    node's GPUs that take part in the call."""
    dp_overlap: NonNegative
    """Share of the last micro-batch's backward behind which the all-reduces of ZeRO-0 can hide."""
    zero_overlap: NonNegative
    """Share of forwards and backwards behind which the collectives of ZeRO-1 to 3 can hide; 0: nothing hides."""
    dp_exposed: NonNegative
    """Share of these collectives that is never hidden."""
    zero_layer_s: NonNegative
    """Seconds of the host for each layer of a rank whose ZeRO stage is above 0, for a reduction and a gathering."""
    zero_crossings: NonNegative
    """How often the bytes of the gradients cross the links in a reduction under ZeRO: 1 if the framework calls
    reduce-scatter, 2 if it calls all-reduce, which is a reduce-scatter and an all-gather."""
    gradient_bytes: NonNegative
    """Bytes of a number of the gradients that data parallelism sums."""
    pp_call_s: NonNegative
    """Seconds of one exchange between two pipeline ranks beside its transfers, for each micro-batch."""
    pp_slow_call_s: NonNegative
    """Seconds that slow links between nodes add to such an exchange."""
    pp_link_efficiency: Share
    """Share of a link in a node that an exchange reaches."""
    pp_node_link_efficiency: Share
    """Share of a link between nodes that an exchange reaches."""
    optimizer_bytes: NonNegative
    """Memory traffic of the optimizer for each parameter whose state the rank holds."""
    clip_bytes: NonNegative
    """Memory traffic of clipping and of zeroing gradients for each parameter of the rank."""
    optimizer_layer_s: NonNegative
    """Seconds of the host for each layer of a rank in the optimizer."""
    rest_s: NonNegative
    """Seconds of a step outside all of this."""
    zero_rank_s: NonNegative = 0.0
    """Seconds in a step for each rank among which a ZeRO stage shards, in programs whose ranks broadcast their
    parameters one after the other."""
    score_bytes: NonNegative = 0.0
    """Memory traffic of each score of attention in forward, in programs that write scores to memory; 0: flash attention
    keeps them on the chip."""
    allocator_loss: NonNegative = 0.0
    """Largest share that is added to a step whose predicted memory leaves the allocator no room for its reserve."""
    head_norm_bytes: NonNegative = 0.0
    """Memory traffic of the norms of queries and keys (qk_norm), for each token and channel of them."""
    selective_launch_s: NonNegative = 0.0
    """Seconds that the host needs in addition for a layer which torch recomputes selectively and did not compile."""
    sparse_launch_s: NonNegative = 0.0
    """Seconds that the host needs in addition for a layer with experts."""
    routed_bytes: NonNegative = 0.0
    """Memory traffic of sorting tokens by their experts and of adding up the results, for each hidden channel of a
    token on its way to one expert."""
    router_bytes: NonNegative = 0.0
    """Memory traffic of scores and of the choice among them, for each token and expert."""
    expert_efficiency: Share = 1.0
    """Share of the rate of other products that those of experts reach, whose groups of rows are small and unequal."""
    ep_node_copies: Share = 0.0
    """Whether an all-to-all over ep sends a token once to each node where it has experts, which forwards it (1, as
    DeepEP does), or once to each of its experts (0); a share between them mixes their bytes."""
    ep_overlap: Share = 0.0
    """Share of the all-to-alls over ep that other work hides."""
    fp8_efficiency: Share = 0.61
    """Share of the peak of fp8 that a product of endlessly large matrices reaches, in place of gemm_efficiency.
    A prior, with which 8B gains what torchtitan published of scales for each row."""
    fp8_cast_bytes: NonNegative = 7.0
    """Bytes of memory traffic for scaling one number of an operand and casting it to fp8, in layers that are not
    compiled. A guess: 9 bytes, or 11 if the operand is transposed, which kernels move at 0.85 of the memory's rate;
    7 is the same time at an hbm_efficiency of 0.6."""
    fp8_experts: bool = False
    """Whether the products of experts are in fp8, too, as Transformer Engine's grouped linear layers are."""
    fp8_launch_s: NonNegative = 0.002
    """Seconds that the host needs in addition for a layer in fp8 that is not compiled. A prior:
    36 operands of 11 kernels."""
    wait_shared: Share = 0.0
    """Share of a pipeline rank's waiting time that other ranks use, because they share its processors; 0 on GPUs."""
    ties_advance: bool = False
    """Whether a pipeline stage ends when its cost equals its part of the total, as in later versions of nanotron,
    and not only when it exceeds it; see `split_stages`."""

    def __post_init__(self) -> None:
        require_allowed(self, "profile.time.")


FlagConstants = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Knob -> its value -> constant of the step time that this value changes -> what it is then."""
FLAG_CONSTANTS = tuple(name for name, hint in field_types(TimeConstants).items() if hint is not bool)
"""The constants that a value of a knob may change: all numbers."""


def with_flags(time: TimeConstants, flags: FlagConstants, spec: RunSpec) -> TimeConstants:
    """The constants of a run, with what the values of its knobs change."""
    if not flags or not (spec.variant or spec.kernel.knobs):
        return time
    changes = dict[str, float]()
    for knob, constants_by_value in flags.items():
        changes |= constants_by_value.get(str(spec.kernel.knob_value(knob, spec.variant)), {})
    return with_changes(time, tuple(changes.items())) if changes else time


@lru_cache(maxsize=1024)
def with_factors(time: TimeConstants, factors: tuple[tuple[str, float], ...]) -> TimeConstants:
    """The constants, of which those named in `factors` are multiplied.

    Raises:
        ConfigError: a constant cannot have its value.
    """
    return with_changes(time, tuple((name, factor * getattr(time, name)) for name, factor in factors))


@lru_cache(maxsize=1024)
def with_changes(time: TimeConstants, changes: tuple[tuple[str, float], ...]) -> TimeConstants:
    """The constants, of which those named in `changes` have other values.

    Raises:
        ConfigError: a constant cannot have its value.
    """
    return replace(time, **dict(changes))  # type: ignore[arg-type]
