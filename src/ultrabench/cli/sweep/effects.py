"""`ultrabench sweep effects` shows what each value of each axis is worth, all else equal."""

from dataclasses import asdict
from pathlib import Path

from ultrabench.analysis.cells import caveats
from ultrabench.analysis.collect import open_results
from ultrabench.analysis.effects import LEVEL, Effect, competing, effects, why_no_pairs
from ultrabench.analysis.knobs import value_text
from ultrabench.cli.tables import print_json, say, show, table, three_digits, warn


def show_effects(source: str | None, as_json: bool, results: Path) -> None:
    """Prints one table of all axes, those with the largest proven effect first."""
    name, _, rows = open_results(source, results, warn)
    measured = competing(rows)
    effects_by_axis = {axis: effects(measured, axis) for axis in measured.varied}
    worth = {axis: max((e.proven for e in of_axis), default=0.0) for axis, of_axis in effects_by_axis.items()}
    compared = sorted((axis for axis in worth if effects_by_axis[axis]), key=lambda axis: -worth[axis])
    without_pairs = {axis: why_no_pairs(measured, axis) for axis in worth if not effects_by_axis[axis]}
    if as_json:
        listed = [
            {"axis": axis, **asdict(effect), "proven": effect.proven > 0}
            for axis in compared
            for effect in effects_by_axis[axis]
        ]
        print_json(
            {"name": name, "effects": listed, "without_pairs": without_pairs, "left_out": measured.left_out}
        )
        return
    heads = ("axis", "value", "against", ">x speed", f">{100 * LEVEL:.0f} % interval", ">pairs")
    lines = [_cells(axis, effect) for axis in compared for effect in effects_by_axis[axis]]
    if lines:
        show(table(f"{name}: what each value is worth, all else equal", *heads, rows=lines))
    show(*(f"no pairs for {axis}: {reason}" for axis, reason in without_pairs.items()))
    intervals = sum(effect.low is not None for of_axis in effects_by_axis.values() for effect in of_axis)
    by_chance = f"Each interval is wrong in {100 * (1 - LEVEL):.0f} % of cases: {intervals} intervals, of which about "
    say(measured.note, f"{by_chance}{(1 - LEVEL) * intervals:.1g} may exclude 1 by chance.", *caveats(rows))


def _cells(axis: str, effect: Effect) -> tuple[object, ...]:
    ratio, low, high = (
        None if x is None else f"{x:.3f}" if x < 100 else three_digits(x)
        for x in (effect.ratio, effect.low, effect.high)
    )
    interval = f"{low} to {high}" if low else None
    values = value_text(axis, effect.value), value_text(axis, effect.against)
    return axis, *values, ratio, interval, effect.pairs
