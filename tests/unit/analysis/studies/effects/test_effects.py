"""What each value of a knob is worth: which runs make a pair, and how often the interval is right."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pyarrow as pa
import pytest

from tests.configs import refused
from tests.sweep_folder import write
from tests.unit.analysis import page_tables
from tests.unit.analysis.sweeps import LAYOUTS as LAYOUTS_OF_SWEEP
from tests.unit.analysis.sweeps import OK, attempted, make_sweep, spec_of
from tests.unit.analysis.tables import row, table_of
from ultrabench.analysis.page.rows import document
from ultrabench.analysis.results.collect import collect
from ultrabench.analysis.results.knobs import in_order, knobs
from ultrabench.analysis.results.ranking import Ranking, leaderboard
from ultrabench.analysis.studies.effects import page_table
from ultrabench.analysis.studies.effects.effects import (
    cells,
    competing,
    effect,
    effects,
    effects_by_axis,
    notes,
    pairs,
    too_few_pairs,
)
from ultrabench.kernel_config import KernelConfig

LAYOUTS = [*product((1, 2, 4, 8), (1, 2, 4, 8, 16))]
"""tp and mbs of 20 layouts, each of which runs with two values of zero_stage."""


def factorial(**columns):
    """The 40 rows of two ZeRO stages on 20 layouts."""
    return [
        row(
            f"{tp}-{mbs}-{stage}", tp=tp, dp=8 // tp, mbs=mbs, gas=32 * tp // mbs, zero_stage=stage, **columns
        )
        for tp, mbs in LAYOUTS
        for stage in (0, 1)
    ]


def simulated(seed, worth, noise=0.025, of_allocation=0.04, allocations=5):
    """The effect of 40 noisy runs in random allocations, where zero_stage=1 is `worth` times as fast."""
    rng = np.random.default_rng(seed)
    allocation_numbers = rng.permutation(np.arange(len(FACTORIAL.runs)) % allocations)
    logs = np.repeat(rng.normal(0, 0.5, len(LAYOUTS)), 2) + rng.normal(0, noise, len(allocation_numbers))
    logs += rng.normal(0, of_allocation, allocations)[allocation_numbers]
    is_one = FACTORIAL.runs["zero_stage"] == 1
    order = FACTORIAL.runs.sort_values(["tp", "mbs", "zero_stage"]).index
    rates = np.empty(len(allocation_numbers))
    rates[order] = np.exp(logs)
    runs = FACTORIAL.runs.assign(rate=rates * np.where(is_one, worth, 1))
    repeats = FACTORIAL.repeats.assign(allocation=allocation_numbers[np.argsort(order)])
    return effect(replace(FACTORIAL, runs=runs, repeats=repeats), PAIRS)


FACTORIAL = competing(table_of(*factorial()))
PAIRS = pairs(FACTORIAL, "zero_stage")


@pytest.mark.parametrize(("worth", "at_least", "at_most"), [(1.05, 95, 100), (1.0, 0, 5)])
@pytest.mark.parametrize("seeds", [range(100), range(100, 200)])
def test_an_effect_of_5_per_cent_is_found_and_none_is_invented(seeds, worth, at_least, at_most):
    assert len(PAIRS) == 20
    num_proven = sum(simulated(seed, worth).proven_log_ratio > 0 for seed in seeds)
    assert at_least <= num_proven <= at_most


def only(axis, *rows):
    """The single effect of an axis."""
    (single,) = effects(competing(table_of(*rows)), axis)
    return single


def test_dp_gas_and_details_follow_from_an_axis():
    tp = only(
        "tp", row("a", 100.0), row("b", 80.0, tp=2, dp=4, gas=64), row("c", tp=4, dp=2, gas=128, status="oom")
    )
    assert (tp.value, tp.against, tp.ratio, tp.pairs) == (2, 1, pytest.approx(0.8), 1)
    piped = {"pp": 2, "dp": 4, "gas": 64}
    rows = [
        row("a", 100.0), row("b", 80.0, pp_schedule="1f1b", **piped),
        row("c", 90.0, pp_schedule="interleaved", virtual_stages=2, **piped),
        row("d", 50.0, pp=4, dp=2, gas=128, pp_schedule="zbv", virtual_stages=2),
    ]  # fmt: skip
    measured = competing(table_of(*rows))
    assert [(e.value, e.pairs) for e in effects(measured, "pp")] == [(1, 2), (4, 0)]
    schedule, _ = effects(measured, "pp_schedule")
    assert (schedule.value, schedule.ratio) == ("interleaved", pytest.approx(9 / 8))
    (small, large) = (row(name, mbs=mbs, pp_schedule=kind, **piped | {"gas": gas})
                      for name, mbs, gas, kind in (("a", 1, 2, "1f1b"), ("b", 2, 1, "afab")))  # fmt: skip
    assert only("mbs", small, large).pairs == 1


def test_runs_of_other_models_hardware_environments_and_axes_are_no_pair():
    others = [{"model": "1B"}, {"hardware": "a100x8"}, {"nodes": 2}, {"seq_len": 128}, {"attention": "math"},
              {"kernel_version": "2"}, {"torch_version": "2"}, {"kernel_digest": "x"}]  # fmt: skip
    for other in others:
        columns = other | ({"dp": 16, "gas": 16, "gpus": 16} if "nodes" in other else {})
        rows = row("a", attention="flash"), row("b", **{"attention": "flash", "zero_stage": 1} | columns)
        assert effects(competing(table_of(*rows)), "zero_stage") == [], other
    torch = (row("a", env_id="x", torch_version="1"), row("b", env_id="y", torch_version="2", zero_stage=1))
    assert effects(competing(table_of(*torch)), "zero_stage") == []
    same = (row("a", env_id="x", kernel_version="1"), row("b", env_id="x", kernel_version="2", zero_stage=1))
    assert len(effects(competing(table_of(*same)), "zero_stage")) == 1


def test_a_knob_that_costs_6_per_cent_is_found_in_the_results_of_a_sweep(tmp_path):
    """Each step time has 1 % of noise; another knob has no effect."""
    flags = {"graph": {"none": (), "full": ("--graph",)}, "fuse": {"off": (), "on": ("--fuse",)}}
    knobs_in_words = {"graph": "what is captured", "fuse": "whether kernels are fused"}
    kernel = KernelConfig(
        name="mine", kind="command", command=("train",), precision="bf16", knobs=knobs_in_words, flags=flags
    )
    specs = [
        replace(spec_of(layout, kernel), variant={"flags.fuse": fuse, "flags.graph": graph})
        for layout in LAYOUTS_OF_SWEEP
        for fuse, graph in product(flags["fuse"], flags["graph"])
    ]
    rng = np.random.default_rng(7)
    slowdown = {"none": 1.0, "full": 1.06}
    seconds = [
        0.2 / s.layout.mbs**0.3 * slowdown[s.variant["flags.graph"]] * rng.normal(1, 0.01, 10) for s in specs
    ]
    folder = make_sweep(tmp_path / "s", specs, kernel=kernel)
    results = [replace(OK, step_times_s=tuple(times)) for times in seconds]
    write(folder, *(event for words in zip(specs, results, strict=True) for event in attempted(*words)))
    measured = competing(collect([folder], pytest.fail))
    (graph,) = effects(measured, "flags.graph")
    assert (graph.value, graph.against, graph.pairs) == ("none", "full", 16)
    assert graph.ratio == pytest.approx(1.06, abs=0.01)
    assert graph.proven_log_ratio > 0.04
    (fuse,) = effects(measured, "flags.fuse")
    assert fuse.proven_log_ratio == 0


def test_two_pairs_give_no_interval_and_a_table_says_how_many_do():
    rows = [
        row(f"{mbs} {zero}", rate, mbs=mbs, gas=32 // mbs, zero_stage=zero)
        for mbs, zero, rate in (
            (1, 0, 100.0),
            (1, 1, 150.0),
            (2, 0, 100.0),
            (2, 1, 20.0),
            (4, 0, 100.0),
            (4, 1, 110.0),
        )
    ]
    two, three = (only("zero_stage", *rows[:number]) for number in (4, 6))
    assert cells("zero_stage", two)[4:] == ["too few pairs (need 3)", "2"]
    assert three.low < three.ratio < three.high
    with refused(
        "runs on different numbers of nodes cannot be paired; use: ultrabench plot scaling --axis nodes"
    ):
        competing(table_of(*rows)).require_axis("nodes")
    with refused("unknown axis 'sequence'; did you mean sequence_parallel?"):
        competing(table_of(*rows)).require_axis("sequence")


def test_attention_has_the_name_that_its_sweep_lists():
    rows = (
        row("a", attention="flash", attention_listed="auto"),
        row("b", 50.0, attention="math", attention_listed="math"),
    )
    (worth,) = effects(competing(table_of(*rows)), "attention")
    assert (worth.against, worth.value, worth.ratio) == ("auto", "math", pytest.approx(0.5))
    assert [run["options"] for board in leaderboard(table_of(*rows)) for run in board] == [
        {"attention": "auto"},
        {"attention": "math"},
    ]


def with_variants(*pairs_of_row_and_variant):
    rows, variants = zip(*pairs_of_row_and_variant, strict=True)
    texts = [variant and json.dumps(variant) for variant in variants]
    table = table_of(*rows)
    return table.set_column(table.column_names.index("variant"), "variant", pa.array(texts, pa.string()))


def test_knobs_of_the_variant_are_axes_too():
    """Its variables make another environment, which is no reason against a pair."""
    table = with_variants(
        (row("a", 100.0, env_id="x", env="{}"), None),
        (row("b", 90.0, env_id="y", env='{"A": "Ring"}'), {"env.A": "Ring"}),
        (row("c", 110.0, env_id="x", env="{}"), {"words.etp": 8, "env.A": None}),
        (row("d", 99.0, env_id="y", env='{"A": "Ring"}'), {"words.etp": 8, "env.A": "Ring"}),
    )
    measured = competing(table)
    assert measured.axes == ["env.A", "words.etp"]
    (ring,), (etp,) = effects(measured, "env.A"), effects(measured, "words.etp")
    assert (ring.value, ring.against, ring.ratio, ring.pairs) == ("Ring", "unset", pytest.approx(0.9), 2)
    assert (etp.value, etp.against, etp.ratio, etp.pairs) == (8, "unset", pytest.approx(1.1), 2)
    assert competing(table_of(row("a"))).axes == []


def test_the_baseline_is_the_first_value_of_the_sweep_or_the_most_frequent_one():
    def baseline(first):
        rows = (
            row("a", first_values=first),
            row("b", mbs=2, first_values=first),
            row("c", mbs=4, first_values=first),
        )
        return {effect.against for effect in effects(competing(table_of(*rows)), "mbs")}

    assert baseline('{"mbs": 4}') == {4}
    assert baseline('{"mbs": 8, "tp": 4}') == baseline(None) == {1}, (
        "no run has it: of equally frequent ones the first"
    )
    first = {"first_values": '{"env.A": null, "words.etp": 8}'}
    etp = with_variants((row("a", **first), {"words.etp": 1}), (row("b", **first), {"words.etp": 8}))
    assert [effect.against for effect in effects(competing(etp), "words.etp")] == [8]
    ring = (
        (row("a", **first), {"env.A": "Ring"}),
        (row("b", **first), {"env.A": "Alg"}),
        (row("c", **first), None),
    )
    assert {effect.against for effect in effects(competing(with_variants(*ring)), "env.A")} == {"unset"}


def test_values_have_an_order_and_a_knob_without_a_choice_has_none():
    assert in_order("words.etp", [16, "unset", 8, None, "on"]) == ["unset", 8, 16, "on"]
    assert in_order("recompute", ["full", "none", "every3", "attention"]) == [
        "none",
        "attention",
        "full",
        "every3",
    ]
    frame = knobs(
        [row("a"), row("b", pp=2, pp_schedule="zbv", virtual_stages=2, compile=False, zero_stage=1)]
    )
    assert frame[["pp_schedule", "virtual_stages", "dp_shard", "compile"]].values.tolist() == [
        [None, None, None, None], ["zbv", 2, 0, None],
    ]  # fmt: skip


def test_repeats_count_as_their_median_and_give_the_interval_of_a_single_pair():
    def repeated(run_id, rates, **columns):
        return [row(run_id, rate, repeat=n, allocation=f"a{n}", **columns) for n, rate in enumerate(rates)]

    slow, fast = repeated("a", (100, 130, 110)), repeated("b", (120.0, 156.0, 132.5), zero_stage=1)
    interval = only("zero_stage", *slow, *fast)
    assert (interval.pairs, interval.ratio) == (1, pytest.approx(1.2, rel=0.01))
    assert 1.15 < interval.low < interval.high < 1.25
    assert only("zero_stage", *slow, *repeated("b", (120.0,), zero_stage=1)).low is None
    unmade = [
        row(f"{n}", mbs=2**n, gas=32 // 2**n, zero_stage=z, status="skipped") for n in (1, 2) for z in (0, 1)
    ]
    measured = competing(table_of(*slow, *fast, *unmade))
    assert "zero_stage" not in {lack.axis for lack in too_few_pairs(measured, effects_by_axis(measured))}
    rows = *slow, *fast, row("c", 100.0, mbs=2, gas=16), row("d", 120.0, mbs=2, gas=16, zero_stage=1)
    assert only("zero_stage", *rows).ratio == pytest.approx((132.5 / 110 * 1.2) ** 0.5)


def test_ratios_to_one_control_cancel_the_speed_of_an_allocation():
    rows = [
        row("a", 100.0, control="c", control_ratio=1.0, allocation="x"),
        row("b", 60.0, control="c", control_ratio=1.2, allocation="y", zero_stage=1),
    ]
    assert only("zero_stage", *rows).ratio == pytest.approx(1.2)
    rows[1]["control"] = "another"
    assert only("zero_stage", *rows).ratio == pytest.approx(0.6)


def test_two_allocations_that_hold_one_value_each_prove_nothing():
    rows = factorial()
    for run in rows:
        run.update(allocation=f"a{run['zero_stage']}", tokens_per_s_per_gpu=100.0 + 30 * run["zero_stage"])
    assert (only("zero_stage", *rows).pairs, only("zero_stage", *rows).low) == (20, None)
    for run in rows:
        run["allocation"] = "a"
    assert only("zero_stage", *rows).low == pytest.approx(1.3, rel=0.01)


def test_steps_that_vary_widen_an_interval_that_is_narrow_by_luck():
    rows = [row(f"{n}{z}", 100.0, mbs=2**n, gas=32 // 2**n, zero_stage=z) for n in range(3) for z in (0, 1)]
    assert only("zero_stage", *rows).high < 1.001
    for run in rows:
        run["step_time_ci95_rel"] = 0.1
    assert only("zero_stage", *rows).high > 1.1


def test_runs_that_cannot_win_are_left_out_counted_and_named():
    rows = [
        row("a"), row("b", zero_stage=1), row("c", zero_stage=2, suspect="x"), row("d", zero_stage=3, status="oom"),
        row("e", mbs=2, gas=16, stopped="slower_than_best"), row("f", status=None), row("g", status="rejected"),
    ]  # fmt: skip
    measured = competing(table_of(*rows))
    assert (len(measured.runs), measured.num_left_out) == (2, {"failed": 1, "suspect": 1, "stopped": 1})
    assert "a slow value may look better than it is" in measured.note
    load = {"suspect": "other programs used 40 % of the cores", "suspect_codes": ["foreign_load"]}
    fact = (
        "3 runs, none can win: 2 suspect (other programs used 40 % of the cores), 1 oom; "
        "to accept these runs, launch again"
    )
    with refused(f"{fact} with measure.max_foreign_load=null"):
        competing(table_of(row("a", **load), row("b", mbs=2, gas=16, **load), rows[3]))
    with refused("1 run, none can win: 1 suspect (x); correct hardware.peak_flops_per_s and launch again"):
        competing(table_of(row("a", suspect="x", suspect_codes=["mfu"])))
    with refused("1 run, none can win: 1 suspect (x); to measure them again, launch under another name="):
        competing(table_of(row("a", suspect="x")))
    with refused(
        "1 run, none can win: 1 stopped early as slower; to measure every run in full, "
        "launch under another name= with measure.race=null"
    ):
        competing(table_of(rows[4]))
    with refused("1 run, none can win: 1 oom; see why: ultrabench plot failures"):
        competing(table_of(rows[3]))


@pytest.mark.parametrize(
    ("left_out", "settings"),
    [
        (("stopped", "unmade"), "measure.race=null name=lab-full"),
        (("unmade", "unmade"), "sweep.strategy=exhaustive measure.race=null"),
        (("stopped", "unmade", "oom"), "sweep.strategy=exhaustive measure.race=null name=lab-full"),
        (("oom", "unlikely"), None), (("dominated", "refused"), None),
    ],
)  # fmt: skip
def test_what_early_stopping_has_taken_from_an_axis_is_named_with_what_gives_enough(left_out, settings):
    """Of four layouts with and without ZeRO, some runs are left out; what cannot fit is not missed."""
    columns = {
        "stopped": {"stopped": "slower_than_best"}, "unmade": {"status": "skipped"}, "oom": {"status": "oom"},
        "unlikely": {"status": "skipped", "p_oom": 0.8}, "dominated": {"status": "skipped", "dominated_by": "a"},
        "refused": {"status": "skipped", "rule": "memory"},
    }  # fmt: skip
    changes = [columns[name] for name in left_out] + [{}] * (4 - len(left_out))
    rows = [row(f"{n} 0", mbs=2**n, gas=32 // 2**n, sweep="lab") for n in range(4)]
    rows += [
        row(f"{n} 1", 90.0, mbs=2**n, gas=32 // 2**n, zero_stage=1, sweep="lab", **change)
        for n, change in enumerate(changes)
    ]
    measured = competing(table_of(*rows))
    effects_of_axes = effects_by_axis(measured)
    all_too_few, text = too_few_pairs(measured, effects_of_axes), " ".join(notes(measured, effects_of_axes))
    if settings is None:
        assert (all_too_few, "early stopping" in text) == ([], False)
        return
    (too_few,) = (lack for lack in all_too_few if lack.axis == "zero_stage")
    num_pairs, num_possible = 4 - len(left_out), 4 - left_out.count("oom")
    assert (too_few.value, too_few.pairs, too_few.possible_pairs) == (1, num_pairs, num_possible)
    assert " ".join(too_few.settings) == settings
    assert f"early stopping has left too few for zero_stage=1 ({num_pairs} of {num_possible})" in text
    assert f"; to have enough, launch again with {settings}" in text


def test_an_option_of_which_the_search_made_one_value_alone_is_named():
    pairs_of_runs = [(row(f"{n}", mbs=2**n, gas=32 // 2**n), None) for n in range(4)]
    ring = {"env.NCCL_ALGO": "Ring"}
    pairs_of_runs += [(row(f"{n} r", mbs=2**n, gas=32 // 2**n, status="skipped"), ring) for n in range(4)]
    (too_few,) = too_few_pairs(competing(with_variants(*pairs_of_runs)), {})
    assert (too_few.axis, too_few.value, too_few.pairs, too_few.possible_pairs) == (
        "env.NCCL_ALGO",
        "Ring",
        0,
        4,
    )


def test_predictions_of_a_plan_have_effects_without_an_interval():
    rows = [
        row(f"{n}", 100.0 + 10 * n, mbs=2 ** (n % 2), tp=2 ** (n // 2), source="predicted", p_oom=0.0)
        for n in range(8)
    ]
    (effect_of_mbs,) = effects(competing(table_of(*rows)), "mbs")
    assert (effect_of_mbs.pairs, effect_of_mbs.low, effect_of_mbs.predicted) == (4, None, True)
    assert effect_of_mbs.ratio > 1
    assert cells("mbs", effect_of_mbs)[4] == "none: predicted"


def test_the_page_has_the_effects_of_the_command():
    table = page_tables.small()
    measured = competing(table)
    expected = [
        cells(axis, effect) for axis, of_axis in effects_by_axis(measured).items() for effect in of_axis
    ]
    section = page_section(table)
    assert section.rows == expected
    assert ["tp", "2", "1"] in [row[:3] for row in expected]
    assert measured.note in section.notes
    assert document(table, public=True)["sections"][0]["rows"] == expected
    assert not page_section(table_of(page_tables.run(1, status="oom"))).rows


def page_section(table):
    """The section of the page that this study makes of a table."""
    return page_table.section(Ranking(table, more_columns=page_table.RANKING_COLUMNS), table, public=True)


def test_runs_that_were_only_screened_are_counted():
    rows = factorial(tokens_per_s_per_gpu=100.0)
    assert "parts of steps" not in competing(table_of(*rows)).note
    for screened_row in rows[:6]:
        screened_row |= {"screened": True, "measured_gas": "2,4"}
    sentence = "6 of 40 runs are measured by parts of steps or few whole steps, whose intervals are wider."
    assert sentence in competing(table_of(*rows)).note
