"""The commands that plan, run or predict the layout of a row of results again."""

import functools
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from ultrabench.layout import AXES
from ultrabench.routing import override_value

_CELL = ("model", "hardware", "kernel", "source", "precision", "routing", "nodes", "seq_len", "gbs")


def launch_words(row: Mapping[str, Any]) -> str:
    """The words of `sweep plan` and `sweep launch` that make a sweep of one layout; unknown values are left out."""
    return f"{_of_cell(*map(row.get, _CELL))[0]} {_of_layout(*map(row.get, AXES))[0]}".strip()


def predict_words(row: Mapping[str, Any], profiles: Collection[str]) -> str:
    """The words of `ultrabench predict` that describe a layout; unknown values are left out.

    Args:
        profiles: names of known profiles; an imported row is predicted with that of its kernel.
    """
    profile = row["kernel"] if row["source"] is not None and row["kernel"] in profiles else None
    return f"{_of_cell(*map(row.get, _CELL), profile)[1]} {_of_layout(*map(row.get, AXES))[1]}".strip()


@functools.cache  # because many layouts are run with the same model and number of nodes
def _of_cell(*values: Any) -> tuple[str, str]:
    """The words of a sweep and of a prediction for the values of _CELL and, if there is one, a profile.

    The kernel of an imported row is left out, since it is no kernel that can be run here.
    """
    model, hardware, kernel, source, precision, routing, nodes, seq_len, gbs, *profile = values
    names = {"model": model, "hardware": hardware, "kernel": kernel if source is None else None}
    uncompiled = "false" if routing == "learned" else None  # compiled layers cannot have it
    batch = {"sweep.nodes": [nodes], "sweep.seq_len": seq_len, "sweep.gbs": gbs}
    predicted = {
        "profile": profile[0] if profile else None,
        "precision": precision,
        "routing": routing,
        "compile": uncompiled,
        "nodes": nodes,
        "seq_len": seq_len,
    }
    of_kernel = {
        "kernel.precision": precision,
        "kernel.routing": routing and override_value(routing),
        "kernel.compile": uncompiled,
    }
    return _joined(names | of_kernel | batch), _joined(names | predicted)


@functools.cache  # because a layout is run with many models and numbers of nodes
def _of_layout(*values: Any) -> tuple[str, str]:
    """The words of a sweep and of a prediction for the AXES; those that do not count for the schedule are left out."""
    values_by_axis = dict(zip(AXES, values, strict=True))
    if values_by_axis["pp_schedule"] == "none":
        del values_by_axis["pp_schedule"]
    if values_by_axis.get("pp_schedule") != "interleaved":
        del values_by_axis["virtual_stages"]
    given_values = {name: value for name, value in values_by_axis.items() if value is not None}
    of_sweep = given_values | ({"dp_shard": "all"} if given_values.get("dp_shard") == 0 else {})
    words = {f"sweep.{name}": [value] for name, value in of_sweep.items() if name != "dp"}
    return _joined(words), _joined({name: value for name, value in of_sweep.items() if value != "all"})


def _joined(words: Mapping[str, Any]) -> str:
    assignments = (f"{name}={value}" for name, value in words.items() if value is not None)
    return " ".join(shlex.quote(assignment.replace("'", "")) for assignment in assignments)
