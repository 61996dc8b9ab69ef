"""`ultrabench sweep effects` shows what each value of each axis is worth, all else equal."""

from dataclasses import asdict
from pathlib import Path

from ultrabench.analysis.cells import caveats
from ultrabench.analysis.collect import open_results
from ultrabench.analysis.effects import HEADS, cells, competing, effects_by_axis, notes, why_no_pairs
from ultrabench.cli.tables import print_json, say, show, table, warn


def show_effects(source: str | None, as_json: bool, results: Path) -> None:
    """Prints one table of all axes, those with the largest proven effect first."""
    name, _, rows = open_results(source, results, warn)
    measured = competing(rows)
    effects_of_axes = effects_by_axis(measured)
    if as_json:
        effect_records = [
            {"axis": axis, **asdict(effect), "proven": effect.proven_log_ratio > 0}
            for axis, axis_effects in effects_of_axes.items()
            for effect in axis_effects
        ]
        unpaired_axes = (axis for axis, axis_effects in effects_of_axes.items() if not axis_effects)
        unpaired = {axis: why_no_pairs(measured, axis) for axis in unpaired_axes}
        pair_notes = {"without_pairs": unpaired, "left_out": measured.num_left_out}
        print_json({"name": name, "effects": effect_records, **pair_notes})
        return
    lines = [cells(axis, effect) for axis, axis_effects in effects_of_axes.items() for effect in axis_effects]
    if lines:
        heads = (*HEADS[:3], *(f">{head}" for head in HEADS[3:]))
        show(table(f"{name}: effect of each value, all else equal", *heads, rows=lines))
    say(*notes(measured, effects_of_axes), *caveats(rows))
