"""Enumerates the layouts of a sweep, and tells which of them cannot exist.

They are all combinations of the values of its axes that use all GPUs and make up the whole batch.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from math import gcd, prod

from ultrabench.errors import ConfigError
from ultrabench.hardware import FP8_ARCHITECTURES, Hardware
from ultrabench.kernel_config import ANY, IN_16_BITS, KernelConfig
from ultrabench.layout import (
    BATCH,
    DEGREES,
    DIVIDES,
    FOLLOWING,
    IN_SWEEP,
    NEUTRAL,
    OTHER_DEGREES,
    Layout,
    default_schedule,
    default_virtual_stages,
    details_of,
    other_degrees,
)
from ultrabench.model_shape import ModelShape, RopeScaling
from ultrabench.record import values_of
from ultrabench.run import Workload, words_in
from ultrabench.stages import split_stages
from ultrabench.sweep.config.files import is_foreign_program
from ultrabench.sweep.config.sweep_config import Axes

FP8_MULTIPLE = 16
"""What divides all dims of a product of fp8 on GPUs; each is the sum of one of the three products of a layer (torch._scaled_mm)."""
MOST_COMBINATIONS = 1_000_000
"""Largest number of combinations of a sweep. With more, planning takes minutes and gigabytes."""


def require_countable(axes: Axes, models: int, options: Mapping[str, Sequence[object]]) -> None:
    """Raises when the axes have too many combinations; gas is not counted, as it follows from the others.

    Raises:
        ConfigError: the axes have more than MOST_COMBINATIONS combinations.
    """
    sizes = {name: len(set(values)) for name, values in axes.layout.items() if name != "gas"}
    sizes |= {"models": models, "nodes": len(set(axes.nodes))}
    sizes |= {name: len(values) for name, values in options.items()}
    number = prod(sizes.values())
    if number > MOST_COMBINATIONS:
        longest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        shown = ", ".join(f"sweep.{name} ({sizes[name]:,} values)" for name in longest)
        rule = f"a sweep may have {MOST_COMBINATIONS:,}: narrow {shown}"
        raise ConfigError(f"the axes have {number:,} combinations; {rule}")


DERIVED = (FOLLOWING[-1], *IN_SWEEP)
"""Axes whose values in a layout depend on those of other axes."""


def layouts(axes: Axes, gpus: int, gpus_per_node: int, gbs: int) -> Iterator[Layout]:
    """All different layouts whose degrees multiply to `gpus`, with dp*mbs*gas = gbs.

    dp follows from the other degrees, and gas from gbs, dp and mbs. Structural rules are applied later.
    """
    free = [name for name in axes.layout if name not in DERIVED]
    for values in product(*(sorted(set(axes.layout[name])) for name in free)):
        value_by_axis = dict(zip(free, values, strict=True))
        dp, ranks_left = divmod(gpus, other_degrees(value_by_axis))
        gas, batch_left = divmod(gbs, dp * value_by_axis["mbs"]) if dp else (0, 1)
        if ranks_left or batch_left:
            continue
        in_node = max(1, gpus_per_node // value_by_axis["tp"])
        shards = [
            _shards(shard_word, dp * value_by_axis["cp"], in_node, value_by_axis["zero_stage"])
            for shard_word in axes.layout["dp_shard"]
        ]
        schedules = _schedules(axes, value_by_axis["pp"], gas)
        for (schedule, virtual_stages), dp_shard in dict.fromkeys(product(schedules, shards)):
            value_by_axis |= {"pp_schedule": schedule, "virtual_stages": virtual_stages, "dp_shard": dp_shard}
            yield Layout(dp=dp, gas=gas, **value_by_axis)


def _shards(shard_word: int | str, copies: int, in_node: int, zero_stage: int) -> int:
    """The dp_shard of a layout for a value of the axis; `node` means all where that is the same."""
    if shard_word == "node":
        return in_node if zero_stage and in_node < copies else 0
    return 0 if shard_word == "all" else int(shard_word)


def _schedules(axes: Axes, pp: int, gas: int) -> Iterator[tuple[str, int]]:
    """The pairs of schedule and virtual stages that the axes ask for."""
    for name in axes.layout["pp_schedule"] if pp > 1 else ("auto",):
        if name == "interleaved":
            yield from ((name, stages) for stages in axes.layout["virtual_stages"])
        else:
            schedule = default_schedule(pp, gas) if name == "auto" else name
            yield schedule, default_virtual_stages(schedule)


def broken_rules(layout: Layout, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Each structural rule that rejects a layout, with the reason why the layout cannot exist.

    The order matters, because a candidate is counted under the first rule that rejects it.
    """
    # Each tensor-parallel rank holds whole attention heads and whole key/value heads.
    heads = {"tp_divides_heads": "num_attention_heads", "tp_divides_kv_heads": "num_key_value_heads"}
    for rule, size in heads.items():
        if getattr(shape, size) % layout.tp:
            yield rule, f"tp={layout.tp} does not divide {size}={getattr(shape, size)}"
    # ZeRO shards over dp*cp ranks; with only one such rank every stage would be the same as ZeRO-0.
    if layout.zero_stage > 0 and layout.dp * layout.cp == 1:
        yield "zero_needs_dp", f"zero_stage={layout.zero_stage} needs dp*cp > 1; dp=1, cp=1"
    # Shards and replicas fill dp*cp ranks; one shard would be ZeRO-0, and as many as ranks are all of them.
    copies, shards = layout.dp * layout.cp, f"dp_shard={layout.dp_shard}"
    if layout.dp_shard and layout.zero_stage == 0:
        yield "dp_shard_divides_dp", f"{shards} needs zero_stage > 0; zero_stage=0 shards nothing"
    if layout.dp_shard == 1:
        why = f"{shards} shards nothing (dp_shard=node gives that where tp={layout.tp} fills a node)"
        yield "dp_shard_divides_dp", f"{why}; take a smaller tp or dp_shard=all"
    if layout.dp_shard == copies:
        yield "dp_shard_divides_dp", f"{shards} is all of dp*cp={copies}; leave dp_shard out, or write all"
    if layout.dp_shard and copies % layout.dp_shard:
        indivisible = f"{shards} does not divide dp*cp={copies} (dp={layout.dp}, cp={layout.cp})"
        common = gcd(layout.dp_shard, copies)
        yield (
            "dp_shard_divides_dp",
            f"{indivisible}; take dp_shard={common if 1 < common < copies else 'all'}",
        )
    if layout.dp_overlap == "off" and copies == 1:
        yield "dp_overlap_needs_dp", "dp_overlap=off needs dp*cp > 1; dp=1, cp=1"
    for name, value in values_of(layout).items():
        if details_of(name) and value == NEUTRAL.get(name):
            for detail in details_of(name):
                if (chosen := getattr(layout, detail)) != NEUTRAL[detail] and detail not in DERIVED:
                    yield f"{detail}_needs_{name}", f"{detail}={chosen} has no effect with {name}={value}"
    for axis, degrees in DIVIDES.items():
        ranks, value = prod(getattr(layout, degree) for degree in degrees), getattr(layout, axis)
        if ranks % value:
            yield (
                f"{axis}_divides_{'_'.join(degrees)}",
                f"{axis}={value} does not divide {'*'.join(degrees)}={ranks}",
            )
    yield from _broken_by_experts(layout, shape)
    if layout.gas < layout.pp - 1:
        yield "enough_micro_batches", next(schedule_refusals(layout))
    # Every pipeline stage holds at least one block.
    cut = f"pp*virtual_stages={layout.num_stages}" if layout.virtual_stages > 1 else f"pp={layout.pp}"
    for stage in split_stages(shape, layout.num_stages):
        if stage.num_blocks == 0:
            empty = f"{cut} leaves stage {stage.index} empty ({shape.num_hidden_layers} layers)"
            yield "no_empty_stage", empty


def _broken_by_experts(layout: Layout, shape: ModelShape) -> Iterator[tuple[str, str]]:
    """Each structural rule of expert parallelism that rejects a layout, with the reason."""
    ep = layout.ep
    if ep > 1 and not shape.num_experts:
        yield "ep_needs_experts", f"ep={ep} needs a model with experts; {shape.name} has none"
    elif shape.num_experts % ep:
        # Each rank holds whole experts.
        yield "ep_divides_experts", f"ep={ep} does not divide num_experts={shape.num_experts}"
    # The ranks that share the experts fill shard groups, or a shard group fills several of them.
    sharing = layout.zero_shards * layout.tp
    if shape.num_experts and layout.zero_stage and sharing % ep and ep % sharing:
        shards = f"tp*{'dp_shard' if layout.dp_shard else 'dp*cp'}={sharing}"
        yield "ep_fits_dp_shard", f"ep={ep} neither divides {shards} nor is a multiple of it"


def schedule_refusals(layout: Layout) -> Iterator[str]:
    """The reasons why the micro-batches of a layout cannot run in the order of its pipeline schedule."""
    gas, pp = layout.gas, layout.pp
    # With fewer than pp-1 micro-batches a pipeline is never filled.
    if gas < pp - 1:
        yield f"gas={gas} is less than pp-1={pp - 1}"
    # 1F1B fills the pipeline with pp micro-batches.
    if layout.pp_schedule == "1f1b" and gas < pp:
        yield f"1f1b needs gas >= pp; gas={gas}, pp={pp}"
    # Torch cuts gas into gas // pp rounds of equal size.
    rounds = max(1, gas // pp)
    if layout.pp_schedule == "interleaved" and gas % rounds:
        near = " or ".join(str(number) for number in _interleaved_near(gas, pp))
        yield f"interleaved needs gas to be a multiple of its {rounds} rounds; gas={gas}, pp={pp}: gas={near} is one"


def _interleaved_near(gas: int, pp: int) -> Iterator[int]:
    """The nearest smaller and the nearest larger number of micro-batches that interleaved can run."""
    for numbers in (range(gas, 0, -1), range(gas, 2 * gas + pp)):
        yield next(number for number in numbers if number % max(1, number // pp) == 0)


def refusal(
    kernel: KernelConfig,
    layout: Layout,
    shape: ModelShape,
    seq_len: int,
    device: str,
    hardware: Hardware | None = None,
) -> str | None:
    """Why `kernel` cannot run `layout`, which no structural rule rejects; None when it can.

    Args:
        device: the torch device type that it would run on, cuda or cpu.
        hardware: the nodes that it would run on; None where they are unknown.
    """
    if kernel.kind != "embedded":
        return next(chain(unsupported(kernel, layout, shape), _unsaid(kernel, layout)), None)
    attention = _of_attention(kernel, layout, device)
    accelerator = _of_accelerator(kernel, layout, shape.head_width, hardware) if hardware else ()
    structure, routing = _of_embedded(layout, shape, seq_len), _of_routing(kernel, layout, shape)
    products = _of_fp8(layout, shape, seq_len, hardware) if kernel.precision == "fp8" else ()
    return next(chain(structure, routing, products, attention, accelerator), None)


def _of_routing(kernel: KernelConfig, layout: Layout, shape: ModelShape) -> Iterator[str]:
    """The reasons why a model cannot have the routing of `kernel`, or not in compiled layers."""
    if kernel.routing != "balanced" and not shape.num_experts:
        # It would be another run of the same training.
        yield f"routing={kernel.routing} needs a model with experts; {shape.name} has none: take routing=balanced"
    if shape.num_experts and kernel.routing == "learned" and kernel.compiles(layout.pp_schedule):
        # The sizes of tensors in the layer then follow from values, which one graph cannot have.
        reason = "kernel.routing=learned with kernel.compile=true; only the router knows how many tokens an expert gets"
        yield f"{reason}: take kernel.compile=false or kernel.routing=balanced"


def _of_fp8(layout: Layout, shape: ModelShape, seq_len: int, hardware: Hardware | None) -> Iterator[str]:
    """The reasons why our own kernel cannot compute the products of a model in fp8."""
    if hardware and not hardware.has_fp8:
        yield f"precision=fp8 needs {FP8_ARCHITECTURES}; {hardware.gpu} is {hardware.architecture}: take precision=bf16"
    if shape.num_experts:
        yield f"precision=fp8 with num_experts={shape.num_experts}; products of experts have no fp8: take precision=bf16"
    sizes = {
        "hidden_size": shape.hidden_size, "intermediate_size/tp": shape.intermediate_size // layout.tp,
        "num_attention_heads*head_dim/tp": shape.q_width // layout.tp, "mbs*seq_len/cp": layout.mbs * seq_len // layout.cp,
        "num_key_value_heads*head_dim/tp": shape.kv_width // layout.tp,
    }  # fmt: skip
    for name, size in sizes.items():
        if size % FP8_MULTIPLE:
            yield f"precision=fp8 needs products whose dims are multiples of {FP8_MULTIPLE}; {name}={size}: take precision=bf16"


def _of_embedded(layout: Layout, shape: ModelShape, seq_len: int) -> Iterator[str]:
    """The reasons why our own kernel cannot run a layout that no structural rule rejects."""
    pp, schedule, zero_stage = layout.pp, layout.pp_schedule, layout.zero_stage
    # A window that is as long as the sequence hides nothing.
    if shape.sliding_window is not None and shape.sliding_window < seq_len:
        use = f"sliding_window={shape.sliding_window} is in use with seq_len={seq_len}"
        yield f"{use}; attention has no window: take seq_len <= {shape.sliding_window} or another model"
    # Context parallelism gives each rank two chunks of the sequence, all of the same length.
    if layout.cp > 1 and seq_len % (2 * layout.cp):
        yield f"2*cp={2 * layout.cp} does not divide seq_len={seq_len}"
    # A stage without parameters has nothing to train (it holds only the cast or the loss).
    for stage in split_stages(shape, layout.num_stages):
        if stage.num_params(shape) == 0:
            large = f"pp={pp} is too large for num_hidden_layers={shape.num_hidden_layers}"
            yield f"{large}: stage {stage.index} has no parameters"
    # Torch's pipeline schedules reduce gradients once in each step, so ZeRO-2 would be just ZeRO-1.
    if zero_stage == 2 and pp > 1:
        yield f"zero_stage=2 with pp={pp} would run as zero_stage=1"
    # Torch reduces the gradients of a pipeline by itself; ours are reduced during its last backward.
    if layout.dp_overlap == "off" and pp > 1:
        yield f"dp_overlap=off with pp={pp}; ultrabench's kernel has it for pp=1 only"
    yield from schedule_refusals(layout)
    if layout.full_every > shape.num_hidden_layers:
        yield f"recompute={layout.recompute} recomputes none of num_hidden_layers={shape.num_hidden_layers}"
    # With zbv and ZeRO-3, torch silently loses some gradients of the sharded parameters.
    if schedule == "zbv" and zero_stage == 3:
        yield "zbv with zero_stage=3 loses gradients in torch; take zero_stage 0 or 1, or another schedule"
    # Tensor parallelism also splits feed-forward and vocabulary, and sequence parallelism the tokens.
    sizes = {name: getattr(shape, name) for name in ("intermediate_size", "vocab_size")}
    if layout.sequence_parallel == "on":
        sizes["seq_len/cp"] = seq_len // layout.cp
    sizes["n_shared_experts*moe_intermediate_size"] = shape.shared_expert_intermediate_size
    for name, size in sizes.items():
        if size % layout.tp:
            yield f"tp={layout.tp} does not divide {name}={size}"
    if shape.num_experts and layout.sequence_parallel == "off":
        # Each rank of tp would send all tokens to the experts.
        yield "sequence_parallel=off with experts; the ranks of tp share the tokens that they send: take sequence_parallel=on"
    if shape.qk_norm_across_heads and layout.tp > 1:
        yield f"qk_norm_across_heads=true is one norm over the heads of all ranks; tp={layout.tp}: take tp=1"
    # Each weight's gradient is then a backward pass of its own, in which torch would run its layer again.
    if schedule == "zbv" and layout.recompute not in ("none", "attention"):
        yield f"zbv splits the backward pass, which torch cannot do with recompute={layout.recompute}"


def _of_attention(kernel: KernelConfig, layout: Layout, device: str) -> Iterator[str]:
    """The reasons why the attention of our own kernel cannot run on a device."""
    attention, precision = kernel.attention, kernel.precision
    if device == "cpu" and attention in ("cudnn", "flash3"):
        yield f"attention={attention} needs an NVIDIA GPU; on CPUs take auto, flash or math"
    # The parts of a ring are put together by their log-sums, which only fused kernels return.
    if layout.cp > 1 and attention == "math":
        yield f"attention=math cannot run with cp={layout.cp}, whose parts it cannot put together; take auto"
    # The fused kernels of GPUs compute in 16 bit only.
    if device == "cuda" and not kernel.in_16_bits:
        rule = f"needs precision={' or '.join(IN_16_BITS)} on GPUs; precision={precision}"
        if layout.cp > 1:
            yield f"cp={layout.cp} {rule}"
        if attention not in ("auto", "math"):
            yield f"attention={attention} {rule}: take auto or math"


def _of_accelerator(
    kernel: KernelConfig, layout: Layout, head_width: int, hardware: Hardware
) -> Iterator[str]:
    """The reason why an accelerator cannot run the attention of our own kernel, if its architecture is known."""
    sm, attention = hardware.compute_capability, kernel.attention
    if hardware.architecture is None or not kernel.in_16_bits or attention == "math":
        return
    if needed := _lacking("flash" if attention == "auto" else attention, sm, head_width):
        other = (
            "auto" if attention not in ("auto", "flash") and not _lacking("flash", sm, head_width) else "math"
        )
        has = f"{hardware.gpu} is {hardware.architecture}, head_dim={head_width}"
        yield f"attention={attention} needs {needed}; {has}: take {other}{' and cp=1' * (layout.cp > 1 and other == 'math')}"


def _lacking(attention: str, compute_capability: int | None, head_width: int) -> str | None:
    """What an implementation of attention needs and an accelerator lacks; None if nothing is known to be lacking.

    These are torch's checks for training without dropout
    (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and torch/nn/attention/_fa3.py). Not checked are
    cuDNN's heads of 129 to 256 on Hopper and Blackwell, which depend on its version, and flash attention on
    AMD GPUs (compute_capability None), for which torch asks AOTriton.
    """
    if attention == "flash3" and compute_capability != 90:
        return "sm_90"
    if compute_capability is None:
        return "an NVIDIA GPU" if attention == "cudnn" else None
    if not 80 <= compute_capability <= 121:
        return "sm_80 to sm_121"
    widest_head = 128 if attention == "cudnn" and compute_capability // 10 not in (9, 10) else 256
    if head_width > widest_head:
        return f"head_dim <= {widest_head}"
    if attention == "cudnn" and head_width % 8:
        return "a head_dim that is a multiple of 8"
    if 192 < head_width <= 224 and (compute_capability in range(86, 90) or compute_capability >= 120):
        return "head_dim <= 192 or > 224"
    return None


def unsupported(kernel: KernelConfig, layout: Layout, shape: ModelShape) -> Iterator[str]:
    """The reasons why a program of the user cannot run a layout, as kernel.supports and kernel.flags say."""
    for name, allowed in (kernel.flags | kernel.supports).items():
        value = (
            kernel.precision if name == "precision" else getattr(layout, name, getattr(shape, name, layout))
        )
        if value is layout:
            yield f"kernel.supports or kernel.flags names {name!r}, which is no word of a layout or a model"
            continue
        if isinstance(value, RopeScaling):
            value = values_of(value)
        alike = name == "zero_stage" and layout.dp * layout.cp == 1  # no stage shards anything
        expressed = value in allowed if name in kernel.supports else str(value) in allowed or ANY in allowed
        if not expressed and not alike and not _has_no_effect(layout, name):
            shown = ", ".join(map(str, allowed))
            yield f"kernel {kernel.name} supports {name} in [{shown}]; {name}={value}"


def _has_no_effect(layout: Layout, name: str) -> bool:
    """Whether a word is an axis without effect on a layout, because another axis has its neutral value."""
    return any(name in details_of(of) and getattr(layout, of) == neutral for of, neutral in NEUTRAL.items())


def _unsaid(kernel: KernelConfig, layout: Layout) -> Iterator[str]:
    """The reasons why the command of a program of others would run another layout again, since it does not say an axis.

    A program of the user may read the layout elsewhere, so that nothing is refused.
    """
    values = values_of(layout).items()
    unsaid = [(name, value) for name, value in values if name not in FOLLOWING and value != NEUTRAL[name]]
    said = words_in(kernel) if unsaid else ()
    for name, value in unsaid:
        if name not in said and is_foreign_program(kernel.name):
            rule = f"so that it would run as {name}={NEUTRAL[name]}: add {name} to kernel.flags"
            yield f"kernel {kernel.name} has no word for {name}={value}, {rule}"


def why_none(axes: Axes, gpus_per_node: int, workload: Workload) -> str:
    """The reason why axes give no candidate, with the numbers that do not divide one another."""
    gpus, values_by_axis = [n * gpus_per_node for n in sorted({*axes.nodes})], axes.layout
    degrees = {name: values_by_axis[name] for name in DEGREES[1:]}
    dps = {g // p for g in gpus for p in map(prod, product(*degrees.values())) if g % p == 0}
    if not dps:
        too_odd = (name for name, values in degrees.items() if all(g % v for g, v in product(gpus, values)))
        name = next(too_odd, None)
        factor = _values({name: degrees[name]}) if name else f"{OTHER_DEGREES} with {_values(degrees)}"
        return f"{' or '.join(map(str, gpus))} GPUs are not divisible by {factor}"
    dp_and_mbs = {"dp": sorted(dps)} | {"mbs": values_by_axis["mbs"]}
    if all(workload.gbs % (dp * mbs) for dp, mbs in product(*dp_and_mbs.values())):
        return f"gbs={workload.gbs} is not divisible by dp*mbs with {_values(dp_and_mbs)}"
    return f"gbs={workload.gbs} is not dp*mbs*gas with {_values(dp_and_mbs | {'gas': values_by_axis['gas']})}"


def _values(axes: Mapping[str, Sequence[int]]) -> str:
    """The values of axes as a text such as `tp=3, pp in [1, 2]`."""
    listed_values = ((name, [*values]) for name, values in axes.items())
    return ", ".join(f"{name}={v[0]}" if len(v) == 1 else f"{name} in {v}" for name, v in listed_values)


def without_candidates(
    axes: Axes, gpus_per_node: int, workload: Workload, candidates: Collection[tuple[int, Layout]]
) -> Iterator[tuple[str, int | str, str]]:
    """Each value of an axis that no candidate has, as the name of the axis, the value and the reason.

    Args:
        candidates: number of nodes and layout of each candidate.
    """
    for nodes in sorted({*axes.nodes} - {nodes for nodes, _ in candidates}):
        yield "nodes", nodes, why_none(replace(axes, nodes=(nodes,)), gpus_per_node, workload)
    for name in (*DEGREES[1:], *BATCH, *details_of("pp")):
        listed = axes.layout.get(name, ())
        for value in sorted({*listed} - {getattr(layout, name) for _, layout in candidates} - {"auto"}):
            if name == "pp_schedule":
                yield name, value, "no candidate has pp > 1"
            elif name != "virtual_stages":
                single_value = replace(axes, layout={**axes.layout, name: (value,)})
                yield name, value, why_none(single_value, gpus_per_node, workload)
            elif len(listed) > 1:  # a single value is usually the default, which only interleaved uses
                yield name, value, "no candidate has pp_schedule=interleaved"
