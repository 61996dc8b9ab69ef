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
    of_axes = effects_by_axis(measured)
    if as_json:
        listed = [
            {"axis": axis, **asdict(effect), "proven": effect.proven > 0}
            for axis, of_axis in of_axes.items()
            for effect in of_axis
        ]
        unpaired = {axis: why_no_pairs(measured, axis) for axis, of_axis in of_axes.items() if not of_axis}
        of_pairs = {"without_pairs": unpaired, "left_out": measured.left_out}
        print_json({"name": name, "effects": listed, **of_pairs})
        return
    lines = [cells(axis, effect) for axis, of_axis in of_axes.items() for effect in of_axis]
    if lines:
        heads = (*HEADS[:3], *(f">{head}" for head in HEADS[3:]))
        show(table(f"{name}: effect of each value, all else equal", *heads, rows=lines))
    say(*notes(measured, of_axes), *caveats(rows))
