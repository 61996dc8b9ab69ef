"""The commands that plan, run or predict the layout of a row of results again."""

import functools
import shlex
from collections.abc import Collection, Iterator
from typing import Any

from ultrabench.analysis.rows import Row
from ultrabench.layout import AXES


def launch_words(row: Row) -> str:
    """The words of `sweep plan` and `sweep launch` that make a sweep of one layout; unknown values are left out."""
    words = {**_names(row), "kernel.precision": row["precision"], "sweep.nodes": [row["nodes"]]}
    words |= {f"sweep.{name}": row[name] for name in ("seq_len", "gbs")}
    words |= {f"sweep.{name}": [value] for name, value in _axes(row) if name != "dp"}
    return _joined(words)


def predict_words(row: Row, profiles: Collection[str]) -> str:
    """The words of `ultrabench predict` that describe a layout; unknown values are left out.

    Args:
        profiles: names of known profiles; an imported row is predicted with that of its kernel.
    """
    imported = row["source"] is not None and row["kernel"] in profiles
    words = {**_names(row), "profile": row["kernel"] if imported else None}
    words |= {name: row[name] for name in ("precision", "nodes", "seq_len")}
    return _joined(words | {name: value for name, value in _axes(row) if value != "all"})


def _names(row: Row) -> Row:
    """Model, hardware and kernel; the kernel of an imported row is no kernel that can be run here."""
    return {name: row[name] for name in ("model", "hardware", *(["kernel"] if row["source"] is None else []))}


def _axes(row: Row) -> Iterator[tuple[str, Any]]:
    """The axes of a layout with the words of a sweep; those that do not count for its schedule are left out."""
    counts = {
        "pp_schedule": row["pp_schedule"] != "none",
        "virtual_stages": row["pp_schedule"] == "interleaved",
    }
    for name in AXES:
        value = "all" if name == "dp_shard" and row[name] == 0 else row[name]
        if value is not None and counts.get(name, True):
            yield name, value


def _joined(words: Row) -> str:
    return " ".join(_word(name, str(value)) for name, value in words.items() if value is not None)


@functools.cache  # for most words are those of many rows
def _word(name: str, value: str) -> str:
    return shlex.quote(f"{name}={value.replace(chr(39), '')}")
