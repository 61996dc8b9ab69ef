"""Answers every question of the parity tests in forked processes; it imports torch once and never computes itself."""

import gc
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.backends.registry import list_backends

from benchmarks.live_peak import join_ranks, rank_costs
from tests.parity.groups import compare_groups
from tests.parity.planted import FAULTS
from ultrabench.kernel.children import ChildError, run_forked
from ultrabench.kernel.dryrun.counts import CollectiveCounts
from ultrabench.kernel.dryrun.rank_cost import rank_cost
from ultrabench.kernel.loss import logits_to_gradient, mask_padding
from ultrabench.kernel.mesh import build_mesh
from ultrabench.kernel.moe import SparseFeedForward
from ultrabench.kernel.rank import checkpoint
from ultrabench.kernel.replicas import require_equal_replicas
from ultrabench.kernel.requests import CheckSpec, RankCost
from ultrabench.kernel.step import TrainStep
from ultrabench.record import from_dict
from ultrabench.run import RunSpec

COMPILING = (
    "sympy.tensor.tensor", "torch._dynamo.repro.after_dynamo", "torch._functorch._aot_autograd.subclass_codegen",
    "torch._export.passes.add_runtime_assertions_for_constraints_pass", "torch._inductor.compiler_bisector",
    "torch._inductor.debug", "torch._inductor.pattern_matcher", "torch._subclasses.schema_check_mode",
    "torch.distributed.tensor.experimental._attention", "torch.export._trace", "torch.fx.experimental.validator",
)  # fmt: skip
"""Modules that torch would import in each rank that compiles, where they took a fifth of its CPU time."""
TIMEOUT_S = 600.0


def in_precision(spec: CheckSpec, precision: str) -> RunSpec:
    """The run that `spec` checks, in another precision."""
    return replace(spec.run, kernel=replace(spec.run.kernel, precision=precision))


def trained_a_step(run: RunSpec, rank: int, folder: Path) -> TrainStep:
    """A rank after its first step, which makes optimizer states and warms caches."""
    join_ranks(rank, run.layout.world_size, folder)
    trainer = TrainStep(run, torch.device("cpu"), build_mesh(run.layout, "cpu"), compile_backend="aot_eager")
    trainer.update(trainer.accumulate(*trainer.batch(1)))
    return trainer


WORDS = {
    "embedding": "look-up",
    "clone": "copy",
    "index_select": "rows",
    "mm": "product",
    "addmm_": "product",
    "add": "sum",
}
"""Operator of aten -> its word in `Order.names`."""


class Order(CollectiveCounts):
    """The collectives inside the `with` block, and the operators that WORDS names, in order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.names = list[str]()

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        before = {name: calls for name, (calls, _) in self.calls_and_bytes.items()}
        super().record(func, args, kwargs, out)
        self.names += [name for name, (calls, _) in self.calls_and_bytes.items() if calls != before.get(name)]
        if func.namespace == "aten" and (kind := WORDS.get(func._schema.name.removeprefix("aten::"))):
            self.names.append(kind)


def _count(spec: CheckSpec, rank: int, folder: Path) -> tuple[dict[str, list[int]], list[str]]:
    precision = spec.run.kernel.precision
    trainer = trained_a_step(in_precision(spec, "bf16" if precision == "fp64" else precision), rank, folder)
    batch = trainer.batch(1)
    groups = trainer.mesh, trainer.cp_group, trainer.expert_mesh, trainer.kv_group
    with Order(*groups) as counts:
        trainer.update(trainer.accumulate(*batch))
    return dict(counts.calls_and_bytes), counts.names


def _count_tokens(spec: CheckSpec, rank: int, folder: Path) -> list[int]:
    trainer = trained_a_step(in_precision(spec, "fp32"), rank, folder)
    trainer.accumulate(*trainer.batch(2))
    ffns = [layer.ffn for model in trainer.models for layer in model.layers.values()]
    return [int(ffn.token_counts.sum()) for ffn in ffns if isinstance(ffn, SparseFeedForward)]


def _compare_replicas(spec: CheckSpec, rank: int, folder: Path) -> None:
    require_equal_replicas(trained_a_step(in_precision(spec, "fp32"), rank, folder))


def _compiled_loss(backend: str, spec: CheckSpec, rank: int, folder: Path) -> tuple[float, float]:
    """The largest differences of losses and gradients, compiled by `backend` and with the vocabulary on one rank.

    The last rank has fewer tokens than columns; the gradients of its padding must be 0.
    """
    join_ranks(rank, spec.layout.world_size, folder)
    generator = torch.Generator().manual_seed(1)
    logits, targets = torch.randn(24, 100, generator=generator, dtype=torch.float64), torch.arange(24) * 4
    whole_loss = logits_to_gradient(whole := logits.clone(), targets, None)
    first_row, num_rows = rank * 60, min(60, 100 - rank * 60)
    pad = torch.nn.functional.pad
    mask_padding(cut := pad(logits[:, first_row : first_row + num_rows], (0, 60 - num_rows)), num_rows)
    to_gradient = torch.compile(logits_to_gradient, fullgraph=True, dynamic=False, backend=backend)
    loss = to_gradient(cut, targets - first_row, dist.group.WORLD)
    expected = pad(whole[:, first_row : first_row + num_rows], (0, 60 - num_rows))
    return (loss - whole_loss).abs().item(), (cut - expected).abs().max().item()


def _checkpointed(blind: bool, spec: CheckSpec, rank: int, folder: Path) -> tuple[list[str], dict[str, int]]:
    """The names of what differs after a load or in an async save, and the bytes of the state by name; `blind` makes the
    names those of parameters alone."""
    trainer, steps = trained_a_step(spec.run, rank, folder), iter(range(2, 100))

    def train() -> float:
        trainer.update(trainer.accumulate(*trainer.batch(next(steps))))
        return 1.0

    saves = checkpoint.CheckpointMeasurement(trainer, folder / "checkpoint")
    if blind:
        saves.tensors = {re.sub("@[^.]*", "", name): tensor for name, tensor in saves.tensors.items()}
    before = {name: tensor.clone() for name, tensor in saves.tensors.items()}
    saves.save_and_load()
    loaded = {name: tensor.clone() for name, tensor in saves.tensors.items()}
    saves._remove_folder = lambda path: None  # type: ignore[method-assign]
    saves.save_during_training(train, 1.0)
    checkpoint.load(saves.tensors, checkpoint_id=folder / "checkpoint/async", process_group=saves.group)
    pairs = ((name, state[name]) for state in (loaded, saves.tensors) for name in before)
    differing = [name for name, tensor in pairs if not torch.equal(before[name], tensor)]
    return differing, {name: tensor.nbytes for name, tensor in before.items()}


def _of_ranks(body: Callable[[CheckSpec, int, Path], Any], spec: CheckSpec) -> list[Any]:
    """What each rank finds."""
    with tempfile.TemporaryDirectory() as name:
        ranks = range(spec.layout.world_size)
        bodies = {f"rank {rank}": partial(body, spec, rank, Path(name)) for rank in ranks}
        return [*run_forked(bodies, TIMEOUT_S / 2).values()]


counted = partial(_of_ranks, _count)
"""The collectives of the second step of each rank: calls and bytes by axis and operation, and their order."""
tokens_of_experts = partial(_of_ranks, _count_tokens)
"""The number of tokens, once for each of its experts, that the sparse layers of each rank counted in a step."""
compared_replicas = partial(_of_ranks, _compare_replicas)
"""Nothing; ranks that hold different copies of the same parameters after a step are an error."""


def checkpointed(spec: CheckSpec, blind: bool = False) -> list[tuple[list[str], dict[str, int]]]:
    """What differs after the state of each rank was saved and loaded, and the bytes of its parts by name."""
    return _of_ranks(partial(_checkpointed, blind), spec)


def compiled_losses(spec: CheckSpec, backend: str) -> list[tuple[float, float]]:
    """How far the compiled loss of each rank is from that of one process."""
    return _of_ranks(partial(_compiled_loss, backend), spec)


def real_costs(spec: CheckSpec) -> list[RankCost]:
    """What a step costs each rank, in bf16."""
    return [from_dict(RankCost, cost) for cost in rank_costs(in_precision(spec, "bf16"))]


def dry_costs(spec: CheckSpec) -> list[RankCost]:
    """What a step costs the first rank of each pipeline stage by a dry run, in bf16."""
    firsts = [spec.layout.first_rank(pp_rank) for pp_rank in range(spec.layout.pp)]
    bodies = {f"rank {rank}": partial(dry_costs_of_rank, rank, spec) for rank in firsts}
    return [cost for costs in run_forked(bodies, TIMEOUT_S / 2).values() for cost in costs]


def dry_costs_of_rank(rank: int, *specs: CheckSpec) -> list[RankCost]:
    """What a step of each spec costs `rank` by a dry run, in bf16.

    One process makes all dry runs, since half the time of a single one is spent on what torch prepares. The specs must
    have the same mesh, whose groups torch remembers by name.
    """
    return [from_dict(RankCost, rank_cost(in_precision(spec, "bf16"), rank)) for spec in specs]


def dry_cost(run: RunSpec) -> RankCost:
    """What a step costs the first rank by a dry run."""
    return from_dict(RankCost, rank_cost(run, 0))


def _answer(fault: str | None, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    if fault is not None:
        FAULTS[fault]()
    return function(*args)


def serve(fd: int) -> None:
    """Answers each (fault, function, arguments) with what the function returns, or with the text of its error."""
    compare_groups()
    for name in COMPILING:
        import_module(name)
    list_backends()  # imports their modules too
    gc.collect()
    gc.freeze()  # a rank that collects garbage would copy all pages of what is imported
    link = Connection(fd)
    with suppress(EOFError):
        while True:
            question = link.recv()
            try:
                link.send(run_forked({"answer": partial(_answer, *question)}, TIMEOUT_S)["answer"])
            except ChildError as error:
                link.send(str(error))
