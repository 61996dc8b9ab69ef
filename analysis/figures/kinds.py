"""The kinds of figures of `ultrabench plot`: those of `plots` and those of studies."""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ultrabench.analysis.study import Kind, names_in_order, studies
from ultrabench.errors import ConfigError, counted, require_known
from ultrabench.layout import DEGREES, DIVIDES, TEXT_AXES, USUAL

if TYPE_CHECKING:  # every --help imports this module, so that it loads no pandas
    import pandas as pd
    import pyarrow as pa
    from matplotlib.figure import Figure


_CORE_KINDS = (
    Kind(name="comm", summary="bandwidth of collectives over nodes, from sweep=comm"),
    Kind(name="scatter", summary="MFU and throughput of every measured run over nodes"),
    Kind(
        name="scaling",
        summary="best throughput and its memory over nodes or a degree",
        axes=("nodes", *DEGREES, *DIVIDES),
    ),
    Kind(
        name="largest-batch",
        summary="largest micro-batch that fits over tp, pp and recompute, predicted and measured",
    ),
    Kind(
        name="pareto",
        summary="throughput, energy or cost against peak memory, with the Pareto front",
        default_column="tokens_per_s_per_gpu",
    ),
    Kind(
        name="checkpoint",
        summary="time and bandwidth of checkpoints over nodes, from measure.checkpoint=true",
    ),
    Kind(
        name="failures",
        summary="how runs ended, over nodes or a degree",
        axes=("nodes", *(name for name in (*DEGREES, *USUAL) if name not in TEXT_AXES)),
    ),
    Kind(
        name="bubble",
        summary="bubble of pipeline schedules over micro-batches, and the measured cost of pipelines",
    ),
    Kind(
        name="schedule",
        summary="timeline of a pipeline schedule: pp=4 gas=8 pp_schedule=1f1b",
        shows_layout=True,
    ),
    Kind(
        name="memory",
        summary="predicted memory of a layout by part: model=llama3-8b tp=8",
        axes=(*DEGREES[1:], DEGREES[0], *USUAL, "seq_len", "stage"),
        shows_layout=True,
    ),
)
"""The kinds that a module of `plots` draws."""
_STUDY_BY_KIND = {study.kind.name: study for study in studies() if study.kind}
"""Name of a kind that a study draws -> the study."""
_STUDY_KINDS = [study.kind for study in _STUDY_BY_KIND.values() if study.kind]
_KIND_BY_NAME = {kind.name: kind for kind in (*_CORE_KINDS, *_STUDY_KINDS)}
KINDS = {
    name: _KIND_BY_NAME[name] for name in names_in_order((kind.name for kind in _CORE_KINDS), _STUDY_KINDS)
}
"""Name of each kind of `ultrabench plot`, in the order of its --list -> the kind."""


def _plot_module(kind: str) -> ModuleType:
    """The module that draws a kind: `figure` of its study, or that of `plots` with its name, with _ for -."""
    study = _STUDY_BY_KIND.get(kind)
    module = study.module("figure") if study else None
    return module or import_module(f"ultrabench.analysis.figures.plots.{kind.replace('-', '_')}")


def prepare_figure(
    kind: str,
    table: "pa.Table | None",
    *,
    title: str,
    axis: str | None = None,
    by: str | None = None,
    layout: Mapping[str, Any] | None = None,
) -> tuple["pd.DataFrame", Callable[[], "Figure"]]:
    """The points of a figure of results, and the function that draws them.

    Args:
        kind: a name in KINDS.
        table: a result table with all columns of the schema; None for a layout without results.
        title: name of the sweep or file.
        axis: one of the kind's axes, None for its default; for a kind over any axis, one that varied in the table.
        by: the column of the y axis, for a kind with a choice of column; None for its default.
        layout: for a kind that shows a layout, its values, such as {"pp": 4, "gas": 8}.

    Raises:
        ConfigError: no such kind, axis or column, or the table has nothing to draw.
    """
    require_known("figure", KINDS, kind)
    traits = KINDS[kind]
    if layout and not traits.shows_layout:
        raise ConfigError(f"layout: the figure {kind} shows results, not a layout; filter the rows instead")
    if axis is not None and not traits.axes and not traits.takes_any_axis:
        raise ConfigError(f"--axis {axis}: the figure {kind} takes no axis; remove --axis")
    if by is not None and not traits.default_column:
        raise ConfigError(f"--by {by}: the figure {kind} takes no column; remove --by")
    if axis is not None and not traits.takes_any_axis:
        require_known(f"axis of the figure {kind}", traits.axes, axis)
    plot_module = _plot_module(kind)
    options: dict[str, Any] = {}
    if traits.axes or traits.takes_any_axis:
        options["axis"] = axis or next(iter(traits.axes), None)
    if traits.default_column:
        options["column"] = by or traits.default_column
    points, notes = plot_module.points(*((layout or {},) if traits.shows_layout else ()), table, **options)
    return points, lambda: plot_module.figure(points, title=title, notes=notes, **options)


def runs_drawn(points: "pd.DataFrame") -> str | None:
    """How many runs or repeats a figure of these points shows; None for a figure of formulas, layouts or links."""
    for noun in ("run", "repeat"):
        if f"{noun}s" in points:
            return counted(int(points[f"{noun}s"].sum()), noun)
    return counted(len(points), "run") if "run_id" in points else None
