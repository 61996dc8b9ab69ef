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
from ultrabench.record import values_of

_PRECISIONS = {(MASTER_DTYPE[word], COMPUTE_DTYPE[word]): word for word in MASTER_DTYPE}
"""Dtypes of the parameters that the optimizer updates and of those in products -> our word."""

Forward = tuple[torch.Size, list[ShardState]]
"""One forward of a model: the size of the tensor that it got, and the state of each layer at its end."""


@contextmanager
def watched(trainer: TrainStep) -> Iterator[list[Forward]]:
    """Records every forward of this rank's models inside the `with` block."""
    seen = list[Forward]()

    def see(model: Decoder, args: tuple[Tensor, ...], _: Any) -> None:
        seen.append((args[0].shape, [shard_state(layer) for layer in model.layers.values()]))

    hooks = [model.register_forward_hook(see) for model in trainer.models]
    yield seen
    for hook in hooks:
        hook.remove()


def options_of(trainer: TrainStep, seen: Sequence[Forward], steps: int = 1) -> dict[str, Any]:
    """Option -> its value in `seen`, which are all forwards of some `steps`.

    An option that differs between layers or micro-batches has all its values, such as `full and none`. What a
    pipeline stage without layers cannot know is absent.
    """
    found = {"mbs": _only(size[0] for size, _ in seen), "gas": len(seen) // (steps * len(trainer.models))}
    if pipeline := getattr(trainer, "pipeline", None):
        held, words = len(pipeline.stages), {kind: word for word, kind in SCHEDULES.items()}
        found |= {"pp": pipeline.stages[0].num_stages // held, "virtual_stages": held}
        found["pp_schedule"] = words[type(pipeline.schedule)]
    layers: list[Any] = [layer for model in trainer.models for layer in model.layers.values()]
    if not layers:
        return found
    width, seq_len = trainer.spec.shape.intermediate_size, trainer.spec.workload.seq_len
    tps = [width // layer.ffn.gate.weight.shape[0] for layer in layers]
    # A stage gets B x S/cp tokens, or x_BSH of the stage before, which is cut over tp, too.
    cps = [seq_len // (size[1] * tps[0] ** (len(size) - 2)) for size, _ in seen]
    states = [state for _, held in seen for state in held]
    # ZeRO stages 1 and 2 differ only in whether every one of several micro-batches reduces gradients.
    sharded = 2 if not pipeline and found["gas"] > 1 and all(state.reduces for state in states) else 1
    wrapped = all(uncompiled(layer.forward) is not layer.forward for layer in layers)
    return found | {
        "tp": _only(tps),
        "cp": _only(cps),
        "dp": _only(state.copies // cps[0] for state in states),
        "dp_shard": _only(state.shards if 1 < state.shards < state.copies else 0 for state in states),
        "zero_stage": _only(3 if s.resharded else sharded if s.shards > 1 else 0 for s in states),
        "precision": _only(_PRECISIONS.get(state.dtypes, state.dtypes) for state in states),
        "recompute": recompute_of(trainer.models, trainer.layout),
        "compile": wrapped and trainer.compiler.graphs > 0,
        "attention": _only(getattr(unwrap(layer.attention.core), "args", ("any",))[-1] for layer in layers),
    }


def _only(values: Iterable[Any]) -> Any:
    """The value, if all values are equal; else a text with all of them."""
    first, *others = sorted(set(values), key=str)
    return " and ".join(map(str, (first, *others))) if others else first


def require_as_asked(trainer: TrainStep, seen: Sequence[Forward], steps: int = 1) -> dict[str, Any]:
    """The options that ran, as `options_of` says; they are those asked for. All ranks have to call it.

    Raises:
        IgnoredOptionError: on every rank if any option differs on any; it names the first rank's differences.
    """
    ran, layout = options_of(trainer, seen, steps), trainer.layout
    asked, copies = values_of(trainer.spec.kernel) | values_of(layout), layout.dp * layout.cp
    asked |= {"compile": trainer.spec.compiles, "attention": trainer.attention}
    if layout.zero_stage < 3 and 1 in (copies, layout.gas):
        asked["zero_stage"] = min(layout.zero_stage, int(copies > 1))  # these stages do the same
    differing = [f"{k}={asked[k]} was asked for, {ran[k]} ran" for k in ran if ran[k] != asked[k]]
    told: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(told, "; ".join(differing))
    if text := next(filter(None, told), None):
        raise IgnoredOptionError(text)
    return ran
