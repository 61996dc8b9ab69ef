"""A result table that is written in any form that `ultrabench import` reads comes back with its rows,
cells and winners.
"""

import csv
import io
import json
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ultrabench.analysis.results.imported.table_map import TYPE_BY_COLUMN, read_map
from ultrabench.analysis.results.ranking import rank
from ultrabench.analysis.results.rows import sizes_of
from ultrabench.analysis.results.schema import FLOATS, SCHEMA, TEXTS, TIME
from ultrabench.analysis.studies.import_tables.import_table import import_table
from ultrabench.record import content_id
from ultrabench.result import Status
from ultrabench.sweep.config.load import load_model

PENDING = "planned"
STATUSES = (*Status, None)
CELL_COLUMNS = ("model", "nodes", "gpus", "seq_len", "gbs")
LAYOUT_COLUMNS = ("dp", "tp", "pp", "mbs", "gas", "zero_stage", "recompute", "variant")


def speeds(row, step_time_s):
    """The columns that follow from the step time of an ok row."""
    tokens_per_s = row["gbs"] * row["seq_len"] / step_time_s
    flops = (
        load_model(row["model"]).flops_per_token(row["seq_len"], row["flops_formula"])
        * tokens_per_s
        / row["gpus"]
    )
    return {
        "step_time_s": step_time_s, "tokens_per_s": tokens_per_s, "tokens_per_s_per_gpu": tokens_per_s / row["gpus"],
        "model_flops_per_s_per_gpu": flops, "mfu": flops / 989e12, "step_times_s": [step_time_s, step_time_s],
        "num_steps_measured": 2,
    }  # fmt: skip


@st.composite
def result_rows(draw):
    """One row of a sweep: a layout of a known model on whole or partly used nodes, and how its attempt ended."""
    model, nodes = draw(st.sampled_from(["llama3.2-1b", "llama3-8b"])), draw(st.sampled_from([1, 2, 4]))
    gpus_per_node = draw(st.sampled_from([8, 8, 4]))
    tp, pp, mbs, gas = (draw(st.sampled_from(values)) for values in ((1, 2, 4), (1, 2), (1, 2, 8), (4, 16)))
    variant = draw(
        st.sampled_from([None, '{"env.NCCL_ALGO":"Ring"}', '{"option.program":"A; b, \\"c\\" | d"}'])
    )
    gpus = nodes * gpus_per_node
    if gpus % (tp * pp):
        tp = pp = 1
    dp = gpus // (tp * pp)
    row = sizes_of(load_model(model)) | {
        "schema_version": 1, "sweep": draw(st.sampled_from(["may", "june"])), "kernel": "own", "kernel_version": "3",
        "hardware": "h100x8", "model": model, "nodes": nodes, "gpus_per_node": gpus_per_node, "gpus": gpus, "dp": dp,
        "tp": tp, "pp": pp, "cp": 1, "mbs": mbs, "gas": gas, "gbs": dp * mbs * gas, "seq_len": 4096,
        "precision": "bf16",
        "zero_stage": draw(st.sampled_from([0, 1])), "zero_shards": 1, "pp_schedule": "none" if pp == 1 else "1f1b",
        "virtual_stages": 1, "recompute": draw(st.sampled_from(["none", "full"])), "compile": draw(st.booleans()),
        "variant": variant, "peak_flops_per_s": 989e12, "peak_source": "a data sheet", "is_final": True,
        "flops_formula": "palm",
    }  # fmt: skip
    row["zero_shards"] = dp if row["zero_stage"] else 1
    row["run_id"] = content_id(
        [row[name] for name in (*CELL_COLUMNS, *LAYOUT_COLUMNS, "compile", "gpus_per_node")]
    )
    row["status"] = draw(st.sampled_from(STATUSES))
    if row["status"] in (None, Status.REJECTED, Status.SKIPPED):
        return row
    row |= {"attempt": 0, "repeat": draw(st.integers(0, 2)), "hostnames": ["n1", "n2"][:nodes]}
    if row["status"] == Status.OK:
        row |= speeds(row, draw(st.floats(0.125, 500)))
        row["peak_mem_reserved_bytes"] = draw(st.integers(2**30, 79 * 2**30))
        row["step_time_ci95_rel"] = draw(st.sampled_from([None, 0.001, 0.25]))
        if draw(st.integers(0, 4)) == 0:
            row |= {"suspect": "its clock was low", "suspect_codes": ["sm_clock"]}
    else:
        row["reason"] = "rank 1: RuntimeError: x | y; z, 1,5 GiB"
    return row


def cell_text(name, value, decimal="."):
    """The cell of a value in a text file."""
    kind = TYPE_BY_COLUMN[name]
    if name == "status" and value is None:
        return PENDING
    if value is None:
        return ""
    if kind == TIME:
        return value.isoformat()
    if kind in (FLOATS, TEXTS):
        return json.dumps(value)
    return repr(value).replace(".", decimal) if isinstance(value, float) else str(value)


def separated(names, rows, separator, decimal="."):
    file = io.StringIO()
    writer = csv.writer(file, delimiter=separator)
    writer.writerow(names)
    writer.writerows([[cell_text(name, row[name], decimal) for name in names] for row in rows])
    return file.getvalue()


def markdown(names, rows):
    lines = [[cell_text(name, row[name]).replace("|", "\\|") for name in names] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in ([*names], ["---"] * len(names), *lines))


def json_rows(names, rows):
    return [
        {name: PENDING if name == "status" and row[name] is None else row[name] for name in names}
        for row in rows
    ]


FORMS = {
    "csv": lambda names, rows: separated(names, rows, ","),
    "semicolon": lambda names, rows: separated(names, rows, ";", ","),
    "tab": lambda names, rows: separated(names, rows, "\t"),
    "markdown": markdown,
    "json": lambda names, rows: json.dumps(json_rows(names, rows)),
    "jsonl": lambda names, rows: "\n".join(map(json.dumps, json_rows(names, rows))),
}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        result_rows(),
        min_size=1,
        max_size=16,
        unique_by=lambda row: (row["run_id"], row.get("repeat"), row["sweep"]),
    )
)
def test_a_result_table_comes_back(form, rows, tmp_path):
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    names = [name for name in TYPE_BY_COLUMN if table[name].null_count < len(table) or name == "status"]
    path = tmp_path / f"table.{form}"
    path.write_text(FORMS[form](names, table.to_pylist()), encoding="utf-8")
    columns = {name: name for name in names if name != "status"}
    columns["status"] = {"column": "status", "values": {**{str(s): str(s) for s in Status}, PENDING: None}}
    map_ = {"columns": columns} | ({"decimal": ","} if form == "semicolon" else {})
    Path(tmp_path / "map.yaml").write_text(yaml.safe_dump(map_))
    returned = import_table(path, read_map(tmp_path / "map.yaml")).table
    source_index = returned.column_names.index("source")
    assert returned["source"].unique().to_pylist() == [path.name]
    returned_rows = returned.set_column(source_index, SCHEMA.field("source"), table["source"]).to_pylist()
    assert [known(row) for row in returned_rows] == [known(row) for row in table.to_pylist()]
    assert cells_of(returned) == cells_of(table)


def known(row):
    """The columns of a row that are known; a row that was never tried has no attempt."""
    return {name: value for name, value in row.items() if value is not None}


def cells_of(table):
    return [cell.to_json() for cell in rank(table)]
