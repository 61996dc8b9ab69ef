"""Sweeps that benchmarks launch: their small model, their journals, and their runs under a cold `torchrun`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from timing import ultrabench

from ultrabench.processes import thread_variables

MODEL = """\
hidden_size: 64
num_hidden_layers: 2
num_attention_heads: 4
num_key_value_heads: 4
intermediate_size: 256
vocab_size: 512
tie_word_embeddings: false
rope_theta: 10000.0
"""
LAYOUTS = [
    "hardware=cpu", "model=minute", "measure=quick", "sweep.nodes=[1]", "sweep.tp=[1]", "sweep.pp=[1,2]",
    "sweep.zero_stage=[0,1,2,3]", "sweep.mbs=[1,2,3,4,6,8,12,24]", "sweep.gas=[1,2,3,4,6]", "sweep.gbs=24",
    "sweep.seq_len=16",
]  # fmt: skip
"""25 layouts of the model `minute` with steps of about 40 ms, of which 6 to 10 are measured."""
WRAPPER = """
import os, sys
os.environ["ULTRABENCH_REPORT"] += os.environ["RANK"]
from ultrabench.kernel.worker import main
code = main()
sys.stdout.flush()
os._exit(code)  # threads of torch may abort a process that ends by itself
"""
"""A program of a rank under torchrun, whose report is named like that of its run with the rank at the end."""
Event = dict[str, Any]


def write_model(folder: Path, name: str = "minute", text: str = MODEL) -> None:
    """Writes a model that commands in `folder` find by its name."""
    path = folder / "ultrabench" / "model" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def launch(folder: Path, *words: str, check: bool = True) -> None:
    """Launches a sweep in `folder` and follows it to its end."""
    subprocess.run(ultrabench("sweep", "launch", *words), cwd=folder, check=check, stdout=subprocess.DEVNULL)


def events(sweep: Path) -> list[Event]:
    """The events in the journals of a sweep by time, without a line that is still being written."""
    texts = [path.read_text() for path in sweep.glob("journal/*.jsonl")]
    lines = (json.loads(line) for text in texts for line in text.rpartition("\n")[0].splitlines())
    return sorted(lines, key=lambda event: event["time"])


def write_tasks(sweep: Path, folder: Path) -> list[Path]:
    """Writes each task that the ranks of a sweep were given to a file of its own; returns the files."""
    jobs = [json.loads(path.read_text()) for path in sweep.glob("allocations/*/allocation.json")]
    files = {
        folder / f"{task['run_id']}.{task['repeat']}.json": task for job in jobs for task in job["tasks"]
    }
    for path, task in files.items():
        path.write_text(json.dumps(task))
    return [*files]


def torchrun(ranks: int, *words: str) -> list[str]:
    """The command by which torchrun starts a program on so many ranks of this machine."""
    options = ("--standalone", f"--nproc-per-node={ranks}")
    return [sys.executable, "-m", "torch.distributed.run", *options, *words]


def cold_ranks(folder: Path, ranks: int) -> list[str]:
    """The command by which torchrun runs a task, which `task_variables` names, in processes that are not forked."""
    wrapper = folder / "wrapper.py"
    wrapper.write_text(WRAPPER)
    return torchrun(ranks, str(wrapper))


def task_variables(task: Path) -> dict[str, str]:
    """The environment in which ranks run the task in a file."""
    files = {"ULTRABENCH_SPEC": str(task), "ULTRABENCH_REPORT": f"{task}.report"}
    return {**os.environ, **files, **thread_variables(1)}


def report(task: Path) -> list[Event]:
    """The lines that rank 0 reported of the task in a file."""
    return [json.loads(line) for line in Path(f"{task}.report0").read_text().splitlines()]
