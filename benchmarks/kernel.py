"""Compares step times: the embedded kernel with the same in plain torch, and forked with exec'd ranks.

The forms are one process, DDP (compared with ZeRO-0) and FSDP2 (compared with ZeRO-3). On CPUs, the default,
both take steps in turn in the same processes; `cpu_ratio` compares their CPU times, which other programs on the
same cores disturb less. On GPUs each runs by itself, in the order ours, plain, plain, ours:

    python benchmarks/kernel.py --device cuda --models 1B,3B --mbs 1,2,4,8 --compile both
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from plain_model import PlainStep
from sweeps import cold_ranks, report, task_variables, torchrun

from ultrabench.agent.agent_group import free_port
from ultrabench.kernel.mesh import build_mesh, join_process_group
from ultrabench.kernel.rank.clock import run_timed
from ultrabench.kernel.rank.environment import use_device
from ultrabench.kernel.requests import CheckSpec
from ultrabench.kernel.step import TrainStep
from ultrabench.layout import Layout
from ultrabench.record import to_dict
from ultrabench.run import Task
from ultrabench.sweep.config.load import load_config, load_model

FORMS = {"single": 0, "ddp": 0, "fsdp2": 3}
"""Form of plain torch -> the ZeRO stage it is compared with."""
PEAK_FLOPS_PER_S = 989e12
"""Peak rate of H100 and H200 SXM in dense bf16, from their data sheets."""
FORKED = """
import os
from functools import partial
from ultrabench.kernel import worker
from ultrabench.kernel.children import run_forked

def body(rank):
    own = os.environ["ULTRABENCH_REPORT"] + str(rank)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), ULTRABENCH_REPORT=own)
    assert worker.main() == 0

run_forked({str(rank): partial(body, rank) for rank in range(2)}, 300)
"""
"""A program that forks two ranks of a task from a process that has imported the kernel."""


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Runs in a rank; returns the step and CPU times of each program in `job["who"]`, and peak bytes on GPUs."""
    torch.set_num_threads(1)
    device = use_device(job["device"], int(os.environ["RANK"]))
    join_process_group(device)
    steps = {who: {"ours": ours, "plain": plain}[who](job, device) for who in job["who"]}
    seconds: dict[str, list[float]] = {who: [] for who in steps}
    cpu_seconds: dict[str, list[float]] = {who: [] for who in steps}
    for number in range(job["warmup"] + job["steps"]):
        for who, step in steps.items():
            cpu_start = time.process_time()
            step_s, loss = run_timed(device, step)
            if number >= job["warmup"]:
                seconds[who].append(step_s)
                cpu_seconds[who].append(time.process_time() - cpu_start)
            assert loss == loss, "no number"
    peak = {"peak_bytes": torch.cuda.max_memory_allocated()} if device.type == "cuda" else {}
    dist.destroy_process_group()
    cpu = {f"{who}_cpu": median(times_s) for who, times_s in cpu_seconds.items()}
    return {**{who: median(times_s) for who, times_s in seconds.items()}, **cpu, **peak}


def ours(job: dict[str, Any], device: torch.device) -> Callable[[], float]:
    """A function that runs a step of the embedded kernel."""
    layout = Layout(dp=dist.get_world_size(), mbs=job["mbs"], zero_stage=FORMS[job["form"]])
    options = {name: job[name] for name in ("seq_len", "precision", "compile")}
    spec = CheckSpec(layout=layout, shape=load_model(job["model"]), **options).run
    trainer = TrainStep(spec, device, build_mesh(layout, device.type))
    batch = trainer.batch(1)
    return lambda: float(trainer.update(trainer.accumulate(*batch)))


def plain(job: dict[str, Any], device: torch.device) -> Callable[[], float]:
    """A function that runs a step of plain torch."""
    torch.manual_seed(0)
    shape = load_model(job["model"])
    trainer = PlainStep(shape, job["seq_len"], job["form"], job["precision"], device, compiled=job["compile"])
    batch = [torch.randint(shape.vocab_size, (job["mbs"], job["seq_len"]), device=device) for _ in "xy"]
    return lambda: trainer.step(*batch)


def ranks_of(job: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Runs the ranks of a job; returns what rank 0 measured, or nothing if a rank failed."""
    command = torchrun(ranks, __file__, "--job", json.dumps(job))
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return {} if process.returncode else dict(json.loads(process.stdout.splitlines()[-1]))


def compare(job: dict[str, Any], ranks: int) -> dict[str, Any]:
    """A row of the result: both times, their ratio, and on GPUs the mfu and peak memory of both."""
    runs_by_program: dict[str, list[dict[str, float]]] = {"ours": [], "plain": []}
    # On CPUs both run in the same processes; on GPUs each has the memory for itself.
    alone = [["ours"], ["plain"], ["plain"], ["ours"]]
    for turn in alone if job["device"] == "cuda" else [["ours", "plain"]]:
        measured = ranks_of({**job, "who": turn}, ranks)
        for who in turn:
            runs_by_program[who].append(measured)
    row = {k: job[k] for k in ("model", "form", "mbs", "seq_len", "precision", "compile")} | {"ranks": ranks}
    for who, runs in runs_by_program.items():
        if not all(runs):
            row[f"{who}_s"] = None  # it most likely ran out of memory; its log is on stderr
            continue
        row[f"{who}_s"] = min(run[who] for run in runs)
        if job["device"] == "cuda":
            per_token = load_model(job["model"]).flops_per_token(job["seq_len"])
            rate = per_token * job["mbs"] * job["seq_len"] / row[f"{who}_s"]
            row |= {f"{who}_mfu": rate / PEAK_FLOPS_PER_S, f"{who}_peak_bytes": runs[0]["peak_bytes"]}
    times_s = row["ours_s"], row["plain_s"]
    row["ratio"] = times_s[0] / times_s[1] if all(times_s) else None
    if all(times_s) and job["device"] == "cpu":
        (run,) = runs_by_program["ours"]
        row["cpu_ratio"] = run["ours_cpu"] / run["plain_cpu"]
    return row


def forked_and_execed(folder: Path, times: int) -> dict[str, float]:
    """Median step seconds of the same run on 2 CPU ranks, forked from a warm process and exec'd."""
    steps = {"warmup_steps": 5, "min_steps": 60, "max_steps": 60, "target_ci95_rel": 1e-9}
    layout = Layout(dp=2, zero_stage=1, mbs=4)
    spec = CheckSpec(layout=layout, shape=load_model("mini"), precision="fp32").run
    task = Task(
        run_id=spec.run_id,
        repeat=0,
        attempt=0,
        spec=spec,
        measure=replace(load_config([]).measure, **steps),
        device="cpu",
        rank_mem_bytes=2**32,
        predicted_step_time_s=0.1,
        predicted_duration_s=10,
        limit_s=100,
    )
    times_by_way: dict[str, list[float]] = {"forked": [], "execed": []}
    for turn in range(2 * times):
        way, path = ("forked", "execed", "execed", "forked")[turn % 4], folder / f"{turn}.json"
        path.write_text(json.dumps(to_dict(task)))
        place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        place["MASTER_PORT"] = str(free_port("127.0.0.1"))
        command = [sys.executable, "-c", FORKED] if way == "forked" else cold_ranks(folder, 2)
        env = task_variables(path) | (place if way == "forked" else {})
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        steps_s = [e["seconds"] for e in report(path) if e["event"] == "step" and e["measured"]]
        times_by_way[way].append(median(steps_s))
    return {way: min(times_s) for way, times_s in times_by_way.items()}


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--job", help=argparse.SUPPRESS)
    cli.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    cli.add_argument("--ranks", type=int, default=None)
    cli.add_argument("--models", default="mini")
    cli.add_argument("--mbs", default="4")
    cli.add_argument("--seq-len", type=int, default=None)
    cli.add_argument("--compile", default="no", choices=("no", "yes", "both"))
    cli.add_argument("--steps", type=int, default=None)
    cli.add_argument("--out", type=Path, help="file that gets a JSON line a row")
    args = cli.parse_args()
    if args.job:
        measured = measure(json.loads(args.job))
        if os.environ["RANK"] == "0":
            print(json.dumps(measured))
        return
    cuda = args.device == "cuda"
    ranks = args.ranks or (1 if cuda else 2)
    jobs = [
        {"model": model, "form": form, "mbs": int(mbs), "compile": compiled, "device": args.device,
         "seq_len": args.seq_len or (4096 if cuda else 256), "precision": "bf16" if cuda else "fp32",
         "warmup": 5 if cuda else 3, "steps": args.steps or (10 if cuda else 12)}
        for model in args.models.split(",")
        for form in FORMS
        for mbs in args.mbs.split(",")
        for compiled in {"no": [False], "yes": [True], "both": [False, True]}[args.compile]
    ]  # fmt: skip
    for job in jobs:
        row = compare(job, 1 if job["form"] == "single" else ranks)
        print(json.dumps(row), flush=True)
        if args.out:
            with args.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
    if not cuda:
        with tempfile.TemporaryDirectory() as name:
            by_way = forked_and_execed(Path(name), 4)
        print(json.dumps({**by_way, "ratio": by_way["forked"] / by_way["execed"]}))


if __name__ == "__main__":
    main()
