"""Draws the predicted memory of a layout by part, over the values of one axis or the ranks of its pipeline."""

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ultrabench.analysis.figures.runs import final
from ultrabench.analysis.figures.style import (
    COLOURS,
    WIDTH,
    categories,
    label,
    legend,
    legend_entry,
    panel_grid,
)
from ultrabench.errors import ConfigError, LayoutError, counted
from ultrabench.hardware import GIB
from ultrabench.layout import AXES
from ultrabench.run import RunSpec
from ultrabench.sweep.arguments import PREDICTED, config_of, read_arguments, run_of
from ultrabench.sweep.config.compose import files
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.predict.memory import memory_constants, p_oom, predict_memory
from ultrabench.sweep.predict.stage_memory import BACKWARD, FORWARD, OPTIMIZER, PARTS

_ACROSS = {
    "tp": "tensor-parallel degree (tp)",
    "pp": "pipeline-parallel degree (pp)",
    "dp": "data-parallel degree (dp), on the nodes that it needs",
    "cp": "context-parallel degree (cp)",
    "zero_stage": "ZeRO stage (zero_stage)",
    "recompute": "recomputation (recompute)",
    "seq_len": "tokens of a sequence (seq_len)",
    "mbs": "sequences of a micro-batch (mbs)",
    "gas": "micro-batches of a step (gas)",
    "stage": "rank of the pipeline (pp_rank)",
}
_VALUES: dict[str, tuple[int | str, ...]] = {
    "zero_stage": (0, 1, 2, 3),
    "recompute": ("none", "attention", "selective", "every2", "full"),
    "seq_len": tuple(2**n for n in range(10, 18)),
    "mbs": tuple(2**n for n in range(6)),
    "gas": tuple(2**n for n in range(8)),
}
"""Axis -> its values; those of degrees follow from the number of GPUs."""
_FOLLOWS = {"tp": "dp", "pp": "dp", "cp": "dp", "dp": "nodes"}
"""Axis -> the argument that changes with it."""
_USUAL = {"mbs": 1, "gas": "pp", "zero_stage": 0, "recompute": "none"}
"""Axes of layouts that are named where they are not given -> their usual values."""
_OF_ROWS = {
    "model": "model", "hardware": "hardware", "profile": "kernel",
    **{name: name for name in ("nodes", "seq_len", "mbs", "gas")},
}  # fmt: skip
"""Argument -> the column of results that gives its default."""
_MOMENTS = {
    FORWARD: "at the end of a forward, before its gradients",
    BACKWARD: "in backward",
    OPTIMIZER: "in the update, when activations and gathered weights are freed",
}
"""Phase of a step -> its name in the note."""
_HATCHES = ("", "////", "", "\\\\\\\\", "....", "", "xxxx")
_CUT = 2.2
"""Largest height of the scale, as a multiple of the memory of a GPU."""
_NUMBER_WIDTH = 0.3
"""Inches that a bar with a number has."""
_THINNEST = 0.005
"""Share of the height of the scale below which a part of a bar cannot be seen."""
_MARKS = {
    "measured": ("measured, largest of all ranks", "o"),
    "measured_rank0": ("measured, rank 0", "s"),
    "oom": ("measured: out of memory", "X"),
}
"""What is shown of a run -> its name and marker."""
_DARK = "#1b1b1b"


def points(
    layout: Mapping[str, Any], table: pa.Table | None = None, *, axis: str
) -> tuple[pd.DataFrame, str]:
    """The rows of the figure, and its note.

    There is a row for each bar, each measured run of its layout, and each value of the axis that cannot run.
    The column `shown` is predicted, impossible, or for runs measured, measured_rank0, oom or suspect; `value`
    is the name of the bar. Predicted rows have the bytes of each part, `bytes` is their sum or what was
    measured.

    Args:
        layout: arguments as `ultrabench predict` takes them.
        table: results in which runs of these layouts are looked up, and whose values are defaults.

    Raises:
        ConfigError: an argument is wrong, or no value of the axis can run.
    """
    asked = [f"{name}={value}" for name, value in layout.items()]
    asked_for = read_arguments(asked, (*PREDICTED, "precision"), "model=llama3-8b tp=8")
    runs = None if table is None else final(table)
    known = {} if runs is None else _values(runs, asked_for)
    given = PREDICTED | {name: values[0] for name, values in known.items()} | asked_for
    config, runs = config_of(given), None if axis == "stage" else runs
    rows = [
        row for own in _variants(given, config, axis, asked_for) for row in _rows(own, config, runs, axis)
    ]
    if all(row["shown"] == "impossible" for row in rows):
        first = f"{axis}={rows[0]['value']}: " if axis != "stage" else ""
        raise ConfigError(f"no layout to draw: {first}{rows[0]['reason']}; choose another one")
    whole, across = given | _USUAL | given, (axis, _FOLLOWS.get(axis))
    words = {name: f"{name}={at}" for name, at in whole.items() if name not in across}
    fixed = " ".join(word for name, word in words.items() if name in ("model", *layout))
    usual = [
        word for name, word in words.items() if name not in ("kernel", *layout) and whole[name] is not None
    ]
    several = [
        f"{len(at)} values of {name}" for name, at in known.items() if len(at) > 1 and name not in across
    ]
    drawn = pd.DataFrame(rows).assign(
        model=config.models[0].name, fixed=fixed, gpu=config.hardware.gpu, mem_bytes=config.hardware.mem_bytes
    )
    told = [f"Defaults: {' '.join(usual)}."] if usual else []
    told += [f"The rows have {', '.join(several)}: choose with NAME=VALUE."] if several else []
    told += [*_notes(drawn, config), *(() if runs is None else _found(drawn, runs, config))]
    return drawn, "\n".join(told)


def _values(runs: pd.DataFrame, given: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Argument that is not given -> its values in the rows, the default first.

    This is the smallest model that has a configuration, with the smallest numbers, but the largest gas, since
    above pp it changes no memory.
    """
    found = {}
    for name, column in _OF_ROWS.items():
        values = [*runs[column].dropna().unique()]
        if name in ("model", "hardware"):
            values = [at for at in values if at in files(name)]
        elif name == "profile":  # those of the embedded kernel follow from the hardware
            values = [at for at in values[:1] if at in files("profiles") and "kernel" not in given]
        else:
            values = sorted(map(int, values), reverse=name == "gas")
        if name in given:
            runs = runs[runs[column] == given[name]]
        elif values:
            found[name], runs = values, runs[runs[column] == values[0]]
    return found


def _variants(
    given: dict[str, Any], config: SweepConfig, axis: str, asked_for: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """The arguments with the value of the axis that was asked for, otherwise with each of its values."""
    if axis == "stage":
        yield given
        return
    per_node, powers = config.hardware.gpus_per_node, [2**n for n in range(17)]
    rest = prod(given.get(name, 1) for name in ("tp", "pp", "cp") if name != axis)
    degrees = [n for n in powers if n * rest <= given["nodes"] * per_node] or [1]
    if axis == "dp":
        degrees = [n for n in powers if n * rest % per_node == 0][:8]
    values: Iterable[Any] = (asked_for[axis],) if axis in asked_for else _VALUES.get(axis, degrees)
    for value in values:
        own = {name: at for name, at in given.items() if name != _FOLLOWS.get(axis)} | {axis: value}
        if axis == "dp":
            own["nodes"] = max(1, -(-value * rest // per_node))
        if axis == "pp" and value == 1:
            own = {name: at for name, at in own.items() if name not in ("pp_schedule", "virtual_stages")}
        yield own


def _rows(
    given: dict[str, Any], config: SweepConfig, runs: pd.DataFrame | None, axis: str
) -> Iterator[dict[str, Any]]:
    """The rows of one layout: its bar or, over ranks of the pipeline, its bars, and its measured runs."""
    value = str(given.get(axis, ""))
    try:
        spec = run_of(given, config)
    except ConfigError as error:
        reason = error.reason if isinstance(error, LayoutError) else error.fact
        yield {"value": value, "shown": "impossible", "reason": reason}
        return
    constants = memory_constants(config.profile.framework, config.profile.memory)
    stages = predict_memory(spec, constants)
    alike, unknown = _alike(runs, spec, config) if runs is not None else (pd.DataFrame(), ())
    for stage in stages if axis == "stage" else [max(stages, key=lambda one: one.peak_bytes)]:
        parts = {part: getattr(stage, part) for part in PARTS}
        name = str(stage.pp_rank) if axis == "stage" else value
        chance = p_oom(stages, config.hardware.mem_bytes, constants, stage if axis == "stage" else None)
        peak = {"bytes": stage.peak_bytes, "p_oom": chance, "phase": stage.phase, "unknown": unknown}
        yield {"value": name, "shown": "predicted"} | peak | parts
    yield from _measured(alike, config, value)


def _alike(runs: pd.DataFrame, spec: RunSpec, config: SweepConfig) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The runs of a layout, and the words of it that no run has.

    Without AFAB the runs may have another gas, if both are above pp.
    """
    layout, least = spec.layout, spec.layout.pp + 1
    wanted = {name: getattr(layout, name) for name in AXES} | {
        "model": spec.shape.name, "hardware": config.hardware.name, "nodes": spec.nodes,
        "seq_len": spec.workload.seq_len, "precision": spec.kernel.precision, "kernel": spec.kernel.name,
    }  # fmt: skip
    fits = {name: (runs[name] == at) | runs[name].isna() for name, at in wanted.items()}
    fits["kernel"] |= runs["kernel"] == config.profile.framework
    unknown = tuple(f"{name}={wanted[name]}" for name, fit in fits.items() if not fit.any())
    fits["gas"] |= (runs["gas"] >= least) & (layout.gas >= least) & (layout.pp_schedule != "afab")
    return runs[np.logical_and.reduce([*fits.values()])], unknown


def _measured(alike: pd.DataFrame, config: SweepConfig, value: str) -> Iterator[dict[str, Any]]:
    """The rows of measured runs of a layout."""
    for run in alike.to_dict("records"):
        whole, rank0 = (run[f"peak_mem_reserved_{which}bytes"] for which in ("", "rank0_"))
        held, shown = (whole, "measured") if whole > 0 else (rank0, "measured_rank0")
        if isinstance(run["suspect"], str):
            yield {"value": value, "shown": "suspect"}
        elif run["status"] == "oom":
            yield {"value": value, "shown": "oom", "bytes": config.hardware.mem_bytes}
        elif run["status"] == "ok" and held > 0:
            yield {"value": value, "shown": shown, "bytes": held}


def _notes(drawn: pd.DataFrame, config: SweepConfig) -> Iterator[str]:
    """The lines under the figure about the prediction and the values that cannot run."""
    bars = drawn[drawn["shown"] == "predicted"].reset_index(drop=True)
    memory = config.hardware.mem_bytes
    odds = dict.fromkeys(f"{100 * share:.0f}" for share in (bars["p_oom"].min(), bars["p_oom"].max()))
    yield (
        f"Predicted with profile {config.profile.name}: peaks, and P(OOM), the probability that it does not fit "
        f"({' to '.join(odds)} %). {config.hardware.gpu} has {memory / GIB:,.4g} GiB."
    )
    moments = {name: bars.loc[bars["phase"] == phase, "value"] for phase, name in _MOMENTS.items()}
    at = "; ".join(f"{_span(values)}: {name}" for name, values in moments.items() if len(values))
    yield f"A bar shows what is held at the moment of its peak. {at}."
    if bars["bytes"].max() > _CUT * memory:
        yield f"Bars are cut at {_CUT:g} times the memory; their numbers are whole."
    none = drawn[drawn["shown"] == "impossible"]
    for reason in dict.fromkeys(none.get("reason", ())):
        yield f"Cannot run: {', '.join(none['value'][none['reason'] == reason])}: {reason}."


def _found(drawn: pd.DataFrame, runs: pd.DataFrame, config: SweepConfig) -> Iterator[str]:
    """The lines under the figure about the measured runs."""
    shown = drawn["shown"]
    found = counted(int(shown.isin([*_MARKS]).sum()), "run")
    yield (
        f"Points: {found} among {counted(len(runs), 'row')} with the same kernel, hardware and layout (gas may "
        f"differ where both are above pp); {(shown == 'suspect').sum()} more are suspect and not drawn."
    )
    of_bars = [*drawn["unknown"][shown == "predicted"]]
    if unknown := [word for word in of_bars[0] if all(word in words for words in of_bars)]:
        yield f"No row has {', '.join(unknown)}."
    if config.hardware.device == "cpu":
        yield "On CPUs a measured peak is the resident set of a process, with Python and torch in it."


def figure(drawn: pd.DataFrame, *, title: str, notes: str, axis: str) -> Figure:
    """A bar for each value of the axis, or each rank of the pipeline, with a line at the memory of the GPU."""
    first, bars = drawn.iloc[0], drawn[drawn["shown"] == "predicted"].reset_index(drop=True)
    memory, most = first["mem_bytes"], drawn["bytes"][drawn["shown"] != "oom"].max()
    unit, name = (GIB, "GiB") if most >= GIB else (2**20, "MiB")
    top = min(1.25 * most if 3 * most < memory else max(1.25 * most, 1.15 * memory), _CUT * memory) / unit
    over = _ACROSS[axis].partition(" (")[0]
    heading = f"Predicted memory of {first['model']} by part, over {over}"
    heading += f"; measured: {title}" if drawn["shown"].isin([*_MARKS]).any() else ""
    whole, middle, (axes,) = panel_grid(1, title=heading, notes=notes, height=3.6)
    handles, below = list[Any](), pd.Series(0.0, bars.index)
    for part, colour, hatch in zip(PARTS, COLOURS, _HATCHES, strict=False):
        if not (largest := bars[part].max() / unit):
            continue
        told = part if largest > _THINNEST * top else f"{part} (at most {largest:.2g} {name})"
        look: dict[str, Any] = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
        handles.append(axes.bar(bars.index, bars[part] / unit, 0.7, below / unit, label=told, **look))
        below = below + bars[part]
    if memory / unit < top:
        limit = f"{memory / unit:,.4g} {name} of {first['gpu']}"
        handles.append(axes.axhline(memory / unit, color=_DARK, linestyle="--", linewidth=1.2, label=limit))
    handles += _mark(axes, drawn, [*bars["value"]], unit)
    label(axes, first["fixed"], _ACROSS[axis], f"memory ({name})")
    _name_bars(axes, drawn, bars, top, unit)
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, top)
    legend(middle, handles)
    return whole


def _mark(axes: Axes, drawn: pd.DataFrame, values: list[str], unit: float) -> list[Any]:
    """Marks the measured runs, and returns their entries of the legend."""
    keys = []
    for shown, (name, marker) in _MARKS.items():
        held = drawn[drawn["shown"] == shown]
        if len(held):
            look: dict[str, Any] = {"color": _DARK, "marker": marker, "edgecolor": "white", "linewidth": 0.6}
            axes.scatter(held["value"].map(values.index), held["bytes"] / unit, 30, **look, zorder=4)
            keys.append(legend_entry(name, linestyle="", color=_DARK, marker=marker))
    return keys


def _name_bars(axes: Axes, drawn: pd.DataFrame, bars: pd.DataFrame, top: float, unit: float) -> None:
    """Names the bars below, and above them the peak and P(OOM), as far as there is room."""
    wide, names = (WIDTH - 1) / max(5, len(bars)), _names(bars["value"])
    categories(axes, names)
    if wide < _NUMBER_WIDTH:
        return
    seen = drawn[drawn["shown"] != "oom"]
    place: dict[str, Any] = {"ha": "center", "va": "bottom", "fontsize": 7.5, "zorder": 3}
    place["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
    for at, (value, held, chance) in enumerate(zip(bars["value"], bars["bytes"], bars["p_oom"], strict=True)):
        odds = f"\nP(OOM)\n{100 * chance:.0f} %" if chance >= 0.005 and wide > 2 * _NUMBER_WIDTH else ""
        near = (seen["value"] == value) & ((seen["bytes"] - held).abs() < 0.08 * top * unit)
        high = min(seen["bytes"][near].max() / unit + 0.03 * top, 0.84 * top)
        digits = 2 if held < 10 * unit else 1 if held < 100 * unit else 0
        axes.text(at, high, f"{held / unit:,.{digits}f}{odds}", **place)


def _names(values: Iterable[str]) -> list[str]:
    """The names of bars, whole numbers with their thousands apart."""
    return [f"{int(value):,}" if value.isdecimal() else value for value in values]


def _span(values: "pd.Series[str]") -> str:
    """The names of some bars, those of several neighbours as `1 to 32`."""
    names, at = _names(values), values.index
    return f"{names[0]} to {names[-1]}" if at[-1] - at[0] == len(at) - 1 > 1 else ", ".join(names)
