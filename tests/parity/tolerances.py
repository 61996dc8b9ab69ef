"""How much losses and gradient norms differ between layouts, and by planted faults: for docs/doctor.md.

`python -m tests.parity.tolerances HIDDEN_SIZE PRECISION SEED...` compares with one process: the loss of the fifth step
and the gradient norm of the first, both relative.
"""

import os
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from tests.parity.planted import FAULTS
from tests.parity.test_layouts import spec_of
from ultrabench.kernel.children import run_forked
from ultrabench.kernel.mesh import build_mesh
from ultrabench.kernel.requests import SINGLE_THREADED, TINY
from ultrabench.kernel.step import TrainStep
from ultrabench.run import RunSpec, Workload

STEPS = 5
GBS = 8
LAYOUTS = (
    "gas=4 mbs=2", "dp=2 gas=4", "dp=2 zero_stage=3 mbs=4", "tp=2 gas=8", "tp=2 mbs=8", "pp=2 gas=8",
    "pp=2 gas=4 mbs=2 interleaved", "pp=2 gas=8 zbv", "cp=2 gas=4 mbs=2", "dp=2 tp=2 zero_stage=1 gas=4",
)  # fmt: skip
PLANTED = {
    "drop_tp_all_reduce": "tp=2 gas=8", "wrong_divisor": "dp=2 gas=4", "untied_sum": "pp=2 gas=8 tied",
    "drop_microbatch": "dp=2 gas=4", "ring_sees_the_future": "cp=2 gas=4 mbs=2",
    "lost_key_gradients": "cp=2 gas=4 mbs=2", "unsummed_rows": "tp=2 gas=8", "reversed_tokens": "tp=2 gas=8",
}  # fmt: skip


def run_of(case: str, hidden_size: int, precision: str, seed: int) -> RunSpec:
    """The run that a line such as those of test_layouts.py describes, of a model as wide as asked."""
    spec, heads = spec_of(case), max(4, hidden_size // 64)
    shape = replace(
        TINY, hidden_size=hidden_size, num_attention_heads=heads, num_key_value_heads=heads // 2,
        intermediate_size=2 * hidden_size, vocab_size=4 * hidden_size, tie_word_embeddings="tied" in case.split(),
    )  # fmt: skip
    workload = Workload(seq_len=64, gbs=GBS, seed=seed)
    return replace(
        spec.run, shape=shape, workload=workload, kernel=replace(spec.run.kernel, precision=precision)
    )


def train(run: RunSpec, fault: str | None, rank: int, folder: Path) -> tuple[float, float]:
    """The loss of the last step and the gradient norm of the first."""
    if fault:
        FAULTS[fault]()
    torch.set_num_threads(1)
    ranks = run.layout.world_size
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    trainer = TrainStep(run, torch.device("cpu"), build_mesh(run.layout, "cpu"))
    norms = []
    for step in range(1, STEPS + 1):
        loss = trainer.update(trainer.accumulate(*trainer.batch(step)))
        norms.append(float(trainer.gradient_norm))
    return float(loss), norms[0]


def found(run: RunSpec, fault: str | None = None) -> tuple[float, float]:
    """What rank 0 of a run finds."""
    with tempfile.TemporaryDirectory() as name:
        ranks = range(run.layout.world_size)
        bodies = {f"rank {rank}": partial(train, run, fault, rank, Path(name)) for rank in ranks}
        return run_forked(bodies, 600.0)["rank 0"]


def main(hidden_size: int, precision: str, seeds: list[int]) -> None:
    """Prints a line for each seed and case."""
    cases = [*((None, case) for case in LAYOUTS), *PLANTED.items()]
    for seed in seeds:
        of = partial(run_of, hidden_size=hidden_size, precision=precision, seed=seed)
        alone = {tied: found(of(f"mbs={GBS}{tied}")) for tied in ("", " tied")}
        for fault, case in cases:
            pairs = zip(found(of(case), fault), alone[" tied" if "tied" in case else ""], strict=True)
            loss, norm = (abs(value - wanted) / abs(wanted) for value, wanted in pairs)
            print(
                f"seed {seed} {fault or 'no fault':21} {case:30} loss {loss:.1e} gradient norm {norm:.1e}",
                flush=True,
            )


if __name__ == "__main__":
    if SINGLE_THREADED.items() - os.environ.items():  # threads before a fork would hang it
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **SINGLE_THREADED})
    main(int(sys.argv[1]), sys.argv[2], [int(seed) for seed in sys.argv[3:]])
