"""Draws the predicted memory of a layout by part, over the values of one axis or the ranks of its pipeline."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ultrabench.analysis.figures.picture import DARK, EDGE_LOOK
from ultrabench.analysis.figures.runs import final_rows
from ultrabench.analysis.figures.style import COLOURS, WIDTH_INCHES, Panel, panel_grid
from ultrabench.analysis.results.columns import column_of
from ultrabench.analysis.results.planned import is_predicted
from ultrabench.column import NUMBER, capacity_text, memory_axis
from ultrabench.errors import ConfigError, LayoutError, counted
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
from ultrabench.result import Status
from ultrabench.run import RunSpec
from ultrabench.sweep.arguments import PREDICTION_DEFAULTS, TEXT_ARGUMENTS, config_of, read_arguments, run_of
from ultrabench.sweep.config.files import files
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan_table import columns_of_run
from ultrabench.sweep.predict.memory import memory_constants, p_oom, predict_memory
from ultrabench.sweep.predict.stage_memory import BACKWARD, FORWARD, MEMORY_PARTS, OPTIMIZER

Arguments = Mapping[str, Any]
"""Name of an argument -> its value."""
_TITLE_BY_AXIS = TITLES | {"seq_len": "tokens per sequence", "stage": "pipeline rank"}
"""Axis -> its title."""
_TITLE_SUFFIX_BY_AXIS = {"dp": " (dp), on as many nodes as needed", "stage": " (pp_rank)"}
"""Axis -> the text after its title; by default, its name in brackets."""
_VALUES_BY_AXIS: dict[str, tuple[int | str, ...]] = USUAL | {"seq_len": tuple(2**n for n in range(10, 18))}
"""Axis -> its values; those of degrees follow from the number of GPUs."""
_FOLLOWER_BY_AXIS = dict.fromkeys(DEGREES, "dp") | {"dp": "nodes"}
"""Axis -> the argument that changes with it."""
_LAYOUT_DEFAULTS = {name: NEUTRAL[name] for name in USUAL if name not in ADDED_LATER} | {"gas": "pp"}
"""Axes of layouts that the note names where they are not given -> their values."""
_ROW_ARGUMENTS = ("model", "hardware", "profile", "nodes", "seq_len", *BATCH, "zero_stage")
"""Arguments whose defaults are those of the rows."""
_CELL_ARGUMENTS = ("model", "hardware", "nodes", "seq_len", "precision")
"""Arguments that set a cell of a plan apart from others."""
_BAR_COLUMNS = [*AXES, "model", "hardware", "nodes", "seq_len", "precision", "routing", "kernel"]
"""Columns that are equal in a measured run and the layout of its bar."""
_MOMENT_BY_PHASE = {
    FORWARD: "at the end of forward, before gradients",
    BACKWARD: "in backward",
    OPTIMIZER: "in the optimizer step, after activations and gathered weights are freed",
}
"""Phase of a step -> its name in the note."""
_HATCHES = ("", "////", "", "\\\\\\\\", "....", "", "xxxx")
_LOOK_BY_PART: dict[Any, dict[str, Any]] = {
    part: {"facecolor": colour, "hatch": hatch, **EDGE_LOOK}
    for part, colour, hatch in zip(MEMORY_PARTS, COLOURS, _HATCHES, strict=False)
}
"""Part of the memory -> the look of its bars."""
_MAX_Y_FACTOR = 2.2
"""Largest value of the y axis, as a multiple of the memory of a GPU."""
_MIN_LABEL_INCHES = 0.3
"""Smallest width in inches of a bar that has a number."""
_MIN_VISIBLE_SHARE = 0.005
"""Share of the y axis below which a part of a bar cannot be seen."""
_MARK_LOOK = {"color": DARK, "linestyle": "", "markeredgecolor": "white", "markeredgewidth": 0.6}
_LOOK_BY_MARK: dict[str, dict[str, Any]] = {
    "measured": {"label": "measured, largest of all ranks", "marker": "o", **_MARK_LOOK},
    "measured_rank0": {"label": "measured, rank 0", "marker": "s", **_MARK_LOOK},
    Status.OOM.value: {"label": "measured: out of memory", "marker": "X", **_MARK_LOOK},
}
"""Kind of a mark (the column `shown`) -> its look."""
_LIMIT_LOOK: dict[str, Any] = {"color": DARK, "linestyle": "--", "linewidth": 1.2}


def points(layout: Arguments, table: pa.Table | None = None, *, axis: str) -> tuple[pd.DataFrame, str]:
    """The rows of the figure, and its note.

    There is a row for each bar and for each measured run of its layout. The column `value` is the name of the
    bar: its value of the axis, or its pipeline rank. `shown` is predicted for a bar; for a run it is measured,
    measured_rank0, oom or suspect. `bytes` is the predicted or measured memory; bars also have the bytes of each part
    and the columns of their layout.

    Args:
        layout: arguments as `ultrabench predict` takes them.
        table: results in which runs of these layouts are looked up, and whose values are defaults.

    Raises:
        ConfigError: an argument is wrong, or no value of the axis can run.
    """
    layout_texts = [f"{name}={value}" for name, value in layout.items()]
    settings = read_arguments(layout_texts, PREDICTION_DEFAULTS, "model=llama3-8b tp=8")
    runs = None if table is None else final_rows(table)
    is_plan = table is not None and is_predicted(table)
    values_function = _plan_values if is_plan else _result_values
    row_values = {} if runs is None else values_function(runs, settings)
    arguments = PREDICTION_DEFAULTS | {name: values[0] for name, values in row_values.items()} | settings
    config = config_of(arguments)
    bars, reasons = list[dict[str, Any]](), dict[str, str]()
    variants = {"": arguments} if axis == "stage" else _variants(arguments, settings, config, axis)
    for bar_name, bar_arguments in variants.items():
        try:
            bars += _bars(bar_name, run_of(bar_arguments, config), config, axis)
        except ConfigError as error:
            reasons[bar_name] = error.reason if isinstance(error, LayoutError) else error.fact
    if not bars:
        bar_name, reason = next(iter(reasons.items()))
        value_text = f"{axis}={bar_name}: " if bar_name else ""
        raise ConfigError(f"no layout to draw: {value_text}{reason}; choose another layout")
    rows, all_arguments = pd.DataFrame(bars), arguments | _LAYOUT_DEFAULTS | arguments
    varied_names = axis, _FOLLOWER_BY_AXIS.get(axis)
    known_values = {name: value for name, value in all_arguments.items() if value is not None}
    text_by_name = {name: f"{name}={known_values[name]}" for name in known_values if name not in varied_names}
    panel_name = " ".join(text for name, text in text_by_name.items() if name in ("model", *settings))
    defaults_text = " ".join(text for name, text in text_by_name.items() if name not in ("kernel", *settings))
    num_values = {name: len(values) for name, values in row_values.items() if name in text_by_name}
    choices_text = ", ".join(f"{count} values of {name}" for name, count in num_values.items() if count > 1)
    origin_text = ", from the best layout of the plan with these values" * is_plan
    note_lines = [f"Defaults{origin_text}: {defaults_text}."] if defaults_text else []
    note_lines += [f"The rows have {choices_text}: choose with NAME=VALUE."] if choices_text else []
    note_lines += _prediction_lines(rows, reasons, config)
    if runs is not None and axis != "stage" and not is_plan:
        marks, mark_lines = _run_marks(runs, rows, config)
        rows, note_lines = pd.concat([rows, marks], ignore_index=True), note_lines + mark_lines
    rows = rows.assign(panel=panel_name, gpu=config.hardware.gpu, mem_bytes=config.hardware.mem_bytes)
    return rows, "\n".join(note_lines)


def _result_values(runs: pd.DataFrame, settings: Arguments) -> dict[str, list[Any]]:
    """Name of an argument that the user did not set -> its values in the results, the default first.

    The defaults are the smallest model that has a configuration, the smallest numbers, the ZeRO stage of most rows,
    and the largest gas, since gas above pp does not change the memory.
    """
    values_by_argument = {}
    for argument in _ROW_ARGUMENTS:
        column = "kernel" if argument == "profile" else argument
        values = [*runs[column].dropna().unique()]
        if argument == "profile":  # that of the embedded kernel follows from the hardware, not from its name
            values = [name for name in values[:1] if name in files("profiles") and "kernel" not in settings]
        elif argument in TEXT_ARGUMENTS:
            values = [value for value in values if value in files(argument)]
        else:
            values = sorted(map(int, values), reverse=argument == "gas")
        if argument == "zero_stage":  # with the most frequent value, most bars have measured runs
            values.sort(key=lambda value: -int((runs[argument] == value).sum()))
        if argument in settings:
            runs = runs[runs[column] == settings[argument]]
        elif values:
            values_by_argument[argument], runs = values, runs[runs[column] == values[0]]
    return values_by_argument


def _plan_values(runs: pd.DataFrame, settings: Arguments) -> dict[str, list[Any]]:
    """Name of an argument that the user did not set -> its values in the rows of a plan, the default first.

    The default is the value of the best predicted layout of the first cell among those with the values of `settings`.
    """
    for name in settings.keys() & {*runs.columns}:
        runs = runs[runs[name] == settings[name]]
    if not len(runs):
        settings_text = " ".join(f"{name}={value}" for name, value in settings.items())
        raise ConfigError(f"no layout of the plan has {settings_text}", "choose other values")
    best_run = runs.sort_values("place_in_cell", kind="stable").iloc[0]
    values_by_argument = {}
    for name in (*_CELL_ARGUMENTS, *AXES):
        is_neutral = name in ADDED_LATER and best_run[name] == NEUTRAL[name]
        if name not in settings and pd.notna(best_run[name]) and not is_neutral:
            default = best_run[name] if name in TEXT_ARGUMENTS else int(best_run[name])
            other_values = runs[name].dropna().unique() if name in _CELL_ARGUMENTS else ()
            values_by_argument[name] = [*dict.fromkeys((default, *other_values))]
    return values_by_argument


def _variants(arguments: Arguments, given: Arguments, config: SweepConfig, axis: str) -> dict[str, Arguments]:
    """Name of a bar -> its arguments, for the value of the axis in `given`, or else for each of its values.

    Args:
        given: the arguments that the user set.
    """
    gpus_per_node, powers = config.hardware.gpus_per_node, [2**n for n in range(17)]
    others_product = model_parallel_degree({**arguments, axis: 1})
    degrees = [n for n in powers if n * others_product <= arguments["nodes"] * gpus_per_node] or [1]
    if axis == "dp":
        degrees = [n for n in powers if n * others_product % gpus_per_node == 0][:8]
    usual_values = _VALUES_BY_AXIS.get(axis, degrees)
    if axis in DIVIDES:
        usual_values = [value for value in usual_values if int(value) <= arguments["nodes"] * gpus_per_node]
    axis_values: Iterable[Any] = (given[axis],) if axis in given else usual_values
    arguments_by_bar = dict[str, Arguments]()
    for axis_value in axis_values:
        details = details_of(axis) if axis_value == NEUTRAL.get(axis) else ()
        dropped_names = {_FOLLOWER_BY_AXIS.get(axis), *details}
        kept_arguments = {name: value for name, value in arguments.items() if name not in dropped_names}
        nodes = {"nodes": max(1, -(-axis_value * others_product // gpus_per_node))} if axis == "dp" else {}
        arguments_by_bar[str(axis_value)] = kept_arguments | {axis: axis_value} | nodes
    return arguments_by_bar


def _bars(value_name: str, spec: RunSpec, config: SweepConfig, axis: str) -> Iterator[dict[str, Any]]:
    """The bar of the rank that needs most memory or, where the axis is `stage`, a bar of each rank."""
    constants = memory_constants(config.profile.framework, config.profile.memory)
    stages = predict_memory(config.profile.as_divided(spec), constants)
    for stage in stages if axis == "stage" else [max(stages, key=lambda stage: stage.peak_bytes)]:
        bar_name, shown_stage = (str(stage.pp_rank), stage) if axis == "stage" else (value_name, None)
        oom_probability = p_oom(stages, config.hardware.mem_bytes, constants, shown_stage)
        bar = {"shown": "predicted", "value": bar_name, "bytes": stage.peak_bytes, "p_oom": oom_probability}
        yield bar | stage._asdict() | columns_of_run(spec)


def _run_marks(runs: pd.DataFrame, bars: pd.DataFrame, config: SweepConfig) -> tuple[pd.DataFrame, list[str]]:
    """The marks of the runs with the layouts of bars, and the lines under the figure about them.

    Except with AFAB, the gas of a run may differ from that of the bar if both are above pp.
    """
    (shape,), kernel = config.models, config.kernel
    kernel_row = {"kernel": kernel.name, "precision": kernel.precision, "routing": kernel.routing_of(shape)}
    bars = bars.assign(hardware=config.hardware.name, **kernel_row)[["value", *_BAR_COLUMNS]]
    pairs = runs.merge(bars, how="cross", suffixes=("", "_of_bar"))  # of a run and a bar
    bar_values = {column: pairs[f"{column}_of_bar"] for column in _BAR_COLUMNS}
    is_equal = pairs[_BAR_COLUMNS].isna() | (pairs[_BAR_COLUMNS] == pd.DataFrame(bar_values))
    is_equal["kernel"] |= pairs["kernel"] == config.profile.framework
    fixed_columns = [column for column in _BAR_COLUMNS if bars[column].nunique() == 1]
    unmatched_columns = [column for column in fixed_columns if not is_equal[column].any()]
    is_above_pp = pairs[["gas", "gas_of_bar"]].min(axis=1) > bar_values["pp"]
    is_equal["gas"] |= is_above_pp & (bar_values["pp_schedule"] != "afab")
    matches = pairs[is_equal.all(axis=1)]
    is_ok, mem_bytes = matches["status"] == Status.OK, config.hardware.mem_bytes
    peak_bytes, rank0_bytes = matches["peak_mem_reserved_bytes"], matches["peak_mem_reserved_rank0_bytes"]
    is_kind = [matches["suspect"].notna(), matches["status"] == Status.OOM]
    is_kind += [is_ok & (peak_bytes > 0), is_ok & (rank0_bytes > 0)]
    kinds = np.select(is_kind, ["suspect", Status.OOM.value, "measured", "measured_rank0"], "")
    mark_bytes = np.select(is_kind, [np.nan, mem_bytes, peak_bytes, rank0_bytes], np.nan)
    marks = pd.DataFrame({"value": matches["value"], "shown": kinds, "bytes": mark_bytes})[kinds != ""]
    num_suspect = int((marks["shown"] == "suspect").sum())
    runs_text = counted(len(marks) - num_suspect, "run")
    equal_text = "the same kernel, hardware and layout (gas may differ where both are above pp)"
    points_text = f"{runs_text} among {counted(len(runs), 'row')} with {equal_text}"
    lines = [f"Points: {points_text}; {num_suspect} more are suspect and not drawn."]
    if unmatched_columns:
        lines.append(f"No row has {', '.join(f'{key}={bars[key][0]}' for key in unmatched_columns)}.")
    if config.hardware.shares_host:
        lines.append("On CPUs, a measured peak is the resident set of a process, including Python and torch.")
    return marks, lines


def _prediction_lines(bars: pd.DataFrame, reasons: Mapping[str, str], config: SweepConfig) -> Iterator[str]:
    """The lines under the figure about the prediction and the values that cannot run.

    Args:
        reasons: name of a bar that cannot run -> the reason.
    """
    mem_bytes, p_ooms = config.hardware.mem_bytes, bars["p_oom"]
    p_oom = column_of("p_oom")
    oom_text = " to ".join(dict.fromkeys(map(p_oom.text, (p_ooms.min(), p_ooms.max()))))
    bar_text = f"peak memory and {p_oom.heading}, the probability that it does not fit ({oom_text})"
    limit_text = f"{config.hardware.gpu} has {capacity_text(mem_bytes)}"
    yield f"Predicted with profile {config.profile.name}: {bar_text}. {limit_text}."
    names, phases = bars["value"], bars["phase"]
    moment_names = ((moment, names[phases == phase]) for phase, moment in _MOMENT_BY_PHASE.items())
    peaks = [f"peak of {_span_text(names)}: {moment}" for moment, names in moment_names if len(names)]
    yield f"A bar shows the memory held at its peak; {'; '.join(peaks)}."
    if bars["bytes"].max() > _MAX_Y_FACTOR * mem_bytes:
        yield f"Bars are cut off at {_MAX_Y_FACTOR:g} times the GPU memory; the numbers on them are not."
    for reason in dict.fromkeys(reasons.values()):
        yield f"Cannot run: {', '.join(name for name in reasons if reasons[name] == reason)}: {reason}."


def figure(points: pd.DataFrame, *, title: str, notes: str, axis: str) -> Figure:
    """A bar for each value of the axis, or each rank of the pipeline, with a line at the memory of the GPU."""
    max_memory = points["bytes"][points["shown"] != Status.OOM].max()
    unit, factor = memory_axis(max_memory)
    size_columns = ["bytes", "mem_bytes", *MEMORY_PARTS]
    points, max_memory = points.assign(**points[size_columns] * factor), max_memory * factor
    first_row, bars = points.iloc[0], points[points["shown"] == "predicted"]
    gpu_memory = first_row["mem_bytes"]
    y_max = 1.25 * max_memory if 3 * max_memory < gpu_memory else max(1.25 * max_memory, 1.15 * gpu_memory)
    y_max = min(y_max, _MAX_Y_FACTOR * gpu_memory)
    heading = f"Predicted memory of {first_row['model']} by part, over {_TITLE_BY_AXIS[axis]}"
    heading += f"; measured: {title}" if points["shown"].isin([*_LOOK_BY_MARK]).any() else ""
    max_sizes = bars[[*MEMORY_PARTS]].max()
    max_sizes = max_sizes[max_sizes > 0]
    legend: list[Any] = []
    for part, size in max_sizes.items():
        size_text = "" if size > _MIN_VISIBLE_SHARE * y_max else f" (at most {size:.2g} {unit})"
        legend.append(Patch(label=f"{part}{size_text}", **_LOOK_BY_PART[str(part)]))
    limit_look = {**_LIMIT_LOOK, "label": f"{gpu_memory:,.4g} {unit} of {first_row['gpu']}"}
    limit_looks = [limit_look] if gpu_memory < y_max else []
    mark_looks = {kind: look for kind, look in _LOOK_BY_MARK.items() if (points["shown"] == kind).any()}
    legend += [*limit_looks, *mark_looks.values()]
    figure, panels = panel_grid([axis], title=heading, notes=notes, legend=legend, height=3.6)
    axes, bottoms = panels[axis], pd.Series(0.0, bars.index)
    for part in max_sizes.index:
        axes.bar(bars.index, bars[part], 0.7, bottoms, **_LOOK_BY_PART[part])
        bottoms = bottoms + bars[part]
    if limit_looks:
        axes.axhline(gpu_memory, **limit_look)
    for kind, look in mark_looks.items():
        marked_runs = points[points["shown"] == kind]
        axes.plot(marked_runs["value"].map([*bars["value"]].index), marked_runs["bytes"], zorder=4, **look)
    x_title = _TITLE_BY_AXIS[axis] + _TITLE_SUFFIX_BY_AXIS.get(axis, f" ({axis})")
    axes.describe(first_row["panel"], x_title, f"memory ({unit})")
    _label_bars(axes, points, bars, y_max)
    axes.grid(axis="x", visible=False)
    axes.set_ylim(0, y_max)
    return figure


def _label_bars(axes: Panel, points: pd.DataFrame, bars: pd.DataFrame, y_max: float) -> None:
    """Names the bars below, and above them the peak and P(OOM), as far as there is room."""
    axes.set_categories(_bar_names(bars["value"]))
    bar_inches = (WIDTH_INCHES - 1) / max(5, len(bars))
    if bar_inches < _MIN_LABEL_INCHES:
        return
    text_box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
    marks = points[points["shown"] != Status.OOM]
    oom_column = column_of("p_oom")
    for x, bar_name, peak, oom_chance in bars[["value", "bytes", "p_oom"]].itertuples():
        has_oom_text = oom_chance >= 0.005 and bar_inches > 2 * _MIN_LABEL_INCHES
        oom_text = f"\n{oom_column.heading}\n{oom_column.text(oom_chance)}" if has_oom_text else ""
        is_close = (marks["value"] == bar_name) & ((marks["bytes"] - peak).abs() < 0.08 * y_max)
        text_height = min(marks["bytes"][is_close].max() + 0.03 * y_max, 0.84 * y_max)
        label = f"{NUMBER.bare_text(peak)}{oom_text}"
        axes.text(x, text_height, label, ha="center", va="bottom", fontsize=7.5, zorder=3, bbox=text_box)


def _bar_names(values: Iterable[str]) -> list[str]:
    """The names of bars, whole numbers with their thousands apart."""
    return [f"{int(value):,}" if value.isdecimal() else value for value in values]


def _span_text(values: "pd.Series[str]") -> str:
    """The names of some bars, those of several neighbours as `1 to 32`."""
    bar_names, indices = _bar_names(values), values.index
    is_range = indices[-1] - indices[0] == len(indices) - 1 > 1
    return f"{bar_names[0]} to {bar_names[-1]}" if is_range else ", ".join(bar_names)
