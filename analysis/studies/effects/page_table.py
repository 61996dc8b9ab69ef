"""The section of the page with the effect of each value of each axis."""

import pyarrow as pa

from ultrabench.analysis.page.section import Section
from ultrabench.analysis.results.ranking import Ranking
from ultrabench.analysis.studies.effects.effects import (
    COLUMNS,
    HEADS,
    cells,
    competing_in,
    effects_by_axis,
    notes,
)
from ultrabench.errors import ConfigError

RANKING_COLUMNS = COLUMNS
"""The columns that this section reads beside those of a ranking."""
NO_EFFECTS = "No two runs that can win differ in only one axis."
TITLE, CAPTION = (
    "Effect of each setting, all else equal",
    "Speed relative to the baseline, in all rows whatever the filters",
)


def section(ranking: Ranking, table: pa.Table, *, public: bool) -> Section:
    """The effects that runs of a ranking show; without any, a sentence says why."""
    try:
        competing_runs = competing_in(ranking)
    except ConfigError:  # no run may win
        return Section(title=TITLE, caption=CAPTION, heads=HEADS, notes=[NO_EFFECTS])
    effects = effects_by_axis(competing_runs)
    rows = [cells(axis, effect) for axis, axis_effects in effects.items() for effect in axis_effects]
    effect_notes = [*notes(competing_runs, effects), *([] if rows else [NO_EFFECTS])]
    return Section(title=TITLE, caption=CAPTION, heads=HEADS, rows=rows, notes=effect_notes)
