"""The results as the document that the scripts of the page read: ranked rows in compact columns, and the cells."""

import functools
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ultrabench.analysis import schema
from ultrabench.analysis.cells import (
    OUTCOMES,
    Cell,
    formula_of_cells,
    layout_words,
    low_peak_in,
    made_with,
    repeats_failed,
    set_apart,
)
from ultrabench.analysis.effects import COLUMNS as EFFECT_COLUMNS
from ultrabench.analysis.effects import HEADS, competing_in, effects_by_axis, notes
from ultrabench.analysis.effects import cells as effect_cells
from ultrabench.analysis.environments import Environments
from ultrabench.analysis.knobs import in_order
from ultrabench.analysis.measured import measured_runs
from ultrabench.analysis.nodes.measurements import table_rows
from ultrabench.analysis.nodes.nodes import reports
from ultrabench.analysis.nodes.table import HEADS as NODE_HEADS
from ultrabench.analysis.nodes.table import NOTE as NODE_NOTE
from ultrabench.analysis.nodes.table import cells as node_cells
from ultrabench.analysis.nodes.table import losses_text
from ultrabench.analysis.numbers import scale_end
from ultrabench.analysis.options import in_rows, variant_in, varied_options
from ultrabench.analysis.page.commands import launch_words, predict_words
from ultrabench.analysis.planned import NOTE, is_predicted
from ultrabench.analysis.predict.cases import profile_and_hardware
from ultrabench.analysis.ranking import PANEL, Ranking
from ultrabench.analysis.rows import Row
from ultrabench.analysis.schema import BOOL, FLOAT, GROUPS, INT, SCHEMA, type_name
from ultrabench.device_rates import NODE_RATES
from ultrabench.errors import ConfigError
from ultrabench.hardware import peak_suffix
from ultrabench.layout import AXES, NEUTRAL, TEXT_AXES
from ultrabench.result import UNSETTLED, Status, state, tier
from ultrabench.routing import routing_text
from ultrabench.sweep.config.files import files
from ultrabench.sweep.extrapolation import beyond_fit
from ultrabench.sweep.predict.memory import memory_constants, predict_memory
from ultrabench.sweep.predict.stage_memory import LARGEST, MEMORY_PARTS
from ultrabench.variant import option_texts, value_text

_KEY = ("sweep", "run_id", "repeat", "attempt")
_key_of = operator.itemgetter(*_KEY)
_ORDER = (*_KEY, "step_time_s", "reason", "job_id")
_VARIABLES = ("env", "variables")
"""Columns of variables, whose values may hold paths and names."""
_REJECTED = ("model", "nodes", "rule", "reason")
"""Columns that are told of rejected layouts."""
_CELL = ("model", "nodes", *PANEL, "contender")
_run_of = operator.itemgetter(*_CELL)
_READ = (*_KEY, *AXES, "status", "suspect", "source", "allocation", *_CELL[:-1])
"""Columns that the texts of a row are made of."""
_UNRANKED = dict.fromkeys(("rank", "cell", "repeats_failed", "environment"))
"""The columns that rank a row in its cell, null for a row that does not stand for its run."""
_LEFT_OUT = ("schema_version", "step_times_s", "bandwidths", "first_values", *NODE_RATES)
"""Columns that stay out of the page, since they are long or the same in all rows; the parquet file has them."""

NAMES = ("model", "kernel", "kernel_version", "hardware", "gpu_name", "torch_version", "cuda_version", "nccl_version",
         "driver_version")  # fmt: skip
"""Names in a public page; of a name that is a path only the last part is told."""
WORDS = (*TEXT_AXES, "model_id", "scaling", "run_id", "precision", "routing", "status", "rule", "cause", "suspect", "stopped", "dominated_by", "measured_by",
         "kernel_digest", "flops_formula", "attention", "env_id", "control")  # fmt: skip
"""Texts of a public page that ultrabench itself writes; `suspect` holds no more than `suspect`."""
PUBLIC = frozenset({*(column.name for column in SCHEMA if column.type in (INT, FLOAT, BOOL)), *NAMES, *WORDS})
"""The only columns of a public page: none of them holds a host, a path, a user, an account or a free text.

All numbers are public, since ids of jobs, users and hosts are texts in the schema; a text is public only if it is
named here.
"""


def document(table: pa.Table, *, public: bool) -> dict[str, Any]:
    """What the page shows of a result table with all columns of the schema, ready for JSON.

    Rows are the attempts and the candidates without one, the ranked run of each cell first and in the order of
    the leaderboard. Layouts that a rule rejects are counted by rule. The order of the rows of `table` changes
    nothing.

    Args:
        public: whether only the columns of PUBLIC are told, without free texts.

    Raises:
        ConfigError: the rows cannot be ranked together.
    """
    notice = NOTE if is_predicted(table) else ""
    table = _without_texts(table) if public else table
    table = table.select(SCHEMA.names).sort_by([(name, "ascending") for name in _ORDER])
    ranking = Ranking(table, more=EFFECT_COLUMNS)
    cells, ranks_by_key = _ranked(ranking)
    panels = [*dict.fromkeys(cell.panel for cell in cells)]
    names = _shown_columns(table, public)
    is_rejected = pc.fill_null(pc.equal(table["status"], Status.REJECTED), False)
    rejected = table.filter(is_rejected).select(_REJECTED).to_pylist()
    valid = table.filter(pc.invert(is_rejected))
    options, contenders = varied_options(valid), Environments(valid).contenders(valid["run_id"].to_pylist())
    columns_of_rows = zip(
        valid.select(_READ).to_pylist(), contenders, in_rows(options, range(len(valid))), strict=True
    )
    rows = [
        row | ranks_by_key.get(_key_of(row), _UNRANKED) | {"contender": contender, "options": of_row}
        for row, contender, of_row in columns_of_rows
    ]
    order = sorted(range(len(rows)), key=lambda n: _rank_first(rows[n]))
    ordered_rows, ordered_table = (
        _with_cells([rows[n] for n in order]),
        valid.select(names).take(pa.array(order, pa.int64())),
    )
    columns = {name: _plain(ordered_table[name]) for name in names if name != "variant"}
    columns |= _derived(ordered_rows, _predicted_parts(valid))
    columns |= {name: _choices([row["options"][name] for row in ordered_rows]) for name in options}
    return {
        "public": public,
        "notice": notice,
        "outcomes": OUTCOMES[bool(notice)],
        "made_with": ". ".join((*low_peak_in(table), *Environments(table).notes, made_with(table))),
        "rows": len(ordered_rows),
        "columns": {
            name: encoded(values) for name, values in columns.items() if any(v is not None for v in values)
        },
        "cells": [_cell(cell, panels, apart) for cell, apart in zip(cells, _apart(cells), strict=True)],
        "formula": formula_of_cells(cells),
        "mfu_end": scale_end(cell.mfu and 100 * cell.mfu for cell in cells),
        "axes": [*AXES, *options],
        "orders": {name: _in_order(name, valid[name]) for name in AXES if name in TEXT_AXES},
        "tiers": {status: tier(status) for status in (*Status, *UNSETTLED)},
        "parts": [*MEMORY_PARTS],
        "effects": _effects(ranking),
        "nodes": _nodes(table, public),
        "rejected": _rejected(rejected),
        "ranking": str(schema.__doc__).split("\n\n")[1:],
        "schema": {group: _meanings(columns_of_group, names) for group, columns_of_group in GROUPS.items()},
    }


def _in_order(axis: str, column: pa.ChunkedArray) -> list[str]:
    """The words of an axis, the neutral one first and the others in the order of layouts."""
    return sorted(in_order(axis, column.to_pylist()), key=lambda word: word != NEUTRAL[axis])


def _choices(values: list[Any]) -> list[Any]:
    """The values of an option, as texts where one is unset or no number."""
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return values if are_numbers else [*map(value_text, values)]


def encoded(values: Sequence[Any]) -> dict[str, Any]:
    """A column as its distinct values and a code for each row, -1 for null; as its values if most are distinct."""
    distinct = {*values} - {None}
    if 2 * len(distinct) > len(values) > 8:
        return {"values": [*values]}
    sorted_values = sorted(distinct)
    code_by_value = {value: n for n, value in enumerate(sorted_values)} | {None: -1}
    return {"known": sorted_values, "codes": [*map(code_by_value.__getitem__, values)]}


def _shown_columns(table: pa.Table, public: bool) -> list[str]:
    """The columns that the page tells: those with a value, without those that are too long or not public."""
    with_values = (name for name in SCHEMA.names if table[name].null_count < len(table))
    return [name for name in with_values if name not in _LEFT_OUT and (not public or name in PUBLIC)]


def _without_texts(table: pa.Table) -> pa.Table:
    """The table with the texts of a public page: no reasons, `suspect` for a doubt, and names without paths."""
    none = pa.scalar(None, pa.string())
    new_columns = dict.fromkeys(("reason", *_VARIABLES), pa.nulls(len(table), pa.string()))
    new_columns |= {
        name: pa.array(map(_public_options, table[name].to_pylist()), pa.string())
        for name in ("variant", "first_values")
    }
    new_columns["suspect"] = pc.if_else(pc.is_valid(table["suspect"]), "suspect", none)
    for name in NAMES:
        new_columns[name] = pc.replace_substring_regex(pc.utf8_rtrim(table[name], r"/\ "), r"^.*[/\\]", "")
    for name, column in new_columns.items():
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def _public_options(text: str | None) -> str | None:
    """Options, such as those of a run, without the folders of paths."""
    variant = variant_in(text).items()
    options = {name: re.sub(r"^.*[/\\]", "", v) if isinstance(v, str) else v for name, v in variant}
    return json.dumps(options) if options else None


def _ranked(ranking: Ranking) -> tuple[list[Cell], dict[tuple[Any, ...], Row]]:
    """The cells of a ranking, and the values of a ranked row in _KEY -> the columns that rank it in its cell."""
    cells, boards = ranking.cells(), ranking.boards(_KEY)
    with_runs = [n for n, cell in enumerate(cells) if cell.status != Status.REJECTED]
    ranks_by_key = {
        tuple(run[name] for name in _KEY): {
            "rank": rank,
            "cell": n,
            "repeats_failed": repeats_failed(run["num_repeats"], run["num_repeats_failed"]),
            "environment": run["environment"],
        }
        for n, board in zip(with_runs, boards, strict=True)
        for rank, run in enumerate(board, 1)
    }
    return cells, ranks_by_key


def _with_cells(rows: Sequence[Row]) -> list[Row]:
    """The rows, of which those of further repeats and attempts of a run are in the cell of the run, too."""
    cell_of = {_run_of(row): row["cell"] for row in rows if row["rank"] is not None}
    return [row | {"cell": cell_of.get(_run_of(row))} for row in rows]


def _apart(cells: Sequence[Cell]) -> list[list[str]]:
    """For each cell what sets its panel apart from others of its model, such as `seq_len 128`."""
    names = [*(name for name in PANEL if name != "gbs"), "batch"]
    settings = [dict(zip(names, cell.panel, strict=True)) for cell in cells]
    named = [s | {"model": c.title, "num_params": c.num_params} for c, s in zip(cells, settings, strict=True)]
    apart = set_apart(named, (*names, "num_params"))
    places = [(cell.title, cell.nodes, *texts) for cell, texts in zip(cells, apart, strict=True)]
    alike = [[n for n, other in enumerate(places) if other == place] for place in places]  # of other shapes
    return [
        [*texts, f"#{same.index(n) + 1}"] if len(same) > 1 else texts
        for n, (texts, same) in enumerate(zip(apart, alike, strict=True))
    ]


def _cell(cell: Cell, panels: Sequence[tuple[object, ...]], apart: Sequence[str]) -> Row:
    hardware, kernel, precision, _, seq_len, batch = cell.panel
    sizes = filter(None, (routing_text(cell.routing), seq_len and f"seq_len {seq_len:,}", batch))
    setting = [hardware or "unknown hardware", f"kernel {kernel or '?'}", precision, *sizes]
    names = ("nodes", "num_params", "num_active_params", "reason", "ranked_by", "predicted")
    fields = {"model": cell.title, **{name: getattr(cell, name) for name in names}}
    named = {"setting": setting, "apart": apart, "of_peak": peak_suffix(cell.precision)}
    return fields | named | {"panel": panels.index(cell.panel)}


def _rank_first(row: Row) -> tuple[bool, int, int]:
    return row["rank"] is None, row["cell"] or 0, row["rank"] or 0


def _derived(rows: Sequence[Row], parts_by_run: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The columns of the page that are no columns of the schema.

    Args:
        parts_by_run: what `_predicted_parts` gives.
    """
    profiles, empty = files("profiles"), dict[str, Any]()
    parts_of_rows = [empty if row["rank"] is None else parts_by_run.get(row["run_id"], empty) for row in rows]
    # A layout is run with many models and numbers of nodes.
    layout_of = functools.cache(lambda *values: layout_words(dict(zip(AXES, values, strict=True))))

    def words_of(row: Row) -> str | None:
        words = (*layout_of(*map(row.get, AXES)), *option_texts(row["options"]))
        return " ".join(filter(None, words)) or None

    place_numbers = {
        place: n for n, place in enumerate(dict.fromkeys((row["sweep"], row["allocation"]) for row in rows))
    }
    return {
        **{name: [row[name] for row in rows] for name in (*_UNRANKED, "contender")},
        "state": [state(row["status"], row["attempt"]) for row in rows],
        "place": [place_numbers[row["sweep"], row["allocation"]] for row in rows],
        "doubt": ["yes" if row["suspect"] else "no" for row in rows],
        "layout": [*map(words_of, rows)],
        "launch": [None if row["rank"] is None else launch_words(row) for row in rows],
        "predict": [None if row["rank"] is None else predict_words(row, profiles) for row in rows],
        **{f"predicted_{part}_bytes": [parts.get(part) for parts in parts_of_rows] for part in MEMORY_PARTS},
        "rank_mem_bytes": [parts.get("limit") for parts in parts_of_rows],
        "extrapolated": [parts.get("extrapolated") for parts in parts_of_rows],
    }


def _predicted_parts(table: pa.Table) -> dict[str, dict[str, Any]]:
    """Run id -> part of MEMORY_PARTS -> bytes, for runs that ended ok or out of memory; of the rank that needs most.

    `extrapolated` beside the parts names what no run of the profile's fit had, `limit` is the memory of a GPU.

    They follow from the profile of the kernel as it is now, also where a run was planned with another one.
    Runs of a kernel or hardware without a profile, and those that do not tell their model and layout in full,
    are left out.
    """
    is_measured = pc.field("is_final") & pc.field("status").isin([Status.OK, Status.OOM])
    runs, _ = measured_runs(table.filter(is_measured))
    parts_by_run = {}
    for kernel_and_hardware in dict.fromkeys((run.spec.kernel.name, run.hardware) for run in runs):
        runs_on_it = [run for run in runs if (run.spec.kernel.name, run.hardware) == kernel_and_hardware]
        try:
            profile, hardware = profile_and_hardware(runs_on_it[0])
        except ConfigError:
            continue
        constants = memory_constants(profile.framework, profile.memory)
        for run in runs_on_it:
            stages = predict_memory(run.spec, constants, LARGEST)
            stage = max(stages, key=lambda stage: stage.peak_bytes)
            extrapolation = "; ".join(beyond_fit([run.spec], profile, hardware.gpu_at_limit))
            parts_by_run[run.run_id] = {part: round(getattr(stage, part)) for part in MEMORY_PARTS} | {
                "extrapolated": extrapolation or None,
                "limit": hardware.mem_bytes,
            }
    return parts_by_run


def _plain(column: pa.ChunkedArray) -> list[Any]:
    """Values as JSON has them: numbers with six digits, times and lists as texts, null for what is no number."""
    values: list[Any] = column.to_pylist()
    if pa.types.is_floating(column.type):
        return [None if v is None or not math.isfinite(v) else float(f"{v:.6g}") for v in values]
    if pa.types.is_timestamp(column.type):
        return [None if v is None else v.isoformat(timespec="seconds") for v in values]
    if pa.types.is_list(column.type):
        return [", ".join(map(str, v or ())) or None for v in values]
    return values


def _rejected(rows: Sequence[Row]) -> list[Row]:
    """Model, nodes and rule of layouts that are never tried, with their number and an example of the reason."""
    names = _REJECTED[:3]
    counts = Counter(tuple(row[name] for name in names) for row in rows)
    example_by_key = {tuple(row[name] for name in names): row["reason"] for row in reversed(rows)}
    return [
        dict(zip(names, key, strict=True)) | {"number": number, "example": example_by_key[key]}
        for key, number in sorted(counts.items(), key=lambda pair: (*map(str, pair[0][::2]), pair[0][1] or 0))
    ]


def _effects(ranking: Ranking) -> Row:
    """What each value of each axis is worth: heads, rows of texts, and sentences below the table."""
    try:
        measured = competing_in(ranking)
    except ConfigError:  # no run may win
        return {"heads": HEADS, "rows": [], "notes": []}
    of_axes = effects_by_axis(measured)
    rows = [effect_cells(axis, effect) for axis, of_axis in of_axes.items() for effect in of_axis]
    return {"heads": HEADS, "rows": rows, "notes": notes(measured, of_axes)}


def _nodes(table: pa.Table, public: bool) -> Row:
    """The table of nodes as texts; without rows where no preflight measured any, and on a public page."""
    is_unknown = all(table[name].null_count == len(table) for name in NODE_RATES)
    found = [] if public or is_unknown else reports(table_rows(table))
    rows = [["" if cell is None else str(cell) for cell in node_cells(report)] for report in found]
    note = f"{NODE_NOTE} {losses_text(found)}" if found else NODE_NOTE
    return {"heads": [head.removeprefix(">") for head in NODE_HEADS], "rows": rows, "note": note}


def _meanings(columns: Iterable[pa.Field], names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Name, type and meaning of the columns of a group that the page tells."""
    return [
        (c.name, type_name(c.type), c.metadata[b"description"].decode()) for c in columns if c.name in names
    ]
