"""Imports tables: small ones made here, and those of the Ultra-Scale Playbook and of others where they are at hand."""

import csv
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.published import FOLDER, PLAYBOOK, RUNS, needs
from tests.unit.cli.conftest import as_json, one_line
from ultrabench.analysis.collect import read_parquet
from ultrabench.analysis.importing.table_map import UNITS
from ultrabench.analysis.measured import measured_runs
from ultrabench.hardware import GIB

PAGE = (Path(__file__).parents[3] / "docs" / "importing.md").read_text()
OK = {
    "job_id": "14100001", "name": "1.34G_dp4_tp1_pp2_acc8_mbs8", "nodes": "1.0", "seq_len": "4096", "mbs": "8",
    "batch_accum": "8.0", "gbs": "256.0", "tok/s/gpu": "32768", "AllReduce (GB/s)": "425.5", "AllGather (GB/s)": "241",
    "ReduceScatter (GB/s)": "242", "AR Intra-node (GB/s)": "424", "AG Intra-node (GB/s)": "243",
    "RS Intra-node (GB/s)": "240", "Mem Res (GB)": "41.5", "dp": "4", "pp": "2", "tp": "1", "hidden_size": "2048",
    "num_layers": "16", "num_heads": "32", "num_kv_heads": "32.0", "vocab_size": "131072", "tie_word_embeddings": "True",
    "zero_stage": "1", "status": "Success", "mfu": "44.5", "after_pp_fix": "True",
}  # fmt: skip
UNKNOWN = (
    "tok/s/gpu", "Mem Res (GB)", "mfu", "num_kv_heads", "tie_word_embeddings", *filter(re.compile("/s").search, OK),
)  # fmt: skip
OOM = (
    OK | dict.fromkeys(UNKNOWN, "") | {"status": "OOM", "gbs": "1048576.0", "mbs": "16", "batch_accum": "4.0"}
)


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


def mapped(ultrabench, text, *rows):
    Path("map.yaml").write_text(text)
    return imported(ultrabench, "--map", "map.yaml", write("table.csv", *rows))[1].to_pylist()


def test_a_row_of_nanotron_in_our_columns(ultrabench):
    _, (row, failed) = nanotron(ultrabench, OK, OOM)
    flops = 6 * (16 * 67_108_864 + 131_072 * 2048) + 12 * 16 * 2048 * 4096
    expected = {
        "gbs": 256, "gpus": 8, "num_params": 1_342_244_864, "step_time_s": 4.0, "tokens_per_s": 32_768 * 8,
        "source_mfu": 0.445, "mfu": flops * 32_768 / 989e12, "peak_mem_reserved_rank0_bytes": int(41.5 * GIB),
        "allreduce_busbw_bytes_per_s": 425.5e9, "reducescatter_intra_node_busbw_bytes_per_s": 240e9, "zero_shards": 4,
    }  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    words = {
        "model": "1B", "status": "ok", "kernel": "nanotron", "kernel_version": "after_pp_fix", "pp_schedule": "1f1b",
        "job_id": "14100001", "suspect": None, "reason": None, "source": "runs.csv", "hardware": "h100x8",
        "peak_mem_reserved_bytes": None,
    }  # fmt: skip
    assert {name: row[name] for name in words} == words
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
        ({"num_kv_heads": "8"}, ["other architecture: num_key_value_heads=8 (GQA), 1B has 32"]),
        ({"vocab_size": "49152"}, ["other vocabulary: vocab_size=49152, 1B has 131072"]),
        ({"status": "Other", "after_pp_fix": "False", "AR Intra-node (GB/s)": ""}, []),
        ({"num_kv_heads": "", "name": "1.34G_dp4_gqa8"}, ["other architecture: num_key_value_heads=8 (GQA), 1B has 32"]),
        ({"num_layers": "12", "batch_accum": "4"},
         ["other architecture: num_hidden_layers=12, 1B has 16", "other batch than 1,048,576 tokens"]),
        ({"tok/s/gpu": "-5"}, ["impossible value: tokens_per_s_per_gpu=-5", "unknown step time"]),
        ({"tok/s/gpu": "0"}, ["impossible value: tokens_per_s_per_gpu=0", "unknown step time"]),
        ({"tok/s/gpu": "400000"}, ["mfu 3.91 is above 1: steps or peak are measured wrongly"]),
        ({"Mem Res (GB)": "500"}, ["more memory than a GPU has: 500 of 80 GiB"]),
        ({"tp": "3"}, ["other number of GPUs than its layout: gpus=8, dp*tp*pp*cp=24"]),
        ({"pp": "0"}, ["impossible value: pp=0", "other number of GPUs than its layout: gpus=8, dp*tp*pp*cp=0"]),
        ({"name": "", "tok/s/gpu": ""}, ["unknown model", "unknown step time"]),
    ],
)  # fmt: skip
def test_reasons_of_doubt(ultrabench, change, reasons):
    account, (row,) = nanotron(ultrabench, OK | change)
    assert row["suspect"] == ("; ".join(reasons) or None)
    assert sorted(account["doubts"]) == sorted(reason.partition(": ")[0] for reason in reasons)


def test_models_that_are_not_of_the_playbook_keep_their_name(ultrabench):
    _, (row,) = nanotron(ultrabench, OK | {"name": "2.2G_dp4", "hidden_size": "2560"})
    assert (row["model"], row["num_params"], row["mfu"], row["suspect"]) == ("2.2G", None, None, None)
    assert row["step_time_s"] == 4.0


def test_a_doubted_row_stays_in_the_cell_of_its_model(ultrabench):
    other = {"num_kv_heads": "8", "batch_accum": "4", "mfu": "50", "tok/s/gpu": "40000"}
    on_two = OK | {"nodes": "2", "dp": "8", "mbs": "4"}
    nanotron(ultrabench, OK | other, OK, OOM, OOM | {"num_kv_heads": "8"}, on_two)
    first, second = as_json(ultrabench, "heatmap", "out.parquet")
    assert (first["source_mfu"], first["peak_mem_reserved_rank0_bytes"]) == (0.445, int(41.5 * GIB))
    assert (first["nodes"], first["num_runs"], first["gbs"], second["nodes"]) == (1, 4, 256, 2)
    words = ("heatmap", "out.parquet", "--rank-by", "source_mfu", "--include-suspects")
    assert [cell["source_mfu"] for cell in as_json(ultrabench, *words)] == [0.5, 0.445]


def test_the_account(ultrabench):
    Path("theirs").mkdir()
    write("theirs/runs.csv", OK, OK, OOM, OK | {"num_kv_heads": "8"})
    code, out, err = ultrabench("import", "nanotron", "theirs/runs.csv")
    assert code == 0
    assert re.search(r"ok +3\noom +1\n", out)
    assert re.search(r"1B +4\n", out)
    assert re.search(r"other architecture +1 +1\n", out)
    assert "columns that were not used: gbs\n" in out
    assert err == "read 4 rows of theirs/runs.csv, wrote 4 rows to runs.parquet; 1 in doubt\n"
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
  step_time_s: {column: step, unit: ms}
  zero_stage: {column: sharding, values: {none: 0, FSDP: 3, '?': null}}
constants: {tp: 1, pp: 1, cp: 1, precision: bf16, gpus_per_node: 8, kernel: other}
"""
ROW = {
    "name": "m", "nodes": "1", "ranks": "", "gpus": "8", "mbs": "2", "batch": "64", "seq": "1,024", "step": "500",
}  # fmt: skip


def test_a_map_for_any_other_table(ultrabench):
    shard, none = mapped(ultrabench, MAP, ROW | {"sharding": "fsdp"}, ROW | {"sharding": "?", "batch": "-"})
    assert (shard["dp"], shard["gas"], shard["zero_stage"], shard["zero_shards"]) == (8, 4, 3, 8)
    numbers = {"step_time_s": 0.5, "tokens_per_s_per_gpu": 64 * 1024 / 0.5 / 8, "gpus": 8}
    words = {"status": "ok", "kernel": "other", "precision": "bf16", "pp_schedule": "none"}
    assert numbers.items() | words.items() <= shard.items()
    assert none["zero_stage"] is none["gas"] is none["gbs"] is none["tokens_per_s_per_gpu"] is None
    assert none["step_time_s"] == 0.5


def test_what_does_not_divide_stays_unknown_and_none_is_a_word(ultrabench):
    text = MAP.replace("gpus_per_node: 8, ", "").replace(
        "seq_len", "gpus: gpus\n  recompute: redo\n  seq_len"
    )
    odd = ROW | {"sharding": "NONE", "redo": "none", "nodes": "3", "batch": "63", "gpus": "8"}
    (row,) = mapped(ultrabench, text, odd)
    assert (row["gpus"], row["nodes"], row["gpus_per_node"], row["gas"], row["gbs"]) == (8, 3, None, None, 63)
    assert (row["zero_stage"], row["zero_shards"], row["recompute"]) == (0, 1, "none")
    assert measured_runs(read_parquet(Path("out.parquet")))[1].keys() == {
        "row lacks gas: give every degree, the ZeRO stage and the batch"
    }
    (row,) = mapped(ultrabench, text.replace("sharding", "redo"), odd | {"nodes": "None", "gpus": ""})
    assert row["nodes"] is row["gpus"] is None


def test_a_batch_that_is_not_that_of_the_layout_is_a_doubt(ultrabench):
    (row,) = mapped(
        ultrabench, MAP.replace("gbs:", "gas: acc\n  gbs:"), ROW | {"sharding": "none", "acc": "2"}
    )
    assert (row["gbs"], row["suspect"]) == (32, "other batch than its layout: gbs=64, dp*mbs*gas=32")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": "title"}, "unknown column of table.csv 'title'"),
        ({"tpp": "tp"}, "map.yaml: unknown column of results 'tpp'; did you mean tp?"),
        ({"mfu": "{column: nodes, unit: percent}"}, "unit='percent'; must be %, us,"),
        ({"job_id": "{column: name, pattern: m}"}, "pattern='m' has 0 groups; write one"),
        ({"job_id": "{column: name, pattern: '('}"}, "pattern='(' is no regular expression"),
        ({"mbs": "name"}, "table.csv, line 2: name='m' is no whole number; mend it or leave it empty"),
        ({"step_time_s": "name"}, "table.csv, line 2: name='m' is no number"),
        ({"compile": "name"}, "table.csv, line 2: unknown truth value of name 'm'"),
        ({"status": "name"}, "table.csv, line 2: unknown status 'm'"),
        ({"status": "{column: name, values: {x: ok}}"}, "table.csv, line 2: unknown value of name 'm'"),
        ({"zero_stage": "{column: name, values: {m: three}}"}, "zero_stage='three' is no whole number"),
        ({"step_times_s": "step"}, "unknown column of results 'step_times_s'"),
    ],
)  # fmt: skip
def test_what_a_map_cannot_say(ultrabench, change, told):
    table = write("table.csv", ROW | {"sharding": "none"})
    lines = [line for line in MAP.splitlines() if line.split(":")[0].strip() not in change]
    at = lines.index("columns:") + 1
    lines[at:at] = [f"  {name}: {value}" for name, value in change.items()]
    Path("map.yaml").write_text("\n".join(lines))
    assert told in one_line(ultrabench, "import", "--map", "map.yaml", table)


def test_a_table_of_another_format_is_named(ultrabench):
    told = one_line(ultrabench, "import", "nanotron", write("three.csv", {"a": "1", "b": "2"}))
    assert "three.csv has none of the 27 columns that this format or map reads, such as 'job_id'" in told
    assert told.endswith("its columns: a, b")


def test_numbers_that_no_column_can_hold(ultrabench):
    table = write("table.csv", ROW | {"sharding": "none", "mbs": "9e30"})
    Path("map.yaml").write_text(MAP)
    told = one_line(ultrabench, "import", "--map", "map.yaml", table)
    assert told.startswith("table.csv holds a number that is too large: ")


@pytest.mark.parametrize(
    ("doubt", "told"),
    [("a: [pp is 1]", "condition 'pp is 1'; write COLUMN, one of = != < >, and a value"),
     ("a: [pp > x]", "condition 'pp > x'; pp is a number"), ("a: [ppp > 1]", "did you mean pp?"),
     ("'a; b': [pp > 1]", "doubt 'a; b' holds '; '"), ("a: null", "condition 'None'"), ("a: mbs > one", "mbs is a number")],
)  # fmt: skip
def test_doubts_that_cannot_be_checked(ultrabench, doubt, told):
    Path("map.yaml").write_text(f"{MAP}doubts: {{{doubt}}}\n")
    assert told in one_line(ultrabench, "import", "--map", "map.yaml", write("table.csv", ROW))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["runs.csv"], "import runs.csv needs one format or one map"),
        (["--map", "map.yaml", "nanotron", "runs.csv"], "needs one format or one map"),
        (["nanotrom", "runs.csv"], "unknown format to import 'nanotrom'; did you mean nanotron?"),
        (["nanotron", "none.csv"], "cannot read none.csv: No such file or directory; give a CSV file"),
        (["nanotron", "runs.csv", "-o", "out.csv"], "out.csv; tables are written as parquet"),
        (["--map", "none.yaml", "runs.csv"], "cannot read none.yaml"),
        (["--map", "runs.csv", "runs.csv"], "runs.csv: it has no mapping `columns`"),
        (["nanotron", "."], "cannot read .: Is a directory; give a CSV file"),
        (["nanotron", "empty.csv"], "empty.csv has no row below its line of column names"),
        (["nanotron", "image.csv"], "cannot read image.csv: 'utf-8' codec can't decode byte 0x89"),
        (["nanotron", "long.csv"], "long.csv, line 2 has more than the 1 columns of line 1; mend it"),
    ],
)
def test_mistakes(ultrabench, words, told):
    Path("runs.csv").write_text("a: 1\n")
    Path("long.csv").write_text("a\n1,2\n")
    Path("empty.csv").write_text("")
    Path("image.csv").write_bytes(b"\x89PNG")
    assert told in one_line(ultrabench, "import", *words)


def test_the_page_names_every_unit():
    (told,) = re.findall(r"^\| `unit` \|.*$", PAGE, re.MULTILINE)
    prefixes = {"KB": "KB to TB", "KiB": "KiB to TiB", "GFLOP/s": "GFLOP/s to PFLOP/s"}
    between = {"MB", "GB", "TB", "MiB", "GiB", "TiB", "TFLOP/s", "PFLOP/s"}
    for unit in UNITS.keys() - between:
        assert prefixes.get(unit, unit) in told


def example():
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    return text


def test_the_map_of_the_page_reads_such_a_table(ultrabench):
    columns = set(re.findall(r"(?:column: |^  \w+: )([a-z_]+)(?=[,}\n])", example(), re.MULTILINE))
    row = dict.fromkeys(sorted(columns), "") | {
        "source": "a paper", "gpu": "H100-SXM-80GB (DGX)", "nodes": "1.0", "gpus": "8.0", "model": "llama3-8B",
        "params_b": "8.0", "dp": "8.0", "tp": "1.0", "pp": "1.0", "cp": "1.0", "zero_or_fsdp": "fsdp", "mbs": "2.0",
        "gas": "1.0", "seq_len": "8192.0", "dtype": "bf16", "step_time_s": "2.0", "mfu_pct": "40", "status": "ok",
        "hidden": "4096", "layers": "32", "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "128256",
    }  # fmt: skip
    text = (
        example()
        .replace("constants:", "constants: {peak_flops_per_s: 800e12, compile: false}  #")
        .replace("\n  compile: false", "")
    )
    assert mapped(ultrabench, text, row)[0]["peak_flops_per_s"] == 800e12
    (found,) = mapped(ultrabench, example(), row)
    expected = {
        "source": "a paper", "num_params": 8_030_261_248, "zero_stage": 3, "gbs": 16, "tokens_per_s_per_gpu": 8192.0,
        "source_mfu": 0.4, "hardware": "h100x8", "peak_flops_per_s": 989e12, "suspect": None,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


@needs(RUNS)
def test_the_map_of_the_page_reads_the_published_runs(ultrabench):
    Path("map.yaml").write_text(example())
    account, table = imported(ultrabench, "--map", "map.yaml", str(RUNS))
    assert (account["rows"], account["by_status"], len(table)) == (440, {"ok": 440}, 440)
    rows = table.to_pylist()
    # NeMo's own MFU of Llama 3.1 in bf16 and ours, which count the same FLOPs, agree where both are known.
    both = [
        (row["mfu"], row["source_mfu"])
        for row in rows
        if row["mfu"] and row["source"].startswith("NVIDIA/dgxc")
    ]
    assert len(both) > 10
    assert all(ours == pytest.approx(theirs, rel=0.01) for ours, theirs in both)


@pytest.fixture
def playbook(ultrabench):
    return imported(ultrabench, "nanotron", str(PLAYBOOK))


def published_cells():
    """(model, nodes) -> MFU in percent, memory of rank 0 in GiB and layout, from the table of PLAYBOOK.md."""
    found = {}
    for line in (FOLDER / "PLAYBOOK.md").read_text().splitlines():
        nodes, *cells = [part.strip() for part in line.split("|")[1:-1]] or [""]
        for model, cell in zip(("1B", "8B", "80B"), cells, strict=False):
            told = re.match(r"([\d.]+), ([\d.]+); (\d+)/(\d+)/(\d+) g(\d+) m(\d+) z(\d)", cell)
            if told and nodes.isdecimal():
                found[model, int(nodes)] = (*map(float, told.groups()[:2]), *map(int, told.groups()[2:]))
    return found


LAYOUT = ("dp", "tp", "pp", "gas", "mbs", "zero_stage")


@needs(PLAYBOOK)
def test_the_published_heatmap_and_what_its_doubts_change(ultrabench, playbook):
    words = ("heatmap", "out.parquet", "--rank-by")
    theirs = {
        (c["model"], c["nodes"]): c for c in as_json(ultrabench, *words, "source_mfu", "--include-suspects")
    }
    published = published_cells()
    assert len(published) == 16
    for key, (mfu, memory, *layout) in published.items():
        cell = theirs[key]
        assert [cell[name] for name in LAYOUT] == layout, key
        assert 100 * cell["source_mfu"] == pytest.approx(mfu, abs=0.0051)
        assert cell["peak_mem_reserved_rank0_bytes"] / GIB == pytest.approx(memory, abs=0.051)
    ours = {(c["model"], c["nodes"]): c for c in as_json(ultrabench, *words, "tokens_per_s_per_gpu")}
    changed = {key for key in published if ours[key]["run_id"] != theirs[key]["run_id"]}
    assert changed == {("1B", 1), ("1B", 2), ("1B", 4), ("1B", 8), ("8B", 1), ("80B", 8)}
    assert ours.keys() == theirs.keys()


@needs(PLAYBOOK)
def test_every_row_of_the_playbook_is_counted_and_measured(playbook):
    account, table = playbook
    assert (account["rows"], len(table)) == (1945, 1945)
    assert account["by_status"] == {"ok": 896, "oom": 824, "crash": 225}
    rows = table.to_pylist()
    counted = Counter(
        reason for row in rows if row["status"] == "ok" for reason in (row["suspect"] or "").split("; ")
    )
    del counted[""]
    assert counted == {
        "before the pipeline fix with pp > 1": 279, "other batch than 1,048,576 tokens": 9,
        "broken NVLink: all-reduce below 300 GB/s inside the node": 13,
        "other architecture: num_key_value_heads=8 (GQA), 80B has 64": 10,
        "other vocabulary: vocab_size=49152, 80B has 131072": 2,
    }  # fmt: skip
    runs, left_out = measured_runs(table)
    assert (len(runs), dict(left_out)) == (1945, {})
    assert json.dumps(account)
