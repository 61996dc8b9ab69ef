import json

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.configs import refused
from tests.unit.analysis.tables import row, table_of
from ultrabench.analysis.results.cells import caveats, compared_with, layout_words, notes
from ultrabench.analysis.results.left_out import none_left
from ultrabench.analysis.results.ranking import leaderboard, rank
from ultrabench.analysis.results.rows import without_doubtful_mfu


def cells_of(*rows, **options):
    return rank(table_of(*rows), **options)


def test_json_is_flat_and_holds_the_layout():
    (cell,) = cells_of(row("a", pp_schedule="interleaved", virtual_stages=4))
    expected = {"run_id": "a", "dp": 8, "virtual_stages": 4, "hardware": "h100x8", "as_good_as_best": []}
    assert expected.items() <= json.loads(json.dumps(cell.to_json())).items()
    assert layout_words(cell.layout)[1].endswith(" x4")


@pytest.mark.parametrize(
    ("rows", "options", "best"),
    [
        ([row("a", 5.0, mfu=0.9), row("b", 6.0, mfu=0.1), row("c", status="oom")], {}, "b"),
        ([row("a", 5.0, mfu=0.9), row("b", 6.0, mfu=0.1)], {"rank_by": "mfu"}, "a"),
        ([row("a", 5.0, loss_final=1.0), row("b", 6.0, loss_final=2.0)], {"rank_by": "loss_final"}, "a"),
        ([row("a", 5.0, checkpoint_save_s=2.0), row("b", 6.0, checkpoint_save_s=20.0)],
            {"rank_by": "checkpoint_save_s"}, "a"),
        ([row("a", 5.0), row("b", 6.0, suspect="hot"), row("c", 7.0, stopped="slower_than_best")], {}, "a"),
        ([row("a", 5.0), row("b", 6.0, suspect="hot")], {"include_suspects": True}, "b"),
        ([row("a", 9.0, is_final=False), row("b", 1.0)], {}, "b"),
    ],
)  # fmt: skip
def test_the_best_is_an_ok_final_row_above_doubt(rows, options, best):
    (cell,) = cells_of(*rows, **options)
    assert (cell.run_id, cell.num_runs) == (best, len({r["run_id"] for r in rows if r["is_final"]}))
    shown = options.get("rank_by", "mfu")
    assert [cell.shown_value] == [
        r[shown] for r in rows if r["run_id"] == best and cell.shown_column == shown
    ]


@pytest.mark.parametrize(
    ("other", "count"),
    [({"nodes": 2}, 2), ({"hardware": "a100x8"}, 2), ({"kernel": "megatron"}, 2), ({"num_params": 9}, 2),
     ({"num_key_value_heads": 8}, 2), ({"gbs": 512}, 2), ({"routing": "learned"}, 2), ({"num_experts": 8}, 2),
     ({"dp": 4}, 1)],
)  # fmt: skip
def test_what_makes_another_cell(other, count):
    assert len(cells_of(row("a"), row("b", **other))) == count


def test_mfu_of_two_formulas_is_not_ranked_together():
    (cell,) = cells_of(row("a"), row("b", 50.0, flops_formula=None))
    assert cell.flops_formula == "palm"
    with refused("it uses the formulas megatron and palm"):
        cells_of(row("a"), row("b", nodes=2, flops_formula="megatron"))


def test_as_good_as_best_follows_the_intervals():
    speeds = (("best", 100.0, 0.02), ("close", 97.0, 0.02), ("off", 95.0, 0.02), ("unsure", 60.0, 0.8))
    (cell,) = cells_of(*(row(name, speed, step_time_ci95_rel=rel) for name, speed, rel in speeds))
    assert (cell.run_id, cell.as_good_as_best) == ("best", ("close", "unsure"))


@pytest.mark.parametrize(
    ("other_speed", "best_ci", "other_ci", "ties"),
    [(55.0, 0.0, 0.5, True), (49.0, 0.0, 0.5, False), (60.0, 0.5, 0.0, False), (1.0, 0.0, 1.0, True)],
)
def test_the_interval_is_that_of_the_step_time_whatever_ranks(other_speed, best_ci, other_ci, ties):
    rows = row("a", step_time_ci95_rel=best_ci), row("b", other_speed, step_time_ci95_rel=other_ci)
    for column in ("tokens_per_s_per_gpu", "mfu", "step_time_s"):
        (cell,) = cells_of(*rows, rank_by=column)
        assert (cell.run_id, cell.as_good_as_best) == ("a", ("b",) * ties), column


def test_a_repeated_run_counts_with_its_median():
    lucky = [row("lucky", speed, repeat=i) for i, speed in enumerate((120.0, 80.0, 81.0))]
    (cell,) = cells_of(*lucky, row("steady", 90.0))
    assert (cell.run_id, cell.as_good_as_best, cell.num_runs) == ("steady", ("lucky",), 2)
    (cell,) = cells_of(*lucky[:2], row("steady", 90.0))
    assert (cell.run_id, cell.tokens_per_s_per_gpu) == ("lucky", 100.0)


def test_a_cell_counts_runs_by_their_best_repeat_and_names_axes_that_vary():
    rows = [
        row("a", 5.0), row("a", status="crash", repeat=1), row("b", status="oom", recompute=None),
        row("b", 4.0, repeat=1),
        row("c", status="oom", dp=4), row("c", status="crash", repeat=1, dp=4), row("d", status="hang", dp=None),
        row("e", suspect="hot"), row("waits", status=None), row("never", status="rejected", tp=3),
        row("left", status="skipped"), row("f", screened=True),
    ]  # fmt: skip
    (cell,) = cells_of(*rows)
    assert (cell.num_runs, cell.num_oom, cell.num_failed, cell.num_in_doubt) == (6, 1, 1, 1)
    assert cell.num_screened == 1
    assert (cell.num_repeats, cell.num_repeats_failed, cell.varied_axes) == (2, 1, ("dp",))


SPEEDS = st.sampled_from((None, float("nan"), 0.0, 1.0, 2.0, 2.0, 3.0))
ROWS = st.builds(
    row,
    st.sampled_from("abcd"), status=st.sampled_from(["ok", "ok", "oom", "crash", None, "rejected"]),
    tokens_per_s_per_gpu=SPEEDS, nodes=st.sampled_from([1, 2]), repeat=st.integers(0, 2),
    suspect=st.sampled_from([None, None, "hot"]), step_time_ci95_rel=st.sampled_from([None, float("nan"), 0.1]),
    rule=st.sampled_from([None, "zero"]), reason=st.sampled_from([None, "x", "y"]),
    recompute=st.sampled_from([None, "none", "full"]),
)  # fmt: skip
RESULTS = st.lists(ROWS, min_size=1, max_size=12, unique_by=lambda r: (r["run_id"], r["nodes"], r["repeat"]))


@settings(max_examples=10)
@given(RESULTS, st.data())
def test_cells_are_the_same_however_the_rows_are_shuffled_and_split(rows, data):
    mixed = data.draw(st.permutations(rows))
    cut = data.draw(st.integers(0, len(rows)))
    cells = cells_of(*rows)
    assert repr(rank(pa.concat_tables([table_of(*mixed[:cut]), table_of(*mixed[cut:])]))) == repr(cells)
    for cell in cells:
        assert cell.run_id is None or cell.tokens_per_s_per_gpu == cell.tokens_per_s_per_gpu, "NaN has won"


def beside(ratio, allocation="a", control="control"):
    return {"control": control, "control_ratio": ratio, "allocation": allocation}


def test_runs_are_compared_through_the_control_they_share():
    rows = [
        row("control", 100.0, **beside(1.0)),
        row("lucky", 120.0, **beside(1.1)),
        row("control", 70.0, repeat=1, **beside(1.0, "slow nodes")),
        row("good", 90.0, **beside(1.3, "slow nodes")),
    ]
    others = row("failed", status="oom"), row("doubted", 500.0, suspect="throttled")
    for cell_rows in (rows, [*rows, *others]):
        (cell,) = cells_of(*cell_rows)
        assert (cell.run_id, cell.ranked_by, cell.tokens_per_s_per_gpu) == ("good", "control_ratio", 90.0)
    (cell,) = cells_of(*rows, rank_by="tokens_per_s")
    assert cell.run_id == "lucky"
    for lacking in ({"control_ratio": None}, {"control": "another"}, {"control": None}):
        (cell,) = cells_of(*rows[:-1], rows[-1] | lacking)
        assert (cell.run_id, cell.ranked_by) == ("lucky", "tokens_per_s_per_gpu")


@pytest.mark.parametrize(
    ("ratios", "close"), [((1.21,), True), ((1.2,), False), ((1.1, 1.1, 1.25), True), ((1.1, 1.1), False)]
)
def test_a_ratio_is_as_unsure_as_both_its_times_and_its_spread_between_allocations(ratios, close):
    """The best is at least 1.3 / (1 + hypot(0.03, 0.04)) = 1.238, the other one at most its ratio / (1 - 0.03)."""
    control = row("control", step_time_ci95_rel=0.03, **beside(1.0))
    best = row("best", 130.0, step_time_ci95_rel=0.04, **beside(1.3))
    near = [row("near", 1.0, repeat=n, **beside(ratio, f"a{n or ''}")) for n, ratio in enumerate(ratios)]
    (cell,) = cells_of(control, best, *near)
    assert cell.as_good_as_best == (("near",) if close else ())


def many(number, status, reason=None, **values):
    return [row(f"{status}{i}", status=status, reason=reason, **values) for i in range(number)]


@pytest.mark.parametrize(
    ("rows", "status", "reason"),
    [
        (many(12, "oom", "tried 2 GiB"), "oom", "all 12 oom"),
        (many(1, "oom"), "oom", "1 oom"),
        (many(3, "crash", "rank 5: boom"), "crash", "all 3 crash: rank 5: boom"),
        (many(9, "oom") + many(3, "crash", "boom"), "oom", "9 oom; 3 crash: boom"),
        (many(4, None), None, "4 pending"),
        (many(2, "hang", "silent") + many(4, None), None, "2 hang: silent; 4 pending"),
        (many(4, None) + many(5, "skipped", "dominated"), None, "4 pending; 5 skipped: dominated"),
        (many(5, "skipped", "112 GiB") + many(9, "rejected", "x"), "skipped", "all 5 skipped: 112 GiB"),
        ([*many(2, "rejected", "tp=3 odd", rule="tp_heads"), row("z", status="rejected", rule="zero")],
         "rejected", "no valid layout: tp=3 odd (tp_heads, 2 of 3)"),
        ([row("a", suspect="throttled", stopped="slower_than_best")], "ok", "1 ok but suspect: throttled"),
        ([row("a", suspect="hot", tokens_per_s_per_gpu=None), row("b", stopped="slower_than_best"),
          row("c", stopped="slower_than_best")], "ok",
         "all 3 ok: 2 stopped early as slower than the best, 1 suspect: hot"),
    ],
)  # fmt: skip
def test_a_cell_without_a_winner_says_why(rows, status, reason):
    (cell,) = cells_of(*rows)
    assert (cell.run_id, cell.layout, cell.status, cell.reason) == (None, {}, status, reason)
    assert (cell.mfu, cell.tokens_per_s_per_gpu, cell.shown_column) == (None, None, "mfu")


def test_a_cell_of_suspects_alone_shows_their_best_marked():
    doubted = [row("a", 5.0, suspect="hot"), row("b", 6.0, suspect="throttled")]
    (cell,) = cells_of(*doubted)
    assert (cell.run_id, cell.suspect, cell.num_in_doubt) == ("b", "throttled", 2)
    (cell,) = cells_of(*doubted, row("c", 1.0))
    assert (cell.run_id, cell.suspect) == ("c", None)


def test_order_is_by_parameters_then_nodes():
    models = (("big", 80), ("a-small", 1), ("unknown", None))
    cells = cells_of(*(row("a", model=m, nodes=n, num_params=size) for m, size in models for n in (16, 2)))
    assert [(c.model, c.nodes) for c in cells] == [
        ("unknown", 2), ("unknown", 16), ("a-small", 2), ("a-small", 16), ("big", 2), ("big", 16),
    ]  # fmt: skip


def test_compare_takes_the_same_work_and_prefers_the_same_machine():
    ours = cells_of(
        row("a", 10.0, recompute=None),
        row("b", 10.0, nodes=2),
        row("c", 10.0, nodes=4),
        row("d", status="oom", nodes=8),
    )
    theirs = cells_of(
        row("a", 5.0), row("a", 50.0, hardware="h200x8"), row("b", 8.0, nodes=2, kernel="megatron", dp=8, tp=2),
        row("d", 8.0, nodes=8), row("c", 5.0, nodes=4, gbs=77),
    )  # fmt: skip
    compared = compared_with(ours, theirs)
    assert [c.compare_ratio for c in compared] == [2.0, 1.25, None, None]
    assert [c.compare_layout and c.compare_layout["tp"] for c in compared] == [None, 2, None, 1]
    assert [c.compare_differing for c in compared] == [{}, {"kernel": "megatron"}, {}, {}]


def test_notes_and_doubts_count_what_ended_and_what_is_in_doubt():
    rows = [
        row("a", 1410.0, torch_version="2.13.0"), row("a", status="crash", repeat=1), *many(3, "oom"), *many(2, None),
        row("b", 1900.0, suspect="hot"), row("c", status="invalid", reason="loss is NaN"),
    ]  # fmt: skip
    table = without_doubtful_mfu(table_of(*rows))
    suspect, invalid, peak = caveats(table)
    assert suspect == "1 of 9 rows suspect (wins only a cell without other results), such as b: hot"
    assert invalid == "1 of 9 rows invalid, such as c: loss is NaN"
    assert peak.startswith("no MFU in 2 rows: a run computed 1.41 x as fast as the peak")
    note = notes(table)
    counts = "Layouts: 2 ok, 3 oom, 1 invalid, 2 pending. Suspect"
    assert note.startswith(
        f"{counts} (win only cells without other results): 1 of 9 rows. N{peak[1:]}. Made with ultrabench"
    )
    assert "torch 2.13.0" in note
    assert notes(table, include_suspects=True).startswith(f"{counts} (may win any cell): 1 of 9 rows. ")


def test_a_run_whose_start_in_full_has_failed_is_named_by_that_everywhere():
    """Parts of it were ok. Only where a start in full may still come is a launch the remedy."""
    parts = {"measured_gas": "2,4", "screened": True}
    failed = [row("a", **parts), row("a", status="oom", repeat=1)]
    for rows, reason, counts, remedy in (
        (failed, "1 oom", "1 run, none can win: 1 oom", "see why: ultrabench plot failures"),
        (
            [*failed, row("b", 50.0, **parts)],
            "1 ok only screened, by parts of steps or few whole steps; 1 oom",
            "2 runs, none can win: 1 only screened, by parts of steps or few whole steps, 1 oom",
            "launch the sweep again: it measures the best ones in full",
        ),
    ):
        table = table_of(*rows)
        (cell,) = rank(table)
        assert (cell.run_id, cell.reason) == (None, reason)
        (board,) = leaderboard(table)
        assert board[-1]["status"] == "oom"
        assert str(none_left(table.to_pandas(), "none can win")) == f"{counts}; {remedy}"
        assert notes(table).startswith("Layouts: 1 oom" if len(board) == 1 else "Layouts: 1 ok, 1 oom")
    (cell,) = cells_of(*failed, row("b", 50.0, **parts), row("b", 49.0, repeat=1))
    assert (cell.run_id, cell.num_oom) == ("b", 1)


@pytest.mark.parametrize("rank_by", ["tokens_per_s_per_gpu", "step_time_s"])
def test_a_leaderboard_holds_every_run_once_winners_first_and_the_rest_by_its_numbers(rank_by):
    rows = [
        row("best", 9.0), row("low", 2.0), row("close", 5.0, step_time_ci95_rel=0.9), row("unknown", **{rank_by: None}),
        row("slower", 7.0, stopped="slower_than_best"), row("hot", 8.0, suspect="hot"), row("oom", status="oom"),
        row("hot", status="crash", repeat=1), row("waits", status=None), row("left", status="skipped"),
        row("never", status="rejected"), row("other", 1.0, nodes=2),
    ]  # fmt: skip
    first, second = leaderboard(table_of(*rows), rank_by=rank_by)
    assert [(r["run_id"], r["rank"], r["best"], r["as_good_as_best"]) for r in (*first, *second)] == [
        ("best", 1, True, False), ("close", 2, False, True), ("hot", 3, False, False), ("slower", 4, False, False),
        ("low", 5, False, False), ("unknown", 6, False, False), ("oom", 7, False, False), ("waits", 8, False, False),
        ("left", 9, False, False), ("other", 10, True, False),
    ]  # fmt: skip
    assert {r["ranked_by"] for r in first} == {rank_by}


def test_a_leaderboard_is_ordered_by_the_ratio_to_the_control_and_needs_a_number():
    slower = row("s", 9.0, stopped="slower_than_best", **beside(0.95))
    table = table_of(row("control", 1.0, **beside(1.0)), row("b", 9.0, **beside(0.9)), slower)
    assert [r["run_id"] for r in leaderboard(table)[0]] == ["control", "s", "b"]
    with refused("no ok run has a value in hfu"):
        leaderboard(table, rank_by="hfu")
