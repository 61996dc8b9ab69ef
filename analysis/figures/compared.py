"""Draws how step times of B differ from those of A: a point for each layout, sorted, with a panel for each model."""

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from ultrabench.analysis.cells import MAY_DIFFER
from ultrabench.analysis.compare import ALPHA, Comparison
from ultrabench.analysis.figures.picture import GREY
from ultrabench.analysis.figures.style import key, label, legend, panel_grid
from ultrabench.errors import ConfigError, counted

_LOOKS: dict[str | None, dict[str, Any]] = {
    "slower": {"marker": "^", "color": "#d55e00", "markersize": 7},
    "faster": {"marker": "v", "color": "#0173b2", "markersize": 7},
    None: {"marker": "o", "color": "#949494", "markersize": 3.5},
}
"""Finding -> marker; layouts without one have small grey points."""
_WON: dict[str, Any] = {
    "marker": "s",
    "markerfacecolor": "none",
    "color": "black",
    "markersize": 11,
    "linestyle": "",
}
"""Frame around the layouts that won a cell in A or in B, where these differ."""
_NAMED = 6
"""Number of cells with another winner that the notes name."""


def figure(found: Comparison, *, title: str, threshold: float, names: tuple[str, str]) -> Figure:
    """The ratios of step times B / A of all layouts that were measured in both.

    Args:
        names: those of A and B.

    Raises:
        ConfigError: no layout was measured in both.
    """
    rows = found.rows[found.rows["ratio"].notna()]
    if not len(rows):
        raise ConfigError(
            "no layout has a step time in A and in B; compare without -o for how their runs ended"
        )
    models = list(rows.sort_values(["num_params", "model"])["model"].unique())
    whole, middle, panels = panel_grid(
        len(models),
        title=f"Step times of {title}: {counted(len(rows), 'layout')}",
        notes=_notes(found, names),
        sharey=True,
    )
    cells = {
        (w["model"], w["nodes"], w[side])
        for w in found.winners.to_dict("records")
        for side in ("best_a", "best_b")
    }
    for axes, model in zip(panels, models, strict=True):
        held = rows[rows["model"] == model].reset_index(drop=True)
        axes.axhspan(1 / (1 + threshold), 1 + threshold, color="#efefef", zorder=0)
        axes.axhline(1, color=GREY, linewidth=0.8)
        for finding, look in _LOOKS.items():
            shown = held[held["finding"].isna() if finding is None else held["finding"] == finding]
            axes.plot(shown.index + 1, shown["ratio"], linestyle="", markeredgewidth=0, **look)
        won = [
            (m, n, lay) in cells
            for m, n, lay in zip(held["model"], held["nodes"], held["layout"], strict=True)
        ]
        axes.plot(held.index[won] + 1, held["ratio"][won], **_WON)
        last = held.iloc[-1]
        axes.annotate(
            last["layout"], (len(held), last["ratio"]), fontsize=6, color=GREY, va="center",
            ha="right" if len(held) > 1 else "left", xytext=(-9 if len(held) > 1 else 9, 0),
            textcoords="offset points",
        )  # fmt: skip
        a, b = (name if len(name) <= 14 else f"{name[:12]}.." for name in names)
        label(axes, model, "layouts, sorted by their ratio", f"step time of {b} / {a}")
        axes.set_yscale("log")
        if rows["ratio"].max() > 2 * rows["ratio"].min():  # else parts of a decade have too few ticks
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        else:
            axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} x"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        step = max(1, round(len(held) / 10))
        axes.xaxis.set_major_locator(
            FixedLocator(sorted({1, len(held), *range(step, len(held) - step // 2, step)}))
        )
        axes.set_xlim(0.2, len(held) + 1)
    handles = [
        key(f"{name}, p <= {ALPHA:g} corrected" if name else "no finding", linestyle="", **look)
        for name, look in _LOOKS.items()
    ]
    legend(middle, [*handles, key("won its cell only in A or only in B", **_WON)])
    return whole


def _notes(found: Comparison, names: tuple[str, str]) -> str:
    """The note under the figure: what was left out, and which cells another layout wins."""
    won = [
        f"{w['model']} on {counted(w['nodes'], 'node')}: {w['best_a']} -> {w['best_b']}"
        for w in found.winners.to_dict("records")
    ]
    more = [f"and in {counted(len(won) - _NAMED, 'cell')} more"] * (len(won) > _NAMED)
    changes = {name: found.differing[name] for name in MAY_DIFFER if name in found.differing}
    told = ", ".join(f"{name} {a} -> {b}" for name, (a, b) in changes.items())
    lines = [
        f"A is {names[0]}, B is {names[1]}. From A to B: {told or 'no other hardware, kernel or precision known'}.",
        " ".join(found.notes),
        "Grey band: differences up to the threshold. Above 1 x, B is slower.",
    ]
    return "\n".join([*lines, *(["Cells that another layout wins in B:"] * bool(won)), *won[:_NAMED], *more])
