"""Draws the largest micro-batch that fits into memory over tp and pp, as predicted and as measured."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ultrabench.analysis.figures.picture import DARK
from ultrabench.analysis.figures.runs import final_rows, noun_of
from ultrabench.analysis.figures.style import COLOURS, PALE, Panel, panel_grid
from ultrabench.analysis.results.cases import profile_and_hardware
from ultrabench.analysis.results.cells import notes
from ultrabench.analysis.results.columns import column_of
from ultrabench.analysis.results.knobs import in_order
from ultrabench.analysis.results.left_out import none_left
from ultrabench.analysis.results.measured import MeasuredRun, measured_runs
from ultrabench.errors import ConfigError, counted
from ultrabench.layout import NEUTRAL, default_schedule
from ultrabench.result import Status
from ultrabench.run import RunSpec
from ultrabench.sweep.grid import broken_rules
from ultrabench.sweep.predict.memory import memory_constants, p_oom, predict_memory
from ultrabench.sweep.predict.predict import LIKELY_OOM
from ultrabench.sweep.predict.profile import Profile
from ultrabench.sweep.predict.stage_memory import LARGEST

_X_AXIS = "tp"
"""Axis whose values are the columns of squares."""
_Y_AXIS = "pp"
"""Axis whose values are the rows of squares."""
_PANEL_AXIS = "recompute"
"""Axis whose values have panels of their own."""
_RunKey = tuple[str | None, str]
"""Sweep and run_id of a run."""
_ROW_INCHES, _MARGIN_INCHES = 0.34, 1.0
"""Height of a row of squares, and that of the title and labels of a panel, in inches."""
_COLOUR_MAP = colormaps["viridis"]
_DARK_COLOURS_SHARE = 0.5
"""Share of the scale up to which light text is readable."""
_FONT: dict[str, Any] = {"fontsize": 6.5, "linespacing": 1.05, "ha": "center", "va": "center", "zorder": 3}
_CONTRADICTED_LOOK: dict[str, Any] = {"edgecolor": COLOURS[3], "linewidth": 1.8}
"""Look of the frame of a prediction that measured runs contradict."""


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """The table of squares, and the note under the figure.

    A square is a row: `panel` is its model, and runs with its values of _X_AXIS, _Y_AXIS and _PANEL_AXIS share it,
    whatever their other axes.

    `predicted` is the largest mbs whose P(OOM) is at most LIKELY_OOM with one of the tried layouts; 0 where none fits,
    null where no profile predicts the program. `measured` is the largest mbs with an ok run; 0 where mbs=1 ran out of
    memory, null where this is not known. `oom` is the smallest mbs above `measured` that ran out of memory, `runs` the
    number of runs. `contradicted` says whether runs contradict `predicted`: a larger mbs was ok, or a layout that is
    predicted to fit with it ran out of memory with it or a smaller one, and no layout was ok with it.

    Raises:
        ConfigError: no run ended ok or out of memory, or none has its degrees and mbs.
    """
    rows, key_columns = final_rows(table), ["panel", _X_AXIS, _Y_AXIS, _PANEL_AXIS]
    runs = rows[rows["status"].isin([Status.OK, Status.OOM]) & rows["suspect"].isna()]
    runs = runs.fillna({_PANEL_AXIS: NEUTRAL[_PANEL_AXIS]}).dropna(subset=[*key_columns, "mbs"])
    if not len(runs):
        reason = f"none with {_X_AXIS}, {_Y_AXIS} and mbs that ended ok or out of memory and is not suspect"
        raise none_left(rows, reason, noun_of(rows))
    is_final_ok_or_oom = pc.field("is_final") & pc.field("status").isin([Status.OK, Status.OOM])
    complete_runs, incomplete_runs_by_reason = measured_runs(table.filter(is_final_ok_or_oom))
    mbs_by_run = _predicted_mbs_by_run({(run.sweep, run.run_id): run for run in complete_runs})
    run_keys = pd.Series([*zip(runs["sweep"], runs["run_id"], strict=True)], runs.index, object)
    runs = runs.assign(run_key=run_keys, predicted=run_keys.map(mbs_by_run).astype(float))
    squares = [
        {**dict(zip(key_columns, square_key, strict=True)), **_square_values(square_runs)}
        for square_key, square_runs in runs.groupby(key_columns, sort=False)
    ]
    rows_text = counted(sum(map(len, incomplete_runs_by_reason.values())), "row")
    unpredicted_text = f"Not predicted: {rows_text} with an incomplete model or layout.\n"
    note = notes(table)
    return pd.DataFrame(squares), unpredicted_text + note if incomplete_runs_by_reason else note


def _square_values(runs: pd.DataFrame) -> dict[str, Any]:
    """What the runs of a square say about its largest micro-batch: the columns of `points`."""
    mbs_of_ok, mbs_of_oom = (runs.loc[runs["status"] == status, "mbs"] for status in (Status.OK, Status.OOM))
    largest_mbs = mbs_of_ok.max() if len(mbs_of_ok) else 0 if mbs_of_oom.min() == 1 else np.nan
    predicted_mbs = runs["predicted"].max()
    smallest_oom_mbs = mbs_of_oom[runs["predicted"] == predicted_mbs].min()
    has_only_oom = smallest_oom_mbs <= predicted_mbs and not mbs_of_ok.max() >= predicted_mbs
    return {
        "predicted": predicted_mbs,
        "measured": largest_mbs,
        Status.OOM.value: (mbs_of_oom[mbs_of_oom > mbs_of_ok.max()] if len(mbs_of_ok) else mbs_of_oom).min(),
        "contradicted": bool(mbs_of_ok.max() > predicted_mbs or has_only_oom),
        "runs": runs["run_key"].nunique(),
    }


def _predicted_mbs_by_run(runs: Mapping[_RunKey, MeasuredRun]) -> dict[_RunKey, float]:
    """Sweep and run_id of a run -> the largest mbs that is predicted to fit with the layout of the run;
    null without a profile.

    Runs that differ only in mbs share one prediction, and runs of one program share the constants of its profile.
    """
    memory_inputs_by_program, mbs_by_layout, mbs_by_run = dict[object, Any](), dict[object, float](), {}
    for run_key, run in runs.items():
        program_key = run.spec.kernel.name, run.hardware
        if program_key not in memory_inputs_by_program:
            memory_inputs_by_program[program_key] = _memory_inputs(run)
        mbs1_spec, memory_inputs = _with_mbs(run.spec, 1), memory_inputs_by_program[program_key]
        layout_key = mbs1_spec.run_id, run.hardware
        if layout_key not in mbs_by_layout:
            mbs_by_layout[layout_key] = _largest_mbs(mbs1_spec, *memory_inputs) if memory_inputs else np.nan
        mbs_by_run[run_key] = mbs_by_layout[layout_key]
    return mbs_by_run


def _memory_inputs(run: MeasuredRun) -> tuple[Profile, int] | None:
    """What decides whether a run fits: the profile of its program, and its GPU's memory in bytes;
    None without a profile of its program.
    """
    with contextlib.suppress(ConfigError):
        profile, hardware = profile_and_hardware(run)
        return profile, hardware.mem_bytes
    return None


def _with_mbs(spec: RunSpec, mbs: int) -> RunSpec:
    """The run with another mbs and the gas that makes up its batch; a schedule that follows from gas follows it."""
    layout = spec.layout
    gas, schedule = layout.mbs * layout.gas // mbs, layout.pp_schedule
    if schedule == default_schedule(layout.pp, layout.gas):
        schedule = default_schedule(layout.pp, gas)
    return replace(spec, layout=replace(layout, mbs=mbs, gas=gas, pp_schedule=schedule))


def _largest_mbs(spec: RunSpec, profile: Profile, mem_bytes: int) -> int:
    """The largest mbs that is predicted to fit, for a run with mbs=1; 0 where none does."""
    constants = memory_constants(profile.framework, profile.memory)
    for mbs in range(spec.layout.gas, 0, -1):
        if spec.layout.gas % mbs == 0:
            larger_spec = _with_mbs(spec, mbs)
            rule_names = {rule_name for rule_name, _ in broken_rules(larger_spec.layout, larger_spec.shape)}
            has_enough = "enough_micro_batches" not in rule_names
            stages = predict_memory(profile.as_divided(larger_spec), constants, LARGEST) if has_enough else ()
            if stages and p_oom(stages, mem_bytes, constants) <= LIKELY_OOM:
                return mbs
    return 0


def figure(points: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """For each model and recomputation two panels of squares, tp across and pp up: predicted, and measured."""
    tps, pps = (sorted(map(int, points[axis].unique())) for axis in (_X_AXIS, _Y_AXIS))
    recomputes = in_order(_PANEL_AXIS, points[_PANEL_AXIS])
    squares_by_group = dict(iter(points.groupby([_PANEL_AXIS, "panel"])))
    group_keys = filter(squares_by_group.__contains__, product(recomputes, points["panel"].unique()))
    panel_keys = product(group_keys, ("predicted", "measured"))
    oom_column = column_of("p_oom")
    caption = (
        "Squares: the largest mbs that fits with any tried layout of these degrees, "
        "at most gbs / dp; oom: the smallest larger"
    )
    caption += (
        " mbs that did not fit; ?: unknown. Predicted to fit: "
        f"{oom_column.heading} of at most {oom_column.text(LIKELY_OOM)}. Framed: contradicted by"
    )
    caption += (
        f" measured runs ({int(points['contradicted'].sum())} of "
        f"{counted(len(points), 'square')}). To draw only 4 nodes: nodes=4."
    )
    heading = f"Largest micro-batch that fits, predicted and measured: {title}"
    panel_inches = _MARGIN_INCHES + _ROW_INCHES * len(pps)
    figure, panels = panel_grid(panel_keys, title=heading, notes=f"{caption}\n{notes}", height=panel_inches)
    max_mbs = points[["predicted", "measured"]].max().max()
    for ((recompute, model_name), source), axes in panels.items():
        for _, square in squares_by_group[recompute, model_name].iterrows():
            x, y = tps.index(square[_X_AXIS]), pps.index(square[_Y_AXIS])
            _draw_square(axes, square, source, (x, y), max_mbs)
        recompute_text = f" | {_PANEL_AXIS} {recompute}" if len(recomputes) > 1 else ""
        axes.describe(f"{source.capitalize()}: {model_name}{recompute_text}", _X_AXIS, _Y_AXIS)
        axes.set_categories(tps)
        axes.set_yticks(range(len(pps)), [str(pp) for pp in pps])
        axes.set_ylim(-0.5, len(pps) - 0.5)
        axes.grid(visible=False)
    return figure


def _draw_square(axes: Panel, square: pd.Series, source: str, xy: tuple[int, int], max_mbs: float) -> None:
    """Draws one square with its centre at `xy`: its mbs as number and colour.

    `source` says which mbs: predicted or measured. A measured square also names the smallest larger mbs that
    ran out of memory.
    """
    mbs, smallest_oom_mbs = square[source], square[Status.OOM] if source == "measured" else np.nan
    text = "?" if pd.isna(mbs) else f"{mbs:.0f}" if mbs else "none"
    text += f"\n{Status.OOM} {smallest_oom_mbs:.0f}" if pd.notna(smallest_oom_mbs) else ""
    colour_share = np.log2(mbs + 1) / np.log2(max_mbs + 1) if mbs > 0 else 0.0
    face_colour = _COLOUR_MAP(0.15 + 0.85 * colour_share) if colour_share else PALE
    is_framed = square["contradicted"] and source == "predicted"
    frame_look = _CONTRADICTED_LOOK if is_framed else {"edgecolor": "white"}
    corner = xy[0] - 0.46, xy[1] - 0.46
    axes.add_patch(Rectangle(corner, 0.92, 0.92, facecolor=face_colour, zorder=1 + is_framed, **frame_look))
    text_colour = "white" if 0 < colour_share < _DARK_COLOURS_SHARE else DARK
    axes.text(*xy, text, color=text_colour, **_FONT)
