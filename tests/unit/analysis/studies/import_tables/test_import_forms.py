"""Imports tables as people write them: their forms, numbers, units, statuses, options and GPUs that fill no node."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.unit.cli.conftest import as_json, one_line
from ultrabench.analysis.results.collect import read_parquet
from ultrabench.hardware import GIB

CONSTANTS = {
    "gpus_per_node": 8, "hardware": "h100x8", "precision": "bf16", "kernel": "own", "zero_stage": 1, "pp": 1, "cp": 1,
    "seq_len": 4096, "recompute": "none",
}  # fmt: skip
LAYOUT = {"model": "net", "nodes": "nodes", "tp": "tp", "mbs": "mbs", "gas": "gas"}
MODELS = {"small": "llama3.2-1b"}


def imported(ultrabench, text, columns, name="table.csv", **sections):
    """Imports a table by a map of LAYOUT and further columns: the account, and the rows."""
    Path(name).write_text(text, encoding=sections.pop("encoding", "utf-8"))
    constants = CONSTANTS | sections.pop("constants", {})
    layout = {ours: theirs for ours, theirs in LAYOUT.items() if theirs}
    columns = {k: v for k, v in (layout | columns).items() if v is not None}
    Path("map.yaml").write_text(
        yaml.safe_dump({"columns": columns, "constants": constants, "models": MODELS} | sections)
    )
    account = as_json(ultrabench, "import", "--map", "map.yaml", name, "-o", "out.parquet")
    return account, read_parquet(Path("out.parquet")).to_pylist()


def refusal(ultrabench, text, columns, name="table.csv", **sections):
    """The line that refuses such a table or map."""
    Path(name).write_text(text)
    constants = CONSTANTS | sections.pop("constants", {})
    table_map = {"columns": LAYOUT | columns, "constants": constants, "models": MODELS} | sections
    Path("map.yaml").write_text(yaml.safe_dump(table_map))
    return one_line(ultrabench, "import", "--map", "map.yaml", name)


def csv_of(header, *rows):
    return "\n".join([f"net,nodes,tp,mbs,gas,{header}", *rows]) + "\n"


# The forms of a table

FORMS = {
    "table.csv": "net,nodes,tp,mbs,gas,time\nsmall,1,1,2,4,1.5\nsmall,1,2,2,8,1.75\n",
    "semicolons.csv": "net;nodes;tp;mbs;gas;time\nsmall;1;1;2;4;1,5\nsmall;1;2;2;8;1,75\n",
    "excel.csv": "\ufeffsep=;\r\nnet;nodes;tp;mbs;gas;time\r\nsmall;1;1;2;4;1,5\r\nsmall;1;2;2;8;1,75\r\n",
    "tabs.tsv": "net\tnodes\ttp\tmbs\tgas\ttime\nsmall\t1\t1\t2\t4\t1.5\n\nsmall\t1\t2\t2\t8\t1.75\n",
    "README.md": (
        "# Speeds\n\n| not | this |\n|---|---|\n| 1 | 2 |\n\nMeasured in May:\n\n"
        "| net | nodes | tp | mbs | gas | time |\n|:---|--:|--:|--:|--:|:-:|\n"
        "| [small](x.md) | 1 | 1 | 2 | 4 | **1.5** |\n| `small` | 1 | 2 | 2 | 8 | 1.75[^1] |\n\n[^1]: warm\n"
    ),
    "bare.md": "net | nodes | tp | mbs | gas | time\n--- | --- | --- | --- | --- | ---\nsmall | 1 | 1 | 2 | 4 | "
    "1.5\nsmall | 1 | 2 | 2 | 8 | 1.75\n",
    "list.json": json.dumps([
        {"net": "small", "nodes": 1, "tp": 1, "mbs": 2, "gas": 4, "time": 1.5},
        {"net": "small", "nodes": 1, "tp": 2, "mbs": 2, "gas": 8, "time": 1.75, "note": None},
    ]),
    "columns.json": json.dumps({
        "net": ["small"] * 2, "nodes": [1, 1], "tp": [1, 2], "mbs": [2, 2], "gas": [4, 8], "time": [1.5, 1.75]}),
    "pandas.json": json.dumps({
        "net": {"0": "small", "1": "small"}, "nodes": {"0": 1, "1": 1}, "tp": {"0": 1, "1": 2}, "mbs": {"0": 2, "1": 2},
        "gas": {"0": 4, "1": 8}, "time": {"0": 1.5, "1": 1.75}}),
    "split.json": json.dumps({
        "columns": ["net", "nodes", "tp", "mbs", "gas", "time"],
        "data": [["small", 1, 1, 2, 4, 1.5], ["small", 1, 2, 2, 8, 1.75]]}),
    "wrapped.json": json.dumps({"version": 3, "runs": [
        {"net": "small", "nodes": 1, "tp": 1, "mbs": 2, "gas": 4, "time": 1.5},
        {"net": "small", "nodes": 1, "tp": 2, "mbs": 2, "gas": 8, "time": 1.75}]}),
    "log.jsonl": (
        '{"net": "small", "nodes": 1, "tp": 1, "mbs": 2, "gas": 4, "time": 1.5}\n\n'
        '{"net": "small", "nodes": 1, "tp": 2, "mbs": 2, "gas": 8, "time": 1.75}\n'
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_rows(ultrabench, name):
    _, rows = imported(ultrabench, FORMS[name], {"step_time_s": "time"}, name)
    facts = [
        (row["model"], row["dp"], row["tp"], row["gas"], row["step_time_s"], row["suspect"]) for row in rows
    ]
    assert facts == [("llama3.2-1b", 8, 1, 4, 1.5, None), ("llama3.2-1b", 4, 2, 8, 1.75, None)]
    assert [row["tokens_per_s"] for row in rows] == [64 * 4096 / 1.5, 64 * 4096 / 1.75]


def test_utf16_and_values_in_objects(ultrabench):
    text = FORMS["tabs.tsv"]
    _, rows = imported(ultrabench, text, {"step_time_s": "time"}, "excel.txt", encoding="utf-16")
    assert [row["step_time_s"] for row in rows] == [1.5, 1.75]
    run = {
        "config": {"net": {"value": "small"}, "tp": 4},
        "nodes": 1,
        "mbs": 1,
        "gas": 2,
        "summary": {"time": 2},
    }
    columns = {"model": "config.net.value", "tp": "config.tp", "step_time_s": "summary.time"}
    _, (row,) = imported(ultrabench, json.dumps([run]), columns, "wandb.json")
    assert (row["model"], row["tp"], row["step_time_s"]) == ("llama3.2-1b", 4, 2.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04...", "x.table is an Excel workbook or another zip archive; save the sheet as CSV UTF-8"),
        (b"PAR1...", "x.table is a parquet file; commands read those of ultrabench"),
        (b"\x1f\x8b...", "x.table is a compressed file; unpack it first"),
        (b"caf\xe9,b\n1,2\n", "cannot read x.table: 'utf-8' codec can't decode byte 0xe9"),
        (b"[1, 2]", "x.table, row 1: 1 is not an object; write each row as an object"),
        (b'{"net": ', "cannot read x.table: "),
        (b'{"net": "small"}\n{"net"\n', "line 2 is not JSON"),
        (b"| net | a |\n|---|---|\n| 1 | 2 |\n\n| net | b |\n|---|---|\n| 1 | 2 |\n",
         "x.table has 2 tables with such columns, at the lines 1, 5; keep the one to import in a file of its own"),
        (b"| net | a |\n|---|---|\n| 1 | 2 | 3 |\n", "line 3 has 3 cells, the header of its table has 2"),
        (b"net,step\na,6,5\n", "Expected 2 fields in line 2, saw 3; give a CSV file in UTF-8"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_table_is_named(ultrabench, content, message):
    Path("x.table").write_bytes(content)
    Path("map.yaml").write_text(yaml.safe_dump({"columns": LAYOUT}))
    assert message in one_line(ultrabench, "import", "--map", "map.yaml", "x.table")


PAGE = (Path(__file__).parents[5] / "docs" / "start" / "your-table.md").read_text()
EXAMPLES = re.findall(r"### ([^\n]+)\n\n```\w+\n(.*?)```\n\n```yaml\n(.*?)```", PAGE, re.DOTALL)
WINNERS = {
    "CSV, with an option beside the layout": ["8 1 1 flash", "4 1 1 flash"],
    "Semicolons and decimal commas": ["8 1 1 None", "16 2 1 None"],
    "A Markdown table": ["64 8 2 None"],
    "JSON, as trackers export it": ["8 1 1 None"],
    "JSON lines": ["16 1 1 B"],
}


@pytest.mark.parametrize(("heading", "text", "table_map"), EXAMPLES, ids=[example[0] for example in EXAMPLES])
def test_the_examples_of_the_manual(ultrabench, heading, text, table_map):
    Path("table.txt").write_text(text)
    Path("map.yaml").write_text(table_map)
    account = as_json(ultrabench, "import", "--map", "map.yaml", "table.txt", "-o", "out.parquet")
    assert (account["suspect"], account["unused_columns"]) == (
        0,
        ["program"] if heading == "JSON lines" else [],
    )
    best = [row for row in as_json(ultrabench, "sweep", "top", "out.parquet") if row["best"]]
    options = [
        next(iter(row["options"].values()), None) if "compile" not in row["options"] else None for row in best
    ]
    facts = [
        f"{row['gpus']} {row['tp']} {row['pp']} {option}" for row, option in zip(best, options, strict=True)
    ]
    assert sorted(facts, reverse=True) == sorted(WINNERS[heading], reverse=True)


def test_every_example_of_the_manual_is_tried():
    assert [example[0] for example in EXAMPLES] == [*WINNERS]


# Numbers and units


@pytest.mark.parametrize(
    ("cells", "source", "expected"),
    [
        (['"6,500"', '"0,512"'], {}, [6.5, 0.512]),
        (['"1.234,5"', '"12"'], {}, [1234.5, 12.0]),
        (['"1,234.5"', '"12"'], {}, [1234.5, 12.0]),
        (['"1,234,567"', '"12"'], {}, [1234567.0, 12.0]),
        (['"6,500"', '"7,250"'], {"decimal": ","}, [6.5, 7.25]),
        (['"6,500"', '"7,250"'], {"decimal": "."}, [6500.0, 7250.0]),
        (["6 500", "1'200.5"], {}, [6500.0, 1200.5]),
        (["6.5 s", "250 ms"], {}, [6.5, 0.25]),
        (["6500 ms", "250"], {"unit": "ms"}, [6.5, 0.25]),
        (["1e1", "2.5E-1"], {}, [10.0, 0.25]),
        (["-", "2"], {}, [None, 2.0]),
        (["n/a", "\u2014"], {}, [None, None]),
    ],
)  # fmt: skip
def test_numbers_are_read_as_their_column_writes_them(ultrabench, cells, source, expected):
    rows = [f"small,1,{2**n},1,{2**n},{cell}" for n, cell in enumerate(cells)]
    _, imported_rows = imported(ultrabench, csv_of("t", *rows), {"step_time_s": {"column": "t"} | source})
    assert [row["step_time_s"] for row in imported_rows] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("header", "cells", "columns", "message"),
    [
        ("t", ['"6,500"', '"7,250"'], {"step_time_s": "t"},
         "line 2: t='6,500' may be 6.5 (decimal: ',') or 6,500 (decimal: '.'); write one of them into the map"),
        ("t,mem", ['10.082,"61,2"', '9.500,"50,5"'],
         {"tokens_per_s_per_gpu": "t", "peak_mem_reserved_bytes": {"column": "mem", "unit": "GiB"}},
         "line 2: t='10.082' may be 10,082 (decimal: ',') or 10.082 (decimal: '.')"),
        ("t", ['"61,2"', '"1,024.5"'], {"step_time_s": "t"}, "line 2: t='61,2' is not a number"),
        ("t", ["6.5 GB"], {"step_time_s": "t"}, "line 2: t='6.5 GB' has the unit GB; known: us, ms, s, min, h"),
        ("t", ["6.5 s"], {"step_time_s": {"column": "t", "unit": "ms"}}, "t='6.5 s' is in s, but its column in ms"),
        ("s", ["4k"], {"seq_len": "s"}, "s='4k' is 1,000 or 1,024 times the number; write unit: thousand or unit: Ki"),
        ("m", ["61.2"], {"peak_mem_reserved_bytes": "m"}, "m='61.2' is not an integer; give its unit, "
        "one of KB, MB, GB"),
        ("tput (tok/s)", ["9000"], {"step_time_s": "tput (tok/s)"},
         "the header 'tput (tok/s)' names tok/s, which is no unit of step_time_s"),
        ("rate (it/s)", ["2"], {"tokens_per_s": "rate (it/s)"}, "names it/s, which is no unit of tokens_per_s"),
        ("tok/s/GPU", ["900"], {"tokens_per_s": "tok/s/GPU"},
            "is of other GPUs than tokens_per_s, which is the rate of all GPUs"),
        ("Total tok/s", ["900"], {"tokens_per_s_per_gpu": "Total tok/s"},
            "the rate of one GPU; map it to tokens_per_s"),
        ("tokens_per_s_per_node", ["900"], {"tokens_per_s": "tokens_per_s_per_node"},
            "write what it is into the map: per: all or per: gpu or per: node"),
        ("tput (tokens/min)", ["900"], {"tokens_per_s": "tput (tokens/min)"},
            "names tokens/min, which is no unit of tokens_per_s"),
        ("t (ms/micro-batch)", ["900"], {"step_time_s": "t (ms/micro-batch)"},
            "names ms/micro-batch, which is no unit"),
        ("max_alloc (GB)", ["61"], {"peak_mem_reserved_bytes": "max_alloc (GB)"},
         "names allocated memory, which is less than peak_mem_reserved_bytes; map it to peak_mem_allocated_bytes"),
        ("it/s", ["0.7", "0.6", "0.5"], {"step_time_s": "it/s"},
            "the header 'it/s' names it/s, which is no unit of step_time_s"),
        ("step/s", ["0.7"], {"step_time_s": "step/s"}, "names step/s, which is no unit of step_time_s"),
        ("Steps per second", ["0.7"], {"step_time_s": "Steps per second"},
            "names steps/second, which is no unit of step_time_s"),
        ("train/iterations_per_sec", ["0.7"], {"step_time_s": "train/iterations_per_sec"},
            "iterations/sec, which is no unit"),
        ("tps", ["9000"], {"step_time_s": "tps"}, "names tps, which is no unit of step_time_s"),
        ("ktok/s", ["9"], {"step_time_s": "ktok/s"}, "names ktok/s, which is no unit of step_time_s"),
        ("ms/token", ["9"], {"step_time_s": "ms/token"}, "names ms/token, which is no unit of step_time_s"),
        ("sec_per_sample", ["9"], {"step_time_s": "sec_per_sample"},
            "names sec/sample, which is no unit of step_time_s"),
        ("samples/s", ["9"], {"tokens_per_s": "samples/s"}, "names samples/s, which is no unit of tokens_per_s"),
        ("Throughput samples/GPU/s", ["9"], {"tokens_per_s_per_gpu": "Throughput samples/GPU/s"},
            "names samples/gpu/s, which is no"),
        ("s/it", ["9"], {"tokens_per_s": "s/it"}, "names s/it, which is no unit of tokens_per_s"),
        ("tokens/day", ["9"], {"tokens_per_s": "tokens/day"}, "names tokens/day, which is no unit of tokens_per_s"),
        ("forward_ms", ["900"], {"step_time_s": "forward_ms"},
         "names 'forward', which is not the time of a whole step (step_time_s); map the column that holds it, "
         "or write certain"),
        ("bwdTime", ["0.9"], {"step_time_s": "bwdTime"}, "the header 'bwdTime' names 'bwd', which is not"),
        ("data loading [s]", ["0.9"], {"step_time_s": "data loading [s]"}, "names 'data loading', which is not"),
        ("opt (ms)", ["90"], {"step_time_s": "opt (ms)"}, "names 'opt', which is not"),
        ("ETA", ["90"], {"step_time_s": "ETA"}, "names 'ETA', which is not"),
        ("time remaining", ["90"], {"step_time_s": "time remaining"}, "names 'remaining', which is not"),
        ("b", ["64"], {"mbs": {"column": "b", "unit": "GB"}},
            "mbs with unit='GB': mbs is a number; its units: thousand"),
        ("t", ["64"], {"step_time_s": {"column": "t", "unit": "TFLOP/s"}},
            "step_time_s is in s; its units: us, ms, s, min, h"),
        ("t", ["64"], {"source_mfu": {"column": "t", "unit": "thousand"}}, "source_mfu is a fraction; its units: %"),
        ("b", ["1000"], {"gbs": {"column": "b", "unit": "tokens"}, "gas": []}, "gbs=1,000 tokens with seq_len=4096"),
        ("tok/s per pipeline", ["900"], {"tokens_per_s_per_gpu": "tok/s per pipeline"},
            "is of other GPUs than tokens_per_s_per_gpu"),
        ("replica_tps", ["900"], {"tokens_per_s_per_gpu": "replica_tps"}, "or per: node or per: dp_rank"),
        ("d", ["05/02/2026"], {"started_at": "d"}, "d='05/02/2026' is not a time in ISO 8601"),
        ("d", ["yesterday"], {"started_at": "d"}, "d='yesterday' is not a time in ISO 8601"),
        ("d", ["3"], {"step_times_s": "d"}, "d='3' is not a JSON array"),
        ("d", ["3"], {"mbs": {"column": "d", "per": "node"}},
            "columns.mbs has no `per`; only rates of GPUs have: tokens_per_s,"),
        ("d", ["3"], {"tokens_per_s": [{"column": "d", "per": "node"}, "d"]},
            "the sources of columns.tokens_per_s have different"),
    ],
)  # fmt: skip
def test_what_could_be_read_wrongly_is_refused(ultrabench, header, cells, columns, message):
    rows = [f"small,1,{2**n},1,{2**n},{cell}" for n, cell in enumerate(cells)]
    assert message in refusal(ultrabench, csv_of(header, *rows), columns)


@pytest.mark.parametrize(
    ("header", "cell", "column", "source", "expected"),
    [
        ("mfu", "40.7%", "source_mfu", {"unit": "%"}, 0.407),
        ("mfu", "40.7 %", "source_mfu", {}, 0.407),
        ("MFU (%)", "40.7", "source_mfu", {}, 0.407),
        ("mfu_pct", "40.7", "source_mfu", {}, 0.407),
        ("step (ms)", "6500", "step_time_s", {}, 6.5),
        ("step [s]", "6.5", "step_time_s", {}, 6.5),
        ("mem (GB)", "61.2", "peak_mem_reserved_bytes", {"unit": "GiB"}, int(61.2 * GIB)),
        ("mem_gib", "61.5", "peak_mem_reserved_bytes", {}, int(61.5 * GIB)),
        ("mem", "61.5 GiB", "peak_mem_allocated_bytes", {}, int(61.5 * GIB)),
        ("tput (k tok/s)", "2.5", "tokens_per_s", {}, 2500.0),
        ("Throughput (tok/s/GPU)", "2500", "tokens_per_s_per_gpu", {}, 2500.0),
        ("time (ms per step)", "2500", "step_time_s", {}, 2.5),
        ("ktok/s", "72", "tokens_per_s", {}, 72000.0),
        ("k tokens per second", "72", "tokens_per_s", {}, 72000.0),
        ("Mtok/s", "1.5", "tokens_per_s", {}, 1_500_000.0),
        ("ktok/s/GPU", "2.5", "tokens_per_s_per_gpu", {}, 2500.0),
        ("tok/GPU/s", "2500", "tokens_per_s_per_gpu", {}, 2500.0),
        ("train/tokens_per_s_per_gpu", "2500", "tokens_per_s_per_gpu", {}, 2500.0),
        ("tps", "2500", "tokens_per_s", {}, 2500.0),
        ("step_minutes", "0.5", "step_time_s", {}, 30.0),
        ("step time min", "0.5", "step_time_s", {}, 0.5),
        ("ms/step", "2500", "step_time_s", {}, 2.5),
        ("milliseconds per iteration", "2500", "step_time_s", {}, 2.5),
        ("s/it", "2.5", "step_time_s", {}, 2.5),
        ("fwd+bwd+opt (ms)", "2500", "step_time_s", {}, 2.5),
        ("forward-backward (s)", "2.5", "step_time_s", {}, 2.5),
        ("step incl. data loading", "2.5", "step_time_s", {}, 2.5),
        ("backward", "2.5", "step_time_s", {"certain": True}, 2.5),
        ("train/step_time_s", "2.5", "step_time_s", {}, 2.5),
        ("time/s", "2.5", "step_time_s", {}, 2.5),
        ("seqs/GPU", "2", "mbs", {}, 2),
        ("TFLOPS/GPU", "400", "model_flops_per_s_per_gpu", {}, 4e14),
        ("hidden (h)", "2048", "hidden_size", {}, 2048),
        ("Batch (B)", "64", "gbs", {}, 64),
        ("params (B)", "1.34", "num_params", {}, 1_340_000_000),
        ("params", "1.34B", "num_params", {}, 1_340_000_000),
        ("rate", "2.5k", "tokens_per_s", {}, 2500.0),
        ("seq", "4", "seq_len", {"unit": "Ki"}, 4096),
        ("seq", "4Ki", "seq_len", {}, 4096),
        ("batch", "262,144", "gbs", {"unit": "tokens"}, 64),
        ("peak", "989 TFLOPS", "peak_flops_per_s", {}, 989e12),
    ],
)  # fmt: skip
def test_units_of_map_header_and_cell(ultrabench, header, cell, column, source, expected):
    text = csv_of(header, f'other,1,1,8,1,"{cell}"')
    _, (row,) = imported(ultrabench, text, {column: {"column": header} | source})
    assert row[column] == pytest.approx(expected, abs=1 if column.endswith("_bytes") else None)


def test_the_account_names_what_was_assumed(ultrabench):
    text = "net;nodes;tp;mbs;gas;step (ms);status\nsmall;1;1;1;8;1500,5;ok\nsmall;1;2;1;8;1600,5;\n"
    account, rows = imported(ultrabench, text, {"step_time_s": "step (ms)", "status": "status"})
    assert [row["step_time_s"] for row in rows] == [1.5005, 1.6005]
    assert account["notes"] == [
        "step_time_s: 'step (ms)' is read in ms, as its header says",
        "decimal commas: step (ms)",
        "status is empty in 1 row, which get the default status=ok",
    ]


# Numbers that contradict each other

RATES = {
    "step_time_s": "t", "tokens_per_s": "total", "tokens_per_s_per_gpu": "each", "source_mfu": "mfu",
    "model_flops_per_s_per_gpu": {"column": "tflops", "unit": "TFLOP/s"},
}  # fmt: skip
MODEL_FLOPS = 6 * 1_235_746_816 + 12 * 16 * 2048 * 4096
"""FLOPs of a token of llama3.2-1b by the formula palm."""


def given(t="", total="", each="", mfu="", tflops="", layout="small,1,1,1,8"):
    return f"{layout},{t},{total},{each},{mfu},{tflops}"


def rows_with(ultrabench, *rows, **sections):
    columns = RATES | sections.pop("columns", {})
    return imported(ultrabench, csv_of("t,total,each,mfu,tflops", *rows), columns, **sections)[1]


# dp8 mbs1 gas8 of 4,096 tokens in 1 s are 262,144 tokens/s, 32,768 of each GPU.
@pytest.mark.parametrize(
    ("row", "facts"),
    [
        (given(t="1", each="262144"), ["tokens_per_s_per_gpu=262,144 contradicts step_time_s=1 s, "
        "from which 32,768 follows",
                                        "of all GPUs or per node"]),
        (given(t="1", each="65536", layout="small,1,2,1,8"), ["tokens_per_s_per_gpu=65,536",
            "from which 16,384 follows"]),
        (given(t="1", each="32768", layout="small,1,2,1,8"), ["from which 16,384 follows (perhaps "
        "tokens_per_s_per_gpu is per DP rank"]),
        (given(t="1", total="32768"), ["tokens_per_s=32,768 contradicts step_time_s=1 s, from which 262,144 follows",
            "per GPU"]),
        (given(t="1000", total="262144", each="32768"), ["step_time_s=1000 s contradicts tokens_per_s=262,144, "
        "from which 1 s", "in ms"]),
        (given(t="0.125", total="262144", each="32768"), ["step_time_s=0.125 s", "of one micro-batch"]),
        (given(t="1", each="8"), ["tokens_per_s_per_gpu=8 ", "in sequences/s"]),
        (given(t="1", mfu="0.6"), ["source_mfu=60.0 % contradicts step_time_s=1 s, from which 29.",
            "by the formula palm"]),
        (given(each="32768", mfu="0.149", layout="small,1,2,1,8"),
            ["source_mfu=14.9 %", "(perhaps tokens_per_s_per_gpu is per DP rank"]),
        (given(t="1", mfu="29.9"), ["source_mfu=2990.0 %", "in per cent", "impossible value: source_mfu=29.9"]),
        (given(t="1", tflops="2364"), ["model_flops_per_s_per_gpu=2.36 PFLOP/s", "of all GPUs or per node"]),
        (given(t="1.00", each="34000"), ["tokens_per_s_per_gpu=34,000"]),
    ],
)  # fmt: skip
def test_a_contradiction_is_a_doubt_with_both_numbers_and_the_likeliest_reading(ultrabench, row, facts):
    (result_row,) = rows_with(ultrabench, row)
    assert [fact for fact in facts if fact not in (result_row["suspect"] or "")] == []
    assert "contradiction" in result_row["suspect_codes"]


@pytest.mark.parametrize(
    "row",
    [
        given(t="1", total="262144", each="32768", mfu="0.299", tflops="295.7"),
        given(t="1.0", each="33e3"),  # 0.7 %
        given(t="0.9", each="34000"),  # 6.6 %, of which 5.6 % are the rounding of 0.9
        given(t="1", tflops="269.3"),  # megatron
        given(t="1", tflops="243.0"),  # 6*N
        given(t="1", tflops="394.3", mfu="0.2991"),  # executed FLOPs of full recomputation
        given(each="32768"),
        given(total="262144", mfu="0.3"),
        given(),
    ],
)  # fmt: skip
def test_numbers_that_a_known_formula_or_rounding_explains_are_no_contradiction(ultrabench, row):
    (result_row,) = rows_with(ultrabench, row, constants={"recompute": "full"})
    assert "contradiction" not in (result_row["suspect_codes"] or [])


def test_given_numbers_are_kept_and_missing_ones_follow_from_those_that_agree(ultrabench):
    trusted, doubted = rows_with(
        ultrabench, given(t="1", total="262100", each="32760"), given(t="8", total="32768", each="32768")
    )
    assert [trusted[name] for name in ("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu")] == [
        1,
        262100,
        32760,
    ]
    assert [doubted[name] for name in ("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu")] == [
        8,
        32768,
        32768,
    ]
    assert doubted["mfu"] == pytest.approx(4096 * MODEL_FLOPS / 989e12, rel=1e-6)
    best, *_ = as_json(ultrabench, "sweep", "top", "out.parquet")
    assert best["run_id"] == trusted["run_id"]


@pytest.mark.parametrize("column", ["tflops", "mfu"])
def test_a_speed_follows_from_flops(ultrabench, column):
    numbers = {"tflops": f"{32768 * MODEL_FLOPS / 1e12}", "mfu": f"{32768 * MODEL_FLOPS / 989e12}"}
    (row,) = rows_with(ultrabench, given(**{column: numbers[column]}))
    assert (row["step_time_s"], row["tokens_per_s_per_gpu"]) == pytest.approx((1.0, 32768.0))
    assert row["suspect"] is None
    assert any("follow from FLOP/s or MFU by the formula palm" in note for note in account_notes(ultrabench))


def account_notes(ultrabench):
    return as_json(ultrabench, "import", "--map", "map.yaml", "table.csv", "-o", "out.parquet")["notes"]


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ("128", "batch does not match the layout: gbs=128, dp*mbs*gas=64"),
        ("262144", "gbs=262144, dp*mbs*gas=64 (perhaps gbs is in tokens: give it unit: tokens)"),
        ("64", None),
        ("", None),
    ],
)  # fmt: skip
def test_a_batch_that_is_not_that_of_the_layout(ultrabench, batch, sentence):
    _, (row,) = imported(
        ultrabench, csv_of("t,b", f"small,1,1,1,8,1,{batch}"), {"step_time_s": "t", "gbs": "b"}
    )
    assert (sentence or "") in (row["suspect"] or "")
    assert (row["suspect"] is None) == (sentence is None)
    assert row["gbs"] == 64


def test_a_batch_that_the_layout_cannot_make(ultrabench):
    text = csv_of("t,b", "small,1,1,3,,1,64")
    _, (row,) = imported(ultrabench, text, {"step_time_s": "t", "gbs": "b"})
    assert row["suspect"] == "batch does not match the layout: gbs=64 is no multiple of dp*mbs=24"


def test_without_a_batch_speeds_rank_and_the_account_says_what_is_missing(ultrabench):
    text = csv_of("each", "small,1,1,,,10000", "small,1,2,,,9000")
    account, rows = imported(ultrabench, text, {"tokens_per_s_per_gpu": "each"})
    assert [row["suspect"] for row in rows] == [None, None]
    assert (
        "2 rows with a speed but no step time, since mbs, gas (or gbs) or seq_len is missing"
        in account["notes"][-1]
    )
    assert "2 rows cannot be predicted" in account["unusable"][0]
    assert "missing mbs, gas" in account["unusable"][0]
    (cell,) = as_json(ultrabench, "heatmap", "out.parquet")
    assert (cell["tp"], cell["suspect"], cell["tokens_per_s_per_gpu"]) == (1, None, 10000.0)


def test_the_account_shows_a_sentence_of_each_code(ultrabench):
    rows_with(
        ultrabench, given(t="1", total="262144"), given(t="1", each="65536"), given(t="1", each="70000")
    )
    code, out, _ = ultrabench("import", "--map", "map.yaml", "table.csv", "-o", "out.parquet")
    assert code == 0
    assert "contradiction, such as line 3: tokens_per_s_per_gpu=65,536 contradicts step_time_s=1 s" in out
    assert "70,000" not in out
    (sentence,) = as_json(ultrabench, "import", "--map", "map.yaml", "table.csv")["doubt_examples"].values()
    assert sentence.startswith(
        "line 3: tokens_per_s_per_gpu=65,536 contradicts step_time_s=1 s, from which 32,768"
    )


# A column that holds something else than its rows say one by one


def column_of(*cells, layouts=((1, 8), (2, 16), (4, 32), (8, 64))):
    return csv_of(
        "v", *(f"small,1,{tp},1,{gas},{cell}" for (tp, gas), cell in zip(layouts, cells, strict=False))
    )


GPUS = tuple((2**n, 8 // 2**n) for n in range(4))
"""Pairs of nodes and gas with one global batch."""


# A token of llama3.2-1b is 9.03e9 FLOPs: 32,768 tokens/s of a GPU are 29.9 % of the peak of an H100.
@pytest.mark.parametrize(
    ("column", "source", "cells", "num_suspect", "facts"),
    [
        ("tokens_per_s_per_gpu", {}, (20000, 38000, 70000, 120000), 3,
         ["tokens_per_s_per_gpu=38,000 may be per DP rank: MFU is then 13.7 % to 17.3 % instead of 34.7 % to 109.5 %",
          "write per: dp_rank into the map if so, certain: true if not"]),
        ("tokens_per_s_per_gpu", {}, (9000, 17000, 31000, 55000), 0, []),  # slow links may make DP as slow
        ("tokens_per_s_per_gpu", {}, (140000, 130000, 120000, 100000), 4,
            ["of all GPUs or per node: MFU is then 11.4 % to 16.0 %"]),
        ("tokens_per_s_per_gpu", {}, (28.1, 26.5, 24.2, 20.3), 4,
            ["in thousands", "write unit: thousand into the map if so"]),
        ("tokens_per_s_per_gpu", {}, (30000, 28000, 26000, 22000), 0, []),
        ("tokens_per_s_per_gpu", {}, (30000, 280000, 26000, 22000), 1, []),  # a slip of the pen
        ("tokens_per_s_per_gpu", {"per": "dp_rank"}, (30000, 56000, 104000, 176000), 0, []),
        ("step_time_s", {}, (1100, 1200, 1300, 1600), 4, ["step_time_s=1100 s may be in ms",
            "write unit: ms into the map if so"]),
        ("step_time_s", {"unit": "ms"}, (1.1, 1.2, 1.3, 1.6), 4,
            ["step_time_s=0.0011 s may be in s: MFU", "write unit: s into"]),
        ("step_time_s", {}, (0.14, 0.075, 0.04, 0.025), 4, ["step_time_s=0.14 s may be of one micro-batch"]),
        ("source_mfu", {"unit": "%"}, (0.41, 0.38, 0.35, 0.30), 4,
         ["source_mfu=0.41 % may be a fraction that was read as per cent: MFU is then 30.0 % to 41.0 % instead "
         "of 0.3 % to 0.41 %"]),
        ("source_mfu", {}, (1.9, 0.7, 0.5, 0.3), 4, []),
        ("source_mfu", {}, (41, 0.9, 38, 35), 4, ["source_mfu=4100.0 % may be in per cent", "unit: '%'"]),
        ("source_mfu", {"unit": "%"}, (0.6, 0.9, 1.5, 2.5), 0, []),  # small, but all of one size
        ("source_mfu", {"unit": "%", "certain": True}, (0.41, 0.38, 0.35, 0.30), 0, []),
        ("peak_mem_reserved_bytes", {}, (61, 45, 40, 33), 4, ["peak_mem_reserved_bytes=61 is in bytes (perhaps "
        "it is in MiB or GiB"]),
        ("model_flops_per_s_per_gpu", {}, (401, 380, 350, 300), 4, ["may be in TFLOP/s"]),
    ],
)  # fmt: skip
def test_a_reading_is_doubted_in_all_rows_of_its_column(
    ultrabench, column, source, cells, num_suspect, facts
):
    _, rows = imported(ultrabench, column_of(*cells), {column: {"column": "v"} | source})
    doubts = [row["suspect"] for row in rows if "other_reading" in (row["suspect_codes"] or [])]
    all_suspect = [row["suspect"] for row in rows if row["suspect"]]
    assert len(all_suspect) == num_suspect
    assert [fact for fact in facts if fact not in doubts[0]] == []


@pytest.mark.parametrize(
    ("column", "cells", "is_doubted"),
    [
        ("tokens_per_s", (30000, 29000, 28000, 27500), False),  # more nodes may bring nothing
        ("tokens_per_s", (240000, 464000, 896000, 1760000), False),
        ("tokens_per_s_per_gpu", (30000, 29000, 28000, 27500), False),
        ("tokens_per_s_per_gpu", (30000, 18000, 9000, 4000), False),
        ("tokens_per_s_per_gpu", (24000, 46400, 89600, 176000), True),  # of all GPUs
    ],
)
def test_speeds_over_nodes_say_of_how_many_gpus_they_are(ultrabench, column, cells, is_doubted):
    lines = [f"small,{nodes},1,1,{gas},{cell}" for (nodes, gas), cell in zip(GPUS, cells, strict=True)]
    _, rows = imported(ultrabench, csv_of("v", *lines), {column: "v"})
    assert [row["suspect"] is not None for row in rows] == [is_doubted] * 4


@pytest.mark.parametrize(("header", "is_doubted"), [("speed", True), ("total tok/s", False)])
def test_a_header_that_names_the_scope_confirms_a_low_rate(ultrabench, header, is_doubted):
    lines = ["small,1,1,1,8,80000", "small,16,1,1,8,80000"]
    _, rows = imported(ultrabench, csv_of(header, *lines), {"tokens_per_s": header})
    assert [row["suspect"] is not None for row in rows] == [False, is_doubted]


def test_a_batch_in_tokens_explains_impossible_step_times(ultrabench):
    lines = [f"small,1,{tp},1,,{cell},262144" for tp, cell in ((1, 1.0), (2, 1.1), (4, 1.3))]
    columns = {"gas": None, "step_time_s": "t", "gbs": "batch"}
    _, rows = imported(ultrabench, csv_of("t,batch", *lines), columns)
    assert all("of a gbs in tokens: MFU is then 23.0 % to 29.9 %" in row["suspect"] for row in rows)
    assert "write unit: tokens for gbs into the map" in rows[0]["suspect"]


def test_rates_of_other_scopes_are_converted_and_compared(ultrabench):
    for scope, num_gpus in (("all", 8), ("node", 8), ("dp_rank", 2), ("gpu", 1)):
        text = csv_of(
            "tok/s/node,t", f"small,1,2,1,16,{16384 * num_gpus},2", f"small,1,2,1,16,{30000 * num_gpus},2"
        )
        columns = {"tokens_per_s_per_gpu": {"column": "tok/s/node", "per": scope}, "step_time_s": "t"}
        _, (same, other) = imported(ultrabench, text, columns)
        assert (same["tokens_per_s_per_gpu"], same["suspect"]) == (16384.0, None)
        assert other["suspect_codes"] == ["contradiction"]


# What differs is not a repeat

PROGRAMS = ("A", "B", "C", "D")
FOUR = [
    f"small,1,{tp},1,{8 * tp},{1 + n / 8 + tp / 64},{name}"
    for tp in (1, 2)
    for n, name in enumerate(PROGRAMS)
]


@pytest.mark.parametrize("how", ["unmapped", "options", "variant"])
def test_programs_of_one_layout_are_candidates_of_one_cell(ultrabench, how):
    columns = {"step_time_s": "t"} | ({"variant": "program"} if how == "variant" else {})
    sections = {"options": ["program"]} if how == "options" else {}
    account, rows = imported(ultrabench, csv_of("t,program", *FOUR), columns, **sections)
    assert len({row["run_id"] for row in rows}) == 8
    assert json.loads(rows[0]["variant"]) == {"option.program": "A"}
    assert any("write ignore: [program]" in note for note in account["notes"]) == (how == "unmapped")
    ranked = as_json(ultrabench, "sweep", "top", "out.parquet")
    assert [row["options"]["option.program"] for row in ranked if row["best"]] == ["A"]
    assert [row["num_repeats"] for row in ranked] == [1] * 8
    (cell,) = as_json(ultrabench, "heatmap", "out.parquet")
    assert (cell["options"], cell["num_runs"]) == ({"option.program": "A"}, 8)
    code, out, _ = ultrabench("sweep", "top", "out.parquet")
    assert code == 0
    assert "program=A" in out
    compared = as_json(ultrabench, "compare", "out.parquet", "out.parquet")
    assert len(compared["rows"] if "rows" in compared else compared["layouts"]) == 8


def test_ignored_columns_numbers_times_and_names_make_no_candidates(ultrabench):
    rows = [
        f"small,1,1,1,8,{1 + n / 8},{'AB'[n % 2]},{n % 2}.5,2026-05-0{1 + n % 2} 10:00,run-{n}"
        for n in range(4)
    ]
    text = csv_of("t,program,loss,day,name", *rows)
    account, result_rows = imported(ultrabench, text, {"step_time_s": "t"}, ignore=["program"])
    assert {row["run_id"] for row in result_rows} == {result_rows[0]["run_id"]}
    assert [row["repeat"] for row in result_rows] == [0, 1, 2, 3]
    assert [row["variant"] for row in result_rows] == [None] * 4
    assert account["notes"] == [
        "repeats of one candidate differ in loss, day, name; name those that are settings in options: [...] of the map,"
        " and the others in ignore: [...]"
    ]


def test_a_text_in_which_only_other_layouts_differ_is_no_option(ultrabench):
    rows = ["small,1,1,1,8,1,A", "small,1,1,1,8,1.1,A", "small,1,2,1,8,1,B", "small,1,2,1,8,1.1,B"]
    account, result_rows = imported(ultrabench, csv_of("t,program", *rows), {"step_time_s": "t"})
    assert [row["repeat"] for row in result_rows] == [0, 1, 0, 1]
    assert account["notes"] == []


def test_a_mapped_setting_in_which_rows_differ_is_an_option(ultrabench):
    rows = ["small,1,1,1,8,1,2.5", "small,1,1,1,8,2,2.6", "small,1,1,1,8,2.1,2.6"]
    text = csv_of("t,torch", *[f"{row}.0+cu" for row in rows])
    _, result_rows = imported(ultrabench, text, {"step_time_s": "t", "torch_version": "torch"})
    assert [json.loads(row["variant"]) for row in result_rows] == [
        {"option.torch_version": f"{row[-3:]}.0+cu"} for row in rows
    ]
    assert [row["repeat"] for row in result_rows] == [0, 0, 1]


def test_names_in_other_letters_are_the_same_name(ultrabench):
    rows = [
        "small,1,1,1,8,1,BF16,H100x8,None,1F1B,palm",
        "Small,1,2,1,16,1.1, bf16,h100x8,none,1f1b,PaLM",
        "small,1,4,1,32,1.2,bfloat16,h100x8,NONE,1f1b,palm",
    ]
    text = csv_of("t,prec,hw,ac,sched,formula", *rows)
    columns = {
        "step_time_s": "t", "precision": "prec", "hardware": "hw", "recompute": "ac", "flops_formula": "formula",
    }  # fmt: skip
    constants = dict.fromkeys(["precision", "hardware", "recompute"])
    _, result_rows = imported(ultrabench, text, columns, constants=constants, ignore=["sched"])
    names = ("model", "precision", "hardware", "recompute", "flops_formula")
    assert {tuple(row[name] for name in names) for row in result_rows} == {
        ("llama3.2-1b", "bf16", "h100x8", "none", "palm")
    }
    assert [row["mfu"] is None for row in result_rows] == [False] * 3
    assert [row["best"] for row in as_json(ultrabench, "sweep", "top", "out.parquet")] == [True, False, False]


# No row vanishes


def test_gpus_that_fill_no_node_are_rows_and_cells_of_their_own(ultrabench):
    rows = [f"small,{gpus},1,1,8,{1 + gpus / 64}" for gpus in (1, 4, 8, 12, 16)]
    text = csv_of("t", *rows).replace("nodes", "gpus")
    _, result_rows = imported(ultrabench, text, {"step_time_s": "t", "nodes": None, "gpus": "gpus"})
    facts = [(row["gpus"], row["nodes"], row["gpus_per_node"], row["dp"]) for row in result_rows]
    assert facts == [(1, 1, 1, 1), (4, 1, 4, 4), (8, 1, 8, 8), (12, 2, 6, 12), (16, 2, 8, 16)]
    cells = as_json(ultrabench, "heatmap", "out.parquet")
    assert sorted((cell["nodes"], cell["gpus"], cell["partial_gpus"]) for cell in cells) == [
        (1, 1, 1), (1, 4, 4), (1, 8, None), (2, 12, 12), (2, 16, None),
    ]  # fmt: skip
    code, out, _ = ultrabench("sweep", "top", "out.parquet")
    assert code == 0
    assert "llama3.2-1b on 1 node (4 GPUs)" in out
    assert "llama3.2-1b on 2 nodes (12 GPUs)" in out
    assert ultrabench("heatmap", "out.parquet", "-o", "heat.svg")[0] == 0
    assert ultrabench("plot", "scaling", "out.parquet", "-o", "scaling.svg")[0] == 0
    assert ultrabench("report", "out.parquet")[0] == 0


def test_nodes_beside_fewer_gpus(ultrabench):
    text = csv_of("t,gpus", "small,1,1,1,8,1,4", "small,1,1,1,8,1,16")
    _, (half, crowded) = imported(ultrabench, text, {"step_time_s": "t", "gpus": "gpus"})
    assert (half["gpus_per_node"], half["dp"], half["suspect"]) == (4, 4, None)
    assert "more GPUs than the nodes have: gpus=16, nodes*gpus_per_node=8" in crowded["suspect"]


def test_ranks_that_the_nodes_of_known_hardware_cannot_hold(ultrabench):
    rows = ["small,1,2,1,8,1,8,1", "small,1,2,1,8,1,4,1", "small,1,2,1,8,1,2,1", "small,1,2,1,8,1,8,"]
    text = csv_of("t,dp,pp", *rows)
    constants = {"gpus_per_node": None, "pp": None}
    _, result_rows = imported(
        ultrabench, text, {"step_time_s": "t", "dp": "dp", "pp": "pp"}, constants=constants
    )
    crowded, full, half, unknown_pp = result_rows
    assert "more GPUs than the nodes have: gpus=16, nodes*gpus_per_node=8" in crowded["suspect"]
    assert crowded["suspect_codes"] == ["other_gpus"]
    assert [(row["gpus_per_node"], row["gpus"], row["suspect"]) for row in (full, half)] == [
        (8, 8, None), (4, 4, None),
    ]  # fmt: skip
    assert "gpus=8, dp*tp*pp*cp=16, with unknown degrees as 1" in unknown_pp["suspect"]
    text = csv_of("t,gpus", "small,1,2,1,8,1,16")
    _, (row,) = imported(
        ultrabench, text, {"step_time_s": "t", "gpus": "gpus"}, constants={"gpus_per_node": None}
    )
    assert row["suspect_codes"] == ["other_gpus"]


def test_rows_that_no_ranking_has_are_counted_in_a_line(ultrabench):
    text = csv_of("each", "small,1,1,1,8,1", ",1,1,1,8,1", "small,,1,1,8,1")
    constants = {"gpus_per_node": None, "hardware": "own"}
    account, rows = imported(ultrabench, text, {"tokens_per_s_per_gpu": "each"}, constants=constants)
    line = "left out of rankings: 1 without a model, 1 without a number of nodes (of 3 rows); give model, and nodes"
    assert len(rows) == 3
    assert line in account["notes"][-1]
    for words in (["sweep", "top"], ["heatmap"], ["export", "csv"]):
        code, _, err = ultrabench(*words, "out.parquet")
        assert (code, line in err) == (0, True), words


def test_export_counts_what_was_never_tried(ultrabench):
    text = csv_of("t,status", "small,1,1,1,8,1,ok", "small,1,2,1,8,,rejected", "small,1,4,1,8,,planned")
    status = {"column": "status", "values": {"ok": "ok", "rejected": "rejected", "planned": None}}
    _, rows = imported(ultrabench, text, {"step_time_s": "t", "status": status})
    assert [row["status"] for row in rows] == ["ok", "rejected", None]
    code, _, err = ultrabench("export", "csv", "out.parquet")
    assert code == 0
    assert "not exported: 1 rejected, 1 pending or running" in err


# Statuses


@pytest.mark.parametrize(
    ("header", "cells", "source", "expected"),
    [
        ("state", ["ok", "OOM", "oom \u274c", "Timeout"], "state", ["ok", "oom", "oom", "timeout"]),
        ("state", ["finished", "CUDA OOM", "", "-"],
         {"column": "state", "values": {"finished": "ok", "CUDA OOM": "oom"}}, ["ok", "oom", "ok", "ok"]),
        ("state", ["done: fine", "done: oom"], {"column": "state", "pattern": "^done: (.*)",
            "values": {"fine": "ok", "oom": "oom"}},
         ["ok", "oom"]),
        ("note", ["ran OOM", "nice"], {"column": "note", "pattern": "(OOM)|$"}, ["oom", "ok"]),
    ],
)  # fmt: skip
def test_statuses(ultrabench, header, cells, source, expected):
    rows = [f"small,1,{2**n},1,8,1,{cell}" for n, cell in enumerate(cells)]
    _, result_rows = imported(
        ultrabench, csv_of(f"t,{header}", *rows), {"step_time_s": "t", "status": source}
    )
    assert [row["status"] for row in result_rows] == expected


@pytest.mark.parametrize(
    ("cell", "source", "message"),
    [
        ("exploded", "state", "line 2: unknown status 'exploded'"),
        ("exploded", {"column": "state", "values": {"fine": "ok"}}, "line 2: unknown value of state 'exploded'"),
        ("exploded", {"column": "state", "pattern": "^done: (.*)"},
         "line 2: state='exploded' does not match the pattern of columns.status; let it match, "
         "or end the pattern with |$"),
    ],
)  # fmt: skip
def test_a_status_text_that_nothing_matches_is_an_error(ultrabench, cell, source, message):
    text = csv_of("t,state", f"small,1,1,1,8,1,{cell}")
    assert message in refusal(ultrabench, text, {"step_time_s": "t", "status": source})


def test_a_status_in_place_of_a_number(ultrabench):
    text = csv_of(
        "each", "small,1,1,1,8,10000", "small,1,2,1,8,OOM", "small,1,4,1,8,oom \u274c", "small,1,8,1,8,n/a"
    )
    _, rows = imported(ultrabench, text, {"tokens_per_s_per_gpu": "each"})
    assert [(row["status"], row["tokens_per_s_per_gpu"]) for row in rows] == [
        ("ok", 10000.0), ("oom", None), ("oom", None), ("ok", None),
    ]  # fmt: skip
    line = refusal(ultrabench, csv_of("each", "small,1,1,1,8,broken"), {"tokens_per_s_per_gpu": "each"})
    assert (
        "each='broken' is not a number; correct it or leave it empty; if it is a status, add columns.status"
        in line
    )


def test_allocated_memory_is_shown_as_allocated(ultrabench):
    text = csv_of("t,max_alloc (GiB)", "small,1,1,1,8,1,61.5")
    account, (row,) = imported(
        ultrabench, text, {"step_time_s": "t", "peak_mem_allocated_bytes": "max_alloc (GiB)"}
    )
    assert (row["peak_mem_allocated_bytes"], row["peak_mem_reserved_bytes"]) == (int(61.5 * GIB), None)
    assert not any("memory" in line for line in account["unusable"]), "it is compared with allocated memory"
    assert "61.5 GiB (allocated)" in ultrabench("sweep", "top", "out.parquet")[1]
