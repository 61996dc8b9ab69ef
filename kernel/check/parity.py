"""Checks that a layout trains correctly: it compares forked ranks with a single process, in fp64.

`python -P -m ultrabench.kernel.check.parity` reads a CheckSpec from stdin and writes a CheckResult. It imports torch
but never computes, because children that are forked after a matrix product in the parent hang.
"""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultrabench.kernel.children import ChildError, run_forked
from ultrabench.kernel.data import load
from ultrabench.kernel.mesh import build_mesh, local, take
from ultrabench.kernel.model import TIED_NAME, Decoder, cross_entropy
from ultrabench.kernel.rank.ran import require_as_asked, watched
from ultrabench.kernel.requests import TOLERANCE, CheckResult, CheckSpec
from ultrabench.kernel.step import BETAS, LEARNING_RATE, WEIGHT_DECAY, TrainStep
from ultrabench.processes import die_with_parent
from ultrabench.record import from_dict, to_dict
from ultrabench.stages import split_stages

TIMEOUT_S = 120.0
_CPU = torch.device("cpu")


def run_check(spec: CheckSpec) -> CheckResult:
    """Runs one check with forked ranks; the caller may have imported torch, but must not have used it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ultrabench-check-") as name:
        folder = Path(name)
        ranks = range(spec.layout.world_size)
        bodies = {f"rank {rank}": partial(_train_rank, spec, rank, folder) for rank in ranks}
        bodies["reference"] = partial(_train_reference, spec, folder)
        try:
            run_forked(bodies, TIMEOUT_S)
            last = run_forked({"comparison": partial(_compare, spec, folder)}, TIMEOUT_S)
            result: CheckResult = last["comparison"]
        except ChildError as error:
            result = CheckResult(error=str(error))
    return replace(result, seconds=time.monotonic() - start)


def _train_reference(spec: CheckSpec, folder: Path) -> None:
    """Trains the plain model on the whole global batch, with clipping and AdamW of torch."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    model = Decoder(spec.shape, split_stages(spec.shape, 1)[0], [range(spec.seq_len)])
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(model.initial_value(name, param.shape, spec.seed, _CPU))
    optimizer = torch.optim.AdamW(params.values(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)

    def accumulate(step: int) -> Tensor:
        everything = range(spec.layout.gbs)
        inputs, targets = load(everything, step, spec.run.workload, spec.shape.vocab_size, _CPU)
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def update(loss: Tensor) -> Tensor:
        torch.nn.utils.clip_grad_norm_(params.values(), spec.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    torch.save(_trained(spec.steps, params, accumulate, update), folder / "reference.pt")


def _train_rank(spec: CheckSpec, rank: int, folder: Path) -> None:
    """Trains `spec.layout` as rank `rank`."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), spec.layout.world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=spec.layout.world_size)
    mesh = build_mesh(spec.layout, "cpu")
    trainer = TrainStep(spec.run, _CPU, mesh, clip_norm=spec.clip, backend="aot_eager")
    with watched(trainer) as seen:
        found = _trained(
            spec.steps, trainer.params, lambda step: trainer.accumulate(*trainer.batch(step)), trainer.update
        )
    require_as_asked(trainer, seen, spec.steps)
    found["parts"] = trainer.parts
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def _trained(
    steps: int,
    params: Mapping[str, Tensor],
    accumulate: Callable[[int], Tensor],
    update: Callable[[Tensor], Tensor],
) -> dict[str, Any]:
    """Trains some steps; returns what this process holds then.

    These are `losses` of all steps, `grads` by name after the first backward, and `params` by name at the end.
    """
    losses, grads = [], dict[str, Tensor]()
    for step in range(1, steps + 1):
        loss = accumulate(step)
        if step == 1:
            grads = {n: local(p.grad).clone() for n, p in params.items() if p.grad is not None}
        losses.append(update(loss).item())
    values = {name: local(param.detach()) for name, param in params.items()}
    return {"losses": losses, "grads": grads, "params": values}


def _diff(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference; 0 for empty tensors, inf if a value is not a number."""
    return float((a - b).abs().nan_to_num(nan=math.inf).max()) if a.numel() else 0.0


def _compare(spec: CheckSpec, folder: Path) -> CheckResult:
    """The differences between each rank's parts and the reference.

    Each rank is compared with its parts of the full tensors, so that replicas which differ are found. An
    element that no rank holds has an infinite difference.
    """
    torch.set_num_threads(1)
    reference = torch.load(folder / "reference.pt")
    ranks = [torch.load(folder / f"rank{r}.pt") for r in range(spec.layout.world_size)]
    whole: dict[str, dict[str, Tensor]] = {}
    worst: dict[str, dict[str, float]] = {}
    for kind in ("grads", "params"):
        whole[kind] = {name: torch.full_like(full, torch.nan) for name, full in reference[kind].items()}
        worst[kind] = dict.fromkeys(reference[kind], 0.0)
        for one in ranks:
            for name, values in one[kind].items():
                tied = spec.shape.tie_word_embeddings and name == "head.weight"
                full_name, part = TIED_NAME if tied else name, one["parts"][name]
                take(whole[kind][full_name], part).copy_(values)
                diff = _diff(take(reference[kind][full_name], part), values)
                worst[kind][full_name] = max(worst[kind][full_name], diff)
        for name, full in whole[kind].items():
            worst[kind][name] = max(worst[kind][name], _diff(reference[kind][name], full))
    if spec.dump is not None:
        Path(spec.dump).mkdir(parents=True, exist_ok=True)
        torch.save(reference, Path(spec.dump) / "reference.pt")
        torch.save({**whole, "losses": ranks[0]["losses"]}, Path(spec.dump) / "check.pt")
    losses = torch.tensor([one["losses"] for one in ranks], dtype=torch.float64)
    diffs = [
        _diff(losses, torch.tensor(reference["losses"], dtype=torch.float64)),
        *(max(worst[kind].values()) for kind in ("grads", "params")),
    ]
    loss_diff, grad_diff, param_diff = (diff if math.isfinite(diff) else None for diff in diffs)
    missing = [f"rank {r}: {n}" for r, one in enumerate(ranks) for n in one["parts"] if n not in one["grads"]]
    return CheckResult(
        passed=not missing and all(diff <= TOLERANCE for diff in diffs),
        loss_diff=loss_diff,
        grad_diff=grad_diff,
        param_diff=param_diff,
        worst_parameter=max(worst["grads"], key=worst["grads"].__getitem__),
        missing_gradients=tuple(missing),
    )


if __name__ == "__main__":
    die_with_parent(os.getppid())  # the process that asks may be killed
    print(json.dumps(to_dict(run_check(from_dict(CheckSpec, json.load(sys.stdin))))))
