"""Reads from the objects that trained which options their steps really ran with.

Options are read from the classes and attributes of modules, the state of fully_shard, the sizes and dtypes of
tensors, and a count of forwards. Only the sizes of the model and its sequences are taken from the run; the options
that were asked for are only compared with. So an option that was lost on its way is found, and so is one that
torch ignored.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import unwrap
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultrabench.kernel.compat import ShardState, shard_state, uncompiled
from ultrabench.kernel.dp import COMPUTE_DTYPE, MASTER_DTYPE
from ultrabench.kernel.model import Decoder
from ultrabench.kernel.pp import SCHEDULES
from ultrabench.kernel.rank.failure import IgnoredOptionError
from ultrabench.kernel.recompute import recompute_of
from ultrabench.kernel.step import TrainStep
from ultrabench.layout import AXES, NEUTRAL
from ultrabench.record import values_of

_PRECISIONS = {(MASTER_DTYPE[precision], COMPUTE_DTYPE[precision]): precision for precision in MASTER_DTYPE}
"""Dtypes of the parameters that the optimizer updates and of those in products -> our word."""

Forward = tuple[torch.Size, list[ShardState]]
"""One forward of a model: the size of the tensor that it got, and the state of each layer at its end."""


@contextmanager
def watched(trainer: TrainStep) -> Iterator[list[Forward]]:
    """Records every forward of this rank's models inside the `with` block."""
    forwards = list[Forward]()

    def see(model: Decoder, args: tuple[Tensor, ...], _: Any) -> None:
        forwards.append((args[0].shape, [shard_state(layer) for layer in model.layers.values()]))

    hooks = [model.register_forward_hook(see) for model in trainer.models]
    yield forwards
    for hook in hooks:
        hook.remove()


def options_of(trainer: TrainStep, forwards: Sequence[Forward], steps: int = 1) -> dict[str, Any]:
    """Option -> its value in `forwards`, which are all of some `steps`.

    An option that differs between layers or micro-batches has all its values, such as `full and none`. What a
    pipeline stage without layers cannot know is absent.
    """
    options = {
        "mbs": _only(size[0] for size, _ in forwards),
        "gas": len(forwards) // (steps * len(trainer.models)),
    }
    if pipeline := getattr(trainer, "pipeline", None):
        num_stages = len(pipeline.stages)
        schedule_by_kind = {kind: schedule for schedule, kind in SCHEDULES.items()}
        options |= {"pp": pipeline.stages[0].num_stages // num_stages, "virtual_stages": num_stages}
        options["pp_schedule"] = schedule_by_kind[type(pipeline.schedule)]
    layers: list[Any] = [layer for model in trainer.models for layer in model.layers.values()]
    if not layers:
        return options
    width, seq_len = trainer.spec.shape.intermediate_size, trainer.spec.workload.seq_len
    tps = [width // layer.ffn.gate.weight.shape[0] for layer in layers]
    # A stage gets B x S/cp tokens, or x_BSH of the stage before, which is cut over tp, too.
    cps = [seq_len // (size[1] * tps[0] ** (len(size) - 2)) for size, _ in forwards]
    states = [state for _, layer_states in forwards for state in layer_states]
    # ZeRO stages 1 and 2 differ only in whether every one of several micro-batches reduces gradients.
    reduces_each = not pipeline and options["gas"] > 1 and all(state.reduces for state in states)
    stage_if_sharded = 2 if reduces_each else 1
    is_wrapped = all(uncompiled(layer.forward) is not layer.forward for layer in layers)
    return options | {
        "tp": _only(tps),
        "cp": _only(cps),
        "dp": _only(state.copies // cps[0] for state in states),
        "dp_shard": _only(state.shards if 1 < state.shards < state.copies else 0 for state in states),
        "zero_stage": _only(3 if s.resharded else stage_if_sharded if s.shards > 1 else 0 for s in states),
        "precision": _only(_PRECISIONS.get(state.dtypes, state.dtypes) for state in states),
        "recompute": recompute_of(trainer.models, trainer.layout),
        "compile": is_wrapped and trainer.compiler.graphs > 0,
        "attention": _only(getattr(unwrap(layer.attention.core), "args", ("any",))[-1] for layer in layers),
    }


def _only(values: Iterable[Any]) -> Any:
    """The value, if all values are equal; else a text with all of them."""
    first, *others = sorted(set(values), key=str)
    return " and ".join(map(str, (first, *others))) if others else first


def require_as_asked(trainer: TrainStep, forwards: Sequence[Forward], steps: int = 1) -> dict[str, Any]:
    """The options that ran, as `options_of` says; they are those asked for. All ranks have to call it.

    Raises:
        IgnoredOptionError: on every rank if any option differs on any; it names the first rank's differences.
    """
    ran, layout = options_of(trainer, forwards, steps), trainer.layout
    requested, copies = values_of(trainer.spec.kernel) | values_of(layout), layout.dp * layout.cp
    requested |= {"compile": trainer.spec.compiles, "attention": trainer.attention}
    if layout.zero_stage < 3 and 1 in (copies, layout.gas):
        requested["zero_stage"] = min(layout.zero_stage, int(copies > 1))  # these stages do the same
    differing = [f"{k}={requested[k]} was asked for, {ran[k]} ran" for k in ran if ran[k] != requested[k]]
    if "tp" in ran:  # a stage without layers knows few options
        unread = [name for name in AXES if name not in ran and requested[name] != NEUTRAL.get(name)]
        differing += [
            f"{name}={requested[name]} was asked for, which this kernel does not have" for name in unread
        ]
    difference_by_rank: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(difference_by_rank, "; ".join(differing))
    if difference := next(filter(None, difference_by_rank), None):
        raise IgnoredOptionError(difference)
    return ran
