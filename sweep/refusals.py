"""Tells why a training program cannot run a layout that no rule of the grid rejects."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from types import MappingProxyType

from ultrabench.hardware import DEVICE_KINDS, Hardware
from ultrabench.kernel_config import (
    ANY,
    AUTO_NEEDS,
    NODE,
    NVLINK_RACK,
    PRECISIONS_16_BIT,
    ROUTING,
    KernelConfig,
    Span,
)
from ultrabench.layer_products import COLUMNS, ROWS
from ultrabench.layer_type import LayerType
from ultrabench.layout import AUTO, FOLLOWING, NEUTRAL, Layout, crosses_nodes, details_of
from ultrabench.model_shape import ModelShape, RopeScaling
from ultrabench.model_words import LISTED, MIXED, PIPELINE_DIVISION, UNEVEN, model_words, pipeline_words
from ultrabench.record import non_default_values, values_of
from ultrabench.run import words_in
from ultrabench.stages import stages_without_params
from ultrabench.sweep.config.files import is_command_of_package
from ultrabench.sweep.untrained import special_features, untrained_reason
from ultrabench.tensor_parallel import KV_COPIES_WORD, fewest_kv_heads, kinds_of_ranks, most_kv_copies
from ultrabench.variant import Variant

FP8_MULTIPLE = 16
"""Number that must divide all three dims of an fp8 matrix product on GPUs (torch._scaled_mm):
a layer's forward product and the two of its backward each sum over another of these dims."""


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
    num_rounds = max(1, gas // pp)
    if layout.pp_schedule == "interleaved" and gas % num_rounds:
        gas_values_text = " or ".join(map(str, _gas_near(gas, pp)))
        yield (
            f"interleaved needs gas divisible by gas // pp = {num_rounds}; gas={gas}, pp={pp}: "
            f"use gas={gas_values_text}"
        )


def _gas_near(gas: int, pp: int) -> Iterator[int]:
    """The nearest smaller and the nearest larger number of micro-batches that interleaved can run."""
    for gas_candidates in (range(gas, 0, -1), range(gas, 2 * gas + pp)):
        yield next(n for n in gas_candidates if n % max(1, n // pp) == 0)


def refusal(
    kernel: KernelConfig,
    layout: Layout,
    shape: ModelShape,
    seq_len: int,
    device: str,
    hardware: Hardware | None = None,
    *,
    variant: Variant = MappingProxyType({}),
    any_model: bool = False,
) -> str | None:
    """Why `kernel` cannot run `layout`, which no structural rule rejects; None when it can.

    Args:
        device: the torch device type that it would run on, cuda or cpu.
        hardware: the nodes that it would run on; None where they are unknown.
        variant: the options of the run beside the layout, some of which may be knobs.
        any_model: whether a model that our own kernel does not train is no reason.
    """
    if not kernel.trains_itself:
        command_refusals = (
            _sequence_refusals(kernel, layout.cp, seq_len),
            _untold_types(kernel, shape),
            # The nodes refuse such a layout whatever its other axes are, so that this reason comes before theirs.
            _span_refusals(kernel, layout, hardware, variant) if hardware else (),
            value_refusals(kernel, layout, shape),
            _undeclared_routing(kernel, shape),
            _no_word_refusals(kernel, layout),
            _step_rank_refusals(kernel, layout),
        )
        return next(chain(*command_refusals), None)
    attention_refusals = _attention_refusals(kernel, layout, shape, device)
    gpu_refusals = _accelerator_refusals(kernel, layout, shape.head_widths[0], hardware) if hardware else ()
    layout_refusals = chain(
        _sequence_refusals(kernel, layout.cp, seq_len), _layout_refusals(layout, shape, seq_len)
    )
    fp8_refusals = _fp8_refusals(layout, shape, seq_len, hardware) if kernel.precision == "fp8" else ()
    other_refusals = _routing_refusals(kernel, layout, shape), fp8_refusals, attention_refusals, gpu_refusals
    if not any_model and (model_refusal := untrained_reason(shape)):
        return model_refusal
    return next(chain(layout_refusals, *other_refusals), None)


def model_refusal(kernel: KernelConfig, shape: ModelShape) -> str | None:
    """Why `kernel` cannot run any layout of a model; None where it can run some."""
    return untrained_reason(shape) if kernel.trains_itself else next(_untold_types(kernel, shape), None)


def _sequence_refusals(kernel: KernelConfig, cp: int, seq_len: int) -> Iterator[str]:
    """The reason why cp ranks cannot share a sequence: they hold equally many tokens,
    with our own kernel as two chunks each.
    """
    num_chunks, chunks_text = (2 * cp, "2*cp") if kernel.trains_itself else (cp, "cp")
    if cp > 1 and kernel.trains and seq_len % num_chunks:
        yield f"{chunks_text}={num_chunks} does not divide seq_len={seq_len}"


def _routing_refusals(kernel: KernelConfig, layout: Layout, shape: ModelShape) -> Iterator[str]:
    """The reasons why a model cannot have the routing of `kernel`, or not in compiled layers."""
    if kernel.routing != "balanced" and not shape.num_experts:
        # It would be another run of the same training.
        yield f"routing={kernel.routing} needs a model with experts; {shape.name} has none: use routing=balanced"
    if shape.num_experts and kernel.routing == "learned" and kernel.compiles(layout.pp_schedule):
        # The sizes of tensors in the layer then follow from values, which one graph cannot have.
        reason = "kernel.routing=learned with kernel.compile=true; tensor sizes then depend on the router"
        yield f"{reason}: use kernel.compile=false or kernel.routing=balanced"


def _fp8_refusals(
    layout: Layout, shape: ModelShape, seq_len: int, hardware: Hardware | None
) -> Iterator[str]:
    """The reasons why our own kernel cannot compute the products of a model in fp8."""
    if hardware and hardware.fp8_refusal:
        yield hardware.fp8_refusal
    if shape.num_experts:
        yield (
            f"precision=fp8 with num_experts={shape.num_experts}; expert layers do not support fp8: "
            "use precision=bf16"
        )
    h, tp, num_tokens = shape.hidden_size, layout.tp, layout.mbs * seq_len // layout.cp
    sizes = [("hidden_size", h), ("mbs*seq_len/cp", num_tokens)]
    # Latents are products of the tokens of one rank of tp.
    if layout.sequence_parallel == "on" and any(kind.latent for kind in shape.kinds):
        sizes.append(("mbs*seq_len/(cp*tp)", num_tokens // tp))
    for kind, rank_kind in zip(shape.kinds, kinds_of_ranks(shape, tp), strict=True):
        sizes += _sizes_on_a_rank(kind, rank_kind, h, tp)
    for name, size in dict.fromkeys(sizes):
        if size % FP8_MULTIPLE:
            yield (
                f"precision=fp8 needs matrix sizes that are multiples of {FP8_MULTIPLE}; "
                f"{name}={size}: use precision=bf16"
            )


def _sizes_on_a_rank(kind: LayerType, rank_kind: LayerType, h: int, tp: int) -> Iterator[tuple[str, int]]:
    """Name and value of each size beside h of the products of a type of layer on a rank of tp.

    Args:
        rank_kind: the type with the copies of key/value heads that the ranks hold.
    """
    if (grouped := rank_kind.grouped_query) and kind.grouped_query:
        is_copied = tp > kind.grouped_query.num_key_value_heads
        yield "num_attention_heads*head_dim/tp", grouped.q_width // tp
        yield "head_dim" if is_copied else "num_key_value_heads*head_dim/tp", grouped.kv_width // tp
    elif rank_kind.attention:
        for outputs, inputs, cut, *_ in rank_kind.attention.products(h):
            yield f"outputs of {rank_kind.attention.name}", outputs // tp if cut == COLUMNS else outputs
            yield f"inputs of {rank_kind.attention.name}", inputs // tp if cut == ROWS else inputs
    if rank_kind.feed_forward:
        yield "intermediate_size/tp", rank_kind.feed_forward.intermediate_size // tp


def _layout_refusals(layout: Layout, shape: ModelShape, seq_len: int) -> Iterator[str]:
    """The reasons why our own kernel cannot run a layout that no structural rule rejects."""
    pp, schedule, zero_stage = layout.pp, layout.pp_schedule, layout.zero_stage
    num_layers = shape.num_hidden_layers
    # A window that is as long as the sequence hides nothing.
    windows = [kind.grouped_query.sliding_window for kind in shape.kinds if kind.grouped_query]
    if (window := min(filter(None, windows), default=seq_len)) < seq_len:
        yield (
            f"sliding_window={window} is shorter than seq_len={seq_len}; ultrabench's attention has no window: "
            f"use seq_len <= {window} or another model"
        )
    # A stage without parameters has nothing to train (it holds only the cast or the loss).
    for stage_index in stages_without_params(shape, layout.num_stages, layout.pp_layout):
        head_layers = shape.embedding_params * num_layers / shape.matmul_params_of_layers(0, num_layers)
        depth_text = f"num_hidden_layers={num_layers} and a head of the size of {head_layers:.1f} layers"
        yield f"{layout.num_stages_text} is too large for {depth_text}: stage {stage_index} has no parameters"
    # Torch's pipeline schedules reduce gradients once in each step, so ZeRO-2 would be just ZeRO-1.
    if zero_stage == 2 and pp > 1:
        yield f"zero_stage=2 with pp={pp} would run as zero_stage=1"
    # Torch reduces the gradients of a pipeline by itself; ours are reduced during its last backward.
    if layout.dp_overlap == "off" and pp > 1:
        yield f"dp_overlap=off with pp={pp}; ultrabench's kernel supports it only with pp=1"
    yield from schedule_refusals(layout)
    if layout.full_every > num_layers:
        yield f"recompute={layout.recompute} recomputes no layer; num_hidden_layers={num_layers}"
    # With zbv and ZeRO-3, torch silently loses some gradients of the sharded parameters.
    if schedule == "zbv" and zero_stage == 3:
        yield "zbv with zero_stage=3 loses gradients in torch; use zero_stage 0 or 1, or another schedule"
    # Tensor parallelism also splits the feed-forward block, and sequence parallelism the tokens.
    sizes = [("intermediate_size", shape.intermediate_size)]
    if shape.layer_types:
        sizes = [size for kind in shape.kinds if kind.ffn for size in kind.ffn.tp_sizes().items()]
    if layout.sequence_parallel == "on":
        sizes.append(("seq_len/cp", seq_len // layout.cp))
    sizes.append(("n_shared_experts*moe_intermediate_size", shape.shared_expert_intermediate_size))
    for name, size in sizes:
        if size % layout.tp:
            yield f"tp={layout.tp} does not divide {name}={size}"
    if shape.num_experts and layout.sequence_parallel == "off":
        # Each rank of tp would send all tokens to the experts.
        yield (
            "sequence_parallel=off with experts; tp ranks must split the tokens that they send: "
            "use sequence_parallel=on"
        )
    is_normed_across = any(kind.grouped_query and kind.grouped_query.qk_norm == "all" for kind in shape.kinds)
    if is_normed_across and layout.tp > 1:
        yield f"qk_norm_across_heads=true normalizes over the heads of all tp ranks; tp={layout.tp}: use tp=1"
    # The tied head is then the table of the tokens that the modules get, so that its weights have two backward passes.
    if schedule == "zbv" and shape.tie_word_embeddings and shape.num_nextn_predict_layers:
        modules_text = (
            f"num_nextn_predict_layers={shape.num_nextn_predict_layers} and tie_word_embeddings=true"
        )
        yield f"zbv splits the backward pass, which torch cannot do with {modules_text}: use another schedule"
    # Each weight's gradient is then a backward pass of its own, in which torch would run its layer again.
    if schedule == "zbv" and layout.recompute not in ("none", "attention"):
        yield f"zbv splits the backward pass, which torch cannot do with recompute={layout.recompute}"


def _attention_refusals(
    kernel: KernelConfig, layout: Layout, shape: ModelShape, device: str
) -> Iterator[str]:
    """The reasons why the attention of our own kernel cannot run on a device."""
    attention, precision = kernel.attention, kernel.precision
    has_gpus, (qk_width, v_width) = DEVICE_KINDS[device].has_gpus, shape.head_widths
    is_fused = attention != "math" and (attention != AUTO or not has_gpus or kernel.in_16_bits)
    # Fused kernels get heads of one width, so that narrower values are padded to the width of keys.
    if is_fused and v_width > qk_width:
        width_text = f"v_head_dim={v_width} is more than qk_nope_head_dim+qk_rope_head_dim={qk_width}"
        advice = "use another model" if layout.cp > 1 else "use attention=math or another model"
        yield f"{width_text}; attention={attention} cannot pad keys to the width of values: {advice}"
    if not has_gpus and attention in ("cudnn", "flash3"):
        yield f"attention={attention} needs an NVIDIA GPU; on CPUs use auto, flash or math"
    # The parts of a ring are put together by their log-sums, which only fused kernels return.
    if layout.cp > 1 and attention == "math":
        yield f"attention=math cannot combine the chunks of cp={layout.cp}; use auto"
    # The fused kernels of GPUs compute in 16 bit only.
    if has_gpus and not kernel.in_16_bits:
        precision_text = f"needs precision={' or '.join(PRECISIONS_16_BIT)} on GPUs, not {precision}"
        if layout.cp > 1:
            yield f"cp={layout.cp} {precision_text}"
        if attention not in (AUTO, "math"):
            yield f"attention={attention} {precision_text}: use auto or math"


def _accelerator_refusals(
    kernel: KernelConfig, layout: Layout, head_width: int, hardware: Hardware
) -> Iterator[str]:
    """The reason why an accelerator cannot run the attention of our own kernel, if its architecture is known."""
    compute_capability, attention = hardware.compute_capability, kernel.attention
    if hardware.architecture is None or not kernel.in_16_bits or attention == "math":
        return
    implementation = AUTO_NEEDS if attention == AUTO else attention
    if needed_text := _missing_feature(implementation, compute_capability, head_width):
        can_use_auto = not _missing_feature(AUTO_NEEDS, compute_capability, head_width)
        fallback = AUTO if can_use_auto and implementation != AUTO_NEEDS else "math"
        gpu_text = f"{hardware.gpu} is {hardware.architecture}, head_dim={head_width}"
        yield (
            f"attention={attention} needs {needed_text}; {gpu_text}: "
            f"use {fallback}{' and cp=1' * (layout.cp > 1 and fallback == 'math')}"
        )


def _missing_feature(attention: str, compute_capability: int | None, head_width: int) -> str | None:
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


def value_refusals(
    kernel: KernelConfig, layout: Layout, shape: ModelShape, program_text: str | None = None
) -> Iterator[str]:
    """The reasons why a program of the user cannot run a layout, as kernel.supports and kernel.flags say.

    Args:
        program_text: what the reasons call it; None for `kernel NAME`.
    """
    program_text = program_text or f"kernel {kernel.name}"
    words = {**model_words(shape), **pipeline_words(shape, layout)}
    words |= {KV_COPIES_WORD: most_kv_copies(shape, layout.tp)}
    num_heads = fewest_kv_heads(shape)
    heads_text = f" (tp={layout.tp}, num_key_value_heads={num_heads})" if num_heads else ""
    tables = kernel.flags | kernel.supports
    if ROUTING in tables:  # first, since no layout mends it
        tables = {ROUTING: tables[ROUTING]} | tables
    for field_name, allowed_values in tables.items():
        if field_name in kernel.knobs:
            continue
        value = getattr(layout, field_name, words.get(field_name, getattr(shape, field_name, None)))
        if field_name == "precision":
            value = kernel.precision
        elif field_name == ROUTING:
            value = kernel.routing_of(shape)
            if value is None:
                continue
        if isinstance(value, RopeScaling):
            value = non_default_values(value)
        zero_shards_nothing = field_name == "zero_stage" and layout.dp * layout.cp == 1
        is_allowed_text = str(value) in allowed_values or ANY in allowed_values
        is_supported = value in allowed_values if field_name in kernel.supports else is_allowed_text
        is_supported &= value != MIXED
        if not is_supported and not zero_shards_nothing and not _has_no_effect(layout, field_name):
            if field_name == PIPELINE_DIVISION and value == UNEVEN and LISTED in allowed_values:
                reason = f"{program_text} has equal stages with pp_layout=auto, and {layout.num_stages_text}"
                num_layers = shape.num_hidden_layers
                yield f"{reason} does not divide num_hidden_layers={num_layers}: use pp_layout=even"
                continue
            allowed_text = ", ".join(map(str, allowed_values))
            value_text = f"{field_name}={value}{heads_text * (field_name == KV_COPIES_WORD)}"
            yield f"{program_text} supports {field_name} in [{allowed_text}]; {value_text}"


def _undeclared_routing(kernel: KernelConfig, shape: ModelShape) -> Iterator[str]:
    """The reason why a program that no word tells how to route its tokens cannot have another routing than usual."""
    if shape.num_experts and kernel.trains and not kernel.takes_routing and kernel.routing != "balanced":
        reason = f"kernel.routing={kernel.routing} with kernel {kernel.name}, which no word tells its routing"
        yield f"{reason}: add {ROUTING} to kernel.flags, or leave kernel.routing out"


def _span_refusals(
    kernel: KernelConfig, layout: Layout, hardware: Hardware, variant: Variant
) -> Iterator[str]:
    """The reasons why groups of ranks are larger than kernel.spans allows with the knobs of a run."""
    for degree, condition, limit in kernel.span_limits():
        excess = _excess_over_span(layout, degree, limit, kernel.rank_order, hardware)
        if excess is None:
            continue
        program_text = f"kernel {kernel.name}"
        if condition:
            knob, knob_value = condition
            if str(kernel.knobs_of(variant)[knob]) != knob_value:
                continue
            program_text += f" with {knob}={knob_value}"
        yield f"{program_text} has groups of {degree} {excess}"


def _excess_over_span(
    layout: Layout, degree: str, limit: Span, rank_order: Sequence[str], hardware: Hardware
) -> str | None:
    """How far groups of a degree may reach and how far those of a layout do; None if they are within the limit."""
    size = getattr(layout, degree)
    if isinstance(limit, int):
        return f"of at most {limit} ranks; {degree}={size}" if size > limit else None
    if limit == NVLINK_RACK and hardware.nvlink_gpus == hardware.gpus_per_node:
        return None
    num_gpus, domain_text = hardware.nvlink_gpus, "an NVLink domain"
    if limit == NODE:
        num_gpus, domain_text = hardware.gpus_per_node, "a node"
    axes = ((size, 1),) if degree == "ep" else layout.group_axes(degree, rank_order=rank_order)
    if not crosses_nodes(axes, num_gpus):
        return None
    return f"only within {domain_text}, of {num_gpus} GPUs; those of {degree}={size} span several"


def _step_rank_refusals(kernel: KernelConfig, layout: Layout) -> Iterator[str]:
    """The reason why no rank of a layout can have the log that `kernel.step_rank` names."""
    if isinstance(kernel.step_rank, int) and kernel.step_rank >= layout.world_size:
        last_rank = layout.world_size - 1
        yield (
            f"kernel.step_rank={kernel.step_rank}; the last of {layout.world_size} ranks is "
            f"{last_rank}: use -1 for the last rank"
        )


def _has_no_effect(layout: Layout, name: str) -> bool:
    """Whether the field `name` of a layout or model is an axis without effect,
    because another axis has its neutral value.
    """
    return any(name in details_of(axis) and getattr(layout, axis) == value for axis, value in NEUTRAL.items())


def _untold_types(kernel: KernelConfig, shape: ModelShape) -> Iterator[str]:
    """The reasons why a program cannot be told the layers of a model.

    One that comes with ultrabench would train a model without those features of it of which its command says nothing.
    """
    mixed_words, feature_names = _untold_words(kernel, shape)
    for name in mixed_words:
        reason = (
            f"kernel {kernel.name} has one {name} for all layers; the layers of {shape.name} differ in it"
        )
        yield f"{reason}: use a command that trains this model"
    if feature_names and is_command_of_package(kernel.name, kernel.command):
        for name in feature_names:
            reason = f"kernel {kernel.name} has no word for {name}, which {shape.name} has"
            yield f"{reason}: use kernel=command with a command that trains this model"


@lru_cache(maxsize=64)  # a search for the best runs asks for each candidate
def _untold_words(kernel: KernelConfig, shape: ModelShape) -> tuple[list[str], list[str]]:
    """The words of a command that layers of the model differ in, and features for which it has no word."""
    words, command_words = model_words(shape), words_in(kernel)
    mixed_words = [name for name in sorted(words_in(kernel, with_tables=False)) if words.get(name) == MIXED]
    return mixed_words, [f.name for f in special_features(shape) if f.word not in command_words]


def _no_word_refusals(kernel: KernelConfig, layout: Layout) -> Iterator[str]:
    """A reason for each axis that has a value of its own in the layout, but no word in the command of the program.

    The program would run the axis with its neutral value, so under a wrong name. Only commands that come with
    ultrabench are refused, since one of the user may set the axis elsewhere, such as in a file.
    """
    axes_and_values = ((axis, value) for axis, value in values_of(layout).items() if axis not in FOLLOWING)
    non_neutral_pairs = [(axis, value) for axis, value in axes_and_values if value != NEUTRAL[axis]]
    command_words = words_in(kernel) if non_neutral_pairs else ()
    for axis, value in non_neutral_pairs:
        if axis not in command_words and is_command_of_package(kernel.name, kernel.command):
            consequence_text = f"and would run as {axis}={NEUTRAL[axis]}: add {axis} to kernel.flags"
            yield f"kernel {kernel.name} has no word for {axis}={value} {consequence_text}"
