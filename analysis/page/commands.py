"""The commands that plan, run or predict the layout of a row of results again."""

import functools
import shlex
from collections.abc import Collection
from typing import Any

from ultrabench.analysis.rows import Row
from ultrabench.layout import AXES


def launch_words(row: Row) -> str:
    """The words of `sweep plan` and `sweep launch` that make a sweep of one layout; unknown values are left out."""
    words = {**_names(row), "kernel.precision": row["precision"], "sweep.nodes": [row["nodes"]]}
    words |= {f"sweep.{name}": row[name] for name in ("seq_len", "gbs")}
    return f"{_joined(words)} {_of_layout(*map(row.get, AXES))[0]}".strip()


def predict_words(row: Row, profiles: Collection[str]) -> str:
    """The words of `ultrabench predict` that describe a layout; unknown values are left out.

    Args:
        profiles: names of known profiles; an imported row is predicted with that of its kernel.
    """
    imported = row["source"] is not None and row["kernel"] in profiles
    words = {**_names(row), "profile": row["kernel"] if imported else None}
    words |= {name: row[name] for name in ("precision", "nodes", "seq_len")}
    return f"{_joined(words)} {_of_layout(*map(row.get, AXES))[1]}".strip()


def _names(row: Row) -> Row:
    """Model, hardware and kernel; the kernel of an imported row is no kernel that can be run here."""
    return {name: row[name] for name in ("model", "hardware", *(["kernel"] if row["source"] is None else []))}


@functools.cache  # because a layout is run with many models and numbers of nodes
def _of_layout(*values: Any) -> tuple[str, str]:
    """The words of a sweep and of a prediction for the AXES; those that do not count for the schedule are left out."""
    told = dict(zip(AXES, values, strict=True))
    if told["pp_schedule"] == "none":
        del told["pp_schedule"]
    if told.get("pp_schedule") != "interleaved":
        del told["virtual_stages"]
    known = {name: value for name, value in told.items() if value is not None}
    of_sweep = known | ({"dp_shard": "all"} if known.get("dp_shard") == 0 else {})
    words = {f"sweep.{name}": [value] for name, value in of_sweep.items() if name != "dp"}
    return _joined(words), _joined({name: value for name, value in of_sweep.items() if value != "all"})


def _joined(words: Row) -> str:
    return " ".join(_word(name, str(value)) for name, value in words.items() if value is not None)


@functools.cache  # because many rows share most of their words
def _word(name: str, value: str) -> str:
    return shlex.quote(f"{name}={value.replace(chr(39), '')}")
