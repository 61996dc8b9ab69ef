import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrabench.analysis.cells import compared_with, doubts, layout_words, notes
from ultrabench.analysis.ranking import leaderboard, rank
from ultrabench.analysis.schema import SCHEMA
from ultrabench.errors import ConfigError

WORDS = (
    "model", "nodes", "run_id", "status", "reason", "dp", "tp", "pp", "cp", "zero_stage", "mbs", "gas",
    "mfu", "source_mfu", "tokens_per_s_per_gpu", "peak_mem_reserved_bytes", "num_runs", "as_good_as_best",
)  # fmt: skip


def row(run_id, speed=None, **values):
    defaults = {
        "run_id": run_id, "is_final": True, "status": None if speed is None else "ok", "model": "1B", "num_params": 10,
        "hidden_size": 8, "nodes": 1, "hardware": "h100x8", "kernel": "embedded", "dp": 8, "repeat": 0,
        "tokens_per_s_per_gpu": speed, "mfu": None if speed is None else speed / 1000,
    }  # fmt: skip
    return defaults | values


def cells_of(*rows, **options):
    return rank(pa.Table.from_pylist(list(rows), schema=SCHEMA), **options)


def test_json_holds_the_promised_words():
    (cell,) = cells_of(row("a", 5.0))
    value = json.loads(json.dumps(cell.to_json()))
    assert set(WORDS) <= set(value)
    told = {"run_id": "a", "dp": 8, "hardware": "h100x8", "as_good_as_best": []}
    assert told.items() <= value.items()


@pytest.mark.parametrize(
    ("rows", "options", "best"),
    [
        ([row("a", 5.0, mfu=0.9), row("b", 6.0, mfu=0.1), row("c", status="oom")], {}, "b"),
        ([row("a", 5.0, mfu=0.9), row("b", 6.0, mfu=0.1)], {"rank_by": "mfu"}, "a"),
        ([row("a", 5.0, loss_final=1.0), row("b", 6.0, loss_final=2.0)], {"rank_by": "loss_final"}, "a"),
        ([row("a", 5.0), row("b", 6.0, suspect="hot"), row("c", 7.0, stopped="slower_than_best")], {}, "a"),
        ([row("a", 5.0), row("b", 6.0, suspect="hot")], {"include_suspects": True}, "b"),
        ([row("a", 9.0, is_final=False), row("b", 1.0)], {}, "b"),
    ],
)  # fmt: skip
def test_the_best_is_an_ok_final_row_above_doubt(rows, options, best):
    (cell,) = cells_of(*rows, **options)
    assert (cell.run_id, cell.num_runs) == (best, len({r["run_id"] for r in rows if r["is_final"]}))


@pytest.mark.parametrize(
    ("other", "count"),
    [({"nodes": 2}, 2), ({"hardware": "a100x8"}, 2), ({"kernel": "megatron"}, 2), ({"num_params": 9}, 2),
     ({"num_key_value_heads": 8}, 2), ({"gbs": 512}, 2), ({"dp": 4}, 1)],
)  # fmt: skip
def test_what_makes_another_cell(other, count):
    assert len(cells_of(row("a", 5.0), row("b", 6.0, **other))) == count


def test_mfu_of_two_formulas_is_not_ranked_together():
    (cell,) = cells_of(row("a", 5.0, flops_formula="palm"), row("b", flops_formula=None))
    assert cell.flops_formula == "palm"
    mixed = [row("a", 5.0, flops_formula="palm"), row("b", 6.0, nodes=2, flops_formula="megatron")]
    for rank_them in (rank, leaderboard):
        with pytest.raises(ConfigError, match="MFU is by megatron and palm in these results"):
            rank_them(pa.Table.from_pylist(mixed, schema=SCHEMA))


def test_as_good_as_best_follows_the_intervals():
    given = (("best", 100.0, 0.02), ("close", 97.0, 0.02), ("off", 95.0, 0.02), ("unsure", 60.0, 0.8))
    (cell,) = cells_of(*(row(name, speed, step_time_ci95_rel=rel) for name, speed, rel in given))
    assert (cell.run_id, cell.as_good_as_best) == ("best", ("close", "unsure"))


def test_a_repeated_run_counts_with_its_median():
    lucky = [row("lucky", speed, repeat=i) for i, speed in enumerate((120.0, 80.0, 81.0))]
    (cell,) = cells_of(*lucky, row("steady", 90.0))
    assert cell.run_id == "steady"
    assert cell.as_good_as_best == ("lucky",)
    assert cell.num_runs == 2
    (cell,) = cells_of(*lucky[:2], row("steady", 90.0))
    assert (cell.run_id, cell.tokens_per_s_per_gpu) == ("lucky", 80.0)


def test_a_cell_counts_runs_by_their_best_repeat_and_names_axes_that_vary():
    rows = [
        row("a", 5.0, recompute="none"), row("b", status="oom", recompute="none"), row("b", 4.0, repeat=1),
        row("c", status="oom", dp=4), row("c", status="crash", repeat=1, dp=4), row("d", status="hang", dp=None),
        row("waits"), row("never", status="rejected", tp=3), row("left", status="skipped"),
    ]  # fmt: skip
    (cell,) = cells_of(*rows)
    assert (cell.num_runs, cell.num_oom, cell.num_failed, cell.varied_axes) == (4, 1, 1, ("dp",))
    assert {"num_oom", "num_failed", "peak_mem_reserved_rank0_bytes"} <= cell.to_json().keys()


VALUES = (None, float("nan"), 0.0, 1.0, 2.0, 2.0, 3.0)
RESULTS = st.lists(
    st.builds(
        lambda run_id, status, **values: row(run_id, **values) | {"status": status},
        st.sampled_from("abcd"), st.sampled_from(["ok", "ok", "oom", "crash", None, "rejected"]),
        speed=st.sampled_from(VALUES), nodes=st.sampled_from([1, 2]), repeat=st.integers(0, 2),
        suspect=st.sampled_from([None, None, "hot"]), step_time_ci95_rel=st.sampled_from([None, float("nan"), 0.1]),
        rule=st.sampled_from([None, "zero"]), reason=st.sampled_from([None, "x", "y"]),
        recompute=st.sampled_from([None, "none", "full"]),
    ),
    min_size=1, max_size=12,
    unique_by=lambda row: (row["run_id"], row["nodes"], row["repeat"]),
)  # fmt: skip


@settings(max_examples=10)
@given(RESULTS, st.data())
def test_cells_are_the_same_however_the_rows_are_shuffled_and_split(rows, data):
    mixed = data.draw(st.permutations(rows))
    cut = data.draw(st.integers(0, len(rows)))
    parts = [pa.Table.from_pylist(part, schema=SCHEMA) for part in (mixed[:cut], mixed[cut:])]
    cells = cells_of(*rows)
    assert repr(rank(pa.concat_tables(parts))) == repr(cells)
    for cell in cells:
        assert cell.run_id is None or cell.tokens_per_s_per_gpu == cell.tokens_per_s_per_gpu, "NaN has won"


def beside(control, ratio, allocation, **values):
    return {"control": control, "control_ratio": ratio, "allocation": allocation, "sweep": "s", **values}


def test_runs_are_compared_through_the_control_they_share():
    rows = [
        row("control", 100.0, **beside("control", 1.0, "a")),
        row("lucky", 120.0, **beside("control", 1.1, "a")),
        row("control", 70.0, repeat=1, **beside("control", 1.0, "slow nodes")),
        row("good", 90.0, **beside("control", 1.3, "slow nodes")),
    ]
    (cell,) = cells_of(*rows)
    assert (cell.run_id, cell.ranked_by, cell.tokens_per_s_per_gpu) == ("good", "control_ratio", 90.0)
    (cell,) = cells_of(*rows, rank_by="tokens_per_s")
    assert cell.run_id is None
    for lacking in ({"control_ratio": None}, {"control": "another"}, {"control": None}):
        (cell,) = cells_of(*rows[:-1], rows[-1] | lacking)
        assert (cell.run_id, cell.ranked_by) == ("lucky", "tokens_per_s_per_gpu")
    (cell,) = cells_of(*rows, row("failed", status="oom"), row("doubted", 500.0, suspect="throttled"))
    assert (cell.run_id, cell.ranked_by) == ("good", "control_ratio")


def test_a_ratio_is_as_unsure_as_both_its_times_and_its_spread_between_allocations():
    control = row("control", 100.0, step_time_ci95_rel=0.03, **beside("control", 1.0, "a"))
    best = row("best", 130.0, step_time_ci95_rel=0.04, **beside("control", 1.3, "a"))

    def close(*ratios):
        near = [
            row("near", 1.0, repeat=n, **beside("control", r, f"a{n or ''}")) for n, r in enumerate(ratios)
        ]
        return cells_of(control, best, *near)[0].as_good_as_best == ("near",)

    # The best is at least 1.3 * (1 - hypot(0.03, 0.04)) = 1.235, the other one at most 1.03 times its ratio.
    assert close(1.2)
    assert not close(1.19)
    assert close(1.1, 1.1, 1.25)  # the spread between allocations
    assert not close(1.1, 1.1)


@pytest.mark.parametrize(("given", "near"), [("tokens_per_s_per_gp", "tokens_per_s_per_gpu"), ("model", "")])
def test_rank_by_what_is_no_numeric_column(given, near):
    with pytest.raises(ConfigError, match=f"did you mean {near}" if near else "unknown column"):
        cells_of(row("a", 1.0), rank_by=given)
    with pytest.raises(
        ConfigError, match=r"\(known: tokens_per_s_per_gpu, mfu, source_mfu, .* and \d+ more\)"
    ) as told:
        cells_of(row("a", 1.0), rank_by=given)
    assert given != "model" or "did you mean" not in str(told.value)


def many(number, status, reason=None, **values):
    return [row(f"{status}{i}", status=status, reason=reason, **values) for i in range(number)]


@pytest.mark.parametrize(
    ("rows", "status", "reason"),
    [
        (many(12, "oom", "tried 2 GiB"), "oom", "all 12 oom"),
        (many(1, "oom"), "oom", "1 oom"),
        (many(3, "crash", "rank 5: boom"), "crash", "all 3 crash: rank 5: boom"),
        (many(9, "oom") + many(3, "crash", "boom"), "oom", "9 oom; 3 crash: boom"),
        (many(4, None), None, "pending 4"),
        (many(2, "hang", "silent") + many(4, None), None, "2 hang: silent; pending 4"),
        (many(4, None) + many(5, "skipped", "dominated"), None, "pending 4; 5 skipped: dominated"),
        (many(5, "skipped", "112 GiB") + many(9, "rejected", "x"), "skipped", "all 5 skipped: 112 GiB"),
        (
            [*many(2, "rejected", "tp=3 odd", rule="tp_heads"), row("z", status="rejected", rule="zero")],
            "rejected",
            "no valid layout: tp=3 odd (tp_heads, 2 of 3)",
        ),
        ([row("a", 1.0, suspect="throttled")], "ok", "1 ok but suspect: throttled"),
    ],
)  # fmt: skip
def test_a_cell_without_a_winner_says_why(rows, status, reason):
    (cell,) = cells_of(*rows)
    assert cell.run_id is None
    assert cell.layout == {}
    assert cell.mfu is cell.tokens_per_s_per_gpu is None
    assert (cell.status, cell.reason) == (status, reason)


def test_order_is_by_parameters_then_nodes_whatever_the_order_of_rows():
    rows = [
        row(f"{model}{nodes}", 1.0, model=model, nodes=nodes, num_params=size)
        for model, size in (("big", 80), ("a-small", 1), ("unknown", None))
        for nodes in (16, 2)
    ]
    order = [(c.model, c.nodes) for c in cells_of(*rows)]
    assert order[2:] == [("a-small", 2), ("a-small", 16), ("big", 2), ("big", 16)]
    assert order == [(c.model, c.nodes) for c in cells_of(*reversed(rows))]


def test_compare_takes_the_same_work_and_prefers_the_same_machine():
    ours = cells_of(
        row("a", 10.0), row("b", 10.0, nodes=2), row("c", 10.0, nodes=4), row("d", status="oom", nodes=8)
    )
    theirs = cells_of(
        row("a", 5.0), row("a", 50.0, hardware="h200x8"), row("b", 8.0, nodes=2, kernel="megatron"),
        row("d", 8.0, nodes=8), row("c", 5.0, nodes=4, gbs=77),
    )  # fmt: skip
    compared = compared_with(ours, theirs)
    assert [c.compare_ratio for c in compared] == [2.0, 1.25, None, None]
    assert [c.compare_layout for c in compared] == [None, None, None, compared[0].layout]
    assert [c.compare_differing for c in compared] == [{}, {"kernel": "megatron"}, {}, {}]
    (moved, *_) = compared_with(ours, cells_of(row("x", 5.0, dp=4, tp=2)))
    assert (moved.compare_layout["dp"], moved.compare_layout["tp"]) == (4, 2)
    (kept, *_) = compared_with(
        ours, cells_of(row("a", 5.0, recompute="none"))
    )  # ours does not tell recompute
    assert kept.compare_layout is None


def test_notes_count_runs_once_and_name_versions():
    rows = [
        row("a", 1.0, torch_version="2.13.0"),
        row("a", status="crash", repeat=1),
        *many(3, "oom"),
        *many(2, None),
    ]
    told = notes(pa.Table.from_pylist(rows, schema=SCHEMA))
    assert told.startswith("Layouts: 1 ok, 3 oom, 2 pending.")
    assert "torch 2.13.0" in told


def test_notes_count_the_suspect_rows_and_say_whether_they_may_win():
    table = pa.Table.from_pylist([row("a", 1.0), row("b", 1.0, suspect="hot")], schema=SCHEMA)
    assert "Layouts: 2 ok. Suspect: 1 of 2 rows, which win no cell. Made" in notes(table)
    assert "1 of 2 rows, which may win cells. Made" in notes(table, include_suspects=True)


def test_notes_and_doubts_tell_a_peak_that_is_too_low_by_rows_that_are_not_in_doubt():
    table = pa.Table.from_pylist([row("a", 1410.0), row("b", 1900.0, suspect="hot")], schema=SCHEMA)
    told = doubts(table)[-1]
    assert told.startswith("MFU up to 1.41 is above 1: the peak is too low")
    assert f"win no cell. {told}. Made" in notes(table)


def test_a_cell_shows_mfu_or_the_column_that_was_asked_for():
    rows = row("a", 5.0, mfu=0.38, source_mfu=0.443), row("b", status="oom", nodes=2)
    for options, shown in (({}, ("mfu", 0.38)), ({"rank_by": "source_mfu"}, ("source_mfu", 0.443))):
        cell, empty = cells_of(*rows, **options)
        assert (cell.shown_column, cell.shown_value) == shown
        assert (empty.shown_column, empty.shown_value) == (shown[0], None)


@pytest.mark.parametrize("stages", [2, 4])
def test_interleaved_schedules_of_different_depth_do_not_look_alike(stages):
    (cell,) = cells_of(row("a", 1.0, pp_schedule="interleaved", virtual_stages=stages))
    assert cell.to_json()["virtual_stages"] == stages
    assert layout_words(cell.layout)[1].endswith(f" x{stages}")


def test_doubts_are_told_with_an_example():
    rows = [row("a", 1.0), row("b", 1.0, suspect="hot"), row("c", status="invalid", reason="loss is NaN")]
    assert doubts(pa.Table.from_pylist(rows, schema=SCHEMA)) == [
        "1 of 3 rows: suspect and wins no cell, such as b: hot",
        "1 of 3 rows: invalid, such as c: loss is NaN",
    ]


def test_a_leaderboard_holds_every_run_once_winners_first():
    rows = [
        row("slow", 5.0), row("best", 6.0, step_time_ci95_rel=0.2), row("hot", 9.0, suspect="hot"),
        row("hot", status="crash", repeat=1), row("lost", status="oom"), row("waits", attempt=None),
        row("left", status="skipped"), row("never", status="rejected"), row("other", 1.0, nodes=2),
    ]  # fmt: skip
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    first, second = leaderboard(table)
    assert [r["run_id"] for r in first] == ["best", "slow", "hot", "lost", "waits", "left"]
    assert [r["rank"] for r in (*first, *second)] == [1, 2, 3, 4, 5, 6, 7]
    assert [r["best"] for r in first[:3]] == [True, False, False]
    assert [r["as_good_as_best"] for r in first[:3]] == [False, True, False]
    assert {r["ranked_by"] for r in first} == {"tokens_per_s_per_gpu"}
    with pytest.raises(ConfigError, match="no ok run has a value in hfu"):
        leaderboard(table, rank_by="hfu")


def test_only_the_best_are_in_front_and_the_rest_is_ordered_by_its_numbers():
    rows = [
        row("best", 9.0), row("low", 2.0), row("close", 5.0, step_time_ci95_rel=0.9), row("unknown", status="ok"),
        row("slower", 7.0, stopped="slower_than_best"), row("hot", 8.0, suspect="hot"), row("oom", status="oom"),
    ]  # fmt: skip
    order = ["best", "close", "slower", "low", "unknown", "hot", "oom"]
    (cell,) = leaderboard(pa.Table.from_pylist(rows, schema=SCHEMA))
    assert [r["run_id"] for r in cell] == order
    for held in rows:
        held["step_time_s"] = None if (speed := held["tokens_per_s_per_gpu"]) is None else 10 - speed
    (cell,) = leaderboard(pa.Table.from_pylist(rows, schema=SCHEMA), rank_by="step_time_s")
    assert [r["run_id"] for r in cell] == order
    ratios = [
        row("control", 1.0, **beside("control", 1.0, "a")),
        row("b", 9.0, **beside("control", 0.9, "a")),
    ]
    slower = row("s", 9.0, stopped="slower_than_best", **beside("control", 0.95, "a"))
    (cell,) = leaderboard(pa.Table.from_pylist([*ratios, slower], schema=SCHEMA))
    assert [r["run_id"] for r in cell] == ["control", "s", "b"]
