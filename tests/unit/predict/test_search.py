"""The adaptive search: what it runs next, what it learns, when it ends, and what replays of it cost."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from ultrabench.analysis.figures.picture import render
from ultrabench.analysis.figures.replayed import figure
from ultrabench.analysis.predict.replay import STRATEGIES, ReplayedRun, replay
from ultrabench.layout import Layout
from ultrabench.sweep.predict.predict import Prediction
from ultrabench.sweep.predict.search import Tried, beliefs_of, propose, reasons


def run(name, time_s, p_oom=0.0, measured=None, oom=False, **layout):
    prediction = Prediction(
        step_time_s=time_s, step_time_low_s=time_s, step_time_high_s=time_s, p_oom=p_oom, limited_by="compute",
        peak_mem_bytes=2**35, memory_share=0.4 + p_oom, duration_s=60.0 + 5 * time_s,
    )  # fmt: skip
    place = Layout(**{"dp": 8, **layout, "pp_schedule": "1f1b" if layout.get("pp", 1) > 1 else "none"})
    return ReplayedRun(run_id=name, layout=place, prediction=prediction, step_time_s=measured, oom=oom)


CELL = [
    run(f"t{tp}m{mbs}", 1.0 + 0.2 * tp + 0.05 * mbs, tp=tp, mbs=mbs)
    for tp in (1, 2, 4, 8)
    for mbs in (1, 2, 4)
]
FAST, SECOND = CELL[0], CELL[1]


def names(runs):
    return [run.run_id for run in runs]


def test_the_search_begins_with_the_fastest_that_is_likely_to_fit():
    assert names(propose(CELL, Tried())) == ["t1m1"]
    unlikely = run("small", 0.5, p_oom=0.8, tp=16)
    assert names(propose([unlikely, *CELL], Tried())) == ["t1m1"]
    assert names(propose([unlikely], Tried())) == ["small"], "nothing else is left"
    huge = [run("huge", 0.5, p_oom=0.95)]
    assert propose(huge, Tried(max_p_oom=0.9)) == [] != propose(huge, Tried(max_p_oom=1.0))


def test_the_search_ends_after_two_runs_where_all_is_as_predicted():
    tried = Tried(times_s={r.run_id: r.prediction.step_time_s for r in (FAST, SECOND)})
    far = [FAST, SECOND, *(r for r in CELL if r.layout.tp > 2)]
    assert propose(far, tried) == []
    assert propose(far, Tried(times_s={FAST.run_id: 1.25})), "one run is not enough"
    told = reasons(far, tried)
    assert told.keys() == {r.run_id for r in far} - tried.times_s.keys()
    assert all(re.fullmatch(r"not promising: \d+ % slower than the best, P\(better\) \d\.\d %", reason)
               for reason in told.values())  # fmt: skip


def test_no_second_success_is_demanded_where_nothing_else_is_likely_to_fit():
    slow = run("slow", 9.0, p_oom=0.7, tp=8)
    assert propose([FAST, slow], Tried(times_s={FAST.run_id: 1.25})) == []


def test_a_slow_neighbourhood_sends_the_search_elsewhere():
    cell = [run(f"t{tp}", 1.0 + 0.01 * tp, tp=tp) for tp in (1, 2, 4, 16, 32)]
    beliefs = beliefs_of(cell, Tried(times_s={"t1": 1.4}))
    assert beliefs["t2"].mean > beliefs["t32"].mean > 0
    assert beliefs["t2"].variance < beliefs["t32"].variance
    assert names(propose(cell, Tried(times_s={"t1": 1.4, "t2": 1.4}))) == ["t16"]


def test_one_accident_does_not_move_the_whole_cell():
    usual = beliefs_of(CELL, Tried(times_s={"t1m1": 1.25 * math.exp(0.3)}))["t1m2"].mean
    accident = beliefs_of(CELL, Tried(times_s={"t1m1": 1.25 * math.exp(3.0)}))["t1m2"].mean
    assert 0 < accident < 2 * usual


def test_an_uncertain_profile_is_believed_less():
    """A layout whose interval reaches below the best has a chance to be better, and is not left out."""

    def widened(by):
        told = [(r, r.prediction.step_time_s) for r in CELL]
        return [replace(r, prediction=replace(r.prediction, step_time_low_s=s / by, step_time_high_s=s * by))
                for r, s in told]  # fmt: skip

    tried = Tried(times_s={r.run_id: r.prediction.step_time_s for r in (FAST, SECOND)})
    sure, unsure = (beliefs_of(widened(by), tried)["t8m4"] for by in (1.1, 1.65))
    assert sure.variance < unsure.variance
    assert sure.p_better(1.25) < 0.001 < unsure.p_better(1.25)
    assert beliefs_of(CELL, tried)["t8m4"].variance == sure.variance, "never surer than a fitted profile"
    accident = Tried(times_s={"t1m1": 1.25 * math.exp(1.0)})
    assert beliefs_of(widened(1.65), accident)["t1m1"].mean > beliefs_of(CELL, accident)["t1m1"].mean


def test_conditioning_one_by_one_is_the_gaussian_process():
    times_s = {"t1m1": 1.3, "t4m2": 1.7, "t8m4": 3.0}
    cell = [r for r in CELL if r.run_id in times_s or r.run_id == "t2m1"]
    place = np.array([[math.log2(r.layout.tp), math.log2(r.layout.mbs)] for r in cell])
    squares = ((place[:, None] - place[None]) ** 2).sum(-1)
    covariance = 0.15**2 + 0.15**2 * np.exp(-squares / (2 * 1.5**2))
    known = [i for i, r in enumerate(cell) if r.run_id in times_s]
    at = next(i for i, r in enumerate(cell) if r.run_id == "t2m1")
    errors = [math.log(times_s[cell[i].run_id] / cell[i].prediction.step_time_s) for i in known]
    weights = np.linalg.solve(covariance[np.ix_(known, known)] + 0.03**2 * np.eye(3), covariance[known, at])
    belief = beliefs_of(cell, Tried(times_s=times_s))["t2m1"]
    assert belief.mean == pytest.approx(weights @ errors)
    assert belief.variance == pytest.approx(covariance[at, at] - weights @ covariance[known, at])


def test_chances_of_memory_follow_the_runs_that_did_and_did_not_fit():
    cell = [run(f"p{p}", 1.0, p_oom=p, tp=tp) for p, tp in ((0.1, 1), (0.4, 2), (0.6, 4))]
    before = beliefs_of(cell, Tried())["p0.4"].p_oom
    assert before == pytest.approx(0.4, abs=0.02)
    assert beliefs_of(cell, Tried(oom={"p0.1"}))["p0.4"].p_oom > before + 0.2
    assert beliefs_of(cell, Tried(times_s={"p0.6": 1.0}))["p0.4"].p_oom < before - 0.1


def test_what_a_failed_run_dominates_is_never_proposed():
    cell = [run(f"m{mbs}", 2.0 - 0.1 * mbs, p_oom=0.1, mbs=mbs) for mbs in (1, 2, 4)]
    assert names(propose(cell, Tried(oom={"m2"}))) == ["m1"]
    assert "m4" not in reasons(cell, Tried(oom={"m2"}))


def test_reasons_name_the_memory_that_is_predicted():
    huge = replace(run("huge", 0.5, p_oom=0.99).prediction, peak_mem_bytes=668 * 2**30, memory_share=8.35)
    cell = [replace(run("huge", 0.5, p_oom=0.99), prediction=huge), *CELL]
    told = {"huge": "predicted 668 GiB of 80, P(OOM) 99 %"}
    assert (reasons(cell, Tried(max_p_oom=0.9)), reasons(cell, Tried(max_p_oom=1.0))) == (told, {})


def test_replays_count_hours_and_what_was_missed(tmp_path):
    cell = [replace(r, step_time_s=1.1 * r.prediction.step_time_s) for r in CELL]
    cell += [replace(run("oom", 0.9, p_oom=0.6, mbs=8), oom=True)]
    cells = {("1B", 1): cell}
    found = {name: replay(cells, name, 1, 0.9) for name in STRATEGIES}
    assert [document["cells"][0]["regret"] for document in found.values()][:2] == [0.0, 0.0]
    hours = {name: document["gpu_hours_share"] for name, document in found.items()}
    assert hours["adaptive"] < hours["predicted"] < hours["exhaustive"]
    all_s = sum(60 + 5 * r.step_time_s for r in cell if r.step_time_s) * 8 + (60 + 0.9) * 8
    assert sum(r.cost() / r.layout.tp for r in cell) == pytest.approx(all_s)
    assert found["exhaustive"]["runs"] == len(cell)
    assert render(lambda: figure(found["adaptive"], "f"), tmp_path / "f.png").startswith(b"\x89PNG")
