"""`ultrabench kernel check` compares one layout on CPU processes with a single process."""

import os
from dataclasses import fields
from pathlib import Path

from ultrabench.cli.kernel.words import layout_of, read_words, require_possible, whole
from ultrabench.cli.tables import out, print_json, say, table, warn
from ultrabench.errors import ConfigError, SweepFolderError, counted
from ultrabench.hardware import GIB
from ultrabench.kernel.requests import TINY, TOLERANCE, CheckSpec, check
from ultrabench.layout import Layout
from ultrabench.record import to_dict
from ultrabench.sweep.config.load import load_model

MOST_RANKS = 64
RANK_BYTES = 1e8
"""Bytes of memory of each process of the check, without torch's libraries, which all processes share."""
STATE_BYTES = 40
"""Bytes for each parameter in fp64: the parameter, its gradient, a copy to compare, two moments of AdamW."""
OTHERS = ("model", "seq_len", "seed", "steps", "recompute")


def run_check(words: list[str], dump: str | None, as_json: bool) -> int:
    """Checks one layout on CPU processes; returns 0 when its results equal those of one process, else 1."""
    spec = check_spec(words, dump)
    ranks, cores = spec.layout.world_size, len(os.sched_getaffinity(0))
    if ranks > max(cores, 8):
        room = ranks * RANK_BYTES / GIB
        warn(
            f"{ranks} processes at a time need about {room:.0f} GiB of memory; with {cores} cores it takes minutes"
        )
    if not as_json:
        say(f"checking {spec.layout.label()} on {counted(ranks, 'process')} against one")
    result = check(spec)
    if as_json:
        print_json(to_dict(result))
        return int(not result.passed)
    made = table(f"{spec.layout.label()}, {spec.shape.name}", "largest difference of", "is", "allowed")
    found = {"loss": result.loss_diff, "gradients": result.grad_diff, "parameters": result.param_diff}
    for name, value in found.items():
        made.add_row(name, "-" if value is None else f"{value:.3g}", f"{TOLERANCE:g}")
    out().print(made)
    for line in [*result.missing_gradients, *([result.error] if result.error else [])]:
        say(f"  {line}")
    where = f"; worst: {result.worst_parameter}" if result.worst_parameter and not result.passed else ""
    undecided = result.loss_diff is None and result.error is not None
    verdict = "the same" if result.passed else "not decided" if undecided else "NOT the same"
    say(f"{verdict} ({result.seconds:.1f} s){where}")
    return int(not result.passed)


def check_spec(words: list[str], dump: str | None = None) -> CheckSpec:
    """The check that words such as `dp=2 tp=2` describe.

    Raises:
        ConfigError: a word is unknown, or the layout is impossible.
    """
    known = [*(f.name for f in fields(Layout)), *OTHERS]
    values = read_words(words, known, "dp=2 tp=2 gas=4")
    shape = load_model(values.pop("model")) if "model" in values else TINY
    schedule, recompute = values.pop("pp_schedule", None), values.pop("recompute", "none")
    numbers = {key: whole(key, value) for key, value in values.items()}
    rest = {key: numbers.pop(key) for key in ("seq_len", "seed", "steps") if key in numbers}
    layout = layout_of({"dp": 1} | numbers, schedule)
    spec = CheckSpec(layout=layout, shape=shape, dump=_folder(dump), recompute=recompute, **rest)  # type: ignore[arg-type]
    require_possible(spec.run.kernel, layout, shape, spec.seq_len)
    if layout.world_size > MOST_RANKS:
        raise ConfigError(
            f"{layout.label()} needs {layout.world_size} processes; the check runs up to {MOST_RANKS} "
            "on this machine: choose smaller degrees"
        )
    needed, have = (
        2 * STATE_BYTES * shape.num_params,
        os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )
    if needed > have:
        raise ConfigError(
            f"model={shape.name} needs at least {needed / GIB:,.0f} GiB: {STATE_BYTES} bytes for each of its "
            f"{shape.num_params:,} parameters, in the layout and in the one process; this machine has "
            f"{have / GIB:,.0f} GiB: choose a smaller model, such as model=tiny"
        )
    return spec


def _folder(dump: str | None) -> str | None:
    if dump is None:
        return None
    try:
        Path(dump).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SweepFolderError(
            f"cannot write --dump {dump}: {error.strerror}; choose another folder"
        ) from error
    return str(Path(dump).absolute())
