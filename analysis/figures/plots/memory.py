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
    model_parallel_degree,
)
from ultrabench.run import RunSpec
from ultrabench.sweep.arguments import PREDICTION_DEFAULTS, TEXT_ARGUMENTS, config_of, read_arguments, run_of
from ultrabench.sweep.config.files import files
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan_table import columns_of_run
from ultrabench.sweep.predict.memory import memory_constants, p_oom, predict_memory
from ultrabench.sweep.predict.stage_memory import BACKWARD, FORWARD, MEMORY_PARTS, OPTIMIZER

Values = Mapping[str, Any]
"""Name of an argument -> its value."""
_TITLES = TITLES | {"seq_len": "tokens per sequence", "stage": "pipeline rank"}
"""Axis -> its title."""
_TITLE_SUFFIXES = {"dp": " (dp), on as many nodes as needed", "stage": " (pp_rank)"}
"""Axis -> the text after its title; by default, its name in brackets."""
_USUAL_VALUES: dict[str, tuple[int | str, ...]] = USUAL | {"seq_len": tuple(2**n for n in range(10, 18))}
"""Axis -> its values; those of degrees follow from the number of GPUs."""
_FOLLOWER = dict.fromkeys(DEGREES, "dp") | {"dp": "nodes"}
"""Axis -> the argument that changes with it."""
_DEFAULTS = {name: NEUTRAL[name] for name in USUAL if name not in ADDED_LATER} | {"gas": "pp"}
"""Axes of layouts that the note names where they are not given -> their values."""
_FROM_ROWS = ("model", "hardware", "profile", "nodes", "seq_len", *BATCH, "zero_stage")
"""Arguments whose defaults are those of the rows."""
_CELL_NAMES = ("model", "hardware", "nodes", "seq_len", "precision")
"""Arguments that set a cell of a plan apart from others."""
_BAR_KEY = [*AXES, "model", "hardware", "nodes", "seq_len", "precision", "routing", "kernel"]
"""Columns that are equal in a measured run and the layout of its bar."""
_MOMENTS = {
    FORWARD: "at the end of forward, before gradients",
    BACKWARD: "in backward",
    OPTIMIZER: "in the optimizer step, after activations and gathered weights are freed",
}
"""Phase of a step -> its name in the note."""
_HATCHES = ("", "////", "", "\\\\\\\\", "....", "", "xxxx")
_LOOKS: dict[Any, dict[str, Any]] = {
    part: {"facecolor": colour, "hatch": hatch, **EDGE}
    for part, colour, hatch in zip(MEMORY_PARTS, COLOURS, _HATCHES, strict=False)
}
"""Part of the memory -> the look of its bars."""
_MAX_SCALE = 2.2
"""Largest value of the y axis, as a multiple of the memory of a GPU."""
_NUMBER_INCHES = 0.3
"""Smallest width in inches of a bar that has a number."""
_MIN_SHARE = 0.005
"""Share of the y axis below which a part of a bar cannot be seen."""
_MARK_LOOK = {"color": DARK, "linestyle": "", "markeredgecolor": "white", "markeredgewidth": 0.6}
_LOOK_BY_MARK: dict[str, dict[str, Any]] = {
    "measured": {"label": "measured, largest of all ranks", "marker": "o", **_MARK_LOOK},
    "measured_rank0": {"label": "measured, rank 0", "marker": "s", **_MARK_LOOK},
    "oom": {"label": "measured: out of memory", "marker": "X", **_MARK_LOOK},
}
"""Kind of a mark (the column `shown`) -> its look."""
_LIMIT_LOOK: dict[str, Any] = {"color": DARK, "linestyle": "--", "linewidth": 1.2}


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
    settings = read_arguments(texts, PREDICTION_DEFAULTS, "model=llama3-8b tp=8")
    runs = None if table is None else final(table)
    is_plan = table is not None and is_predicted(table)
    read_values = _best_values if is_plan else _values_of_rows
    row_values = {} if runs is None else read_values(runs, settings)
    arguments = PREDICTION_DEFAULTS | {name: values[0] for name, values in row_values.items()} | settings
    config = config_of(arguments)
    bars, reasons = list[dict[str, Any]](), dict[str, str]()
    variants = {"": arguments} if axis == "stage" else _variants(arguments, settings, config, axis)
    for value, variant in variants.items():
        try:
            bars += _bars(value, run_of(variant, config), config, axis)
        except ConfigError as error:
            reasons[value] = error.reason if isinstance(error, LayoutError) else error.fact
    if not bars:
        value, reason = next(iter(reasons.items()))
        value_text = f"{axis}={value}: " if value else ""
        raise ConfigError(f"no layout to draw: {value_text}{reason}; choose another layout")
    rows, all_values = pd.DataFrame(bars), arguments | _DEFAULTS | arguments
    varied_names = axis, _FOLLOWER.get(axis)
    names = [name for name in all_values if name not in varied_names and all_values[name] is not None]
    panel_name = " ".join(f"{name}={all_values[name]}" for name in names if name in ("model", *settings))
    defaults = " ".join(f"{name}={all_values[name]}" for name in names if name not in ("kernel", *settings))
    choices = [(name, len(values)) for name, values in row_values.items() if name in names]
    choices_text = ", ".join(f"{count} values of {name}" for name, count in choices if count > 1)
    origin_text = ", from the best layout of the plan with these values" * is_plan
    note_lines = [f"Defaults{origin_text}: {defaults}."] if defaults else []
    note_lines += [f"The rows have {choices_text}: choose with NAME=VALUE."] if choices_text else []
    note_lines += _notes(rows, reasons, config)
    if runs is not None and axis != "stage" and not is_plan:
        marks, mark_lines = _measured(runs, rows, config)
        rows, note_lines = pd.concat([rows, marks], ignore_index=True), note_lines + mark_lines
    rows = rows.assign(panel=panel_name, gpu=config.hardware.gpu, mem_bytes=config.hardware.mem_bytes)
    return rows, "\n".join(note_lines)


def _values_of_rows(runs: pd.DataFrame, settings: Values) -> dict[str, list[Any]]:
    """Argument that the user did not set -> its values in the rows, the default first.

    The defaults are the smallest model that has a configuration, the smallest numbers, the ZeRO stage of most rows,
    and the largest gas, since gas above pp does not change the memory.
    """
    values_by_name = {}
    for name in _FROM_ROWS:
        column = "kernel" if name == "profile" else name
        values = [*runs[column].dropna().unique()]
        if name == "profile":  # that of the embedded kernel follows from the hardware, not from its name
            values = [name for name in values[:1] if name in files("profiles") and "kernel" not in settings]
        elif name in TEXT_ARGUMENTS:
            values = [value for value in values if value in files(name)]
        else:
            values = sorted(map(int, values), reverse=name == "gas")
        if name == "zero_stage":  # with the most frequent value, most bars have measured runs
            values.sort(key=lambda value: -int((runs[name] == value).sum()))
        if name in settings:
            runs = runs[runs[column] == settings[name]]
        elif values:
            values_by_name[name], runs = values, runs[runs[column] == values[0]]
    return values_by_name


def _best_values(runs: pd.DataFrame, settings: Values) -> dict[str, list[Any]]:
    """Argument that the user did not set -> its values in the rows of a plan, the default first.

    The default is the value of the best predicted layout of the first cell among those with the values of `settings`.
    """
    for name in settings.keys() & {*runs.columns}:
        runs = runs[runs[name] == settings[name]]
    if not len(runs):
        settings_text = " ".join(f"{name}={value}" for name, value in settings.items())
        raise ConfigError(f"no layout of the plan has {settings_text}", "choose other values")
    best_row = runs.sort_values("standing", kind="stable").iloc[0]
    names = [name for name in (*_CELL_NAMES, *AXES) if name not in settings and pd.notna(best_row[name])]
    is_usual = {name: name in ADDED_LATER and best_row[name] == NEUTRAL[name] for name in names}
    known_values = {name: best_row[name] for name in names if not is_usual[name]}
    values = {name: value if name in TEXT_ARGUMENTS else int(value) for name, value in known_values.items()}
    other_values = {name: [*runs[name].dropna().unique()] if name in _CELL_NAMES else [] for name in values}
    return {name: [*dict.fromkeys((value, *other_values[name]))] for name, value in values.items()}


def _variants(arguments: Values, settings: Values, config: SweepConfig, axis: str) -> dict[str, Values]:
    """Name of a bar -> its arguments, for the value of the axis that the user set, or else for each of its values."""
    gpus_per_node, powers = config.hardware.gpus_per_node, [2**n for n in range(17)]
    others_product = model_parallel_degree({**arguments, axis: 1})
    degrees = [n for n in powers if n * others_product <= arguments["nodes"] * gpus_per_node] or [1]
    if axis == "dp":
        degrees = [n for n in powers if n * others_product % gpus_per_node == 0][:8]
    usual_values = _USUAL_VALUES.get(axis, degrees)
    if axis in DIVIDES:
        usual_values = [value for value in usual_values if int(value) <= arguments["nodes"] * gpus_per_node]
    values: Iterable[Any] = (settings[axis],) if axis in settings else usual_values
    variants = dict[str, Values]()
    for value in values:
        dropped_names = (_FOLLOWER.get(axis), *(details_of(axis) if value == NEUTRAL.get(axis) else ()))
        dependents = {"nodes": max(1, -(-value * others_product // gpus_per_node))} if axis == "dp" else {}
        variant = {name: argument for name, argument in arguments.items() if name not in dropped_names}
        variants[str(value)] = variant | {axis: value} | dependents
    return variants


def _bars(value: str, spec: RunSpec, config: SweepConfig, axis: str) -> Iterator[dict[str, Any]]:
    """The bar of the rank that needs most memory or, where the axis is `stage`, a bar of each rank."""
    constants = memory_constants(config.profile.framework, config.profile.memory)
    stages = predict_memory(spec, constants)
    for stage in stages if axis == "stage" else [max(stages, key=lambda stage: stage.peak_bytes)]:
        name, only_stage = (str(stage.pp_rank), stage) if axis == "stage" else (value, None)
        oom_probability = p_oom(stages, config.hardware.mem_bytes, constants, only_stage)
        bar = {"shown": "predicted", "value": name, "bytes": stage.peak_bytes, "p_oom": oom_probability}
        yield bar | stage._asdict() | columns_of_run(spec)


def _measured(runs: pd.DataFrame, bars: pd.DataFrame, config: SweepConfig) -> tuple[pd.DataFrame, list[str]]:
    """The runs with the layouts of bars, and the lines under the figure about them.

    Except with AFAB, the gas of a run may differ from that of the bar if both are above pp.
    """
    (shape,), kernel = config.models, config.kernel
    kernel_row = {"kernel": kernel.name, "precision": kernel.precision, "routing": kernel.routing_of(shape)}
    bars = bars.assign(hardware=config.hardware.name, **kernel_row)[["value", *_BAR_KEY]]
    pairs = runs.merge(bars, how="cross", suffixes=("", "_of_bar"))
    bar_values = {name: pairs[f"{name}_of_bar"] for name in _BAR_KEY}
    is_equal = pd.DataFrame({key: pairs[key].isna() | (pairs[key] == bar_values[key]) for key in _BAR_KEY})
    is_equal["kernel"] |= pairs["kernel"] == config.profile.framework
    unmatched_names = [name for name in _BAR_KEY if bars[name].nunique() == 1 and not is_equal[name].any()]
    is_above_pp = pairs[["gas", "gas_of_bar"]].min(axis=1) > bar_values["pp"]
    is_equal["gas"] |= is_above_pp & (bar_values["pp_schedule"] != "afab")
    matches = pairs[is_equal.all(axis=1)]
    is_ok, mem_bytes = matches["status"] == "ok", config.hardware.mem_bytes
    peak_bytes, rank0_bytes = matches["peak_mem_reserved_bytes"], matches["peak_mem_reserved_rank0_bytes"]
    cases = [matches["suspect"].notna(), matches["status"] == "oom"]
    cases += [is_ok & (peak_bytes > 0), is_ok & (rank0_bytes > 0)]
    kinds = np.select(cases, ["suspect", "oom", "measured", "measured_rank0"], "")
    mark_bytes = np.select(cases, [np.nan, mem_bytes, peak_bytes, rank0_bytes], np.nan)
    marks = pd.DataFrame({"value": matches["value"], "shown": kinds, "bytes": mark_bytes})[kinds != ""]
    num_suspect = int((marks["shown"] == "suspect").sum())
    runs_text = counted(len(marks) - num_suspect, "run")
    equal_text = "the same kernel, hardware and layout (gas may differ where both are above pp)"
    points_text = f"{runs_text} among {counted(len(runs), 'row')} with {equal_text}"
    lines = [f"Points: {points_text}; {num_suspect} more are suspect and not drawn."]
    if unmatched_names:
        lines.append(f"No row has {', '.join(f'{name}={bars[name][0]}' for name in unmatched_names)}.")
    if config.hardware.device == "cpu":
        lines.append("On CPUs, a measured peak is the resident set of a process, including Python and torch.")
    return marks, lines


def _notes(bars: pd.DataFrame, reasons: Mapping[str, str], config: SweepConfig) -> Iterator[str]:
    """The lines under the figure about the prediction and the values that cannot run."""
    mem_bytes, p_ooms = config.hardware.mem_bytes, bars["p_oom"]
    oom_text = " to ".join(dict.fromkeys(f"{100 * p:.0f}" for p in (p_ooms.min(), p_ooms.max())))
    bar_text = f"peak memory and P(OOM), the probability that it does not fit ({oom_text} %)"
    capacity_text = f"{config.hardware.gpu} has {mem_bytes / GIB:,.4g} GiB"
    yield f"Predicted with profile {config.profile.name}: {bar_text}. {capacity_text}."
    values_by_moment = ((moment, bars["value"][bars["phase"] == phase]) for phase, moment in _MOMENTS.items())
    peak_texts = [f"peak of {_span(values)}: {moment}" for moment, values in values_by_moment if len(values)]
    yield f"A bar shows the memory held at its peak; {'; '.join(peak_texts)}."
    if bars["bytes"].max() > _MAX_SCALE * mem_bytes:
        yield f"Bars are cut off at {_MAX_SCALE:g} times the GPU memory; the numbers on them are not."
    for reason in dict.fromkeys(reasons.values()):
        yield f"Cannot run: {', '.join(name for name in reasons if reasons[name] == reason)}: {reason}."


def figure(points: pd.DataFrame, *, title: str, notes: str, axis: str) -> Figure:
    """A bar for each value of the axis, or each rank of the pipeline, with a line at the memory of the GPU."""
    highest = points["bytes"][points["shown"] != "oom"].max()
    unit, unit_bytes = ("GiB", GIB) if highest >= GIB else ("MiB", 2**20)
    size_columns = ["bytes", "mem_bytes", *MEMORY_PARTS]
    points, highest = points.assign(**points[size_columns] / unit_bytes), highest / unit_bytes
    row, bars = points.iloc[0], points[points["shown"] == "predicted"]
    capacity = row["mem_bytes"]
    y_end = 1.25 * highest if 3 * highest < capacity else max(1.25 * highest, 1.15 * capacity)
    y_end = min(y_end, _MAX_SCALE * capacity)
    heading = f"Predicted memory of {row['model']} by part, over {_TITLES[axis]}"
    heading += f"; measured: {title}" if points["shown"].isin([*_LOOK_BY_MARK]).any() else ""
    largest_parts = bars[[*MEMORY_PARTS]].max()
    min_size = _MIN_SHARE * y_end
    legend: list[Any] = [
        Patch(label=part if size > min_size else f"{part} (at most {size:.2g} {unit})", **_LOOKS[part])
        for part, size in largest_parts[largest_parts > 0].items()
    ]
    limits = [{**_LIMIT_LOOK, "label": f"{capacity:,.4g} {unit} of {row['gpu']}"}] if capacity < y_end else []
    mark_looks = {shown: look for shown, look in _LOOK_BY_MARK.items() if (points["shown"] == shown).any()}
    legend += [*limits, *mark_looks.values()]
    figure, panels = panel_grid([axis], title=heading, notes=notes, legend=legend, height=3.6)
    axes, bottom = panels[axis], pd.Series(0.0, bars.index)
    for part in largest_parts[largest_parts > 0].index:
        axes.bar(bars.index, bars[part], 0.7, bottom, **_LOOKS[part])
        bottom = bottom + bars[part]
    for limit in limits:
        axes.axhline(capacity, **limit)
    for shown, look in mark_looks.items():
        marked_runs = points[points["shown"] == shown]
        axes.plot(marked_runs["value"].map([*bars["value"]].index), marked_runs["bytes"], zorder=4, **look)
    axes.describe(row["panel"], _TITLES[axis] + _TITLE_SUFFIXES.get(axis, f" ({axis})"), f"memory ({unit})")
    _name_bars(axes, points, bars, y_end)
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, y_end)
    return figure


def _name_bars(axes: Panel, points: pd.DataFrame, bars: pd.DataFrame, y_end: float) -> None:
    """Names the bars below, and above them the peak and P(OOM), as far as there is room."""
    axes.categories(_names(bars["value"]))
    bar_inches = (WIDTH - 1) / max(5, len(bars))
    if bar_inches < _NUMBER_INCHES:
        return
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
    marks = points[points["shown"] != "oom"]
    for x, value, peak, p in bars[["value", "bytes", "p_oom"]].itertuples():
        oom_text = f"\nP(OOM)\n{100 * p:.0f} %" if p >= 0.005 and bar_inches > 2 * _NUMBER_INCHES else ""
        is_close = (marks["value"] == value) & ((marks["bytes"] - peak).abs() < 0.08 * y_end)
        text_height = min(marks["bytes"][is_close].max() + 0.03 * y_end, 0.84 * y_end)
        digits = 2 if peak < 10 else 1 if peak < 100 else 0
        text = f"{peak:,.{digits}f}{oom_text}"
        axes.text(x, text_height, text, ha="center", va="bottom", fontsize=7.5, zorder=3, bbox=box)


def _names(values: Iterable[str]) -> list[str]:
    """The names of bars, whole numbers with their thousands apart."""
    return [f"{int(value):,}" if value.isdecimal() else value for value in values]


def _span(values: "pd.Series[str]") -> str:
    """The names of some bars, those of several neighbours as `1 to 32`."""
    names, indices = _names(values), values.index
    is_range = indices[-1] - indices[0] == len(indices) - 1 > 1
    return f"{names[0]} to {names[-1]}" if is_range else ", ".join(names)
