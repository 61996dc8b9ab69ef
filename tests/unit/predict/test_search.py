"""The adaptive search: what it runs next, what it learns, when it ends, and what replays of it cost."""

import json
import math
import re
import sys
from collections import namedtuple
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from replay import STRATEGIES, ReplayedCell, ReplayedRun, main, prediction_metrics, replay
from replay_figure import figure

from tests.strategies import layouts
from ultrabench.analysis.figures.picture import render
from ultrabench.layout import AXES, FOLLOWING, Layout
from ultrabench.sweep.predict import search
from ultrabench.sweep.predict.predict import Prediction
from ultrabench.sweep.predict.search import (
    TriedRuns,
    beliefs_of,
    coordinates,
    expected_runs,
    propose,
    reasons,
    words,
)

Belief = namedtuple("Belief", "mean variance p_oom p_better")
USUAL = math.exp(search._STANDARD_LOG_WIDTH / 2)
"""Half the interval, as a factor, of a prediction whose errors are BIAS_SD and SHAPE_SD."""


def run(name, time_s, p_oom=0.0, factor=USUAL, **layout):
    """A run whose predicted step time is certain within `factor`."""
    prediction = Prediction(
        step_time_s=time_s, step_time_low_s=time_s / factor, step_time_high_s=time_s * factor, p_oom=p_oom,
        limited_by="compute", peak_mem_bytes=668 * 2**30, memory_share=8.35, duration_s=60.0 + 5 * time_s,
    )  # fmt: skip
    place = Layout(**{"dp": 8, **layout})
    return ReplayedRun(run_id=name, layout=place, prediction=prediction, step_time_s=None, oom=False)


def cell_of(factor=USUAL):
    grid = [(tp, mbs) for tp in (1, 2, 4, 8) for mbs in (1, 2, 4)]
    return [
        run(f"t{tp}m{mbs}", 1.0 + 0.2 * tp + 0.05 * mbs, factor=factor, tp=tp, mbs=mbs) for tp, mbs in grid
    ]


CELL = cell_of()
FAST, SECOND, *_ = CELL
AS_PREDICTED = TriedRuns(times_s={r.run_id: r.prediction.step_time_s for r in (FAST, SECOND)})


@pytest.mark.parametrize(
    ("runs", "max_p_oom", "first"),
    [
        (CELL, 1.0, ["t1m1"]),
        ([run("unlikely", 0.5, p_oom=0.8, tp=16), *CELL], 1.0, ["t1m1"]),
        ([run("unlikely", 0.5, p_oom=0.8)], 1.0, ["unlikely"]),  # nothing else is left
        ([run("huge", 0.5, p_oom=0.95)], 1.0, ["huge"]),
        ([run("huge", 0.5, p_oom=0.95)], 0.9, []),
    ],
)
def test_the_search_begins_with_the_fastest_that_is_likely_to_fit(runs, max_p_oom, first):
    assert [run.run_id for run in propose(runs, TriedRuns(max_p_oom=max_p_oom))] == first


def test_the_search_ends_where_all_is_as_predicted_and_the_rest_is_far():
    far = [FAST, SECOND, *(r for r in CELL if r.layout.tp > 2)]
    assert propose(far, AS_PREDICTED) == []
    first = TriedRuns(times_s={FAST.run_id: 1.25})
    assert propose(far, first) == [SECOND], "the second may be the faster one"
    assert propose([FAST, *far[-3:]], first) == [], "no second run is worth it"
    surprise = TriedRuns(times_s={FAST.run_id: 4.0})
    assert propose([FAST, *far[-3:]], surprise), "the first was an accident"
    slow = run("slow", 9.0, p_oom=0.7, tp=8)
    assert propose([FAST, slow], TriedRuns(times_s={FAST.run_id: 1.25})) == [], "no second is likely to fit"
    reason_by_id = reasons(far, AS_PREDICTED)
    assert reason_by_id.keys() == {r.run_id for r in far} - AS_PREDICTED.times_s.keys()
    pattern = r"not promising: \d+ % slower than the best, P\(better\) \d\.\d %"
    assert all(re.fullmatch(pattern, reason) for reason in reason_by_id.values())


def test_a_slow_neighbourhood_sends_the_search_elsewhere():
    cell = [run(f"t{tp}", 1.0 + 0.01 * tp, tp=tp) for tp in (1, 2, 4, 16, 32)]
    assert [run.run_id for run in propose(cell, TriedRuns(times_s={"t1": 1.4, "t2": 1.4}))] == ["t16"]


def belief(runs, tried, run_id, best_s=1.25):
    """What is expected of one run of a cell."""
    beliefs = beliefs_of(runs, tried)
    columns = (beliefs.means, beliefs.variances, beliefs.p_ooms, beliefs.p_better(best_s))
    return Belief(*(column[beliefs.index_by_id[run_id]] for column in columns))


def test_one_accident_does_not_move_the_whole_cell():
    usual, accident = (
        belief(CELL, TriedRuns(times_s={"t1m1": 1.25 * math.exp(error)}), "t1m2").mean for error in (0.3, 3.0)
    )
    assert 0 < accident < 2.2 * usual


def test_an_uncertain_profile_is_believed_less():
    """A layout whose interval reaches below the best has a chance to be better, and is not left out."""
    certain, exact, sure, unsure = (belief(cell_of(f), AS_PREDICTED, "t8m4") for f in (1.0, 1.01, 1.1, 1.65))
    assert exact.variance < sure.variance < unsure.variance
    assert sure.p_better < 0.0001 < unsure.p_better
    assert certain.variance == exact.variance > 0, "never surer than a measurement"
    accident = TriedRuns(times_s={"t1m1": 1.25 * math.exp(1.0)})
    assert belief(cell_of(1.65), accident, "t1m1").mean > belief(CELL, accident, "t1m1").mean


PROVEN = USUAL**0.4
"""Half the interval, as a factor, of a profile that is proven for a run."""


def test_conditioning_one_by_one_is_the_gaussian_process():
    times_s = {"t1m1": 1.3, "t4m2": 1.7, "t8m4": 3.0}
    measured = [r for r in cell_of(PROVEN) if r.run_id in times_s]
    other = run("t2m1", 1.45, factor=PROVEN, tp=2)
    cell = [*measured, other]
    place = np.array([[math.log2(r.layout.tp), math.log2(r.layout.mbs)] for r in cell])
    squares = ((place[:, None] - place[None]) ** 2).sum(-1)
    covariance = 0.4**2 * (0.15**2 + 0.15**2 * np.exp(-squares / (2 * 1.5**2)))
    errors = [math.log(times_s[r.run_id] / r.prediction.step_time_s) for r in measured]
    errors = [min(error, 0.4 * search.MAX_LOG_RATIO) for error in errors]
    weights = np.linalg.solve(covariance[:3, :3] + 0.03**2 * np.eye(3), covariance[:3, 3])
    other_belief = belief(cell, TriedRuns(times_s=times_s), other.run_id)
    assert other_belief.mean == pytest.approx(weights @ errors)
    assert other_belief.variance == pytest.approx(covariance[3, 3] - weights @ covariance[:3, 3])


def test_an_unproven_interval_becomes_as_wide_as_the_errors_of_the_cell():
    """Runs as predicted make it narrower, and surprises wider; that of a proven profile stays."""
    as_predicted = {r.run_id: r.prediction.step_time_s for r in CELL[:4]}
    surprises = {
        run_id: time_s * (1.5 if n % 2 else 0.7) for n, (run_id, time_s) in enumerate(as_predicted.items())
    }
    for factor, differs in ((USUAL, True), (PROVEN, False)):
        sure, unsure = (
            belief(cell_of(factor), TriedRuns(times_s=times_s), "t8m4").variance
            for times_s in (as_predicted, surprises)
        )
        assert bool(unsure > 2 * sure) is differs


def test_an_unproven_profile_is_tried_once_on_each_mechanism_that_may_win():
    """The first run is a pipeline's; one with tensor parallelism may win, one with recomputation may not."""
    cells = {
        factor: [
            run("p2", 1.0, factor=factor, pp=2, gas=2, pp_schedule="1f1b"),
            run("p4", 1.02, factor=factor, pp=4, gas=4, pp_schedule="1f1b"),
            run("t2", 1.15, factor=factor, tp=2),
            run("t4", 1.2, factor=factor, tp=4),
            run("full", 3.0, factor=factor, tp=2, recompute="full"),
        ]
        for factor in (USUAL, PROVEN)
    }
    measured = TriedRuns(times_s={"p2": 1.0})
    assert [r.layout.pp for r in propose(cells[USUAL], measured)] == [1]
    assert [r.run_id for r in propose(cells[PROVEN], measured)] == ["p4"], "as the interval says"
    slow_start = TriedRuns(times_s={"p2": 1.0, "p4": 1.02, "t2": 1.15, "t4": 1.2})
    assert propose(cells[USUAL], slow_start) == []


def test_an_option_is_a_mechanism_of_its_own():
    """Runs of one layout in other precisions are apart; one is tried before the search ends."""
    plain = run("bf16", 1.0)
    other = replace(run("fp8", 1.1), options={"precision": "fp8"})
    assert propose([plain, other], TriedRuns(times_s={"bf16": 1.0})) == [other]


def test_a_foreseen_search_makes_the_runs_that_are_proposed_one_after_the_other():
    """What a search keeps from one choice to the next changes no choice, also where runs fail or surprise."""
    cell = [
        *cell_of(2.5),
        *(run(f"p{pp}", 1.3, p_oom=0.6, pp=pp, pp_schedule="afab", gas=8) for pp in (2, 4)),
    ]
    tried = TriedRuns(times_s={"t1m1": 1.9, "t4m2": 1.5}, oom_ids={"p4"}, failed_ids={"t8m4"})
    for count in (1, 3):
        foreseen = [planned.run_id for planned in expected_runs(cell, tried, count)]
        times_s, oom_ids, steps = dict(tried.times_s), {*tried.oom_ids}, []
        while proposed := propose(cell, replace(tried, times_s=times_s, oom_ids=oom_ids), count):
            steps += [planned.run_id for planned in proposed]
            times_s |= {r.run_id: r.prediction.step_time_s for r in proposed if r.prediction.p_oom <= 0.5}
            oom_ids |= {r.run_id for r in proposed if r.prediction.p_oom > 0.5}
        assert foreseen == steps
        assert len(steps) > 3


def test_chances_of_memory_follow_the_runs_that_did_and_did_not_fit():
    cell = [run(f"p{p}", 1.0, p_oom=p, tp=tp) for p, tp in ((0.1, 1), (0.4, 2), (0.6, 4))]
    before, lower, higher = (
        belief(cell, tried, "p0.4").p_oom
        for tried in (TriedRuns(), TriedRuns(times_s={"p0.6": 1.0}), TriedRuns(oom_ids={"p0.1"}))
    )
    assert before == pytest.approx(0.4, abs=0.02)
    assert lower + 0.05 < before < higher - 0.1


def test_what_a_failed_run_dominates_is_never_proposed():
    cell = [run(f"m{mbs}", 2.0 - 0.1 * mbs, p_oom=0.1, mbs=mbs, gas=8 // mbs) for mbs in (1, 2, 4)]
    assert propose(cell, TriedRuns(oom_ids={"m2"})) == cell[:1]
    assert "m4" not in reasons(cell, TriedRuns(oom_ids={"m2"}))


@pytest.mark.parametrize(
    ("max_p_oom", "reason_by_id"), [(0.9, {"huge": "predicted 668 GiB of 80, P(OOM) 99 %"}), (1.0, {})]
)
def test_reasons_name_the_memory_that_is_predicted(max_p_oom, reason_by_id):
    assert reasons([run("huge", 0.5, p_oom=0.99), *CELL], TriedRuns(max_p_oom=max_p_oom)) == reason_by_id


def test_replays_count_hours_and_what_was_missed(tmp_path):
    cell = [replace(r, step_time_s=1.1 * r.prediction.step_time_s) for r in CELL]
    cell += [replace(run("oom", 0.9, p_oom=0.6, mbs=8), oom=True)]
    key = ReplayedCell("", "own", "1B", "H100-SXM", 8, 4096, 64)
    replays = {name: replay({key: cell}, name, 1, 0.9) for name in STRATEGIES}
    assert [replays[name]["cells"][0]["regret"] for name in ("adaptive", "exhaustive")] == [0.0, 0.0]
    hours = {name: document["gpu_hours_share"] for name, document in replays.items()}
    assert hours["adaptive"] < hours["predicted"] < hours["exhaustive"]
    all_s = sum(60 + 5 * r.step_time_s for r in cell if r.step_time_s) * 8 + (60 + 0.9) * 8
    assert sum(r.cost_gpu_s() / r.layout.tp for r in cell) == pytest.approx(all_s)
    assert replays["exhaustive"]["runs"] == len(cell)
    large_cells = replays["adaptive"]["large_cells"]
    assert (large_cells["cells"], large_cells["near_best"], large_cells["layouts"]) == (1, 1, len(cell))
    assert large_cells["runs_share"] == replays["adaptive"]["runs"] / len(cell) < 1
    assert replays["adaptive"]["small_cells"]["cells"] == 0
    assert replays["adaptive"]["predictions"] == {
        "rank_correlation": pytest.approx(1), "first_regret": 0, "best_in_first": True,
    }  # fmt: skip
    assert render(lambda: figure(replays["adaptive"], "f"), tmp_path / "f.png").startswith(b"\x89PNG")


def test_predictions_are_ranked_by_the_layout_that_they_put_first():
    times_s = {"t1m1": 2.0, "t1m2": 1.0, "t1m4": 3.0, "t2m1": 4.0, "t2m2": 5.0, "t2m4": 0.5}
    runs = [replace(r, step_time_s=times_s.get(r.run_id)) for r in CELL]
    metrics = prediction_metrics(runs)
    assert metrics["first_regret"] == 3
    assert metrics["best_in_first"] is False
    assert metrics["rank_correlation"] == pytest.approx(1 - 6 * 32 / 210), "squared differences of ranks: 32"
    assert prediction_metrics(runs[:4])["first_regret"] is None, "too few to rank"


OTHER_VALUES = {
    "dp_shard": 2,
    "recompute": "full",
    "zero_stage": 3,
    "pp_schedule": "zbv",
    "virtual_stages": 3,
    "sequence_parallel": "off",
    "cp_exchange": "allgather",
    "dp_overlap": "off",
    "pp_layout": "even",
    **dict.fromkeys(("tp", "cp", "mbs", "ep"), 64),
}


def place(layout):
    return coordinates(layout), words(layout)


def test_layouts_that_differ_in_any_axis_are_apart():
    """An axis without a line in this table fails, so that no new one is overlooked."""
    pipeline = Layout(dp=8, pp=2, gas=2, zero_stage=1, pp_schedule="interleaved", virtual_stages=2)
    for name in AXES:
        if name in FOLLOWING or name == "pp":
            continue
        changes = {name: OTHER_VALUES[name]}
        assert place(replace(pipeline, **changes)) != place(pipeline), name
    assert place(Layout(dp=4, pp=2, gas=2, pp_schedule="1f1b")) != place(Layout(dp=4, gas=2))


@given(layouts(most=5))
def test_every_layout_has_a_place_with_all_axes_that_follow_from_no_other(layout):
    assert len(coordinates(layout)) + len(words(layout)) == len(fields(Layout)) - len(FOLLOWING)


def test_a_number_that_may_be_0_fails_without_a_coordinate_of_its_own(monkeypatch):
    monkeypatch.setattr("ultrabench.sweep.predict.search._AXIS_COORDINATES", {})
    coordinates.cache_clear()
    with pytest.raises(ValueError, match="zero_stage=0 has no number of doublings"):
        coordinates(Layout(dp=1))


def test_the_program_replays_a_file_and_refuses_an_unknown_strategy(monkeypatch, capsys):
    path = Path(__file__).parents[3] / "benchmarks/h100/runs.parquet"
    monkeypatch.setattr(sys, "argv", ["replay.py", str(path), "--strategy", "exhaustive", "--json"])
    assert main() == 0
    assert json.loads(capsys.readouterr().out)["strategy"] == "exhaustive"
    monkeypatch.setattr(sys, "argv", ["replay.py", str(path), "--strategy", "adaptiv"])
    assert main() == 2
    assert "unknown strategy 'adaptiv'; did you mean adaptive?" in capsys.readouterr().err
