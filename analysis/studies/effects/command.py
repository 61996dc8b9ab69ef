"""`ultrabench sweep effects` shows what each value of each axis is worth, all else equal."""

from dataclasses import asdict

from ultrabench.cli.options import RESULTS, Json, ResultsDir, SelectedRows


def effects(rows: SelectedRows = None, json_: Json = False, results_dir: ResultsDir = RESULTS) -> None:
    """Prints one table of all axes, those with the largest proven effect first."""
    from ultrabench.analysis.results.cells import caveats
    from ultrabench.analysis.results.selected_rows import open_rows
    from ultrabench.analysis.studies.effects.effects import (
        HEADS,
        cells,
        competing,
        effects_by_axis,
        notes,
        too_few_pairs,
        why_no_pairs,
    )
    from ultrabench.cli.tables import print_json, say, show, table, warn

    source_name, _, result_table = open_rows(rows, results_dir, warn)
    competing_runs = competing(result_table)
    effects_of_axes = effects_by_axis(competing_runs)
    if json_:
        effect_records = [
            {"axis": axis, **asdict(effect), "proven": effect.proven_log_ratio > 0}
            for axis, axis_effects in effects_of_axes.items()
            for effect in axis_effects
        ]
        unpaired_axes = (axis for axis, axis_effects in effects_of_axes.items() if not axis_effects)
        reason_by_axis = {axis: why_no_pairs(competing_runs, axis) for axis in unpaired_axes}
        pair_notes = {"without_pairs": reason_by_axis, "left_out": competing_runs.num_left_out}
        all_too_few = too_few_pairs(competing_runs, effects_of_axes)
        pair_notes["too_few_pairs"] = [asdict(too_few) for too_few in all_too_few]
        print_json({"name": source_name, "effects": effect_records, **pair_notes})
        return
    table_rows = [
        cells(axis, effect) for axis, axis_effects in effects_of_axes.items() for effect in axis_effects
    ]
    if table_rows:
        headings = (*HEADS[:3], *(f">{head}" for head in HEADS[3:]))
        show(table(f"{source_name}: effect of each value, all else equal", *headings, rows=table_rows))
    say(*notes(competing_runs, effects_of_axes), *caveats(result_table))
