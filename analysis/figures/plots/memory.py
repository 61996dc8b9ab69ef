"""Draws the predicted memory of a layout by part, over the values of one axis or the ranks of its pipeline."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ultrabench.analysis.figures.picture import DARK, EDGE
from ultrabench.analysis.figures.runs import final
from ultrabench.analysis.figures.style import COLOURS, WIDTH, Panel, panel_grid
from ultrabench.analysis.planned import is_predicted
from ultrabench.errors import ConfigError, LayoutError, counted
from ultrabench.hardware import GIB
from ultrabench.layout import (
    ADDED_LATER,
    AXES,
    BATCH,
    DEGREES,
    DIVIDES,
    NEUTRAL,
    TITLES,
    USUAL,
    details_of,
    other_degrees,
)
from ultrabench.run import RunSpec
from ultrabench.sweep.arguments import PREDICTED, TEXTS, config_of, read_arguments, run_of
from ultrabench.sweep.config.files import files
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan_table import place_of
from ultrabench.sweep.predict.memory import memory_constants, p_oom, predict_memory
from ultrabench.sweep.predict.stage_memory import BACKWARD, FORWARD, MEMORY_PARTS, OPTIMIZER

Values = Mapping[str, Any]
"""Name of an argument -> its value."""
_TITLES = TITLES | {"seq_len": "tokens per sequence", "stage": "pipeline rank"}
"""Axis -> its title."""
_REMARKS = {"dp": " (dp), on as many nodes as needed", "stage": " (pp_rank)"}
"""Axis -> what follows its title, if that is not its name in brackets."""
_VALUES: dict[str, tuple[int | str, ...]] = USUAL | {"seq_len": tuple(2**n for n in range(10, 18))}
"""Axis -> its values; those of degrees follow from the number of GPUs."""
_FOLLOWS = dict.fromkeys(DEGREES, "dp") | {"dp": "nodes"}
"""Axis -> the argument that changes with it."""
_DEFAULTS = {name: NEUTRAL[name] for name in USUAL if name not in ADDED_LATER} | {"gas": "pp"}
"""Axes of layouts that the note names where they are not given -> their values."""
_FROM_ROWS = ("model", "hardware", "profile", "nodes", "seq_len", *BATCH, "zero_stage")
"""Arguments whose defaults are those of the rows."""
_OF_CELL = ("model", "hardware", "nodes", "seq_len", "precision")
"""Arguments that set a cell of a plan apart from others."""
_ALIKE = [*AXES, "model", "hardware", "nodes", "seq_len", "precision", "routing", "kernel"]
"""Columns that are equal in a measured run and the layout of its bar."""
_MOMENTS = {
    FORWARD: "at the end of forward, before gradients",
    BACKWARD: "in backward",
    OPTIMIZER: "in the optimizer step, after activations and gathered weights are freed",
}
"""Phase of a step -> its name in the note."""
_HATCHES = ("", "////", "", "\\\\\\\\", "....", "", "xxxx")
_PARTS: dict[Any, dict[str, Any]] = {
    part: {"facecolor": colour, "hatch": hatch, **EDGE}
    for part, colour, hatch in zip(MEMORY_PARTS, COLOURS, _HATCHES, strict=False)
}
"""Part of the memory -> its look."""
_CUT = 2.2
"""Largest height of the scale, as a multiple of the memory of a GPU."""
_NUMBER_WIDTH = 0.3
"""Inches that a bar with a number has."""
_THINNEST = 0.005
"""Share of the height of the scale below which a part of a bar cannot be seen."""
_MARK = {"color": DARK, "linestyle": "", "markeredgecolor": "white", "markeredgewidth": 0.6}
_MARKS: dict[str, dict[str, Any]] = {
    "measured": {"label": "measured, largest of all ranks", "marker": "o", **_MARK},
    "measured_rank0": {"label": "measured, rank 0", "marker": "s", **_MARK},
    "oom": {"label": "measured: out of memory", "marker": "X", **_MARK},
}
"""What is shown of a run -> its look."""
_LIMIT: dict[str, Any] = {"color": DARK, "linestyle": "--", "linewidth": 1.2}


def points(layout: Values, table: pa.Table | None = None, *, axis: str) -> tuple[pd.DataFrame, str]:
    """The rows of the figure, and its note.

    There is a row for each bar and for each measured run of its layout. The column `value` is the name of the
    bar; `shown` is predicted, or for a run measured, measured_rank0, oom or suspect. `bytes` is what was predicted
    or measured; bars also have the bytes of each part and the columns of their layout.

    Args:
        layout: arguments as `ultrabench predict` takes them.
        table: results in which runs of these layouts are looked up, and whose values are defaults.

    Raises:
        ConfigError: an argument is wrong, or no value of the axis can run.
    """
    texts = [f"{name}={value}" for name, value in layout.items()]
    chosen = read_arguments(texts, PREDICTED, "model=llama3-8b tp=8")
    runs = None if table is None else final(table)
    is_plan = table is not None and is_predicted(table)
    values_of = _best_values if is_plan else _values_of_rows
    row_values = {} if runs is None else values_of(runs, chosen)
    arguments = PREDICTED | {name: values[0] for name, values in row_values.items()} | chosen
    config = config_of(arguments)
    bars, reasons = list[dict[str, Any]](), dict[str, str]()
    variants = {"": arguments} if axis == "stage" else _variants(arguments, chosen, config, axis)
    for value, variant in variants.items():
        try:
            bars += _bars(value, run_of(variant, config), config, axis)
        except ConfigError as error:
            reasons[value] = error.reason if isinstance(error, LayoutError) else error.fact
    if not bars:
        value, reason = next(iter(reasons.items()))
        where = f"{axis}={value}: " if value else ""
        raise ConfigError(f"no layout to draw: {where}{reason}; choose another layout")
    drawn, whole = pd.DataFrame(bars), arguments | _DEFAULTS | arguments
    shared = [name for name in whole if name not in (axis, _FOLLOWS.get(axis)) and whole[name] is not None]
    panel = " ".join(f"{name}={whole[name]}" for name in shared if name in ("model", *chosen))
    defaults = " ".join(f"{name}={whole[name]}" for name in shared if name not in ("kernel", *chosen))
    choices = {name: len(values) for name, values in row_values.items() if name in shared and len(values) > 1}
    several = ", ".join(f"{number} values of {name}" for name, number in choices.items())
    of_best = ", from the best layout of the plan with these values" * is_plan
    lines = [f"Defaults{of_best}: {defaults}."] if defaults else []
    lines += [f"The rows have {several}: choose with NAME=VALUE."] if several else []
    lines += _notes(drawn, reasons, config)
    if runs is not None and axis != "stage" and not is_plan:
        marks, notes = _measured(runs, drawn, config)
        drawn, lines = pd.concat([drawn, marks], ignore_index=True), lines + notes
    drawn = drawn.assign(panel=panel, gpu=config.hardware.gpu, mem_bytes=config.hardware.mem_bytes)
    return drawn, "\n".join(lines)


def _values_of_rows(runs: pd.DataFrame, chosen: Values) -> dict[str, list[Any]]:
    """Argument that is not chosen -> its values in the rows, the default first.

    This is the smallest model that has a configuration, with the smallest numbers, but the ZeRO stage of most
    rows, and the largest gas, since above pp it changes no memory.
    """
    values_by_name = {}
    for name in _FROM_ROWS:
        column = "kernel" if name == "profile" else name
        values = [*runs[column].dropna().unique()]
        if name == "profile":  # those of the embedded kernel follow from the hardware
            values = [value for value in values[:1] if value in files("profiles") and "kernel" not in chosen]
        elif name in TEXTS:
            values = [value for value in values if value in files(name)]
        else:
            values = sorted(map(int, values), reverse=name == "gas")
        if name == "zero_stage":  # the rows of one value have the layouts of more bars
            values.sort(key=lambda value: -int((runs[name] == value).sum()))
        if name in chosen:
            runs = runs[runs[column] == chosen[name]]
        elif values:
            values_by_name[name], runs = values, runs[runs[column] == values[0]]
    return values_by_name


def _best_values(runs: pd.DataFrame, chosen: Values) -> dict[str, list[Any]]:
    """Argument that is not chosen -> its values in the rows of a plan, the default first.

    This is the value of the layout that is predicted to be the best one with the chosen values, of the first cell.
    """
    for name in chosen.keys() & {*runs.columns}:
        runs = runs[runs[name] == chosen[name]]
    if not len(runs):
        settings = " ".join(f"{name}={value}" for name, value in chosen.items())
        raise ConfigError(f"no layout of the plan has {settings}", "choose other values")
    best = runs.sort_values("standing", kind="stable").iloc[0]
    names = [name for name in (*_OF_CELL, *AXES) if name not in chosen and pd.notna(best[name])]
    is_usual = {name: name in ADDED_LATER and best[name] == NEUTRAL[name] for name in names}
    known = {name: best[name] for name in names if not is_usual[name]}
    values = {name: value if name in TEXTS else int(value) for name, value in known.items()}
    others = {name: [*runs[name].dropna().unique()] if name in _OF_CELL else [] for name in values}
    return {name: [*dict.fromkeys((value, *others[name]))] for name, value in values.items()}


def _variants(arguments: Values, chosen: Values, config: SweepConfig, axis: str) -> dict[str, Values]:
    """Name of a bar -> its arguments: with the value of the axis that was chosen, or with each of its values."""
    per_node, powers = config.hardware.gpus_per_node, [2**n for n in range(17)]
    others = other_degrees({**arguments, axis: 1})
    degrees = [n for n in powers if n * others <= arguments["nodes"] * per_node] or [1]
    if axis == "dp":
        degrees = [n for n in powers if n * others % per_node == 0][:8]
    usual = _VALUES.get(axis, degrees)
    if axis in DIVIDES:
        usual = [value for value in usual if int(value) <= arguments["nodes"] * per_node]
    values: Iterable[Any] = (chosen[axis],) if axis in chosen else usual
    variants = dict[str, Values]()
    for value in values:
        idle = (_FOLLOWS.get(axis), *(details_of(axis) if value == NEUTRAL.get(axis) else ()))
        follows = {"nodes": max(1, -(-value * others // per_node))} if axis == "dp" else {}
        variant = {name: other for name, other in arguments.items() if name not in idle}
        variants[str(value)] = variant | {axis: value} | follows
    return variants


def _bars(value: str, spec: RunSpec, config: SweepConfig, axis: str) -> Iterator[dict[str, Any]]:
    """The bar of the rank that needs most or, over ranks of the pipeline, of each rank."""
    constants = memory_constants(config.profile.framework, config.profile.memory)
    stages = predict_memory(spec, constants)
    for stage in stages if axis == "stage" else [max(stages, key=lambda stage: stage.peak_bytes)]:
        name, rank = (str(stage.pp_rank), stage) if axis == "stage" else (value, None)
        chance = p_oom(stages, config.hardware.mem_bytes, constants, rank)
        peak = {"shown": "predicted", "value": name, "bytes": stage.peak_bytes, "p_oom": chance}
        yield peak | stage._asdict() | place_of(spec)


def _measured(runs: pd.DataFrame, bars: pd.DataFrame, config: SweepConfig) -> tuple[pd.DataFrame, list[str]]:
    """The runs with the layouts of bars, and the lines under the figure about them.

    Without AFAB the runs may have another gas, if both are above pp.
    """
    (shape,), kernel = config.models, config.kernel
    of_kernel = {"kernel": kernel.name, "precision": kernel.precision, "routing": kernel.routing_of(shape)}
    bars = bars.assign(hardware=config.hardware.name, **of_kernel)[["value", *_ALIKE]]
    pairs = runs.merge(bars, how="cross", suffixes=("", "_of_bar"))
    of_bar = {name: pairs[f"{name}_of_bar"] for name in _ALIKE}
    fits = pd.DataFrame({name: pairs[name].isna() | (pairs[name] == of_bar[name]) for name in _ALIKE})
    fits["kernel"] |= pairs["kernel"] == config.profile.framework
    missing = [name for name in _ALIKE if bars[name].nunique() == 1 and not fits[name].any()]
    above_pp = pairs[["gas", "gas_of_bar"]].min(axis=1) > of_bar["pp"]
    fits["gas"] |= above_pp & (of_bar["pp_schedule"] != "afab")
    alike = pairs[fits.all(axis=1)]
    ok, mem_bytes = alike["status"] == "ok", config.hardware.mem_bytes
    largest, rank0 = alike["peak_mem_reserved_bytes"], alike["peak_mem_reserved_rank0_bytes"]
    cases = [alike["suspect"].notna(), alike["status"] == "oom", ok & (largest > 0), ok & (rank0 > 0)]
    shown = np.select(cases, ["suspect", "oom", "measured", "measured_rank0"], "")
    peaks = np.select(cases, [np.nan, mem_bytes, largest, rank0], np.nan)
    marks = pd.DataFrame({"value": alike["value"], "shown": shown, "bytes": peaks})[shown != ""]
    suspect = int((marks["shown"] == "suspect").sum())
    drawn = counted(len(marks) - suspect, "run")
    equal = "the same kernel, hardware and layout (gas may differ where both are above pp)"
    among = f"{drawn} among {counted(len(runs), 'row')} with {equal}"
    lines = [f"Points: {among}; {suspect} more are suspect and not drawn."]
    if missing:
        lines.append(f"No row has {', '.join(f'{name}={bars[name][0]}' for name in missing)}.")
    if config.hardware.device == "cpu":
        lines.append("On CPUs, a measured peak is the resident set of a process, including Python and torch.")
    return marks, lines


def _notes(bars: pd.DataFrame, reasons: Mapping[str, str], config: SweepConfig) -> Iterator[str]:
    """The lines under the figure about the prediction and the values that cannot run."""
    memory, chances = config.hardware.mem_bytes, bars["p_oom"]
    odds = " to ".join(dict.fromkeys(f"{100 * chance:.0f}" for chance in (chances.min(), chances.max())))
    meaning = f"peak memory and P(OOM), the probability that it does not fit ({odds} %)"
    capacity = f"{config.hardware.gpu} has {memory / GIB:,.4g} GiB"
    yield f"Predicted with profile {config.profile.name}: {meaning}. {capacity}."
    by_moment = ((moment, bars["value"][bars["phase"] == phase]) for phase, moment in _MOMENTS.items())
    spans = [f"peak of {_span(values)}: {moment}" for moment, values in by_moment if len(values)]
    yield f"A bar shows the memory held at its peak; {'; '.join(spans)}."
    if bars["bytes"].max() > _CUT * memory:
        yield f"Bars are cut off at {_CUT:g} times the GPU memory; the numbers on them are not."
    for reason in dict.fromkeys(reasons.values()):
        yield f"Cannot run: {', '.join(name for name in reasons if reasons[name] == reason)}: {reason}."


def figure(drawn: pd.DataFrame, *, title: str, notes: str, axis: str) -> Figure:
    """A bar for each value of the axis, or each rank of the pipeline, with a line at the memory of the GPU."""
    highest = drawn["bytes"][drawn["shown"] != "oom"].max()
    unit, unit_bytes = ("GiB", GIB) if highest >= GIB else ("MiB", 2**20)
    sizes = ["bytes", "mem_bytes", *MEMORY_PARTS]
    drawn, highest = drawn.assign(**drawn[sizes] / unit_bytes), highest / unit_bytes
    first, bars = drawn.iloc[0], drawn[drawn["shown"] == "predicted"]
    memory = first["mem_bytes"]
    top = min(1.25 * highest if 3 * highest < memory else max(1.25 * highest, 1.15 * memory), _CUT * memory)
    heading = f"Predicted memory of {first['model']} by part, over {_TITLES[axis]}"
    heading += f"; measured: {title}" if drawn["shown"].isin([*_MARKS]).any() else ""
    largest = bars[[*MEMORY_PARTS]].max()
    keys: list[Any] = [
        Patch(label=part if size > _THINNEST * top else f"{part} (at most {size:.2g} {unit})", **_PARTS[part])
        for part, size in largest[largest > 0].items()
    ]
    limits = [{**_LIMIT, "label": f"{memory:,.4g} {unit} of {first['gpu']}"}] if memory < top else []
    marks = {shown: look for shown, look in _MARKS.items() if (drawn["shown"] == shown).any()}
    keys += [*limits, *marks.values()]
    whole, panels = panel_grid([axis], title=heading, notes=notes, keys=keys, height=3.6)
    axes, below = panels[axis], pd.Series(0.0, bars.index)
    for part in largest[largest > 0].index:
        axes.bar(bars.index, bars[part], 0.7, below, **_PARTS[part])
        below = below + bars[part]
    for limit in limits:
        axes.axhline(memory, **limit)
    for shown, look in marks.items():
        runs = drawn[drawn["shown"] == shown]
        axes.plot(runs["value"].map([*bars["value"]].index), runs["bytes"], zorder=4, **look)
    axes.describe(first["panel"], _TITLES[axis] + _REMARKS.get(axis, f" ({axis})"), f"memory ({unit})")
    _name_bars(axes, drawn, bars, top)
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, top)
    return whole


def _name_bars(axes: Panel, drawn: pd.DataFrame, bars: pd.DataFrame, top: float) -> None:
    """Names the bars below, and above them the peak and P(OOM), as far as there is room."""
    axes.categories(_names(bars["value"]))
    width = (WIDTH - 1) / max(5, len(bars))
    if width < _NUMBER_WIDTH:
        return
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
    marks = drawn[drawn["shown"] != "oom"]
    for place, value, peak, chance in bars[["value", "bytes", "p_oom"]].itertuples():
        odds = f"\nP(OOM)\n{100 * chance:.0f} %" if chance >= 0.005 and width > 2 * _NUMBER_WIDTH else ""
        close = (marks["value"] == value) & ((marks["bytes"] - peak).abs() < 0.08 * top)
        height = min(marks["bytes"][close].max() + 0.03 * top, 0.84 * top)
        digits = 2 if peak < 10 else 1 if peak < 100 else 0
        text = f"{peak:,.{digits}f}{odds}"
        axes.text(place, height, text, ha="center", va="bottom", fontsize=7.5, zorder=3, bbox=box)


def _names(values: Iterable[str]) -> list[str]:
    """The names of bars, whole numbers with their thousands apart."""
    return [f"{int(value):,}" if value.isdecimal() else value for value in values]


def _span(values: "pd.Series[str]") -> str:
    """The names of some bars, those of several neighbours as `1 to 32`."""
    names, places = _names(values), values.index
    return f"{names[0]} to {names[-1]}" if places[-1] - places[0] == len(places) - 1 > 1 else ", ".join(names)
