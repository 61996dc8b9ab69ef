"""The results as the document that the scripts of the page read: ranked rows in compact columns, and the cells."""

import functools
import itertools
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ultrabench.analysis.page.commands import launch_words, predict_words
from ultrabench.analysis.results import schema
from ultrabench.analysis.results.cases import profile_and_hardware
from ultrabench.analysis.results.cells import (
    OUTCOMES,
    Cell,
    foreign_load,
    formula_of_cells,
    layout_words,
    made_with,
    mfu_problems,
    nodes_text,
    repeats_failed,
    screened_rows,
    set_apart,
)
from ultrabench.analysis.results.columns import BOOL, GROUPS, RESULT_TABLE
from ultrabench.analysis.results.environments import Environments
from ultrabench.analysis.results.knobs import in_order
from ultrabench.analysis.results.measured import measured_runs
from ultrabench.analysis.results.numbers import scale_end
from ultrabench.analysis.results.options import in_rows, variant_in, varied_options
from ultrabench.analysis.results.planned import NOTE, is_predicted
from ultrabench.analysis.results.ranking import PANEL_COLUMNS, Ranking
from ultrabench.analysis.results.rows import Row
from ultrabench.analysis.results.schema import SCHEMA
from ultrabench.analysis.study import modules
from ultrabench.column import NUMBER, NUMERIC_TYPES, PEAK_FRACTION, Better, Column
from ultrabench.device_rates import NODE_RATES
from ultrabench.errors import ConfigError
from ultrabench.hardware import peak_suffix
from ultrabench.layout import AXES, NEUTRAL, TEXT_AXES
from ultrabench.partial_step import FEW_STEPS, IN_PARTS, SCREENED_BY
from ultrabench.result import SLOWER, UNSETTLED, Status, state, tier
from ultrabench.routing import routing_text
from ultrabench.sweep.config.files import files
from ultrabench.sweep.extrapolation import beyond_fit
from ultrabench.sweep.predict.memory import memory_constants, predict_memory
from ultrabench.sweep.predict.stage_memory import LARGEST, MEMORY_PARTS
from ultrabench.variant import option_texts, value_text

_ATTEMPT_KEY = ("sweep", "run_id", "repeat", "attempt")
"""Columns whose values name an attempt."""
_attempt_key = operator.itemgetter(*_ATTEMPT_KEY)
_SORT_COLUMNS = (*_ATTEMPT_KEY, "step_time_s", "reason", "job_id")
_VARIABLE_COLUMNS = ("env", "variables")
"""Columns of variables, whose values may hold paths and names."""
_REJECTED_COLUMNS = ("model", "nodes", "rule", "reason")
"""Columns that the page counts rejected layouts by, and the reason."""
_RUN_KEY = ("model", "nodes", *PANEL_COLUMNS, "contender")
"""Columns that are equal in all repeats and attempts of a run."""
_run_key = operator.itemgetter(*_RUN_KEY)
_ROW_COLUMNS = (*_ATTEMPT_KEY, *AXES, "status", "suspect", "source", "allocation", *_RUN_KEY[:-1])
"""Columns from which the page derives those that are not in the schema, such as `layout`."""
_NO_RANK = dict.fromkeys(("rank", "cell", "repeats_failed", "environment"))
"""The columns that rank a row in its cell, null for a row that does not stand for its run."""
_RUN_NUMBERS = (
    "mfu",
    "tokens_per_s_per_gpu",
    "step_time_s",
    "control_ratio",
    "step_time_ci95_rel",
    "ci_reached",
)
"""Numbers that the page shows of a run: of several repeats as `run_mfu` and so on, else those of its row."""
_LEFT_OUT_COLUMNS = ("schema_version", "step_times_s", "bandwidths", "first_values", *NODE_RATES)
"""Columns that stay out of the page, since they are long or the same in all rows; the parquet file has them."""

NAME_COLUMNS = (
    "model",
    "kernel",
    "kernel_version",
    "hardware",
    "gpu_name",
    "torch_version",
    "cuda_version",
    "nccl_version",
    "driver_version",
)
"""Columns of names that a public page shows; if a name is a path, only its last part."""
WORD_COLUMNS = (
    *TEXT_AXES,
    "model_id",
    "scaling",
    "run_id",
    "precision",
    "routing",
    "status",
    "rule",
    "cause",
    "suspect",
    "stopped",
    "dominated_by",
    "measured_by",
    "measured_gas",
    "kernel_digest",
    "flops_formula",
    "attention",
    "env_id",
    "control",
)
"""Columns of texts that ultrabench itself writes; a public page shows `suspect` as the word suspect alone."""
PUBLIC_COLUMNS = frozenset(
    {
        *(c.name for c in RESULT_TABLE.values() if c.type in (*NUMERIC_TYPES, BOOL)),
        *NAME_COLUMNS,
        *WORD_COLUMNS,
    }
)
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
        public: whether the page shows only PUBLIC_COLUMNS, without free texts.

    Raises:
        ConfigError: the rows cannot be ranked together.
    """
    notice = NOTE if is_predicted(table) else ""
    table = _public_table(table) if public else table
    table = table.select(SCHEMA.names).sort_by([(name, "ascending") for name in _SORT_COLUMNS])
    page_tables = modules("page_table")
    ranking = Ranking(table, more_columns=[name for module in page_tables for name in module.RANKING_COLUMNS])
    cells, ranks_by_attempt = _cells_and_ranks(ranking)
    sections = [module.section(ranking, table, public=public) for module in page_tables]
    del ranking  # its frame is as large as the rows that follow
    shown_columns = _shown_columns(table, public)
    is_rejected = pc.fill_null(pc.equal(table["status"], Status.REJECTED), False)
    valid_table = table.filter(pc.invert(is_rejected))
    values_by_option = varied_options(valid_table)
    options_of_rows = in_rows(values_by_option, range(len(valid_table)))
    contenders = Environments(valid_table).contenders(valid_table["run_id"].to_pylist())
    rows: list[Row] = valid_table.select(_ROW_COLUMNS).to_pylist()
    for row, contender, options in zip(rows, contenders, options_of_rows, strict=True):
        row |= ranks_by_attempt.get(_attempt_key(row), _NO_RANK)
        row |= {"contender": contender, "options": options}
    row_order = sorted(range(len(rows)), key=lambda n: _rank_sort_key(rows[n]))
    page_rows = [rows[n] for n in row_order]
    _add_cells(page_rows)
    page_table = valid_table.select(shown_columns).take(pa.array(row_order, pa.int64()))
    # Each column is encoded before the next one is read, since the values of all are several GB of objects.
    columns_in_order = itertools.chain(
        ((name, _json_values(page_table[name])) for name in shown_columns if name != "variant"),
        _derived_columns(page_rows, _memory_by_run(valid_table)),
        ((name, _option_values([row["options"][name] for row in page_rows])) for name in values_by_option),
    )
    num_rows, columns = len(page_rows), dict[str, dict[str, Any]]()
    for name, values in columns_in_order:
        columns.pop(name, None)
        if any(value is not None for value in values):
            columns[name] = encoded_column(values)
    return {
        "public": public,
        "notice": notice,
        "outcomes": OUTCOMES[bool(notice)],
        "made_with": ". ".join(
            (
                *(() if public else mfu_problems(table)),
                *screened_rows(table),
                *foreign_load(table),
                *Environments(table).notes,
                made_with(table),
            )
        ),
        "num_rows": num_rows,
        "columns": columns,
        "cells": _cells_json(cells),
        "formula": formula_of_cells(cells),
        "mfu_end": scale_end(cell.mfu and PEAK_FRACTION.drawn(cell.mfu) for cell in cells),
        "axes": [*AXES, *values_by_option],
        "orders": {name: _words_in_order(name, valid_table[name]) for name in AXES if name in TEXT_AXES},
        "tiers": {status: tier(status) for status in (*Status, *UNSETTLED)},
        "names": {
            "ok": Status.OK,
            "oom": Status.OOM,
            "slower": SLOWER,
            "in_parts": IN_PARTS,
            "few_steps": FEW_STEPS,
            "screened_by": SCREENED_BY,
        },
        "parts": [*MEMORY_PARTS],
        "sections": [asdict(section) for section in sections if section],
        "rejected": _rejected_counts(table.filter(is_rejected).select(_REJECTED_COLUMNS).to_pylist()),
        "ranking": str(schema.__doc__).split("\n\n")[1:],
        "schema": {group: _column_meanings(columns, shown_columns) for group, columns in GROUPS.items()},
        "units": {name: facts for name, column in RESULT_TABLE.items() if (facts := _unit_facts(column))},
    }


def _words_in_order(axis: str, column: pa.ChunkedArray) -> list[str]:
    """The words of an axis, the neutral one first and the others in the order of layouts."""
    return sorted(in_order(axis, column.to_pylist()), key=lambda word: word != NEUTRAL[axis])


def _option_values(values: list[Any]) -> list[Any]:
    """The values of an option in the rows: all numbers, or all texts if one is unset or not a number."""
    are_numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return values if are_numbers else [*map(value_text, values)]


def encoded_column(values: Sequence[Any]) -> dict[str, Any]:
    """A column as its distinct values and the index of each row's value (-1: null),
    or as values if most are distinct.
    """
    distinct_values = {*values} - {None}
    if 2 * len(distinct_values) > len(values) > 8:
        return {"values": [*values]}
    sorted_values = sorted(distinct_values)
    code_by_value = {value: code for code, value in enumerate(sorted_values)} | {None: -1}
    return {"distinct": sorted_values, "codes": [*map(code_by_value.__getitem__, values)]}


def _shown_columns(table: pa.Table, public: bool) -> list[str]:
    """The columns that the page shows: those with a value, without those that are too long or not public."""
    nonempty_columns = (name for name in SCHEMA.names if table[name].null_count < len(table))
    allowed_columns = PUBLIC_COLUMNS if public else SCHEMA.names
    return [name for name in nonempty_columns if name in allowed_columns and name not in _LEFT_OUT_COLUMNS]


def _public_table(table: pa.Table) -> pa.Table:
    """The table with the texts of a public page: no reasons, only the word `suspect`, and names without paths."""
    null_text = pa.scalar(None, pa.string())
    new_columns = dict.fromkeys(("reason", *_VARIABLE_COLUMNS), pa.nulls(len(table), pa.string()))
    for name in ("variant", "first_values"):
        new_columns[name] = pa.array(map(_public_options, table[name].to_pylist()), pa.string())
    new_columns["suspect"] = pc.if_else(pc.is_valid(table["suspect"]), "suspect", null_text)
    for name in NAME_COLUMNS:
        new_columns[name] = pc.replace_substring_regex(pc.utf8_rtrim(table[name], r"/\ "), r"^.*[/\\]", "")
    for name, column in new_columns.items():
        table = table.set_column(table.column_names.index(name), name, column)
    return table


def _public_options(variant_text: str | None) -> str | None:
    """The options in a column such as `variant`, as JSON, without the folders of paths."""
    items = variant_in(variant_text).items()
    options = {name: re.sub(r"^.*[/\\]", "", v) if isinstance(v, str) else v for name, v in items}
    return json.dumps(options) if options else None


def _cells_and_ranks(ranking: Ranking) -> tuple[list[Cell], dict[tuple[Any, ...], Row]]:
    """The cells of a ranking, and key of a ranked attempt -> the columns of _NO_RANK, and the numbers of its run."""
    cells, leaderboards = ranking.cells(), ranking.leaderboards(_ATTEMPT_KEY)
    indices_with_runs = [n for n, cell in enumerate(cells) if cell.status != Status.REJECTED]
    ranks_by_attempt = {
        _attempt_key(ranked_row): {
            "rank": rank,
            "cell": cell_index,
            "repeats_failed": repeats_failed(ranked_row["num_repeats"], ranked_row["num_repeats_failed"]),
            "environment": ranked_row["environment"],
            "run_numbers": ranking.run_numbers(standing),
        }
        for cell_index, leaderboard, standings in zip(
            indices_with_runs, leaderboards, ranking.standings.values(), strict=True
        )
        for rank, (ranked_row, standing) in enumerate(zip(leaderboard, standings, strict=True), 1)
    }
    return cells, ranks_by_attempt


def _add_cells(rows: Sequence[Row]) -> None:
    """Gives each row the index of its run's cell, also where the row itself is not ranked."""
    cell_index_by_run = {_run_key(row): row["cell"] for row in rows if row["rank"] is not None}
    for row in rows:
        row["cell"] = cell_index_by_run.get(_run_key(row))


def _panel_texts(cells: Sequence[Cell]) -> list[list[str]]:
    """For each cell what sets its panel apart from others of its model, such as `seq_len 128`."""
    setting_names = [*(name for name in PANEL_COLUMNS if name != "gbs"), "batch"]
    settings = [
        dict(zip(setting_names, cell.panel, strict=True), model=cell.title, num_params=cell.num_params)
        for cell in cells
    ]
    texts_of_cells = set_apart(settings, (*setting_names, "num_params"))
    for cell, cell_texts in zip(cells, texts_of_cells, strict=True):
        cell_texts += [f"{cell.partial_gpus} GPUs"] * bool(cell.partial_gpus)
    labels = [(cell.title, cell.nodes, *texts_of_cells[n]) for n, cell in enumerate(cells)]
    return [  # cells of models with one name and other shapes have equal labels, and get numbers
        [*cell_texts, f"#{labels[: n + 1].count(labels[n])}"] if labels.count(labels[n]) > 1 else cell_texts
        for n, cell_texts in enumerate(texts_of_cells)
    ]


def _cells_json(cells: Sequence[Cell]) -> list[Row]:
    """The cells as the page reads them; `panel` numbers the panel of a cell, `apart` names it."""
    panels = [*dict.fromkeys(cell.panel for cell in cells)]
    copied_fields = (
        "nodes",
        "partial_gpus",
        "num_params",
        "num_active_params",
        "reason",
        "ranked_by",
        "predicted",
    )
    documents = []
    for cell, panel_texts in zip(cells, _panel_texts(cells), strict=True):
        hardware, kernel, precision, _, seq_len, batch = cell.panel
        size_texts = filter(None, (routing_text(cell.routing), seq_len and f"seq_len {seq_len:,}", batch))
        setting_texts = [hardware or "unknown hardware", f"kernel {kernel or '?'}", precision, *size_texts]
        texts_by_field = {
            "setting": setting_texts,
            "apart": panel_texts,
            "of_peak": peak_suffix(cell.precision),
            "place": nodes_text(cell.nodes, cell.partial_gpus),
        }
        values_by_field = {name: getattr(cell, name) for name in copied_fields} | texts_by_field
        documents.append({"model": cell.title, **values_by_field, "panel": panels.index(cell.panel)})
    return documents


def _rank_sort_key(row: Row) -> tuple[bool, int, int]:
    return row["rank"] is None, row["cell"] or 0, row["rank"] or 0


def _derived_columns(
    rows: Sequence[Row], memory_by_run: Mapping[str, Row]
) -> Iterator[tuple[str, list[Any]]]:
    """Name and values of the columns of the page that are not in the schema.

    Args:
        memory_by_run: what `_memory_by_run` returns.
    """
    profile_files = files("profiles")
    memories = [{} if row["rank"] is None else memory_by_run.get(row["run_id"], {}) for row in rows]
    # Cached because a layout is run with many models and numbers of nodes.
    words_of_layout = functools.cache(lambda *values: layout_words(dict(zip(AXES, values, strict=True))))

    def words_of_row(row: Row) -> str | None:
        return (
            " ".join(filter(None, (*words_of_layout(*map(row.get, AXES)), *option_texts(row["options"]))))
            or None
        )

    allocations = [(row["sweep"], row["allocation"]) for row in rows]
    allocation_numbers = {allocation: number for number, allocation in enumerate(dict.fromkeys(allocations))}
    for name in (*_NO_RANK, "contender"):
        yield name, [row[name] for row in rows]
    for name in _RUN_NUMBERS:
        yield f"run_{name}", [_six_digits(row.get("run_numbers", {}).get(name)) for row in rows]
    yield "state", [state(row["status"], row["attempt"]) for row in rows]
    yield "allocation_number", [allocation_numbers[allocation] for allocation in allocations]
    yield "doubt", ["yes" if row["suspect"] else "no" for row in rows]
    yield "layout", [*map(words_of_row, rows)]
    yield "launch", [None if row["rank"] is None else launch_words(row) for row in rows]
    yield "predict", [None if row["rank"] is None else predict_words(row, profile_files) for row in rows]
    for part in MEMORY_PARTS:
        yield f"predicted_{part}_bytes", [memory.get(part) for memory in memories]
    yield "rank_mem_bytes", [memory.get("limit") for memory in memories]
    yield "extrapolated", [memory.get("extrapolated") for memory in memories]


def _memory_by_run(table: pa.Table) -> dict[str, Row]:
    """Run id -> predicted memory of its largest rank: part of MEMORY_PARTS -> bytes, `limit` and `extrapolated`.

    `limit` is the memory of a GPU in bytes; `extrapolated` names what no run of the profile's fit had. The
    prediction uses today's profile of the kernel, even if the run was planned with another one. Only runs
    that ended ok or out of memory have one, and only if their kernel and hardware have a profile and their
    model and layout are known in full.
    """
    is_measured = pc.field("is_final") & pc.field("status").isin([Status.OK, Status.OOM])
    measured_table = table.filter(is_measured)
    # The repeats of a run have one prediction.
    run_keys = [
        *zip(*(measured_table[name].to_pylist() for name in ("run_id", "kernel", "hardware")), strict=True)
    ]
    first_rows = dict(zip(reversed(run_keys), range(len(run_keys) - 1, -1, -1), strict=True))
    runs, _ = measured_runs(measured_table.take(pa.array(sorted(first_rows.values()), pa.int64())))
    memory_by_run = {}
    for kernel_and_hardware in dict.fromkeys((run.spec.kernel.name, run.hardware) for run in runs):
        program_runs = [run for run in runs if (run.spec.kernel.name, run.hardware) == kernel_and_hardware]
        try:
            profile, hardware = profile_and_hardware(program_runs[0])
        except ConfigError:
            continue
        constants = memory_constants(profile.framework, profile.memory)
        for run in program_runs:
            stages = predict_memory(profile.as_divided(run.spec), constants, LARGEST)
            stage = max(stages, key=lambda stage: stage.peak_bytes)
            extrapolation = "; ".join(beyond_fit([run.spec], profile, hardware.gpu_at_limit))
            memory_by_run[run.run_id] = {part: round(getattr(stage, part)) for part in MEMORY_PARTS} | {
                "extrapolated": extrapolation or None,
                "limit": hardware.mem_bytes,
            }
    return memory_by_run


def _json_values(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column for JSON: numbers with six digits, times and lists as texts, null for NaN and infinity."""
    values: list[Any] = column.to_pylist()
    if pa.types.is_floating(column.type):
        return [*map(_six_digits, values)]
    if pa.types.is_timestamp(column.type):
        return [None if v is None else v.isoformat(timespec="seconds") for v in values]
    if pa.types.is_list(column.type):
        return [", ".join(map(str, v or ())) or None for v in values]
    return values


def _six_digits(number: Any) -> Any:
    """A number with six digits; None for NaN and infinity, and other values as they are."""
    if not isinstance(number, float):
        return number
    return float(f"{number:.6g}") if math.isfinite(number) else None


def _rejected_counts(rows: Sequence[Row]) -> list[Row]:
    """For each model, number of nodes and rule the number of layouts that it rejects, and an example of its reason."""
    key_columns = _REJECTED_COLUMNS[:3]
    counts = Counter(tuple(row[name] for name in key_columns) for row in rows)
    example_by_key = {tuple(row[name] for name in key_columns): row["reason"] for row in reversed(rows)}
    return [
        dict(zip(key_columns, key, strict=True)) | {"number": num_layouts, "example": example_by_key[key]}
        for key, num_layouts in sorted(
            counts.items(), key=lambda item: (*map(str, item[0][::2]), item[0][1] or 0)
        )
    ]


def _column_meanings(columns: Iterable[Column], shown_columns: Sequence[str]) -> list[list[str]]:
    """Name, type, unit, better values and meaning of those columns of a group that the page shows."""
    return [
        [c.name, c.type, c.unit.symbol, "" if c.better == Better.NONE else c.better, c.meaning]
        for c in columns
        if c.name in shown_columns
    ]


def _unit_facts(column: Column) -> Row:
    """What the page needs to write and draw the numbers of a column; empty for plain numbers and texts."""
    unit, texts = column.unit, column.text_by_value
    if unit == NUMBER and not texts and not column.title:
        return {}
    axis = {"axis": unit.axis_symbol, "factor": unit.axis.factor}
    return {
        "form": unit.form,
        "symbol": unit.symbol,
        "short": unit.short_symbol,
        **axis,
        "title": column.title,
        "texts": texts,
    }
