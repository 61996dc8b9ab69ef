"""Answers every question of the parity tests: a question a line in, a JSON line out.

It imports torch once and never computes itself; forked ranks do. A question with a fault is answered by a forked
copy of the server, in which the fault is planted.
"""

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # so that not every rank that compiles imports it
import torch.distributed as dist
from torch import Tensor

from tests.parity.groups import compare_groups
from tests.parity.planted import FAULTS
from ultrabench.kernel.check.parity import run_check
from ultrabench.kernel.children import ChildError, run_forked
from ultrabench.kernel.dryrun.counts import CollectiveCounts
from ultrabench.kernel.dryrun.rank_cost import measure_step, rank_cost
from ultrabench.kernel.mesh import build_mesh
from ultrabench.kernel.replicas import require_equal_replicas
from ultrabench.kernel.requests import CheckSpec
from ultrabench.kernel.step import TrainStep
from ultrabench.processes import die_with_parent
from ultrabench.record import from_dict, to_dict
from ultrabench.run import RunSpec

LETTING_GO_S = 0.3
"""Seconds after which gloo's thread has usually let go of what it sent."""
TIMEOUT_S = 120.0


def in_precision(spec: CheckSpec, precision: str) -> RunSpec:
    """The run that `spec` checks, in another precision."""
    return replace(spec.run, kernel=replace(spec.run.kernel, precision=precision))


def join(rank: int, world_size: int, folder: Path) -> None:
    """Makes the default process group of the ranks that share `folder`."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


class Order(CollectiveCounts):
    """The collectives inside the `with` block, and the look-up of tokens, in order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.names = list[str]()

    def see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        before = {name: calls for name, (calls, _) in self.found.items()}
        super().see(func, args, kwargs, out)
        self.names += [name for name, (calls, _) in self.found.items() if calls != before.get(name)]
        self.names += ["look-up"] * (func is torch.ops.aten.embedding.default)


def count(spec: CheckSpec, rank: int, folder: Path, *, order: bool = False) -> Any:
    """Counts or lists the collectives of the second step: the first makes optimizer states and warms caches."""
    join(rank, spec.layout.world_size, folder)
    trainer = TrainStep(in_precision(spec, "fp32"), torch.device("cpu"), build_mesh(spec.layout, "cpu"))
    batch = trainer.batch(1)
    trainer.update(trainer.accumulate(*batch))
    with Order(trainer.mesh, trainer.cp_group) as counts:
        trainer.update(trainer.accumulate(*batch))
    return counts.names if order else dict(counts.found)


def train_a_step(trainer: TrainStep) -> None:
    """Runs the first step; from now on updates end when gloo's thread has let go of what it sent."""
    right = trainer.update

    def update(loss: Tensor) -> Tensor:
        out = right(loss)
        time.sleep(LETTING_GO_S)
        return out

    trainer.update = update  # type: ignore[method-assign]
    trainer.update(trainer.accumulate(*trainer.batch(1)))


def cost(spec: CheckSpec, rank: int, folder: Path) -> Any:
    """Measures what a step costs a real rank."""
    join(rank, spec.layout.world_size, folder)
    return measure_step(in_precision(spec, "bf16"), train_a_step)


def dry(spec: CheckSpec, rank: int, folder: Path) -> Any:
    """Measures what a step costs a rank by a dry run."""
    return rank_cost(in_precision(spec, "bf16"), rank)


def compare_replicas(spec: CheckSpec, rank: int, folder: Path) -> Any:
    """Trains a step, and compares the ranks that hold copies of the same parameters."""
    join(rank, spec.layout.world_size, folder)
    trainer = TrainStep(in_precision(spec, "fp32"), torch.device("cpu"), build_mesh(spec.layout, "cpu"))
    trainer.update(trainer.accumulate(*trainer.batch(1)))
    require_equal_replicas(trainer)


def call(name: str) -> Any:
    """What a function, such as `tests.unit.kernel.test_data.test_x`, returns in a process of its own."""
    module, _, function = name.rpartition(".")
    try:
        return run_forked({name: getattr(import_module(module), function)}, TIMEOUT_S)[name]
    except ChildError as error:
        return str(error)


Rank = Callable[[CheckSpec, int, Path], Any]


def of_ranks(rank_body: Rank, spec: CheckSpec, every: int = 1) -> list[Any] | str:
    """What each rank finds, or each `every`th one only; or what went wrong."""
    with tempfile.TemporaryDirectory() as name:
        ranks = range(0, spec.layout.world_size, every)
        bodies = {f"rank {rank}": partial(rank_body, spec, rank, Path(name)) for rank in ranks}
        try:
            return [*run_forked(bodies, TIMEOUT_S).values()]
        except ChildError as error:
            return str(error)


def answer(question: dict[str, Any]) -> None:
    """Prints the answer to one question."""
    if question["ask"] == "call":
        print(json.dumps(call(question["spec"])), flush=True)
        return
    spec = from_dict(CheckSpec, question["spec"])
    firsts = spec.layout.world_size // spec.layout.pp
    answers: dict[str, Callable[[], Any]] = {
        "check": lambda: to_dict(run_check(spec)),
        "counts": partial(of_ranks, count, spec),
        "order": partial(of_ranks, partial(count, order=True), spec),
        "replicas": partial(of_ranks, compare_replicas, spec),
        "costs": partial(of_ranks, cost, spec),
        "dry costs": partial(of_ranks, dry, spec, firsts),
    }
    print(json.dumps(answers[question["ask"]]()), flush=True)


def answer_in_a_copy(question: dict[str, Any]) -> None:
    """Answers in a forked copy of this process, in which the fault of the question is planted."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    die_with_parent(parent)
    FAULTS[question["fault"]]()
    answer(question)
    os._exit(0)


if __name__ == "__main__":
    compare_groups()
    gc.collect()
    gc.freeze()  # a rank that collects garbage would copy all pages of what is imported
    for line in sys.stdin:
        question = json.loads(line)
        if question["ask"] == "call":  # copies need not import its module again
            import_module(question["spec"].rpartition(".")[0])
        (answer_in_a_copy if question["fault"] else answer)(question)
