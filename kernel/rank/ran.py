"""Reads from the objects that trained which options their steps really ran with.

Options are read from the classes and attributes of modules, the state of fully_shard, the sizes and values of
tensors, and counts of forwards and of calls of compiled graphs. Only the sizes of the model and its sequences are
taken from the run; the options that were asked for are only compared with. So an option that was lost on its way
is found, and so is one that torch ignored.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import unwrap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultrabench.kernel.compat import ShardState, pads_values, shard_state
from ultrabench.kernel.cut import Cut, num_tp_copies
from ultrabench.kernel.dp import COMPUTE_DTYPE, MASTER_DTYPE
from ultrabench.kernel.fp8 import SCALED_PRODUCTS
from ultrabench.kernel.mesh import is_expert, is_norm, local_shard
from ultrabench.kernel.model import Decoder
from ultrabench.kernel.moe import SparseFeedForward
from ultrabench.kernel.pp import SCHEDULE_CLASSES
from ultrabench.kernel.rank import precisions
from ultrabench.kernel.rank.failure import IgnoredOptionError
from ultrabench.kernel.recompute import recompute_of
from ultrabench.kernel.step import TrainStep
from ultrabench.kernel_config import EMBEDDED_PRECISIONS
from ultrabench.layout import AXES, NEUTRAL
from ultrabench.record import values_of
from ultrabench.stages import stages_by_rank
from ultrabench.tensor_parallel import most_kv_copies, padded_vocab_size

_PRECISION_BY_DTYPES = {(MASTER_DTYPE[p], COMPUTE_DTYPE[p]): p for p in EMBEDDED_PRECISIONS if p != "fp8"}
"""Dtypes of the parameters that the optimizer updates and of those that layers get -> our word."""
WIDE_NUMBERS = ("gradients", "masters", "moments", "angles", "norms", "scores")
"""Kinds of numbers that are computed in the precision of the optimizer."""
MIN_READ_VALUES = 32
"""Smallest number of values other than 0 that say in which precision they were computed; fewer may be round numbers."""
HEAD_NAME = "head.weight"
"""The parameter whose gradient every token adds to; a tied one has the name of the embedding."""
MOMENT_KEYS = ("exp_avg", "exp_avg_sq")
"""Keys of the two moments in the optimizer states of AdamW."""
TF32_VARIABLE = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
"""The variable with which a user asks torch to round fp32 products to TF32."""

ForwardRecord = tuple[torch.Size, list[ShardState]]
"""One forward of a model: the shape of the tensor that it got, and the state of each layer at its end."""


@dataclass(slots=True)
class StepObservations:
    """What a rank did in some steps."""

    forward_records: list[ForwardRecord] = field(default_factory=list)
    num_steps: int = 0
    num_graph_calls: int = 0
    """Number of forwards of layers that were calls of a compiled graph."""
    scaled_products: Counter[str] = field(default_factory=Counter)
    """Purpose -> number of products of fp8: output or gradient."""
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)
    """Group of parameters whose gradients are added up in the same way -> the first values of the gradient of each in
    the last step, before clipping."""
    rotations: tuple[Tensor, Tensor] | None = None
    """The cosines and sines that the layers got."""
    num_layer_tokens: int = 0
    """Number of tokens of each sequence in the input of a layer."""


@contextmanager
def observe_steps(trainer: TrainStep) -> Iterator[StepObservations]:
    """Observes all steps of this rank inside the `with` block."""
    observations, compiler, original_update = StepObservations(), trainer.compiler, trainer.update
    products_before, num_calls_before = SCALED_PRODUCTS + compiler.scaled_products, compiler.num_calls

    def see_forward(model: Decoder, args: tuple[Tensor, ...], _: Any) -> None:
        observations.forward_records.append((args[0].shape, [*map(shard_state, model.layers.values())]))

    def see_gradients(loss_summand: Tensor) -> Tensor:
        gradients = defaultdict[str, list[Tensor]](list)
        for name, param in trainer.params.items():
            if param.grad is not None and (group := _reduction_group(trainer, name)):
                gradients[group].append(precisions.leading_values(local_shard(param.grad)))
        observations.gradients = gradients
        observations.num_steps += 1
        return original_update(loss_summand)

    def see_rotations(_: Any, args: tuple[Tensor, ...]) -> None:
        observations.num_layer_tokens, observations.rotations = args[0].shape[1], (args[1], args[2])

    hooks = [model.register_forward_hook(see_forward) for model in trainer.models]
    hooks += [layer.register_forward_pre_hook(see_rotations) for layer in layers_of(trainer)[:1]]
    trainer.update = see_gradients  # type: ignore[method-assign]
    yield observations
    del trainer.update  # that of the class again
    observations.scaled_products = SCALED_PRODUCTS + compiler.scaled_products - products_before
    observations.num_graph_calls = compiler.num_calls - num_calls_before
    for hook in hooks:
        hook.remove()


def _reduction_group(trainer: TrainStep, name: str) -> str | None:
    """The group of a parameter in `StepObservations.gradients`; None if a single summand may be its gradient.

    So it may be that of the row of a token or an expert, which few micro-batches have.
    """
    cut, layout = trainer.cuts[name], trainer.layout
    if is_expert(name):
        num_summands = layout.gas * layout.dp * layout.cp * layout.tp // layout.ep
        return "experts" if num_summands > 1 and trainer.spec.kernel.routing == "balanced" else None
    if cut.is_vocabulary:
        return "head" if name == HEAD_NAME else None
    if cut.dim is None:
        return "whole"
    return "copied heads" if cut.num_heads and num_tp_copies(cut, layout.tp) > 1 else "cut"


def _is_matrix(name: str) -> bool:
    """Whether the parameter is a matrix of a layer, to whose gradient every micro-batch adds."""
    return name.startswith("layers.") and not is_norm(name)


def layers_of(trainer: TrainStep) -> list[Any]:
    """All layers of this rank."""
    return [layer for model in trainer.models for layer in model.layers.values()]


def options_of(trainer: TrainStep, observations: StepObservations) -> dict[str, Any]:
    """Option -> its value in the observed steps.

    An option that differs between layers or micro-batches has all its values, such as `full and none`. What a
    pipeline stage without layers cannot know is absent.
    """
    records = observations.forward_records
    gas = len(records) // (observations.num_steps * len(trainer.models))
    options = {
        "fused_optimizer": bool(trainer.optimizer.defaults["fused"]),
        "tf32": torch.get_float32_matmul_precision() != "highest",
        "mbs": _common_value(x_shape[0] for x_shape, _ in records),
        "gas": gas,
    }
    if pipeline := getattr(trainer, "pipeline", None):
        rank_stages = pipeline.stages
        schedule_by_class = {torch_class: schedule for schedule, torch_class in SCHEDULE_CLASSES.items()}
        options |= {"pp": rank_stages[0].num_stages // len(rank_stages), "virtual_stages": len(rank_stages)}
        options["pp_schedule"] = schedule_by_class[type(pipeline.schedule)]
        options["pp_layout"] = _pp_layout_of(trainer)
    if not (layers := layers_of(trainer)):
        return options
    shape, seq_len = trainer.spec.shape, trainer.spec.workload.seq_len
    tp_degrees = _part_counts(trainer, lambda name, cut: not (cut.num_heads or is_expert(name)))
    copies = [tp_degrees[0] // n for n in _part_counts(trainer, lambda _, cut: bool(cut.num_heads))]
    options |= {"kv_copies": _common_value(copies or [1]), **_padded_vocabulary(trainer, tp_degrees[0])}
    ep_degrees = _part_counts(trainer, lambda name, _: is_expert(name))
    if ep_degrees or not shape.num_experts:
        options["ep"] = _common_value(ep_degrees or [1])
        options["routing"] = _common_value(model.routing.name for model in trainer.models)
    assert observations.rotations is not None
    num_token_parts = len(observations.rotations[0]) // observations.num_layer_tokens
    # A stage gets B x S/cp tokens, or x_BSH of the stage before, whose tokens may be cut over tp, too.
    cp_degrees = [seq_len // (x_shape[1] * num_token_parts ** (len(x_shape) - 2)) for x_shape, _ in records]
    shard_states = [state for _, layer_states in records for state in layer_states]
    num_layer_outputs = sum(layer.num_products for layer in layers) * len(records) // len(trainer.models)
    # ZeRO stages 1 and 2 differ only in whether every one of several micro-batches reduces gradients.
    later_has_reduced = {s.has_reduced for i, (_, states) in enumerate(records) for s in states if i % gas}
    zero_stage_if_sharded = 2 if not pipeline and later_has_reduced == {True} else 1
    if not pipeline:
        last_shard_states = [state for _, layer_states in records[gas - 1 :: gas] for state in layer_states]
        options["dp_overlap"] = _common_value("on" if s.reduces_next else "off" for s in last_shard_states)
    # A core is a partial whose arguments end with the backend; those of a ring begin with its group and exchange.
    attention_cores = (unwrap(layer.attention.core) for layer in layers)
    fixed_args: list[tuple[str, ...]] = [getattr(core, "args", ("any",)) for core in attention_cores]
    qk_width, v_width = shape.head_widths
    if v_width < qk_width:  # how many channels of zeros an implementation of attention added to values
        padded_counts = ((qk_width - v_width) * pads_values(args[-1]) for args in fixed_args)
        options["padded_value_channels"] = _common_value(padded_counts)
    return options | _precisions(trainer, observations) | {
        "tp": _common_value(tp_degrees),
        "sequence_parallel": "on" if num_token_parts == tp_degrees[0] else "off",
        "cp": _common_value(cp_degrees),
        "dp": _common_value(s.num_ranks // cp_degrees[0] for s in shard_states),
        "dp_shard": _common_value(s.num_shards if 1 < s.num_shards < s.num_ranks else 0 for s in shard_states),
        "zero_stage": _common_value(
            3 if s.is_sharded else zero_stage_if_sharded if s.num_shards > 1 else 0 for s in shard_states
        ),
        "precision": _precision_of_products(_common_value(_PRECISION_BY_DTYPES.get(s.dtypes,
            s.dtypes) for s in shard_states), observations, num_layer_outputs),
        "recompute": recompute_of(trainer.models, trainer.layout),
        "compile": _compile_value(observations.num_graph_calls, len(shard_states)),
        "attention": _common_value(args[-1] for args in fixed_args),
        "cp_exchange": _common_value(args[1] if len(args) > 1 else "ring" for args in fixed_args),
    }  # fmt: skip


def _part_counts(trainer: TrainStep, is_counted: Callable[[str, Cut], bool]) -> list[int]:
    """Into how many parts the ranks of tp, or of ep, cut each counted parameter of the layers of this rank."""
    return [
        trainer.full_shapes[name][cut.dim] // trainer.params[name].shape[cut.dim]
        for name, cut in trainer.cuts.items()
        if name.startswith("layers.") and cut.dim is not None and is_counted(name, cut)
    ]


def _pp_layout_of(trainer: TrainStep) -> str:
    """The requested pp_layout if the stages of this rank have the layers that it gives them,
    else how many they have.
    """
    stages = stages_by_rank(trainer.spec.shape, trainer.layout)[trainer.coordinates.pp]
    layer_counts = [len(model.layers) - len(model.predict) for model in trainer.models]
    if layer_counts == [stage.num_layers for stage in stages]:
        return trainer.layout.pp_layout
    return f"{'-'.join(map(str, layer_counts))} on pipeline rank {trainer.coordinates.pp}"


def _padded_vocabulary(trainer: TrainStep, tp: int) -> dict[str, int]:
    """The rows of embedding or head on all ranks of tp, by the name of the option; empty for a stage without them."""
    tables = [
        table for model in trainer.models for table in (model.embedding, model.head) if table is not None
    ]
    return {"padded_vocab_size": _common_value(len(t.weight) * tp for t in tables)} if tables else {}


def _precision_of_products(precision: str, observations: StepObservations, num_layer_outputs: int) -> str:
    """`fp8` if all matrix products of the layers ran in fp8, else `precision`, followed by how many did if any did.

    `precision` belongs to the dtypes that the layers got. `num_layer_outputs` is the number of outputs that forwards of
    layers computed by their products; for each, backward makes two gradients. Recomputation may repeat outputs.
    """
    num_outputs, num_gradients = (observations.scaled_products[purpose] for purpose in ("output", "gradient"))
    if precision == "bf16" and num_outputs >= num_layer_outputs and num_gradients == 2 * num_layer_outputs:
        return "fp8"
    counts_text = (
        f" with {num_outputs} of {num_layer_outputs} outputs and {num_gradients} of "
        f"{2 * num_layer_outputs} gradients in fp8"
    )
    return precision + counts_text * bool(num_outputs or num_gradients)


def _precisions(trainer: TrainStep, observations: StepObservations) -> dict[str, str]:
    """Kind of numbers -> the precision in which they were computed; kinds that are 0 everywhere are absent."""
    matrices = [shard for name, shard in trainer.shards.items() if _is_matrix(name) and shard.numel()]
    states = [state for matrix in matrices if (state := trainer.optimizer.state[matrix])]
    tensor_lists_by_kind = {
        "gradients": [*observations.gradients.values()],
        "masters": [[precisions.leading_values(matrix) for matrix in matrices]],
        "moments": [[precisions.leading_values(state[key]) for state in states] for key in MOMENT_KEYS],
    }
    precision_by_kind = dict[str, str]()
    for kind, tensor_lists in tensor_lists_by_kind.items():
        read_lists = (t for t in tensor_lists if sum(map(torch.count_nonzero, t)) >= MIN_READ_VALUES)
        if kind_precisions := [*filter(None, map(precisions.value_precision, read_lists))]:
            precision_by_kind[kind] = _common_value(kind_precisions)
    assert observations.rotations is not None
    cos, sin = observations.rotations
    sparse_blocks = (layer.ffn for layer in layers_of(trainer) if isinstance(layer.ffn, SparseFeedForward))
    if block := next(sparse_blocks, None):
        precision_by_kind["scores"] = str(precisions.score_precision(block, cos))
    rotation = next(rotation for model in trainer.models for rotation in model.rotations.values())
    return precision_by_kind | {
        "angles": precisions.rotation_precision(cos, sin, trainer.positions, rotation),
        "norms": precisions.norm_precision(layers_of(trainer)[0].ffn_norm, cos),
    }


def _compile_value(num_graph_calls: int, num_forwards: int) -> bool | str:
    """Whether the forwards of layers were calls of compiled graphs; a text where only some of them were."""
    counts_text = f"in {num_graph_calls} of {num_forwards} forwards of layers"
    return num_graph_calls == num_forwards or (num_graph_calls > 0 and counts_text)


def _common_value(values: Iterable[Any]) -> Any:
    """The value, if all values are equal; else a text with all of them."""
    first_value, *other_values = sorted(set(values), key=str)
    return " and ".join(map(str, (first_value, *other_values))) if other_values else first_value


def require_requested_options(trainer: TrainStep, observations: StepObservations) -> dict[str, Any]:
    """The options that ran, as `options_of` says; they are those asked for. All ranks have to call it.

    Raises:
        IgnoredOptionError: on every rank if any option differs on any; it names the first rank's differences.
    """
    options, layout = options_of(trainer, observations), trainer.layout
    # Option -> the value that was asked for.
    requests, num_replicas = values_of(trainer.spec.kernel) | values_of(layout), layout.dp * layout.cp
    requests |= {"compile": trainer.spec.compiles, "attention": trainer.attention_backend}
    requests |= {
        "kv_copies": most_kv_copies(trainer.spec.shape, layout.tp),
        "padded_vocab_size": padded_vocab_size(trainer.spec.shape.vocab_size, layout.tp),
    }
    qk_width, v_width = trainer.spec.shape.head_widths
    requests["padded_value_channels"] = (qk_width - v_width) * pads_values(trainer.attention_backend)
    requests |= {"fused_optimizer": True, "tf32": os.environ.get(TF32_VARIABLE) == "1"}
    wide_precision = "fp64" if trainer.spec.kernel.precision == "fp64" else "fp32"
    requests |= dict.fromkeys(WIDE_NUMBERS, wide_precision)
    if num_replicas * layout.gas == 1:  # a gradient that nothing is added to has the precision of its product
        requests["gradients"] = options.get("gradients")
    if layout.zero_stage < 3 and 1 in (num_replicas, layout.gas):
        requests["zero_stage"] = min(layout.zero_stage, int(num_replicas > 1))  # these stages do the same
    differing_names = [name for name, value in options.items() if value != requests[name]]
    differences = [f"requested {name}={requests[name]}, but ran {options[name]}" for name in differing_names]
    if "ep" in options:  # stages without layers, or without the experts of their model, know few options
        missing_axes = [name for name in AXES if name not in options and requests[name] != NEUTRAL.get(name)]
        differences += [
            f"requested {name}={requests[name]}, which this kernel does not support" for name in missing_axes
        ]
    difference_text_by_rank: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(difference_text_by_rank, "; ".join(differences))
    if difference_text := next(filter(None, difference_text_by_rank), None):
        raise IgnoredOptionError(difference_text)
    return options
