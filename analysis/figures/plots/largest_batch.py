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

from ultrabench.analysis.cells import notes
from ultrabench.analysis.figures.picture import DARK
from ultrabench.analysis.figures.runs import final
from ultrabench.analysis.figures.style import COLOURS, PALE, Panel, panel_grid
from ultrabench.analysis.knobs import in_order
from ultrabench.analysis.left_out import none_left
from ultrabench.analysis.measured import MeasuredRun, measured_runs
from ultrabench.analysis.predict.cases import profile_and_hardware
from ultrabench.errors import ConfigError, counted
from ultrabench.layout import NEUTRAL, default_schedule
from ultrabench.result import Status
from ultrabench.run import RunSpec
from ultrabench.sweep.grid import broken_rules
from ultrabench.sweep.predict.memory import MemoryConstants, memory_constants, p_oom, predict_memory
from ultrabench.sweep.predict.predict import LIKELY_OOM
from ultrabench.sweep.predict.stage_memory import LARGEST

ACROSS = "tp"
"""Axis whose values are the columns of squares."""
UP = "pp"
"""Axis whose values are the rows of squares."""
APART = "recompute"
"""Axis whose values have panels of their own."""
_Id = tuple[str | None, str]
"""Sweep and run_id of a run."""
_ROW, _TOP = 0.34, 1.0
"""Heights in inches of a row of squares, and of what a panel has above and below them."""
_COLOURS = colormaps["viridis"]
_DARK_COLOURS = 0.5
"""Share of the scale up to which light text is readable."""
_TEXT: dict[str, Any] = {"fontsize": 6.5, "linespacing": 1.05, "ha": "center", "va": "center", "zorder": 3}
_WRONG: dict[str, Any] = {"edgecolor": COLOURS[3], "linewidth": 1.8}
"""Look of the frame of a prediction that measured runs contradict."""


def points(table: pa.Table) -> tuple[pd.DataFrame, str]:
    """One row for each square, a panel and values of ACROSS, UP and APART, with all other axes free; and the note.

    `predicted` is the largest mbs whose P(OOM) is at most one half, among the layouts that were tried with any mbs; 0
    where none fits, null where no profile predicts the program. `measured` is the largest mbs with an ok run; 0 where
    mbs=1 ran out of memory, null where this is not known. `oom` is the smallest larger mbs that ran out of memory, `runs`
    the number of runs. `contradicted` marks a prediction below an ok run, or of a layout that ran out of memory with it, where no layout was ok.

    Raises:
        ConfigError: no run ended ok or out of memory, or none has its degrees and mbs.
    """
    frame, place = final(table), ["panel", ACROSS, UP, APART]
    tried = frame[frame["status"].isin([Status.OK, Status.OOM]) & frame["suspect"].isna()]
    tried = tried.fillna({APART: NEUTRAL[APART]}).dropna(subset=[*place, "mbs"])
    if not len(tried):
        wanted = f"none with {ACROSS}, {UP} and mbs that ended ok or out of memory and is not suspect"
        raise none_left(frame, wanted)
    is_measured = pc.field("is_final") & pc.field("status").isin([Status.OK, Status.OOM])
    runs, incomplete = measured_runs(table.filter(is_measured))
    limits = _limits({(run.sweep, run.run_id): run for run in runs})
    ids = pd.Series([*zip(tried["sweep"], tried["run_id"], strict=True)], tried.index, object)
    tried = tried.assign(id=ids, predicted=ids.map(limits).astype(float))
    squares = [
        {**dict(zip(place, key, strict=True)), **_measured(of_square)}
        for key, of_square in tried.groupby(place, sort=False)
    ]
    lacking = counted(sum(map(len, incomplete.values())), "row")
    unpredicted = f"Not predicted: {lacking} with an incomplete model or layout.\n" if incomplete else ""
    return pd.DataFrame(squares), f"{unpredicted}{notes(table)}"


def _measured(of_square: pd.DataFrame) -> dict[str, Any]:
    """What the runs of a square say about its largest micro-batch: the columns of `points`."""
    ok, oom = (of_square.loc[of_square["status"] == status, "mbs"] for status in (Status.OK, Status.OOM))
    largest = ok.max() if len(ok) else 0 if oom.min() == 1 else np.nan
    predicted = of_square["predicted"].max()
    of_layout = oom[of_square["predicted"] == predicted]
    is_too_large = of_layout.min() <= predicted and not ok.max() >= predicted
    return {
        "predicted": predicted,
        "measured": largest,
        "oom": (oom[oom > ok.max()] if len(ok) else oom).min(),
        "contradicted": bool(ok.max() > predicted or is_too_large),
        "runs": of_square["id"].nunique(),
    }


def _limits(runs: Mapping[_Id, MeasuredRun]) -> dict[_Id, float]:
    """Sweep and run_id of a run -> the largest mbs that is predicted to fit with the layout of the run; null without a profile."""
    constants_by_program, limit_by_family = dict[object, Any](), dict[object, float]()
    limits = {}
    for run_id, run in runs.items():
        program = run.spec.kernel.name, run.hardware
        if program not in constants_by_program:
            constants_by_program[program] = _constants(run)
        smallest, constants = _with_mbs(run.spec, 1), constants_by_program[program]
        family = smallest.run_id, run.hardware
        if family not in limit_by_family:
            limit_by_family[family] = _limit(smallest, *constants) if constants else np.nan
        limits[run_id] = limit_by_family[family]
    return limits


def _constants(run: MeasuredRun) -> tuple[MemoryConstants, int] | None:
    """What predicts the memory of a run, and the memory of its GPU; None where no profile is that of its program."""
    with contextlib.suppress(ConfigError):
        profile, hardware = profile_and_hardware(run)
        return memory_constants(profile.framework, profile.memory), hardware.mem_bytes
    return None


def _with_mbs(spec: RunSpec, mbs: int) -> RunSpec:
    """The run with another mbs and the gas that makes up its batch; a schedule that follows from gas follows it."""
    layout = spec.layout
    gas, schedule = layout.mbs * layout.gas // mbs, layout.pp_schedule
    if schedule == default_schedule(layout.pp, layout.gas):
        schedule = default_schedule(layout.pp, gas)
    return replace(spec, layout=replace(layout, mbs=mbs, gas=gas, pp_schedule=schedule))


def _limit(spec: RunSpec, constants: MemoryConstants, mem_bytes: int) -> int:
    """The largest mbs that is predicted to fit, for a run with mbs=1; 0 where none does."""
    for mbs in range(spec.layout.gas, 0, -1):
        if spec.layout.gas % mbs == 0:
            larger = _with_mbs(spec, mbs)
            rules = {rule for rule, _ in broken_rules(larger.layout, larger.shape)}
            is_filled = "enough_micro_batches" not in rules
            stages = predict_memory(larger, constants, LARGEST) if is_filled else ()
            if stages and p_oom(stages, mem_bytes, constants) <= LIKELY_OOM:
                return mbs
    return 0


def figure(drawn: pd.DataFrame, *, title: str, notes: str) -> Figure:
    """For each model and recomputation two panels of squares, tp across and pp up: predicted, and measured."""
    tps, pps = (sorted(map(int, drawn[name].unique())) for name in (ACROSS, UP))
    words, by_panel = in_order(APART, drawn[APART]), drawn.groupby([APART, "panel"])
    keys = [key for key in product(words, drawn["panel"].unique()) if key in by_panel.groups]
    of_panels = product(keys, ("predicted", "measured"))
    about = "Squares: the largest mbs that fits with any tried layout of these degrees, at most gbs / dp; oom: the smallest larger"
    about += f" mbs that did not fit; ?: unknown. Predicted to fit: P(OOM) of at most {100 * LIKELY_OOM:.0f} %. Framed: contradicted by"
    about += f" measured runs ({int(drawn['contradicted'].sum())} of {counted(len(drawn), 'square')}). To draw only 4 nodes: nodes=4."
    heading = f"Largest micro-batch that fits, predicted and measured: {title}"
    height = _TOP + _ROW * len(pps)
    whole, panels = panel_grid(of_panels, title=heading, notes=f"{about}\n{notes}", height=height)
    largest = drawn[["predicted", "measured"]].max().max()
    for ((word, name), column), axes in panels.items():
        for _, square in by_panel.get_group((word, name)).iterrows():
            _square(axes, square, column, (tps.index(square[ACROSS]), pps.index(square[UP])), largest)
        shown = f" | {APART} {word}" if len(words) > 1 else ""
        axes.describe(f"{column.capitalize()}: {name}{shown}", ACROSS, UP)
        axes.categories(tps)
        axes.set_yticks(range(len(pps)), [str(pp) for pp in pps])
        axes.set_ylim(-0.5, len(pps) - 0.5)
        axes.grid(visible=False)
    return whole


def _square(axes: Panel, square: pd.Series, column: str, place: tuple[int, int], largest: float) -> None:
    """Draws one square: its mbs as number and colour; measured ones also name the mbs that ran out of memory."""
    value, oom = square[column], square["oom"] if column == "measured" else np.nan
    text = "?" if pd.isna(value) else f"{value:.0f}" if value else "none"
    text += f"\noom {oom:.0f}" if pd.notna(oom) else ""
    share = np.log2(value + 1) / np.log2(largest + 1) if value > 0 else 0.0
    face = _COLOURS(0.15 + 0.85 * share) if share else PALE
    is_framed = square["contradicted"] and column == "predicted"
    frame = _WRONG if is_framed else {"edgecolor": "white"}
    corner = place[0] - 0.46, place[1] - 0.46
    axes.add_patch(Rectangle(corner, 0.92, 0.92, facecolor=face, zorder=1 + is_framed, **frame))
    ink = "white" if 0 < share < _DARK_COLOURS else DARK
    axes.text(*place, text, color=ink, **_TEXT)
