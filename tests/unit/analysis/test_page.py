"""The document and the HTML text of `ultrabench report`; test_page_in_chromium.py opens the page."""

import json
import re
import shlex

import pyarrow as pa
import pytest

from tests.unit.analysis.page_tables import decoded, page, repeated, run, shown, small
from tests.unit.analysis.tables import table_of
from ultrabench.analysis.page.commands import launch_words, predict_words
from ultrabench.analysis.page.rows import NAME_COLUMNS, PUBLIC_COLUMNS, WORD_COLUMNS, encoded_column
from ultrabench.analysis.results.measured import spec_of
from ultrabench.analysis.results.rows import without_doubtful_mfu
from ultrabench.analysis.results.schema import BOOL, FLOAT, INT, SCHEMA
from ultrabench.layout import Layout
from ultrabench.sweep.arguments import PREDICTION_DEFAULTS, read_run
from ultrabench.sweep.config.load import load_config, load_profile
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.predict.memory import memory_constants, predict_memory


def test_rows_are_in_the_order_of_the_leaderboard_and_every_attempt_is_there():
    data = shown(small())
    columns = data["columns"]
    assert data["num_rows"] == len(small()) - 1 == len(columns["run_id"])
    # The last one is the attempt that crashed before another one was ok.
    assert columns["rank"] == [*range(1, 12), *range(1, 10), *range(1, 10), *range(1, 11), None]
    best = columns["run_id"][columns["rank"].index(1)]
    assert best == f"{0:016x}", "the suspect row is faster and must not be the best"
    assert (data["rejected"][0]["number"], data["rejected"][0]["example"]) == (1, "tp=3 does not divide 8")


@pytest.mark.parametrize("public", [False, True])
def test_why_rows_have_no_mfu_is_said_unless_the_page_is_public(public):
    table = without_doubtful_mfu(table_of(run(1, mfu=1.41)))
    problem = "no MFU in 1 row: a run computed 1.41 x as fast as the peak"
    assert shown(table, public=public)["made_with"].startswith(problem) is not public


def test_the_cells_of_fp8_name_the_peak_of_their_mfu():
    cells_of_page = shown(table_of(run(1), run(2, precision="fp8", mfu=0.2)))["cells"]
    assert sorted((cell["setting"][2], cell["of_peak"]) for cell in cells_of_page) == [
        ("bf16", ""),
        ("fp8", " of fp8"),
    ]


def test_cells_name_what_sets_them_apart_from_others_of_their_model():
    sizes = [{"seq_len": s, "gbs": g} for s in (64, 128) for g in (8, 16)]
    weak = [{"model": "w", "nodes": n, "gbs": 8 * n, "scaling": "weak"} for n in (1, 2)]
    cells_of_page = shown(table_of(*(run(n, **of) for n, of in enumerate((*sizes, *weak)))))["cells"]
    assert [cell["apart"] for cell in cells_of_page if cell["model"] != "w"] == [
        [f"seq_len {of['seq_len']}", f"gbs {of['gbs']}"] for of in sizes
    ]
    assert [cell["apart"] for cell in cells_of_page if cell["model"] == "w"] == [[], []]
    alike = shown(table_of(run(1, hidden_size=64), run(2, hidden_size=128)))["cells"]
    assert [cell["apart"] for cell in alike] == [["#1"], ["#2"]]


def test_the_row_of_a_run_counts_as_in_the_heatmap():
    columns = shown(repeated())["columns"]
    states = [state for state, place in zip(columns["state"], columns["rank"], strict=True) if place]
    assert sorted(states) == ["crash", "crash", "ok", "ok", "ok", "oom", "running", "skipped"]


def test_the_order_of_the_rows_changes_no_byte():
    assert page(table_of(*reversed(small().to_pylist()))) == page(small())


def test_texts_of_users_are_data_and_no_html():
    text = page(small(), title="<script>alert(2)</script>")
    assert "<script>alert" not in text
    assert "<b>power" not in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text).group(1)
    assert "<script>alert(1)</script> on n7" in json.dumps(json.loads(data))


PLANTED = "node17.cluster.example"


def test_a_public_page_tells_no_text_that_is_not_allowed():
    """Every column of text and every list holds a name of a host, a path and a user, also those that failed."""
    names = {
        "model": f"/home/{PLANTED}/8B", "kernel": f"/opt/{PLANTED}/kernel/", "hardware": rf"C:\{PLANTED}\h100x8",
    }  # fmt: skip
    names |= {column.name: [PLANTED] for column in SCHEMA if column.type == pa.list_(pa.string())}
    texts = [
        column.name for column in SCHEMA if column.type == pa.string() and column.name not in PUBLIC_COLUMNS
    ]
    columns = names | dict.fromkeys(texts, f"error on {PLANTED}")
    rows = [run(1, **columns), run(2, **columns, suspect=f"throttled on {PLANTED}")]
    ends = enumerate(("crash", "rejected", "oom"), 5)
    rows += [run(n, status=end, reason=f"{end} at {PLANTED}", **names) for n, end in ends]
    text = page(table_of(*rows), title=PLANTED, public=True)
    assert PLANTED not in text
    assert "h100x8" in text
    assert PLANTED in page(table_of(*rows))


def test_what_is_public_is_a_number_or_a_text_that_was_chosen_by_name():
    texts = {column.name for column in SCHEMA if column.type not in (INT, FLOAT, BOOL)}
    assert set(SCHEMA.names) >= PUBLIC_COLUMNS
    assert PUBLIC_COLUMNS & texts == {*NAME_COLUMNS, *WORD_COLUMNS}
    private = "sweep", "cluster", "reason", "hostnames", "suspect_hosts", "source", "job_id", "allocation"
    assert PUBLIC_COLUMNS.isdisjoint(private)
    numbers = set(SCHEMA.names) - texts
    assert not [
        name for name in numbers if {"id", "ids", "user", "host", "path", "account"} & {*name.split("_")}
    ]


def test_memory_by_part_is_that_of_predict():
    rows = run(1), run(2, status="oom"), run(3, hardware="none"), run(4, vocab_size=None)
    columns = shown(table_of(*rows))["columns"]
    weights = zip(columns["run_id"], columns["predicted_weights_bytes"], strict=True)
    assert sorted(run_id for run_id, size in weights if size) == [f"{n:016x}" for n in (1, 2)]
    profile = load_profile("ultrabench")
    spec = spec_of(rows[0] | {"source": None})
    (stage,) = predict_memory(spec, memory_constants(profile.framework, profile.memory))
    index = columns["run_id"].index(rows[0]["run_id"])
    parts = [sizes[index] for name, sizes in columns.items() if re.fullmatch("predicted_[a-z]+_bytes", name)]
    assert sum(parts) == pytest.approx(stage.peak_bytes, abs=len(parts))
    beyond = dict(zip(columns["run_id"], columns["extrapolated"], strict=True))
    assert beyond[rows[0]["run_id"]].startswith("zero_stage=1 (0)")
    assert beyond[rows[2]["run_id"]] is None


PROBE = run(1, model=None, **dict.fromkeys(("dp", "tp", "mfu", "tokens_per_s_per_gpu", "step_time_s")))


@pytest.mark.parametrize(
    ("rows", "name", "expected"),
    [([], "cells", []), ([PROBE], "cells", []), ([], "mfu_end", 0.1), ([run(1, mfu=0.0011)], "mfu_end", 0.2),
     ([run(0, mfu=0.4), run(1)], "mfu_end", 40)],
)  # fmt: skip
def test_probes_are_no_cells_and_the_colour_scale_is_that_of_the_heatmap(rows, name, expected):
    """Round: in percent the smallest of 0.1, 0.2, 0.5, 1, 2, 5, 10, 20 and so on that no MFU exceeds."""
    assert shown(table_of(*rows))[name] == expected


def test_a_cell_of_rejected_layouts_alone_has_its_reason():
    rejected = run(1, status="rejected", reason="too few heads", rule="heads", attempt=None)
    assert [bool(cell["reason"]) for cell in shown(table_of(rejected, run(2, nodes=2)))["cells"]] == [
        True,
        False,
    ]


def test_numbers_that_are_none_are_null():
    content = shown(table_of(run(1, hfu=float("nan"), loss_final=float("inf"))))
    assert {"hfu", "loss_final"}.isdisjoint(content["columns"])


@pytest.mark.parametrize(
    "values", [["a", "b", "a", None] * 4, [*range(20)], [None, 1.5], [True, False, True]]
)
def test_a_column_is_encoded_without_loss(values):
    assert decoded(encoded_column(values)) == values


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, tp=2, pp=2, zero_stage=1, mbs=4, gas=32, pp_schedule="interleaved", virtual_stages=2),
        Layout(dp=8, zero_stage=3, dp_shard=2, mbs=2, gas=16, recompute="full"),
        Layout(dp=4, pp=2, mbs=1, gas=64, pp_schedule="afab"),
        Layout(dp=4, cp=2, mbs=1, gas=64),
    ],
)
def test_the_commands_of_a_row_describe_its_layout(layout):
    axes = {name: getattr(layout, name) for name in Layout.__slots__}
    run_row = run(1, **axes) | {"source": None}
    (candidate,) = make_plan(load_config(shlex.split(launch_words(run_row)))).candidates
    assert candidate.spec.layout == layout
    assert (candidate.spec.workload.gbs, candidate.spec.workload.seq_len) == (256, 4096)
    assert read_run(shlex.split(predict_words(run_row, ())), PREDICTION_DEFAULTS)[0].layout == layout
    imported = shlex.split(predict_words(run_row | {"source": "a table", "kernel": "nanotron"}, ["nanotron"]))
    assert read_run(imported, PREDICTION_DEFAULTS)[0].layout == layout
    assert "profile=nanotron" in imported


@pytest.mark.parametrize("routing", ["balanced", "skew=0.5", "learned"])
def test_the_commands_of_a_row_describe_how_its_experts_are_chosen(routing):
    axes = {name: getattr(Layout(dp=8, mbs=1, gas=32, ep=8), name) for name in Layout.__slots__}
    run_row = run(1, **axes) | {"source": None, "model": "olmoe-1b-7b", "routing": routing}
    (candidate,) = make_plan(load_config(shlex.split(launch_words(run_row)))).candidates
    spec, _ = read_run(shlex.split(predict_words(run_row, ())), PREDICTION_DEFAULTS)
    assert (candidate.spec.kernel.routing, candidate.rule) == (routing, None)
    assert spec.kernel == candidate.spec.kernel
