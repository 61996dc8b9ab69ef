"""`ultrabench kernel check` compares one layout on processes or GPUs of this machine with a single process."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ultrabench.cli.tables import print_json, say, show, table, warn
from ultrabench.column import capacity_text
from ultrabench.errors import ConfigError, SweepFolderError, counted
from ultrabench.hardware import DEVICE_KINDS
from ultrabench.kernel.requests import TINY, CheckSpec, check
from ultrabench.record import to_dict
from ultrabench.sweep.arguments import layout_of, read_arguments, require_possible
from ultrabench.sweep.config.load import load_model

MAX_RANKS = 64
"""Largest number of processes of a check."""
RANK_MEM_BYTES = 1e8
"""Bytes of memory of each process of the check, without torch's libraries, which all processes share."""
PARAM_STATE_BYTES = 40
"""Bytes for each parameter in fp64: the parameter, its gradient, a copy to compare, two moments of AdamW."""
SPEC_ARGUMENTS = ("seq_len", "seed", "steps", "attention", "routing")
"""Arguments besides the model and the axes; they are fields of CheckSpec."""


def run_check(arguments: list[str], options: Mapping[str, Any], as_json: bool) -> int:
    """Checks one layout; returns 0 when its results equal those of one process, else 1."""
    spec = check_spec(arguments, options)
    num_ranks, num_cores = spec.layout.world_size, len(os.sched_getaffinity(0))
    shares_host = DEVICE_KINDS[spec.device].shares_host
    if shares_host and num_ranks > max(num_cores, 8):
        memory_text = (
            f"{num_ranks} processes need about {capacity_text(num_ranks * RANK_MEM_BYTES)} of memory"
        )
        warn(f"{memory_text}, and take minutes on {counted(num_cores, 'core')}")
    ranks_text = f"{counted(num_ranks, 'process' if shares_host else 'GPU')} in {spec.precision}"
    say(f"comparing {spec.layout.label()} on {ranks_text} with one process in fp64")
    result = check(spec)
    if as_json:
        print_json(to_dict(result))
        return int(not result.passed)
    diffs = [
        ("loss", result.loss_diff, result.loss_allowed),
        ("gradients", result.grad_diff, result.grad_allowed),
        ("parameters", result.param_diff, result.param_allowed),
    ]
    rows = [(name, "-" if diff is None else f"{diff:.3g}", f"{limit:.3g}") for name, diff, limit in diffs]
    title = f"{spec.layout.label()}, {spec.shape.name}, {spec.precision} on {spec.device}"
    show(table(title, "difference of", "is", "allowed", rows=rows))
    say(*(f"  {line}" for line in (*result.missing_gradients, result.error) if line))
    outcome_text = "equal" if result.passed else "NOT equal"
    if result.error and result.loss_diff is None:
        outcome_text = "no result"
    worst_text = f"; worst: {result.worst_parameter}" if result.worst_parameter and not result.passed else ""
    say(f"{outcome_text} ({result.seconds:.1f} s){worst_text}")
    return int(not result.passed)


def check_spec(arguments: list[str], options: Mapping[str, Any]) -> CheckSpec:
    """The check that arguments such as `dp=2 tp=2` and the options of the command describe.

    Args:
        options: the fields device, precision, compile and dump of CheckSpec.

    Raises:
        ConfigError: a word is unknown, or the layout is impossible.
    """
    values = {"dp": 1} | read_arguments(arguments, ("model", *SPEC_ARGUMENTS), "dp=2 tp=2 gas=4")
    shape = load_model(values["model"]) if "model" in values else TINY
    layout = layout_of(values)
    dump = _make_folder(options["dump"])
    fields = {**options, "dump": dump, **{n: values[n] for n in SPEC_ARGUMENTS if n in values}}
    spec = CheckSpec(layout=layout, shape=shape, **fields)
    require_possible(spec.run, spec.device)
    if layout.world_size > MAX_RANKS:
        fact = f"{layout.label()} needs {layout.world_size} processes"
        raise ConfigError(f"{fact}; the check runs at most {MAX_RANKS}: choose smaller degrees")
    needed_bytes = 2 * PARAM_STATE_BYTES * shape.num_params
    ram_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed_bytes > ram_bytes:
        state_text = (
            f"{shape.num_params:,} parameters, {PARAM_STATE_BYTES} bytes each, "
            "in the layout and in one process"
        )
        fact = f"model={shape.name} needs at least {capacity_text(needed_bytes)} ({state_text})"
        raise ConfigError(
            f"{fact}; this machine has {capacity_text(ram_bytes)}: use a smaller model, such as tiny"
        )
    return spec


def _make_folder(dump: str | None) -> str | None:
    """Makes the folder `dump`; returns its absolute path, or None without a folder."""
    if dump is None:
        return None
    try:
        Path(dump).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SweepFolderError(f"cannot write --dump {dump}: {error.strerror}; choose another") from error
    return str(Path(dump).absolute())
