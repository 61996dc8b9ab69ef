"""The document and the HTML text of `ultrabench report`; test_page_in_chromium.py opens the page."""

import json
import re
import shlex

import pyarrow as pa
import pytest

from tests.unit.analysis.page_tables import failed, page, repeated, row, small, table
from ultrabench.analysis.measured import spec_of
from ultrabench.analysis.page.commands import launch_words, predict_words
from ultrabench.analysis.page.rows import NAMES, PUBLIC, WORDS, document, encoded
from ultrabench.analysis.ranking import rank
from ultrabench.analysis.schema import BOOL, FLOAT, INT, SCHEMA
from ultrabench.layout import Layout
from ultrabench.sweep.arguments import PREDICTED, read_run
from ultrabench.sweep.config.load import load_config, load_profile
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.predict.memory import memory_constants, predict_memory


def shown(results, public=False):
    """The document of a page, with its columns as lists."""
    told = document(results, public=public)
    for name, held in told["columns"].items():
        codes = held.get("codes", ())
        told["columns"][name] = held.get("values") or [None if c < 0 else held["known"][c] for c in codes]
    return told


def test_rows_are_in_the_order_of_the_leaderboard_and_every_attempt_is_there():
    told = shown(small())
    columns = told["columns"]
    assert told["rows"] == len(small()) - 1 == len(columns["run_id"])
    assert columns["rank"][:-1] == [*range(1, 12), *range(1, 10), *range(1, 10), *range(1, 11)]
    assert columns["rank"][-1] is None  # the attempt that crashed before another one was ok
    assert [columns["mark"].count(mark) for mark in ("best", "as good as the best")] == [4, 0]
    best = columns["run_id"][columns["mark"].index("best")]
    assert best == f"{0:016x}", "the suspect row is faster and must not be the best"
    assert told["rejected"][0]["number"] == 1
    assert told["rejected"][0]["example"] == "tp=3 does not divide 8"


@pytest.mark.parametrize("public", [False, True])
def test_a_peak_that_is_too_low_is_told(public):
    (fast,) = small().slice(0, 1).to_pylist()
    told = shown(pa.Table.from_pylist([fast | {"mfu": 1.41}], schema=SCHEMA), public=public)
    assert told["made_with"].startswith("MFU up to 1.41 is above 1: the peak is too low")


def test_the_row_of_a_run_counts_as_in_the_heatmap():
    columns = shown(repeated())["columns"]
    states = [state for state, place in zip(columns["state"], columns["rank"], strict=True) if place]
    assert sorted(states) == ["crash", "hang", "ok", "ok", "ok", "oom", "running", "skipped"]
    (cell,) = rank(repeated())
    assert (cell.num_runs, cell.num_oom, cell.num_failed, cell.num_in_doubt) == (6, 1, 2, 1)
    assert (cell.num_repeats, cell.num_repeats_failed) == (2, 1)


def test_the_order_of_the_rows_changes_no_byte():
    rows = small().to_pylist()
    assert page(table(*reversed(rows)), title="s") == page(table(*rows), title="s")


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
        "model": f"/home/{PLANTED}/8B",
        "kernel": f"/opt/{PLANTED}/kernel/",
        "hardware": rf"C:\{PLANTED}\h100x8",
    }
    texts = {f.name: f"error on {PLANTED}" for f in SCHEMA if f.type == pa.string() and f.name not in PUBLIC}
    lists = {f.name: [PLANTED] for f in SCHEMA if f.type == pa.list_(pa.string())}
    doubt = {"suspect": f"throttled on {PLANTED}"}
    rows = [row(1, **names | texts | lists), row(2, **names | texts | lists | doubt)]
    rows += [
        failed(n, s, f"{s} at {PLANTED}", **names | lists)
        for n, s in enumerate(("crash", "rejected", "oom"), 5)
    ]
    text = page(table(*rows), title=PLANTED, public=True)
    assert PLANTED not in text
    assert "h100x8" in text
    assert PLANTED in page(table(*rows), title="s")


def test_what_is_public_is_a_number_or_a_text_that_was_chosen_by_name():
    assert set(SCHEMA.names) >= PUBLIC
    texts = {column.name for column in SCHEMA if column.type not in (INT, FLOAT, BOOL)}
    assert PUBLIC & texts == {*NAMES, *WORDS}
    numbers = {
        name
        for name in set(SCHEMA.names) - texts
        if re.search("(^|_)(ids?|user|host|path|account)(_|$)", name)
    }
    assert not numbers, "an id is a text, which is not public unless it is named"
    assert PUBLIC.isdisjoint(
        {"sweep", "cluster", "reason", "hostnames", "suspect_hosts", "source", "job_id", "allocation"}
    )


def test_memory_by_part_is_that_of_predict():
    told = row(1) | {"source": None}
    columns = shown(table(told, failed(2, "oom", None), row(3, hardware="none"), row(4, vocab_size=None)))[
        "columns"
    ]
    parts = {name: held for name, held in columns.items() if re.fullmatch("predicted_[a-z]+_bytes", name)}
    spec = spec_of(told)
    profile = load_profile("ultrabench")
    (stage,) = predict_memory(spec, memory_constants(profile.framework, profile.memory))
    at = columns["run_id"].index(told["run_id"])
    assert sum(held[at] for held in parts.values()) == pytest.approx(stage.peak_bytes, abs=len(parts))
    known = {
        run_id
        for run_id, held in zip(columns["run_id"], parts["predicted_weights_bytes"], strict=True)
        if held
    }
    assert known == {f"{n:016x}" for n in (1, 2)}, "nobody here knows that hardware or model"


def test_a_page_of_probes_or_of_nothing_ranks_nothing():
    probe = row(1, model=None, **dict.fromkeys(("dp", "tp", "mfu", "tokens_per_s_per_gpu", "step_time_s")))
    for results in (table(), table(probe)):
        assert shown(results)["cells"] == []
        assert "nothing to rank" in page(results, title="s")


def test_the_colour_scale_is_that_of_the_heatmap():
    """Round: in percent the smallest of 0.1, 0.2, 0.5, 1, 2, 5, 10, 20 and so on that no MFU exceeds."""
    assert shown(small())["mfu_end"] == 40
    assert shown(table(row(1, mfu=0.0011)))["mfu_end"] == 0.2
    assert shown(table())["mfu_end"] == 0.1


def test_a_cell_of_rejected_layouts_alone_has_its_reason():
    cells = shown(table(failed(1, "rejected", "too few heads", rule="heads", attempt=None), row(2, nodes=2)))[
        "cells"
    ]
    assert [bool(cell["reason"]) for cell in cells] == [True, False]


def test_numbers_that_are_none_are_null():
    told = shown(table(row(1, hfu=float("nan"), loss_final=float("inf"))))
    assert {"hfu", "loss_final"}.isdisjoint(told["columns"])


@pytest.mark.parametrize(
    "values", [["a", "b", "a", None] * 4, [*range(20)], [None, 1.5], [True, False, True]]
)
def test_a_column_is_encoded_without_loss(values):
    held = encoded(values)
    decoded = held.get("values") or [None if code < 0 else held["known"][code] for code in held["codes"]]
    assert decoded == values


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
    told = row(1, **axes) | {"source": None}
    (candidate,) = make_plan(load_config(shlex.split(launch_words(told)))).candidates
    assert candidate.spec.layout == layout
    assert (candidate.spec.workload.gbs, candidate.spec.workload.seq_len) == (256, 4096)
    assert read_run(shlex.split(predict_words(told, ())), PREDICTED)[0].layout == layout
    imported = shlex.split(predict_words(told | {"source": "a table", "kernel": "nanotron"}, ["nanotron"]))
    assert read_run(imported, PREDICTED)[0].layout == layout
    assert "profile=nanotron" in imported
