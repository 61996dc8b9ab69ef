"""The commands that plan, run or predict the layout of a row of results again."""

import functools
import shlex
from collections.abc import Collection, Mapping
from typing import Any

from ultrabench.layout import AXES
from ultrabench.routing import override_value

_WORKLOAD = ("model", "hardware", "kernel", "source", "precision", "routing", "nodes", "seq_len", "gbs")
"""Columns that say what was trained on what; all but `source` are options of the commands."""


def launch_words(row: Mapping[str, Any]) -> str:
    """The arguments of `sweep plan` and `sweep launch` for a sweep of this row's layout;
    unknown values are left out.
    """
    return f"{_workload_words(*map(row.get, _WORKLOAD))[0]} {_axis_words(*map(row.get, AXES))[0]}".strip()


def predict_words(row: Mapping[str, Any], profiles: Collection[str]) -> str:
    """The arguments of `ultrabench predict` for this row's layout; unknown values are left out.

    Args:
        profiles: names of all profiles; for an imported row the arguments name that of its kernel.
    """
    profile_name = row["kernel"] if row["source"] is not None and row["kernel"] in profiles else None
    workload_words = _workload_words(*map(row.get, _WORKLOAD), profile_name=profile_name)[1]
    return f"{workload_words} {_axis_words(*map(row.get, AXES))[1]}".strip()


@functools.cache  # because many layouts are run with the same model and number of nodes
def _workload_words(*values: Any, profile_name: str | None = None) -> tuple[str, str]:
    """The arguments of a sweep and of a prediction for the values of _WORKLOAD.

    The kernel of an imported row is left out, since ultrabench cannot run it.
    """
    model, hardware, kernel, source, precision, routing, nodes, seq_len, gbs = values
    config_names = {"model": model, "hardware": hardware, "kernel": kernel if source is None else None}
    compile_word = "false" if routing == "learned" else None  # compiled layers cannot have learned routing
    batch_values = {"sweep.nodes": [nodes], "sweep.seq_len": seq_len, "sweep.gbs": gbs}
    kernel_values = {"precision": precision, "routing": routing, "compile": compile_word}
    sweep_values = {f"kernel.{name}": value for name, value in kernel_values.items()} | batch_values
    sweep_values["kernel.routing"] = routing and override_value(routing)
    predict_values = {"profile": profile_name, **kernel_values, "nodes": nodes, "seq_len": seq_len}
    return _arguments(config_names | sweep_values), _arguments(config_names | predict_values)


@functools.cache  # because a layout is run with many models and numbers of nodes
def _axis_words(*values: Any) -> tuple[str, str]:
    """The arguments of a sweep and of a prediction for the AXES, without those that the row's schedule does not use."""
    values_by_axis = dict(zip(AXES, values, strict=True))
    if values_by_axis["pp_schedule"] == "none":
        del values_by_axis["pp_schedule"]
    if values_by_axis.get("pp_schedule") != "interleaved":
        del values_by_axis["virtual_stages"]
    known_values = {name: value for name, value in values_by_axis.items() if value is not None}
    sweep_values = known_values | ({"dp_shard": "all"} if known_values.get("dp_shard") == 0 else {})
    list_values = {f"sweep.{name}": [value] for name, value in sweep_values.items() if name != "dp"}
    predict_values = {name: value for name, value in sweep_values.items() if value != "all"}
    return _arguments(list_values), _arguments(predict_values)


def _arguments(value_by_key: Mapping[str, Any]) -> str:
    """The arguments KEY=VALUE, quoted for a shell; values that are None are left out."""
    assignments = (f"{name}={value}" for name, value in value_by_key.items() if value is not None)
    return " ".join(shlex.quote(assignment.replace("'", "")) for assignment in assignments)
