"""Imports tables: small ones made here, and those of the Ultra-Scale Playbook and of others where they are at hand."""

import csv
import json
import re
from collections import Counter
from pathlib import Path
from statistics import median

import pyarrow.parquet as pq
import pytest
import yaml

from tests.published import FOLDER, FRAMEWORKS, LAYOUTS, PLAYBOOK, RUNS, needs
from tests.unit.cli.conftest import as_json, one_line
from ultrabench.analysis.results.collect import read_parquet
from ultrabench.analysis.results.measured import measured_runs
from ultrabench.hardware import GIB

EXAMPLES = Path(__file__).parents[5] / "examples" / "import"
OK = {
    "job_id": "14100001", "name": "1.34G_dp4_tp1_pp2_acc8_mbs8", "nodes": "1.0", "seq_len": "4096", "mbs": "8",
    "batch_accum": "8.0", "gbs": "256.0", "tok/s/gpu": "32768", "AllReduce (GB/s)": "425.5", "AllGather (GB/s)": "241",
    "ReduceScatter (GB/s)": "242", "AR Intra-node (GB/s)": "424", "AG Intra-node (GB/s)": "243",
    "RS Intra-node (GB/s)": "240", "Mem Res (GB)": "41.5", "dp": "4", "pp": "2", "tp": "1", "hidden_size": "2048",
    "num_layers": "16", "num_heads": "32", "num_kv_heads": "32.0", "vocab_size": "131072",
    "tie_word_embeddings": "True",
    "zero_stage": "1", "status": "Success", "mfu": "32.0", "after_pp_fix": "True",
}  # fmt: skip
UNKNOWN = (
    "tok/s/gpu", "Mem Res (GB)", "mfu", "num_kv_heads", "tie_word_embeddings", *filter(re.compile("/s").search, OK),
)  # fmt: skip
OF_OOM = {"status": "OOM", "gbs": "1048576.0", "mbs": "16", "batch_accum": "4.0"}
OOM = OK | dict.fromkeys(UNKNOWN, "") | OF_OOM


def write(path, *rows):
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def imported(ultrabench, *words):
    account = as_json(ultrabench, "import", *words, "-o", "out.parquet")
    return account, read_parquet(Path("out.parquet"))


def nanotron(ultrabench, *rows):
    account, table = imported(ultrabench, "nanotron", write("runs.csv", *rows))
    return account, table.to_pylist()


def test_a_row_of_nanotron_in_our_columns(ultrabench):
    _, (row, failed) = nanotron(ultrabench, OK, OOM)
    flops = 6 * (16 * 67_108_864 + 131_072 * 2048) + 12 * 16 * 2048 * 4096
    expected = {
        "gbs": 256, "gpus": 8, "num_params": 1_342_244_864, "step_time_s": 4.0, "tokens_per_s": 32_768 * 8,
        "source_mfu": 0.32, "mfu": flops * 32_768 / 989e12, "peak_mem_reserved_rank0_bytes": int(41.5 * GIB),
        "allreduce_busbw_bytes_per_s": 425.5e9, "reducescatter_intra_node_busbw_bytes_per_s": 240e9, "zero_shards": 4,
        "model": "1B", "status": "ok", "kernel": "nanotron", "kernel_version": "after_pp_fix", "pp_schedule": "1f1b",
        "job_id": "14100001", "suspect": None, "reason": None, "source": "runs.csv", "hardware": "h100x8",
        "peak_mem_reserved_bytes": None,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    # The file's gbs of a failed row is in tokens, and it lacks sizes of the model, which our model has.
    assert (failed["status"], failed["gbs"], failed["num_key_value_heads"]) == ("oom", 256, 32)
    assert failed["num_params"] == row["num_params"]
    assert failed["step_time_s"] is failed["mfu"] is failed["allreduce_busbw_bytes_per_s"] is None
    assert failed["run_id"] != row["run_id"]


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({"after_pp_fix": "False"}, ["before the pipeline fix with pp > 1"]),
        ({"after_pp_fix": "False", "pp": "1", "dp": "8", "batch_accum": "4"}, []),
        ({"AR Intra-node (GB/s)": "45"}, ["broken NVLink: all-reduce below 300 GB/s inside the node"]),
        ({"batch_accum": "4"}, ["other batch than 1,048,576 tokens"]),
        ({"seq_len": "2048", "batch_accum": "16"}, []),
        ({"num_kv_heads": "8"}, ["different architecture: num_key_value_heads=8 (GQA), 1B has 32"]),
        ({"vocab_size": "49152"}, ["different vocabulary: vocab_size=49152, 1B has 131072"]),
        ({"status": "Other", "after_pp_fix": "False", "AR Intra-node (GB/s)": ""}, []),
        ({"num_kv_heads": "", "name": "1.34G_dp4_gqa8"}, ["different architecture: "
        "num_key_value_heads=8 (GQA), 1B has 32"]),
        ({"num_layers": "12", "batch_accum": "4"},
         ["different architecture: num_hidden_layers=12, 1B has 16", "other batch than 1,048,576 tokens"]),
        ({"tok/s/gpu": "-5"}, ["impossible value: tokens_per_s_per_gpu=-5", "unknown step time"]),
        ({"tok/s/gpu": "0"}, ["impossible value: tokens_per_s_per_gpu=0", "unknown step time"]),
        ({"tok/s/gpu": "400000"},
         ["tokens_per_s_per_gpu=400,000 may be of all GPUs or per node: MFU is then 48.9 % instead of 390.8 % in "
         "1 row; write "
          "per: all or per: node into the map if so, certain: true if not",
          "mfu 3.91 is above 1: the step time or the peak is measured wrongly"]),
        ({"Mem Res (GB)": "500"}, ["more memory than a GPU has: 500 GiB of 79.11"]),
        ({"tp": "3"}, ["number of GPUs does not match the layout: gpus=8, dp*tp*pp*cp=24"]),
        ({"pp": "0"}, ["impossible value: pp=0", "number of GPUs does not match the layout: gpus=8, dp*tp*pp*cp=0"]),
        ({"name": "", "tok/s/gpu": ""}, ["unknown model", "unknown step time"]),
    ],
)  # fmt: skip
def test_reasons_of_doubt(ultrabench, change, reasons):
    account, (row,) = nanotron(ultrabench, OK | {"mfu": ""} | change)
    assert row["suspect"] == ("; ".join(reasons) or None)
    assert sorted(account["doubts"]) == sorted(row["suspect_codes"] or [])
    assert len(row["suspect_codes"] or []) == len(reasons)


def test_models_that_are_not_of_the_playbook_keep_their_name(ultrabench):
    _, (row,) = nanotron(ultrabench, OK | {"name": "2.2G_dp4", "hidden_size": "2560"})
    assert (row["model"], row["num_params"], row["mfu"], row["suspect"]) == ("2.2G", None, None, None)
    assert row["step_time_s"] == 4.0


def test_the_account(ultrabench):
    Path("theirs").mkdir()
    write("theirs/runs.csv", OK, OK, OOM, OK | {"num_kv_heads": "8", "mfu": ""})
    code, out, err = ultrabench("import", "nanotron", "theirs/runs.csv")
    assert code == 0
    assert re.search(r"ok +3\noom +1\n(.*\n)+.*1B +4\n(.*\n)+.*other_architecture +1 +1\n", out)
    assert "unused columns: gbs\n" in out
    assert err == "read 4 rows from theirs/runs.csv, wrote 4 rows to runs.parquet; 1 suspect\n"
    rows = read_parquet(Path("runs.parquet")).to_pylist()
    assert [row["repeat"] for row in rows] == [0, 1, 0, 0]
    assert len({row["run_id"] for row in rows}) == 3


MAP = """
columns:
  model: name
  nodes: nodes
  dp: [ranks, gpus]
  mbs: mbs
  gbs: batch
  seq_len: seq
  gpus_per_node: per
  step_time_s: {column: step, unit: ms}
  zero_stage: {column: sharding, values: {none: 0, FSDP: 3, '?': null}}
constants: {tp: 1, pp: 1, cp: 1, precision: bf16, kernel: other, hardware: h100x8, peak_flops_per_s: 8e14}
"""
ROW = {
    "name": "m", "nodes": "1", "ranks": "", "gpus": "8", "mbs": "2", "batch": "64", "seq": "1,024", "step": "500",
    "per": "8",
    "sharding": "none", "redo": "none", "acc": "2", "many": "9e30", "big": "9e18",
    "comma": "700,5", "commas": "7,0,0",
}  # fmt: skip


def write_map(part, change):
    """Writes MAP with other keys in one of its parts."""
    values = yaml.safe_load(MAP)
    values[part] = values.get(part, {}) | change
    Path("map.yaml").write_text(yaml.safe_dump(values))


ODD = {"sharding": "NONE", "nodes": "3", "batch": "63", "per": ""}


@pytest.mark.parametrize(
    ("columns", "change", "expected"),
    [
        ({}, {"sharding": "fsdp"},
         {"dp": 8, "gas": 4, "zero_stage": 3, "zero_shards": 8, "step_time_s": 0.5, "tokens_per_s_per_gpu": 16384.0,
             "gpus": 8,
          "peak_flops_per_s": 8e14, "status": "ok", "kernel": "other", "precision": "bf16", "pp_schedule": "none"}),
        ({}, {"sharding": "?", "batch": "-"},
         {"zero_stage": None, "gas": None, "gbs": None, "tokens_per_s_per_gpu": None, "step_time_s": 0.5}),
        ({"gas": "acc"}, {}, {"gbs": 32, "suspect": "batch does not match the layout: gbs=64, dp*mbs*gas=32"}),
        ({"gpus": "gpus", "recompute": "redo"}, ODD,
         {"gpus": 8, "nodes": 3, "gpus_per_node": None, "gas": None, "gbs": 63, "zero_stage": 0, "zero_shards": 1,
          "recompute": "none"}),
        ({"gpus": "gpus"}, ODD | {"nodes": "None", "gpus": ""}, {"nodes": None, "gpus": None}),
    ],
    ids=["whole", "unknown", "other batch", "not divisible", "none"],
)  # fmt: skip
def test_a_map_for_any_other_table(ultrabench, columns, change, expected):
    write_map("columns", columns)
    _, table = imported(ultrabench, "--map", "map.yaml", write("table.csv", ROW | change))
    (row,) = table.to_pylist()
    assert {name: row[name] for name in expected} == expected
    (unusable,) = measured_runs(table)[1] or [""]
    assert ("gas: give every degree" in unusable) == (row["gas"] is None)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("columns", {"model": "title"}, "unknown column of table.csv 'title'"),
        ("columns", {"tpp": "tp"}, "map.yaml: unknown column of results 'tpp'; did you mean tp?"),
        ("columns", {"mfu": {"column": "nodes", "unit": "percent"}}, "unit='percent'; must be %, fraction, us,"),
        ("columns", {"job_id": {"column": "name", "pattern": "m"}}, "pattern='m' has 0 groups; use exactly one"),
        ("columns", {"job_id": {"column": "name", "pattern": "("}}, "pattern='(' is not a regular expression"),
        ("columns", {"mbs": "name"}, "table.csv, line 2: name='m' is not an integer; correct it or leave it empty"),
        ("columns", {"mbs": "many"}, "table.csv, line 2: many='9e30' is too large; correct it or its unit"),
        ("columns", {"mbs": "big", "gas": "big", "gbs": []}, "too large: Float value "),
        ("columns", {"mfu": "name"}, "table.csv, line 2: name='m' is not a number; correct it or leave it empty"),
        ("columns", {"mfu": "commas"}, "table.csv, line 2: commas='7,0,0' is not a number"),
        ("columns", {"compile": "name"}, "table.csv, line 2: unknown truth value of name 'm'"),
        ("columns", {"status": "name"}, "table.csv, line 2: unknown status 'm'"),
        ("columns", {"status": {"column": "name", "values": {"x": "ok"}}}, "line 2: unknown value of name 'm'"),
        ("columns", {"zero_stage": {"column": "name", "values": {"m": "three"}}},
            "zero_stage='three' is not an integer"),
        ("doubts", {"a": ["pp is 1"]}, "condition 'pp is 1'; write COLUMN OPERATOR VALUE, "
        "with an operator of = != < >"),
        ("doubts", {"a": "mbs > one"}, "condition 'mbs > one'; mbs holds numbers"),
        ("doubts", {"a": ["ppp > 1"]}, "did you mean pp?"),
        ("doubts", {"a": {"code": "b"}, "c": {"where": "pp > 1"}}, "map.yaml: "),
    ],
)  # fmt: skip
def test_what_a_map_cannot_say(ultrabench, part, change, message):
    write_map(part, change)
    table = write("table.csv", ROW)
    assert message in one_line(ultrabench, "import", "--map", "map.yaml", table)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("runs.csv", "import runs.csv needs one format or one map"),
        ("nanotrom runs.csv", "unknown format to import 'nanotrom'; did you mean nanotron?"),
        ("nanotron none.csv", "cannot read none.csv: No such file or directory; give a CSV file in UTF-8"),
        ("--map runs.csv runs.csv", "runs.csv: `columns` is missing"),
        ("nanotron empty.csv", "empty.csv has no rows below the header"),
        ("nanotron image.csv", "cannot read image.csv: 'utf-8' codec can't decode byte 0x89"),
        ("nanotron long.csv", "cannot read long.csv: Error tokenizing data. C error: Expected 1 fields in line "
        "2, saw 2; give"),
        ("nanotron german.csv", "german.csv has none of the 27 columns that this format or map reads, "
        "such as 'job_id'; its columns: a, b"),
        ("nanotron twice.csv", "twice.csv has several columns 'a'; keep one or rename them"),
        ("nanotron two.csv", "has none of the 27 columns that this format or map reads, such as 'job_id'; "
        "its columns: a, b"),
    ],
)  # fmt: skip
def test_mistakes(ultrabench, words, message):
    files = {"runs": b"a: 1\n", "long": b"a\n1,2\n", "empty": b"", "image": b"\x89PNG", "two": b"a,b\n1,2\n",
             "german": b"a;b\n1;2\n", "twice": b"a,a\n1,2\n"}  # fmt: skip
    for name, text in files.items():
        Path(f"{name}.csv").write_bytes(text)
    assert message in one_line(ultrabench, "import", *words.split())


def example(name="published_runs"):
    return (EXAMPLES / f"{name}.yaml").read_text()


def test_an_example_map_reads_such_a_table(ultrabench):
    columns = set(re.findall(r"(?:column: |^  \w+: )([a-z_]+)(?=[,}\n])", example(), re.MULTILINE))
    row = dict.fromkeys(sorted(columns), "") | {
        "source": "a paper", "gpu": "H100-SXM-80GB (DGX)", "nodes": "1.0", "gpus": "8.0", "model": "llama3-8B",
        "params_b": "8.0", "dp": "8.0", "tp": "1.0", "pp": "1.0", "cp": "1.0", "zero_or_fsdp": "fsdp", "mbs": "2.0",
        "gas": "1.0", "seq_len": "8192.0", "dtype": "bf16", "step_time_s": "2.0", "mfu_pct": "40", "status": "ok",
        "hidden": "4096", "layers": "32", "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256",
    }  # fmt: skip
    Path("map.yaml").write_text(example())
    (result_row,) = imported(ultrabench, "--map", "map.yaml", write("table.csv", row))[1].to_pylist()
    expected = {
        "source": "a paper", "num_params": 8_030_261_248, "zero_stage": 3, "gbs": 16, "tokens_per_s_per_gpu": 8192.0,
        "source_mfu": 0.4, "hardware": "h100x8", "peak_flops_per_s": 989e12, "suspect": None,
    }  # fmt: skip
    assert {name: result_row[name] for name in expected} == expected


@needs(RUNS)
def test_an_example_map_reads_the_published_runs(ultrabench):
    Path("map.yaml").write_text(example())
    account, table = imported(ultrabench, "--map", "map.yaml", str(RUNS))
    assert (account["rows"], account["by_status"], len(table)) == (440, {"ok": 440}, 440)
    rows = table.to_pylist()
    # NeMo's own MFU of Llama 3.1 and ours, which count the same FLOPs and peaks, agree where both are known.
    theirs = (row for row in rows if row["source"].startswith("NVIDIA/dgxc"))
    nemo = [row for row in theirs if row["mfu"] and row["source_mfu"]]
    assert Counter(row["precision"] for row in nemo) == {"bf16": 22, "fp8": 22}
    assert [row["mfu"] for row in nemo] == pytest.approx([row["source_mfu"] for row in nemo], rel=0.01)


@needs(FRAMEWORKS)
def test_an_example_map_reads_what_frameworks_publish_and_every_other_row_is_judged(ultrabench):
    Path("map.yaml").write_text(example("published_frameworks"))
    account, _ = imported(ultrabench, "--map", "map.yaml", str(FRAMEWORKS))
    assert (account["rows"], account["suspect"]) == (18, 0)
    words = "predict", "validate", "out.parquet"
    judged, err = as_json(ultrabench, *words), ultrabench(*words)[2]
    assert "18 runs; excluded: none" in err
    of_llama = [row for row in judged["rows"] if "llama3.1-8b" in row["model"]]
    assert {(row["profile"], row["hardware"]) for row in of_llama} == {("torchtitan", "h100-96gb-x8")}
    assert Counter(row["profile"] for row in judged["rows"]) == {"megatron-perf": 12, "torchtitan": 6}
    errors = [abs(row["step_time_error"]) for row in judged["rows"]]
    assert median(errors) == pytest.approx(judged["healthy"]["step_time"]["median_error"])
    assert sum(row["inside"] for row in judged["rows"]) / 18 == judged["healthy"]["interval"]["coverage"]


@needs(LAYOUTS)
def test_an_example_map_reads_layouts_and_counts_what_cannot_be_predicted(ultrabench):
    Path("map.yaml").write_text(example("published_layouts"))
    account, table = imported(ultrabench, "--map", "map.yaml", str(LAYOUTS))
    assert account["rows"] == 207
    err = ultrabench("predict", "validate", "out.parquet")[2]
    unpredicted = [int(count) for count in re.findall(r"^(\d+) rows? cannot be predicted", err, re.MULTILINE)]
    assert 20 < sum(unpredicted) < 40
    assert "of an older release of the program" in err
    rows = table.to_pylist()
    assert all(row["num_experts"] for row in rows if row["model"] == "gpt-oss-120b")
    graphs = [row for row in rows if '"flags.cuda_graph":"full_iteration"' in (row["variant"] or "")]
    assert {row["kernel_version"][:5] for row in graphs} == {"26.06", "26.08"}
    assert not any(row["hardware"] == "h100x8" for row in graphs)


def test_texts_of_two_columns_choose_a_value_and_options_add_up(ultrabench):
    row = {"gpu": "B200", "release": "26.06", "overlap": "on", "step": "2.0", "mem": "30"}
    columns = {
        "hardware": {"column": "gpu", "values": {"B200": "b200x8", "H100": "h100x8"}},
        "step_time_s": {"column": "step", "unit": "s"}, "kernel_version": "release",
        "peak_mem_device_bytes": {"column": "mem", "unit": "GiB"},
        "variant": [
            {"column": "release", "beside": "gpu", "pattern": r"(26\.06) B200", "values": {"26.06": '{"flags.a": 1}'}},
            {"column": "overlap", "values": {"on": '{"flags.a": 2, "flags.b": "on"}', "off": None}},
        ],
    }  # fmt: skip
    constants = {
        "kernel": "megatron", "model": "m", "gpus": 8, "dp": 8, "tp": 1, "pp": 1, "cp": 1, "zero_stage": 1, "mbs": 1,
        "gbs": 8, "seq_len": 4096, "precision": "bf16", "recompute": "none",
    }  # fmt: skip
    text = json.dumps({"columns": columns, "constants": constants, "models": {"m": "gpt-oss-20b"}})
    Path("map.yaml").write_text(text)
    rows = [row, {**row, "gpu": "H100"}, {**row, "release": "26.04", "overlap": "off", "step": "3.0"}]
    table = imported(ultrabench, "--map", "map.yaml", write("table.csv", *rows))[1]
    assert table["variant"].to_pylist() == [
        '{"flags.a":1,"flags.b":"on"}',
        '{"flags.a":2,"flags.b":"on"}',
        None,
    ]
    judged, err = (
        as_json(ultrabench, "predict", "validate", "out.parquet", "--rows", "rows.parquet"),
        ultrabench("predict", "validate", "out.parquet")[2],
    )
    assert "2 runs; excluded: 1 of an older release of the program" in err
    assert [of["model"] for of in judged["rows"]] == ["gpt-oss-20b"] * 2
    predicted = pq.read_table("rows.parquet").to_pylist()
    assert {of["memory_kind"] for of in predicted} == {"device"}
    assert [of["peak_mem_bytes"] for of in predicted] == [30 * GIB] * 2
    assert sum(of["predicted_peak_mem_bytes"] for of in predicted) > 2 * 20 * GIB


def test_beside_needs_a_pattern(ultrabench):
    write_map("columns", {"zero_stage": {"column": "name", "beside": "mbs"}})
    assert "beside='mbs' needs a pattern" in one_line(
        ultrabench, "import", "--map", "map.yaml", write("table.csv", ROW)
    )


def published_cells():
    """(model, nodes) -> MFU in percent, memory of rank 0 in GiB and layout, from the table of PLAYBOOK.md."""
    layouts = {}
    for line in (FOLDER / "PLAYBOOK.md").read_text().splitlines():
        nodes, *cells = [part.strip() for part in line.split("|")[1:-1]] or [""]
        for model, cell in zip(("1B", "8B", "80B"), cells, strict=False):
            match = re.match(r"([\d.]+), ([\d.]+); (\d+)/(\d+)/(\d+) g(\d+) m(\d+) z(\d)", cell)
            if match and nodes.isdecimal():
                layouts[model, int(nodes)] = (*map(float, match.groups()[:2]), *map(int, match.groups()[2:]))
    return layouts


@needs(PLAYBOOK)
def test_the_published_heatmap_and_what_its_doubts_change(ultrabench):
    account, _ = imported(ultrabench, "nanotron", str(PLAYBOOK))
    assert account["by_status"] == {"ok": 896, "oom": 824, "crash": 225}
    words = ("heatmap", "out.parquet", "--rank-by")
    everything = as_json(ultrabench, *words, "source_mfu", "--include-suspects")
    theirs = {(c["model"], c["nodes"]): c for c in everything}
    published = published_cells()
    assert len(published) == 16
    for key, (mfu, memory, *layout) in published.items():
        cell = theirs[key]
        assert [cell[name] for name in ("dp", "tp", "pp", "gas", "mbs", "zero_stage")] == layout, key
        assert 100 * cell["source_mfu"] == pytest.approx(mfu, abs=0.0051)
        assert cell["peak_mem_reserved_rank0_bytes"] / GIB == pytest.approx(memory, abs=0.051)
    ours = {(c["model"], c["nodes"]): c for c in as_json(ultrabench, *words, "tokens_per_s_per_gpu")}
    changed = {key for key in published if ours[key]["run_id"] != theirs[key]["run_id"]}
    assert changed == {("1B", 1), ("1B", 2), ("1B", 4), ("1B", 8), ("8B", 1), ("80B", 8)}
    assert ours.keys() == theirs.keys()
