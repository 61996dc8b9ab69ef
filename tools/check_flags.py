#!/usr/bin/env python3
"""Lets a program's own parser judge the commands that a kernel file makes, without a GPU.

Example: python tools/check_flags.py megatron --python /path/to/its/python --checkout Megatron-LM

Layouts and values of knobs are drawn for several models; their commands run as they are, with a `python` in front of
PATH that only writes down what it was called with. A module of tools/parsers/ runs in the program's Python and gives
these words to the program's parser and to its validation. Printed are the words that it refuses with the layouts, the
values of knobs that no layout makes it accept, and the version; the exit code is 1 if there are any.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ultrabench.errors import ConfigError
from ultrabench.kernel_config import ANY
from ultrabench.layout import Layout
from ultrabench.run import UNKNOWN_PROCESS, AttemptKey, RunSpec, Workload, fill_in, fill_in_files
from ultrabench.sweep.config.load import load_config, load_model
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import rejections
from ultrabench.variant import FLAGS, variables_of

PARSERS = {
    "pretrain_gpt.py": "megatron_parser.py", "pretrain_hybrid.py": "megatron_parser.py",
    "torchtitan.train": "torchtitan_parser.py", "run_train.py": "nanotron_parser.py",
}  # fmt: skip
"""Word of a command -> the module of tools/parsers/ that judges it."""
MODELS = (
    "llama3-8b", "llama3.1-8b", "llama3.1-405b", "qwen3-8b", "qwen2.5-7b", "mistral-7b", "mixtral-8x7b",
    "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-120b", "nemotron-3",
)  # fmt: skip
DEGREES = {"tp": (1, 2, 4, 8), "pp": (1, 2, 4), "cp": (1, 2), "mbs": (1, 2), "gas": (1, 2, 4, 8, 16)}
WORLD_SIZE, SEQ_LEN = 64, 4096
SAMPLE = 2
"""The value that stands for all others of a knob, which are numbers."""
TRIES = 200
"""Draws of a layout until the kernel runs it."""

SHIM = """#!/bin/bash
out=$(mktemp "$RECORDED_WORDS/XXXXXXXX")
printf '%s\\0' "$CUDA_DEVICE_MAX_CONNECTIONS" "$PYTHONPATH" >> "$out"
for word in "$@"; do
  case $word in /dev/fd/*) copy=$(mktemp); cat "$word" > "$copy"; word=$copy ;; esac
  printf '%s\\0' "$word" >> "$out"
done
"""
"""What runs in place of the program's Python: it writes its words into a file of the folder $RECORDED_WORDS."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A run whose command is judged."""

    spec: RunSpec
    knob: str = ""
    """The value of a knob that is tried, as `NAME=VALUE`; empty if all have their usual values."""
    beside: str = ""
    """The value of another knob beside it."""

    @property
    def label(self) -> str:
        """The run in one line."""
        return f"{self.spec.shape.name} {self.spec.kernel.precision} {self.spec.label()}"


def drawn_layout(spec_model: str, config: SweepConfig, rng: random.Random, precision: str) -> RunSpec | None:
    """A run with a random layout that the kernel runs; None if it runs none of those drawn."""
    shape = load_model(spec_model)
    supports = config.kernel.supports
    zero_stages = [int(stage) for stage in supports.get("zero_stage", (0, 1, 3))]
    schedules = [name for name in supports.get("pp_schedule", ("1f1b",)) if name != "none"]
    for _ in range(TRIES):
        values: dict[str, Any] = {name: rng.choice(choices) for name, choices in DEGREES.items()}
        dp, rest = divmod(WORLD_SIZE, values["tp"] * values["pp"] * values["cp"])
        if rest:
            continue
        values |= {
            "dp": dp,
            "zero_stage": rng.choice(zero_stages),
            "recompute": rng.choice(("none", "none", "none", "attention", "selective", "full")),
            "sequence_parallel": rng.choice(("on", "off")) if values["tp"] > 1 else "on",
            "cp_exchange": rng.choice(("ring", "allgather")) if values["cp"] > 1 else "ring",
            "dp_overlap": rng.choice(("on", "off")),
            "ep": rng.choice((1, 2, 8)) if shape.num_experts else 1,
        }
        if values["pp"] > 1:
            values |= {"pp_schedule": rng.choice(schedules), "pp_layout": rng.choice(("auto", "even"))}
            values["virtual_stages"] = 2 if values["pp_schedule"] == "interleaved" else 1
        layout = Layout(**values)
        spec = RunSpec(
            shape=shape,
            workload=Workload(seq_len=SEQ_LEN, gbs=layout.gbs),
            layout=layout,
            kernel=replace(config.kernel, precision=precision),
            nodes=WORLD_SIZE // config.hardware.gpus_per_node,
            gpus_per_node=config.hardware.gpus_per_node,
        )
        if not any(rejections(config, spec)):
            return spec
    return None


def with_knobs(spec: RunSpec, values: Mapping[str, str]) -> RunSpec:
    """The run with these values of knobs."""
    return replace(spec, variant={f"{FLAGS}.{knob}": value for knob, value in values.items()})


def knob_values(config: SweepConfig) -> Iterator[tuple[str, str]]:
    """Each knob of the kernel with each of its values."""
    for knob in config.kernel.knobs:
        for value in config.kernel.flags[knob]:
            yield knob, str(SAMPLE) if value == ANY else value


class Draws:
    """Draws runs of a kernel."""

    def __init__(self, config: SweepConfig, models: Sequence[str], seed: int) -> None:
        self.config, self.rng = config, random.Random(seed)
        self.precisions = [*config.kernel.flags.get("precision", {config.kernel.precision: ()})]
        self.models = [m for m in models if drawn_layout(m, config, self.rng, config.kernel.precision)]
        if not self.models:
            raise ConfigError(f"kernel {config.kernel.name} trains none of the models {', '.join(models)}")
        print(
            f"models: {', '.join(self.models)}; not trained: {', '.join({*models} - {*self.models}) or 'none'}"
        )

    def run(self) -> RunSpec:
        """A run with the usual values of knobs."""
        while True:
            model, precision = self.rng.choice(self.models), self.rng.choice(self.precisions)
            if spec := drawn_layout(model, self.config, self.rng, precision):
                return spec

    def usual(self, num_runs: int) -> list[Drawn]:
        """Runs with the usual values of all knobs."""
        return [Drawn(spec=self.run()) for _ in range(num_runs)]

    def single(self, num_runs: int, knobs: Iterable[str]) -> list[Drawn]:
        """Runs in which one knob has another value."""
        return [
            Drawn(spec=with_knobs(self.run(), dict([knob.split("=")])), knob=knob)
            for knob in knobs
            for _ in range(num_runs)
        ]

    def pairs(self, num_runs: int, knobs: Sequence[str]) -> list[Drawn]:
        """Runs in which each of these values of knobs stands beside each value of another one."""
        all_values = [f"{name}={value}" for name, value in knob_values(self.config)]
        return [
            Drawn(
                spec=with_knobs(self.run(), dict(k.split("=") for k in (knob, other))),
                knob=knob,
                beside=other,
            )
            for knob in knobs
            for other in all_values
            if other.split("=")[0] != knob.split("=")[0]
            for _ in range(num_runs)
        ]


def recorded_command(spec: RunSpec, config: SweepConfig, folder: Path) -> dict[str, Any]:
    """The program and the words with which the command of a run starts Python."""
    run = spec, AttemptKey("r", 0, 0), config.measure
    files_folder = Path(tempfile.mkdtemp(dir=folder))
    for name, text in fill_in_files(*run, str(files_folder)).items():
        (files_folder / name).parent.mkdir(parents=True, exist_ok=True)
        (files_folder / name).write_text(text)
    command = fill_in(*run, UNKNOWN_PROCESS._replace(files=str(files_folder)))
    env = spec.kernel.env | {k: v for k, v in variables_of(spec.variant).items() if v is not None}
    if command[0] == sys.executable:
        words, recorded_env = command[1:], {}
    else:
        shim = folder / "python"
        if not shim.exists():
            shim.write_text(SHIM)
            shim.chmod(0o755)
        words_folder = Path(tempfile.mkdtemp(dir=folder))
        path = f"{folder}:{os.environ['PATH']}"
        environment = {**os.environ, **env, "PATH": path, "RECORDED_WORDS": str(words_folder)}
        subprocess.run(command, env=environment, check=True)
        (recorded,) = words_folder.iterdir()
        connections, python_path, *words = recorded.read_text().split("\0")[:-1]
        recorded_env = {"CUDA_DEVICE_MAX_CONNECTIONS": connections, "PYTHONPATH": python_path}
    words = words[1:] if words[0] == "-m" else words
    env |= {name: value for name, value in recorded_env.items() if value}
    return {"program": words[0], "arguments": words[1:], "env": env, "world_size": spec.layout.world_size}


def judged(
    commands: Sequence[Mapping[str, Any]], python: str, checkout: Path, capability: str
) -> tuple[str, list[str | None]]:
    """The version of the program, and for each command why its parser refuses it, or None.

    Raises:
        ConfigError: no module of tools/parsers/ knows the program, or it cannot start.
    """
    program = str(commands[0]["program"])
    if program not in PARSERS:
        raise ConfigError(f"no parser is known for {program}; known are {', '.join(PARSERS)}")
    module = Path(__file__).parent / "parsers" / PARSERS[program]
    words = [python, str(module), str(checkout.resolve()), capability]
    process = subprocess.run(words, input=json.dumps(commands), capture_output=True, text=True)
    if process.returncode:
        raise ConfigError(f"{module.name} failed: {process.stderr.strip().splitlines()[-1]}")
    answer = json.loads(process.stdout)
    return answer["version"], answer["refusals"]


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, or an empty text if git does not know it."""
    words = ["git", "-C", str(checkout), "log", "-1", "--format=%h of %cs"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def show_refusals(runs: Sequence[Drawn], refusals: Sequence[str | None]) -> bool:
    """Prints what is refused with the usual values of knobs or as an unknown word; whether nothing is."""
    runs_by_reason: dict[str, list[Drawn]] = defaultdict(list)
    for run, reason in zip(runs, refusals, strict=True):
        if reason is not None:
            runs_by_reason[reason].append(run)
    is_clean = True
    for reason, refused_runs in sorted(runs_by_reason.items(), key=lambda item: -len(item[1])):
        is_fault = (
            not all(run.knob for run in refused_runs) or "unrecognized" in reason or "invalid" in reason
        )
        is_clean &= not is_fault
        kind = "REFUSED" if is_fault else "refused beside other values"
        knobs_text = ", ".join(sorted({run.knob for run in refused_runs if run.knob})) or "usual knobs"
        print(f"{kind}, {len(refused_runs)} times: {reason}")
        print(f"    {knobs_text}; such as {refused_runs[0].label}")
    return is_clean


class Judge:
    """Gives commands to the parser of the program, and knows which values of knobs it has accepted."""

    def __init__(self, config: SweepConfig, python: str, checkout: Path, capability: str) -> None:
        self.config, self.words = config, (python, checkout, capability)
        self.accepted: dict[str, str] = {}
        self.num_accepted = self.num_commands = 0
        self.version = ""

    def judge(self, runs: Sequence[Drawn]) -> list[str | None]:
        """Why the parser refuses each of these runs, or None."""
        with tempfile.TemporaryDirectory() as folder:
            commands = [recorded_command(run.spec, self.config, Path(folder)) for run in runs]
            self.version, refusals = judged(commands, *self.words)
        for run, reason in zip(runs, refusals, strict=True):
            self.num_commands += 1
            if reason is None:
                self.num_accepted += 1
                self.accepted.setdefault(run.knob, run.beside)
        return refusals

    def missing(self) -> list[str]:
        """The values of knobs that no command has made the parser accept."""
        values = (f"{name}={value}" for name, value in knob_values(self.config))
        return [value for value in values if value not in self.accepted]


def main() -> int:
    """Draws, judges and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("kernel", help="name of a kernel file")
    parser.add_argument("--python", required=True, help="Python of the program's environment")
    parser.add_argument("--checkout", required=True, type=Path, help="folder of the program's sources")
    parser.add_argument("--capability", default="10.0", help="compute capability of the GPUs (default 10.0)")
    parser.add_argument("--hardware", default="b200x8")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--draws", type=int, default=100, help="number of layouts (default 100)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    first_model = options.models.split(",")[0]
    config = load_config([f"kernel={options.kernel}", f"hardware={options.hardware}", f"model={first_model}"])
    judge = Judge(config, options.python, options.checkout, options.capability)
    try:
        draws = Draws(config, options.models.split(","), options.seed)
        runs = [*draws.usual(options.draws), *draws.single(3, judge.missing())]
        is_accepted = show_refusals(runs, judge.judge(runs))
        if missing := judge.missing():
            judge.judge(draws.single(12, missing))
        if missing := judge.missing():
            judge.judge(draws.pairs(2, missing))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    for knob in judge.missing():
        print(f"REFUSED in all layouts drawn: {knob}")
    for knob, beside in judge.accepted.items():
        if beside:
            print(f"accepted only beside {beside}: {knob}")
    is_accepted &= not judge.missing()
    print(f"{judge.num_accepted:,} of {judge.num_commands:,} commands are accepted")
    print(
        f"{'accepted' if is_accepted else 'refused'} by: {judge.version} {commit_of(options.checkout)}".rstrip()
    )
    return 0 if is_accepted else 1


if __name__ == "__main__":
    sys.exit(main())
