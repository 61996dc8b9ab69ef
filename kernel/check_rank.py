"""The processes of a check: the ranks, the single reference process, and the comparison of both."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultrabench.kernel.check_spec import TOLERANCE, CheckSpec
from ultrabench.kernel.data import load
from ultrabench.kernel.mesh import build_mesh, local, part_of, take
from ultrabench.kernel.model import TIED_NAME, Decoder, cross_entropy
from ultrabench.kernel.step import BETAS, LEARNING_RATE, WEIGHT_DECAY, TrainStep
from ultrabench.stages import split_stages

_CPU = torch.device("cpu")
Found = dict[str, Any]
"""The results of a process: `losses` of all steps, `grads` by name after the first backward, `params` by name
at the end, and `missing`, the names of parameters without a gradient."""


def run_reference(spec: CheckSpec, folder: Path) -> None:
    """Trains the plain model on the whole global batch, with clipping and AdamW of torch."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    model = Decoder(spec.shape, split_stages(spec.shape, 1)[0], spec.seq_len)
    params = dict(model.named_parameters())
    with torch.no_grad():
        for name, param in params.items():
            param.copy_(model.initial_value(name, param.shape, spec.seed, _CPU))
    optimizer = torch.optim.AdamW(params.values(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
    found: Found = {"losses": [], "grads": {}}
    for step in range(1, spec.steps + 1):
        everything = range(spec.layout.gbs)
        inputs, targets = load(everything, step, spec.run.workload, spec.shape.vocab_size, _CPU)
        loss = cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        found["losses"].append(loss.item())
        if step == 1:
            found["grads"] = {n: p.grad.clone() for n, p in params.items() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(params.values(), spec.clip)
        optimizer.step()
        optimizer.zero_grad()
    found["params"] = {n: p.detach() for n, p in params.items()}
    torch.save(found, folder / "reference.pt")


def run_rank(spec: CheckSpec, rank: int, folder: Path) -> None:
    """Trains `spec.layout` as rank `rank`, and saves the gradients and parameters that the rank holds."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), spec.layout.world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=spec.layout.world_size)
    trainer = TrainStep(
        spec.run, _CPU, build_mesh(spec.layout, "cpu"), clip_norm=spec.clip, backend="aot_eager"
    )
    found: Found = {"losses": [], "parts": {n: part_of(p) for n, p in trainer.params.items()}}
    for step in range(1, spec.steps + 1):
        loss_here = trainer.accumulate(*trainer.batch(step))
        if step == 1:
            grads = {n: p.grad for n, p in trainer.params.items()}
            found["missing"] = [n for n, g in grads.items() if g is None]
            found["grads"] = {n: local(g).clone() for n, g in grads.items() if g is not None}
        loss, _ = trainer.update(loss_here)
        found["losses"].append(float(loss))
    found["params"] = trainer.shards
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def _diff(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference; 0 for empty tensors, inf if a value is not a number."""
    return float((a - b).abs().nan_to_num(nan=math.inf).max()) if a.numel() else 0.0


def compare(spec: CheckSpec, folder: Path) -> None:
    """Writes the differences between each rank's parts and the reference to differences.json.

    Each rank is compared with its parts of the full tensors, so that replicas which differ are found. An
    element that no rank holds has an infinite difference.
    """
    torch.set_num_threads(1)
    reference: Found = torch.load(folder / "reference.pt")
    found = [torch.load(folder / f"rank{r}.pt") for r in range(spec.layout.world_size)]
    whole: dict[str, dict[str, Tensor]] = {"grads": {}, "params": {}}
    worst: dict[str, dict[str, float]] = {"grads": {}, "params": {}}
    for kind in ("grads", "params"):
        for name, full in reference[kind].items():
            whole[kind][name] = torch.full_like(full, torch.nan)
            worst[kind][name] = 0.0
        for one in found:
            for name, values in one[kind].items():
                tied = spec.shape.tie_word_embeddings and name == "head.weight"
                full_name = TIED_NAME if tied else name
                part = one["parts"][name]
                take(whole[kind][full_name], part).copy_(values)
                diff = _diff(take(reference[kind][full_name], part), values)
                worst[kind][full_name] = max(worst[kind][full_name], diff)
        for name, full in whole[kind].items():
            if full.isnan().any():
                worst[kind][name] = math.inf
    losses = torch.tensor([one["losses"] for one in found], dtype=torch.float64)
    missing = [f"rank {r}: {name}" for r, one in enumerate(found) for name in one["missing"]]
    diffs = {
        "loss_diff": _diff(losses, torch.tensor(reference["losses"], dtype=torch.float64)),
        "grad_diff": max(worst["grads"].values()),
        "param_diff": max(worst["params"].values()),
    }
    out = {
        **{key: diff if math.isfinite(diff) else None for key, diff in diffs.items()},
        "passed": not missing and all(diff <= TOLERANCE for diff in diffs.values()),
        "worst_parameter": max(worst["grads"], key=lambda name: worst["grads"][name]),
        "missing_gradients": missing,
    }
    (folder / "differences.json").write_text(json.dumps(out))
    if spec.dump is not None:
        Path(spec.dump).mkdir(parents=True, exist_ok=True)
        torch.save(reference, Path(spec.dump) / "reference.pt")
        torch.save({**whole, "losses": found[0]["losses"]}, Path(spec.dump) / "check.pt")
