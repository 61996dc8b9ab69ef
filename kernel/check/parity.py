"""Checks that a layout trains correctly: it compares forked ranks with a single process that trains in fp64.

`python -P -m ultrabench.kernel.check.parity` reads a CheckSpec from stdin and writes a CheckResult. It imports
torch but never computes and never uses a GPU: children that are forked after a matrix product in the parent hang,
and CUDA does not work in a child of a process that has used it.

How much of a difference is allowed: in fp64 at most FP64_TOLERANCE. In fp32 and bf16 rounding alone makes differences
that depend on the model, so they are measured. The single process trains the plain model in that precision as well,
and for each tensor a layout may differ from fp64 by ALLOWED_ROUNDINGS times what this differs from it.
Both are L2 norms over the elements of the tensor: rounding errors of many elements are independent,
so that their norm hardly depends on the order of sums, in which layouts differ, while the largest error of a single
element does. The parameters after AdamW are taken together: where a gradient is nearly 0,
rounding decides about the sign of a whole update, and a tensor may have one such element or none.
"""

import json
import math
import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from ultrabench.errors import counted
from ultrabench.hardware import DEVICE_KINDS
from ultrabench.kernel.check.rounded_products import round_products
from ultrabench.kernel.children import ChildError, run_forked
from ultrabench.kernel.data import make_batch
from ultrabench.kernel.device import kind_of
from ultrabench.kernel.dp import COMPUTE_DTYPE, MASTER_DTYPE
from ultrabench.kernel.mesh import Part, build_mesh, join_process_group, own_values, part_view
from ultrabench.kernel.model import TIED_PARAMETER_NAME, Decoder, copy_name, cross_entropy
from ultrabench.kernel.moe import router_biases, update_router_biases
from ultrabench.kernel.rank import environment
from ultrabench.kernel.rank.ran import observe_steps, require_requested_options
from ultrabench.kernel.requests import FP64_TOLERANCE, CheckResult, CheckSpec
from ultrabench.kernel.step import ADAMW_BETAS, CLIP_NORM, WEIGHT_DECAY, TrainStep, learning_rate
from ultrabench.processes import die_with_parent
from ultrabench.record import from_dict, to_dict
from ultrabench.routing import LEARNED_ROUTING
from ultrabench.run import RunSpec
from ultrabench.stages import split_stages

TIMEOUT_S = {"cpu": 120.0, "cuda": 600.0}
"""Device type -> seconds for all of a training; on GPUs compiling the layers takes most of them."""
UNREACHED_NORM = 1e3
"""A gradient norm that no step reaches, so that nothing is clipped; finite, since torch multiplies by its inverse."""
ALLOWED_ROUNDINGS = {"loss": 8.0, "grad": 3.0, "param": 3.0}
"""Largest difference of a layout in units of the rounding error of one process in the same precision.

Correct layouts show 1.0 to 1.3 for gradients, and up to 2.2 for the loss, which is only a few numbers.
"""


def run_check(spec: CheckSpec) -> CheckResult:
    """Runs one check with forked ranks; the caller may have imported torch, but must not have used it."""
    start_s, ranks = time.monotonic(), range(spec.layout.world_size)
    with tempfile.TemporaryDirectory(prefix="ultrabench-check-") as folder_name:
        folder, timeout_s = Path(folder_name), TIMEOUT_S[spec.device]
        functions = {f"rank {rank}": partial(_train_rank, spec, rank, folder) for rank in ranks}
        for precision in {"fp64", spec.precision}:
            functions[f"one process in {precision}"] = partial(_train_plain, spec, precision, folder)
        try:
            if DEVICE_KINDS[spec.device].has_gpus:
                num_gpus = run_forked({"GPUs": torch.cuda.device_count}, timeout_s)["GPUs"]
                if num_gpus < len(ranks):
                    gpus_text = f"torch sees {counted(num_gpus, 'GPU')} here"
                    return CheckResult(refused=f"{spec.layout.label()} needs {len(ranks)} GPUs; {gpus_text}")
            run_forked(functions, timeout_s)
            results = run_forked({"comparison": partial(_compare, spec, folder)}, timeout_s)
            result: CheckResult = results["comparison"]
        except ChildError as error:
            result = CheckResult(error=str(error))
    return replace(result, seconds=time.monotonic() - start_s)


def _prepare_device(spec: CheckSpec, index: int) -> torch.device:
    """The device of a forked process, which it uses alone; products of fp32 numbers are not rounded to TF32."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    return environment.use_device(spec.device, index)


class _PlainStep:
    """The plain model on one process, with clipping and AdamW of torch; its methods are those of a TrainStep.

    In 16 bits it computes with copies of fp32 parameters, as the layouts do.
    """

    def __init__(self, run: RunSpec, precision: str, device: torch.device) -> None:
        torch.set_default_dtype(MASTER_DTYPE[precision])
        self.run, self.device, self.dtype = run, device, COMPUTE_DTYPE[precision]
        shape, positions = run.shape, [range(run.workload.seq_len)]
        self.model = Decoder(shape, split_stages(shape, 1)[0], positions, run.kernel.routing).to(device)
        if precision == "fp8":
            round_products(self.model)
        assert self.model.head is not None
        self.model.head.loss = _plain_loss
        self.clip_norm, self.models = CLIP_NORM, [self.model]
        self.params = dict(self.model.named_parameters())
        self.parts: dict[str, Part] = dict.fromkeys(self.params, ())  # all of them are whole
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(self.model.initial_value(name, param.shape, run.workload.seed, device))
        lr = learning_rate(shape)
        self.optimizer = torch.optim.AdamW(
            self.params.values(), lr=lr, betas=ADAMW_BETAS, weight_decay=WEIGHT_DECAY
        )

    def set_gas(self, gas: int) -> None:
        """Makes the next steps those of the global batch that a layout has with `gas` micro-batches."""
        self.run = self.run.with_gas(gas)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The inputs and targets of the whole global batch in `step`."""
        all_sequences = range(self.run.layout.gbs)
        shape = self.run.shape
        num_later = shape.num_nextn_predict_layers
        return make_batch(all_sequences, step, self.run.workload, shape.vocab_size, self.device, num_later)

    def accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Computes the gradients of the mean loss, and returns the loss."""
        compute_params = {name: param.to(self.dtype) for name, param in self.params.items()}
        loss: Tensor = functional_call(self.model, compute_params, (inputs, targets))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def update(self, loss: Tensor) -> Tensor:
        """Clips, updates the parameters and clears the gradients; returns the loss."""
        torch.nn.utils.clip_grad_norm_(self.params.values(), self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.run.shape.num_experts and self.run.kernel.routing == LEARNED_ROUTING:
            update_router_biases(self.models, self.run.shape)
        return loss


def _plain_loss(
    x_BSH: Tensor, weight_VH: Tensor, targets_BS: Tensor, _: object, loss_weight: float = 1.0
) -> Tensor:
    """What `head_loss` computes, from all logits at once."""
    return loss_weight * cross_entropy(functional.linear(x_BSH, weight_VH), targets_BS)


def _train_plain(spec: CheckSpec, precision: str, folder: Path) -> None:
    """Trains the plain model on the whole global batch."""
    trainer = _PlainStep(spec.run, precision, _prepare_device(spec, 0))
    torch.save(_train_steps(spec, trainer), folder / f"{precision}.pt")


def _train_rank(spec: CheckSpec, rank: int, folder: Path) -> None:
    """Trains `spec.layout` as rank `rank`."""
    device = _prepare_device(spec, rank)
    store = dist.FileStore(str(folder / "store"), spec.layout.world_size)  # type: ignore[attr-defined]
    join_process_group(device, store, rank, spec.layout.world_size)
    mesh = build_mesh(spec.layout, device.type)
    compile_backend = "inductor" if kind_of(device).has_gpus else "aot_eager"
    trainer = TrainStep(spec.run, device, mesh, compile_backend=compile_backend)
    with observe_steps(trainer) as observations:
        tensors_by_kind = _train_steps(spec, trainer)
    if not spec.sizes:  # what is observed is that of steps of one size
        require_requested_options(trainer, observations)
    tensors_by_kind |= {"parts": trainer.parts, "graphs": trainer.compiler.num_graphs}
    torch.save(tensors_by_kind, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


def _train_steps(spec: CheckSpec, trainer: TrainStep | _PlainStep) -> dict[str, Any]:
    """Trains some steps, of which the second is not clipped; returns what this process holds then.

    These are `loss` of all steps, `grad` by name after the first backward, and `param` by name at the end, with which
    the biases of routers count in fp64; rounding may move a token to another expert, and a bias by a whole step.
    """
    losses, grads, params, parts = [], dict[str, Tensor](), trainer.params, trainer.parts
    for step in range(1, spec.steps + 1):
        if spec.sizes:
            trainer.set_gas(spec.sizes[(step - 1) % len(spec.sizes)])
        loss = trainer.accumulate(*trainer.batch(step))
        if step == 1:
            local_grads = {n: own_values(p.grad, parts[n]) for n, p in params.items() if p.grad is not None}
            grads = {name: grad.to("cpu", copy=True) for name, grad in local_grads.items()}
        trainer.clip_norm = UNREACHED_NORM if step == 2 else spec.clip
        losses.append(trainer.update(loss).item())
    values = {name: own_values(param.detach(), parts[name]).cpu() for name, param in params.items()}
    if spec.precision == "fp64":
        values |= {name: bias for model in trainer.models for name, bias in router_biases(model).items()}
    return {"loss": {"loss": torch.tensor(losses, dtype=torch.float64)}, "grad": grads, "param": values}


def _l2_diff(a: Tensor, b: Tensor) -> float:
    """The L2 norm of the difference; inf if a value is not a number."""
    return float((a - b).double().norm().nan_to_num(nan=math.inf))


def _compare(spec: CheckSpec, folder: Path) -> CheckResult:
    """The differences between each rank's parts and one process in fp64, and what is allowed for each tensor.

    Here `exact` and `rounded` are what the single process holds after training in fp64 and in the precision of the
    layout, `assembled` is made of the parts of the ranks; each maps loss, grad and param to tensors by name.
    Each rank is compared with its parts of the full tensors, so that replicas which differ are found. An
    element that no rank holds has an infinite difference.
    """
    torch.set_num_threads(1)
    exact, rounded = (torch.load(folder / f"{precision}.pt") for precision in ("fp64", spec.precision))
    tensors_by_rank = [torch.load(folder / f"rank{rank}.pt") for rank in range(spec.layout.world_size)]
    assembled: dict[str, dict[str, Tensor]] = {}
    result: dict[str, Any] = {"passed": True}
    for kind, exact_values in exact.items():
        assembled[kind] = {name: torch.full_like(value, torch.nan) for name, value in exact_values.items()}
        diffs = dict.fromkeys(exact_values, 0.0)
        for rank_tensors in tensors_by_rank:
            for name, rank_values in rank_tensors[kind].items():
                full_name = TIED_PARAMETER_NAME if name == copy_name(spec.shape) else name
                part = rank_tensors["parts"].get(name, ())
                part_view(assembled[kind][full_name], part).copy_(rank_values)
                part_diff = _l2_diff(part_view(exact_values[full_name], part), rank_values)
                diffs[full_name] = max(diffs[full_name], part_diff)
        for name, assembled_value in assembled[kind].items():
            diffs[name] = max(diffs[name], _l2_diff(exact_values[name], assembled_value))
        roundings = {name: _l2_diff(value, rounded[kind][name]) for name, value in exact_values.items()}
        if kind == "param":
            diffs, roundings = ({"all": math.hypot(*norms.values())} for norms in (diffs, roundings))
        # In fp32 and bf16 an update of one element may have the other sign.
        min_allowed = FP64_TOLERANCE
        if kind == "param" and spec.precision != "fp64":
            min_allowed = 2 * learning_rate(spec.shape)
        allowed = {name: max(min_allowed, ALLOWED_ROUNDINGS[kind] * diff) for name, diff in roundings.items()}
        worst_name = max(diffs, key=lambda name: diffs[name] / allowed[name])
        result[f"{kind}_diff"] = diffs[worst_name] if math.isfinite(diffs[worst_name]) else None
        result[f"{kind}_allowed"] = allowed[worst_name]
        result["passed"] &= diffs[worst_name] <= allowed[worst_name]
        if kind == "grad":
            result["worst_parameter"] = worst_name
    if spec.dump is not None:
        torch.save(exact, Path(spec.dump) / "reference.pt")
        torch.save(assembled, Path(spec.dump) / "check.pt")
    missing_grads = list[str]()
    for rank, rank_tensors in enumerate(tensors_by_rank):
        missing_grads += [f"rank {rank}: {n}" for n in rank_tensors["parts"] if n not in rank_tensors["grad"]]
    result["passed"] &= not missing_grads
    result["graphs"] = max(rank_tensors["graphs"] for rank_tensors in tensors_by_rank)
    return CheckResult(**result, missing_gradients=tuple(missing_grads))


if __name__ == "__main__":
    die_with_parent(os.getppid())  # the process that asks may be killed
    print(json.dumps(to_dict(run_check(from_dict(CheckSpec, json.load(sys.stdin))))))
