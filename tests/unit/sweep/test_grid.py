import inspect
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ultrabench.sweep.plan
from tests.configs import refused
from ultrabench.attention_type import GroupedQuery, Latent
from ultrabench.kernel_config import KernelConfig
from ultrabench.launchers.open_sweep import sweep_json_of
from ultrabench.layer_type import LayerType
from ultrabench.layout import Layout, default_schedule
from ultrabench.store.state import SweepState
from ultrabench.sweep.candidate import PRUNED, UNSELECTED
from ultrabench.sweep.config.load import load_config, load_model
from ultrabench.sweep.config.sweep_config import Axes
from ultrabench.sweep.grid import broken_rules, layouts
from ultrabench.sweep.plan import GAS_NOT_LISTED, make_plan, rejections
from ultrabench.sweep.plan_table import plan_table, runs_of
from ultrabench.sweep.refusals import refusal
from ultrabench.sweep.remedy import require_runs
from ultrabench.sweep.running.price import TIME_LIMIT

RULES_PAGE = Path(__file__).parents[3] / "docs/reference/rules.md"
SMALL = ["sweep=playbook", "sweep.models=[8B]", "sweep.nodes=[1]"]


@pytest.fixture(scope="module")
def playbook():
    return make_plan(load_config(["sweep=playbook", "max_p_oom=1"]))


@pytest.fixture(scope="module")
def pruned():
    return make_plan(load_config(SMALL))


def test_the_playbook_grid_has_the_published_counts(playbook):
    assert len(playbook.candidates) == len({c.run_id for c in playbook.candidates}) == 12000
    valid = Counter(c.shape.name for c in playbook.candidates if c.valid)
    assert valid == {"1B": 1178, "3B": 1288, "8B": 1348, "80B": 1376, "469B": 1386}
    assert len(playbook.runs) == 6120


def test_what_the_kernel_refuses_is_a_stage_without_parameters(playbook):
    refused = [c for c in playbook.candidates if c.valid and not c.runs]
    assert (len(refused), {c.rule for c in refused}) == (456, {"kernel"})
    assert all(re.search(r": stage \d+ has no parameters$", c.reason) for c in refused)


def test_too_few_micro_batches_for_1f1b_run_as_afab(playbook):
    afab = [c for c in playbook.runs if c.layout.pp_schedule == "afab"]
    assert len(afab) == 340
    assert all(c.layout.gas == c.layout.pp - 1 for c in afab)
    winner = Layout(dp=128, tp=2, pp=2, zero_stage=1, mbs=2, gas=1, pp_schedule="afab")
    assert ("1B", 64, winner) in {(*c.cell[:2], c.layout) for c in afab}


def test_every_rejected_candidate_is_counted_under_one_rule(playbook):
    summary = playbook.summary()
    assert summary["candidates"] == summary["valid"] + sum(summary["rejected"].values())
    assert summary["valid"] == summary["runs"] + sum(summary["refused_by_kernel"].values())
    assert set(summary["rejected"]) == {"zero_needs_dp", "enough_micro_batches", "no_empty_stage"}
    assert all(c.reason for c in playbook.candidates if not c.runs)
    numbers = ("candidates", "valid", "runs")
    assert [sum(cell[n] for cell in summary["cells"]) for n in numbers] == [summary[n] for n in numbers]
    cells = [(model, 2**n) for model in ("1B", "3B", "8B", "80B", "469B") for n in range(7)]
    assert [(c["model"], c["nodes"]) for c in summary["cells"]] == cells


def test_runs_come_first_and_cheapest_first(playbook):
    runs = [c.runs for c in playbook.candidates]
    assert runs == sorted(runs, reverse=True)
    fit = [c.prediction.p_oom <= 0.5 for c in playbook.runs]
    assert fit == sorted(fit, reverse=True)
    prices = [c.gpu_hours for c in playbook.runs[: sum(fit)]]
    assert prices == sorted(prices)
    shares = [c.prediction.memory_share for c in playbook.runs[sum(fit) :]]
    assert shares == sorted(shares), "what is most likely to fit all the same is first"
    assert all(c.prediction.duration_s == 20.0 for c in playbook.runs[sum(fit) :])


def test_what_surely_runs_out_of_memory_is_left_out_with_its_prediction(playbook, pruned):
    ooms = [c for c in pruned.candidates if c.rule == "memory"]
    all_runs = [c for c in playbook.runs if c.cell[:2] == ("8B", 1)]
    assert {c.run_id for c in ooms} == {c.run_id for c in all_runs if c.prediction.p_oom > 0.9}
    assert all(c.valid and not c.runs and c.prediction.limited_by == "memory" for c in ooms)
    assert all(re.fullmatch(r"predicted [\d,]+ GiB of 79.11, P\(OOM\) (9\d|100) %", c.reason) for c in ooms)
    assert pruned.summary()["pruned"] == len(ooms)


def test_the_plan_table_has_a_row_for_every_candidate_from_which_runs_are_read_again(pruned):
    rows = plan_table(pruned.candidates).to_pylist()
    assert [r["run_id"] for r in rows] == [c.spec.run_id for c in pruned.candidates]
    decisions = {None: "run", "memory": "skipped"}
    assert [r["decision"] for r in rows] == [decisions.get(c.rule, "rejected") for c in pruned.candidates]
    assert all((r["reason"] is None) == (r["decision"] == "run") for r in rows)
    assert all(r["gbs"] == r["dp"] * r["mbs"] * r["gas"] for r in rows)
    for column in ("p_oom", "predicted_gpu_hours", "predicted_to_fit"):
        assert [r[column] is not None for r in rows] == [c.valid for c in pruned.candidates]
    assert tuple(runs_of(sweep_json_of(pruned.config, {}), rows, SweepState())) == pruned.runs


def run_ids(words):
    return [c.run_id for c in make_plan(load_config(words)).candidates]


def test_several_processes_make_the_same_plan_and_tell_how_far_they_are(pruned, monkeypatch):
    monkeypatch.setattr(ultrabench.sweep.plan, "MIN_PARALLEL_CANDIDATES", 1)
    monkeypatch.setattr(ultrabench.sweep.plan, "CANDIDATES_PER_TASK", 40)
    calls, of = [], len(pruned.candidates)
    assert make_plan(load_config(SMALL), report_progress=lambda *args: calls.append(args)) == pruned
    assert calls == [(min(count, of), of) for count in range(40, of + 40, 40)]


def test_the_same_input_plans_the_same_in_every_process():
    words = ["sweep=playbook", "sweep.models=[8B,1B]", "sweep.nodes=[4,1]"]
    code = f"from tests.unit.sweep.test_grid import run_ids\nprint(*run_ids({words}))"
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert process.stdout.split() == run_ids(words)


small = st.lists(st.integers(1, 12), min_size=1, max_size=5).map(tuple)
axes = st.fixed_dictionaries({
    "tp": small, "pp": small, "cp": small, "mbs": small, "pp_schedule": st.just(("auto",)),
    "zero_stage": st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), "virtual_stages": st.just((2,)),
    "dp_shard": st.just(("all",)), "ep": st.just(("auto",)),
}).map(lambda layout: Axes(nodes=(1,), layout=layout))  # fmt: skip


@given(axes=axes, gpus=st.sampled_from((4, 12, 24)), gbs=st.sampled_from((8, 12, 48)))
def test_the_grid_is_every_combination_that_fits_once(axes, gpus, gbs):
    grid = list(layouts(axes, load_model("tiny"), gpus, 4, gbs))
    assert len(grid) == len(set(grid))
    values = axes.layout
    by_hand = {
        (dp, tp, pp, cp, zero, mbs, gas)
        for tp in values["tp"] for pp in values["pp"] for cp in values["cp"] for mbs in values["mbs"]
        for gas in range(1, gbs + 1)
        for zero in values["zero_stage"] for dp in range(1, gpus + 1)
        if dp * tp * pp * cp == gpus and dp * mbs * gas == gbs
    }  # fmt: skip
    assert {(x.dp, x.tp, x.pp, x.cp, x.zero_stage, x.mbs, x.gas) for x in grid} == by_hand
    assert all(x.pp_schedule == default_schedule(x.pp, x.gas) for x in grid)


def test_auto_tries_the_degrees_that_share_the_experts_of_a_model_and_changes_no_dense_one():
    words = ["model=olmoe-1b-7b", "hardware=h100x8", "sweep.zero_stage=[0]"]
    candidates = make_plan(load_config([*words, "sweep.nodes=[4]", "sweep.pp=[1,4]"])).candidates
    of_32_ranks, of_8_ranks = ({(pp, 2**n) for n in range(powers)} for pp, powers in ((1, 6), (4, 4)))
    assert {(c.layout.pp, c.layout.ep) for c in candidates} == of_32_ranks | of_8_ranks
    assert not {c.rule for c in candidates} & {"ep_divides_dp_cp_tp", "ep_divides_experts"}
    on_16_nodes = make_plan(load_config([*words, "sweep.nodes=[16]"])).candidates
    assert max(c.layout.ep for c in on_16_nodes) == 64
    dense = ["model=llama3-8b", "hardware=h100x8", "sweep.nodes=[1]"]
    assert run_ids(dense) == run_ids([*dense, "sweep.ep=[1]"])
    with refused("auto or a number >= 1"):
        load_config([*dense, "sweep.ep=[all]"])


def test_auto_is_every_number_that_divides_the_gpus_the_batch_or_the_layers():
    words = ["model=llama3-8b", "hardware=h100x8", "sweep.nodes=[3]", "sweep.gbs=24", "sweep.zero_stage=[0]"]
    auto = ["sweep.tp=[1]", "sweep.pp=[auto]", "sweep.mbs=[auto]", "sweep.pp_schedule=[auto,interleaved]"]
    all_layouts = [
        c.layout for c in make_plan(load_config([*words, *auto, "sweep.virtual_stages=[auto]"])).candidates
    ]
    assert {layout.pp for layout in all_layouts} == {1, 2, 3, 4, 6, 8, 12}  # of 24 GPUs, up to 16
    assert {layout.mbs for layout in all_layouts} == {1, 2, 3, 4, 6, 8, 12}  # of 24 sequences, up to 12
    # 32 layers, or 34 with embedding and head, in equal stages.
    stages_by_pp = {pp: {x.virtual_stages for x in all_layouts if x.pp == pp} - {1} for pp in (1, 2, 4, 8)}
    assert stages_by_pp == {1: {*()}, 2: {2, 4, 8, 16}, 4: {2, 4, 8}, 8: {2, 4}}
    listed = [*words, *auto, "sweep.virtual_stages=[2,auto]"]
    assert len(make_plan(load_config(listed)).candidates) > len(all_layouts), (
        "24 layers of 12 stages are listed"
    )
    with refused("auto or a number >= 2"):
        load_config([*words, "sweep.virtual_stages=[1]"])


def test_what_a_list_of_gas_leaves_out_has_a_row_with_its_reason():
    words = [*SMALL, "sweep.gbs=1024"]
    free, listed = make_plan(load_config([*words, "sweep.gas=null"])), make_plan(load_config(words))
    assert {c.run_id for c in free.candidates} == {c.run_id for c in listed.candidates}
    lost = [c for c in listed.candidates if c.rule == "gas_not_listed"]
    assert len(lost) == free.summary()["valid"] - listed.summary()["valid"] > 0
    values = [2**n for n in range(9)]
    reasons = {512: f"gas=512 is not in sweep.gas={values}", 1024: f"gas=1024 is not in sweep.gas={values}"}
    assert {c.layout.gas: c.reason for c in lost} == reasons
    assert listed.summary()["rejected"]["gas_not_listed"] == len(lost)


def test_the_default_sweep_is_small_and_covers_everything():
    runs = make_plan(load_config([])).runs
    assert 12 <= len(runs) <= 30
    assert {(run.nodes, run.layout.zero_stage) for run in runs} >= {(n, z) for n in (1, 2) for z in range(4)}
    assert {(run.layout.tp, run.layout.pp) for run in runs} >= {(1, 1), (1, 2), (2, 1)}
    assert {(run.layout.mbs, run.layout.gas) for run in runs} >= {(1, 4), (2, 2)}


SHARD, NOTHING = "dp_shard_divides_dp", "needs zero_stage > 0; zero_stage=0 shards nothing"


TINY = load_model("tiny")
GQA = load_model("tiny-gqa")
FULL = GroupedQuery(num_attention_heads=24, num_key_value_heads=1, head_dim=8)
WINDOW = replace(FULL, num_key_value_heads=6, sliding_window=16)
LATENT = Latent(num_attention_heads=24, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
TYPES = LayerType(latent=LATENT), LayerType(grouped_query=FULL), LayerType(grouped_query=WINDOW)
TYPED = replace(GQA, layer_types=TYPES)
MOE = replace(GQA, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=33, n_shared_experts=1)


@pytest.mark.parametrize(
    ("shape", "layout", "broken"),
    [
        *((GQA, *row) for row in [
            (Layout(dp=1, tp=3), ("tp_divides_heads", "tp=3 does not divide num_attention_heads=4")),
            (Layout(dp=1, tp=3, zero_stage=1), ("tp_divides_heads", "tp=3 does not divide num_attention_heads=4")),
            (Layout(dp=1, tp=4), None),  # two ranks hold a copy of each key/value head
            (Layout(dp=1, zero_stage=2), ("zero_needs_dp", "zero_stage=2 needs dp*cp > 1; dp=1, cp=1")),
            (Layout(dp=1, pp=4, gas=2, pp_schedule="afab"), ("enough_micro_batches", "gas=2 is less than pp-1=3")),
            (Layout(dp=1, pp=12, gas=12, pp_schedule="1f1b"),
                ("no_empty_stage", "pp=12 leaves stage 8 empty (4 layers)")),
            (Layout(dp=2, tp=2, zero_stage=1), None),
            (Layout(dp=1, cp=8, zero_stage=3), None),  # ZeRO spans dp*cp
            (Layout(dp=8, zero_stage=3, dp_shard=4), None),
            (Layout(dp=8, dp_shard=3), (SHARD, f"dp_shard=3 {NOTHING}")),
            (Layout(dp=8, zero_stage=3, dp_shard=3), (SHARD, "dp_shard=3 does not divide dp*cp=8 (dp=8, cp=1); "
            "use dp_shard=all")),
            (Layout(dp=4, cp=2, zero_stage=1, dp_shard=6), (SHARD,
                "dp_shard=6 does not divide dp*cp=8 (dp=4, cp=2); use dp_shard=2")),
            (Layout(dp=8, zero_stage=3, dp_shard=8), (SHARD, "dp_shard=8 equals dp*cp=8; "
            "leave dp_shard out or use all")),
            (Layout(dp=2, tp=2, zero_stage=3, dp_shard=1), (SHARD,
                "dp_shard=1 shards nothing (dp_shard=node means 1 where "
             "tp=2 fills a node); use a smaller tp or dp_shard=all")),
        ]),
        *((MOE, *row) for row in [  # ranks of one stage share the experts, and fit shard groups
            (Layout(dp=2, ep=4), ("ep_divides_dp_cp_tp", "ep=4 does not divide dp*cp*tp=2")),
            (Layout(dp=8, tp=2, ep=16), ("ep_divides_experts", "ep=16 does not divide num_experts=8")),
            (Layout(dp=12, ep=4, zero_stage=3, dp_shard=6),
             ("ep_fits_dp_shard", "ep=4 neither divides tp*dp_shard=6 nor is a multiple of it")),
            (Layout(dp=12, ep=4, zero_stage=3, dp_shard=2), None),  # a group of experts fills two shard groups
            (Layout(dp=2, cp=2, tp=2, ep=8, zero_stage=1), None),
            (Layout(dp=12, ep=4), None),
        ]),
        (TINY, Layout(dp=2, ep=2), ("ep_needs_experts", "ep=2 needs a model with experts; tiny has none")),
        *((replace(GQA, num_attention_heads=24, num_key_value_heads=4, head_dim=8), Layout(dp=1, tp=tp), broken) for tp,
            broken in [
            (6, ("tp_fits_kv_heads", "tp=6 neither divides num_key_value_heads=4 nor is a multiple of it")), (2, None),
            (12, None)]),
        *((TYPED, Layout(dp=1, tp=tp), broken) for tp, broken in [  # of windows, not of full or latent attention
            (8, ("tp_fits_kv_heads", "tp=8 neither divides num_key_value_heads=6 nor is a multiple of it")), (3, None),
            (12, None)]),
    ],
)  # fmt: skip
def test_the_first_broken_rule_gives_its_reason(shape, layout, broken):
    assert next(broken_rules(layout, shape), None) == broken


def test_the_page_of_rules_has_the_rules_of_the_code_and_no_other():
    """The layouts below break every structural rule; other rules come from a plan, its budget and its time limit."""
    values = {
        "dp": (1, 2, 12), "tp": (1, 3), "cp": (1, 2), "zero_stage": (0, 1), "dp_shard": (0, 6), "ep": (1, 3, 4),
        "dp_overlap": ("on", "off"), "sequence_parallel": ("on", "off"), "cp_exchange": ("ring", "allgather"),
    }  # fmt: skip
    layouts = [
        Layout(**dict(zip(values, combination, strict=True))) for combination in product(*values.values())
    ]
    layouts += [Layout(dp=1, pp=12, pp_schedule="1f1b"), Layout(dp=12, pp_layout="even")]
    layouts.append(Layout(dp=1, pp=2, gas=2, pp_schedule="1f1b", pp_layout="1-1-1"))
    rules = {rule for shape in (MOE, TINY) for layout in layouts for rule, _ in broken_rules(layout, shape)}
    rules |= {PRUNED, UNSELECTED, TIME_LIMIT, GAS_NOT_LISTED}
    rules |= {*re.findall(r'yield "(\w+)"', inspect.getsource(rejections))}
    rows = RULES_PAGE.read_text().split("| rule | rejects |")[1].split("\n\n")[0].splitlines()[2:]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(listed) == sorted(rules)


@pytest.mark.parametrize(
    ("changes", "layout", "routing", "reason"),
    [
        ({}, Layout(dp=2, ep=2), "learned", None),
        ({}, Layout(dp=1, tp=2), "balanced", "tp=2 does not divide n_shared_experts*moe_intermediate_size=33"),
        ({"n_shared_experts": 2}, Layout(dp=1, tp=2), "balanced", None),
        ({"n_shared_experts": 0}, Layout(dp=1, tp=2, sequence_parallel="off"), "balanced", "use sequence_parallel=on"),
        ({"n_shared_experts": 0, "qk_norm": True, "qk_norm_across_heads": True}, Layout(dp=1, tp=2), "balanced",
         "qk_norm_across_heads=true normalizes over the heads of all tp ranks; tp=2: use tp=1"),
    ],
)  # fmt: skip
def test_experts_that_our_kernel_cannot_train_are_refused(changes, layout, routing, reason):
    kernel, shape = KernelConfig(name="embedded", routing=routing), replace(MOE, **changes)
    message = refusal(kernel, layout, shape, 64, "cpu")
    assert message is None if reason is None else reason in message


def test_a_routing_without_effect_is_refused():
    kernel = KernelConfig(name="embedded", routing="skew=0.5")
    message = refusal(kernel, Layout(dp=1), TINY, 64, "cpu")
    assert message == "routing=skew=0.5 needs a model with experts; tiny has none: use routing=balanced"


def test_shards_are_all_ranks_those_of_a_node_or_a_number():
    words = ["sweep=playbook", "sweep.models=[3B]", "sweep.nodes=[2]", "sweep.tp=[2,8]", "sweep.pp=[1]"]
    words += ["sweep.zero_stage=[0,3]", "sweep.mbs=[1]", "sweep.gas=null"]
    candidates = make_plan(load_config([*words, "sweep.dp_shard=[node,all,3,8]"])).candidates
    rules = {(c.layout.tp, c.layout.zero_stage, c.layout.dp_shard): c.rule for c in candidates}
    whole = {(tp, zero, 0): None for tp in (2, 8) for zero in (0, 3)}
    rejected = {(tp, zero, shard): SHARD for tp in (2, 8) for zero in (0, 3) for shard in (3, 8)}
    assert rules == whole | rejected | {(2, 3, 4): None, (8, 3, 1): SHARD}


def test_a_sweep_without_runs_says_why():
    plan = make_plan(load_config(["sweep.nodes=[1]", "sweep.tp=[2,1]", "sweep.pp=[1]",
                                  "sweep.zero_stage=[1]", "sweep.mbs=[1,2]", "sweep.gas=[1]"]))  # fmt: skip
    rules = (
        "2 by gas_not_listed (gas=4 is not in sweep.gas=[1])",
        "2 by zero_needs_dp (zero_stage=1 needs dp*cp > 1; dp=1, cp=1)",
    )
    with refused(f"none of 4 candidates can run; rejected: {', '.join(rules)}; change the axes or the model"):
        require_runs(plan)
    with refused("no candidate: 2 or 4 GPUs are not divisible by tp=3; choose divisors"):
        make_plan(load_config(["sweep.tp=[3]"]))


@pytest.mark.parametrize(
    ("overrides", "lost"),
    [
        ([], []),
        (["nodes=[1,2,3]"], [("nodes", 3, "gbs=8 is not divisible by dp*mbs with dp in [3, 6], mbs in [1, "
        "2] (gbs=9 is)")]),
        (["tp=[1,2,3]"], [("tp", 3, "2 or 4 GPUs are not divisible by tp=3")]),
        (["tp=[2]", "pp=[1,2]", "cp=[1,4]", "nodes=[2]"],
         [("cp", 4, "4 GPUs are not divisible by tp*pp*cp with tp=2, pp in [1, 2], cp=4")]),
        (["mbs=[1,3]"], [("mbs", 3, "gbs=8 is not divisible by dp*mbs with dp in [1, 2, 4], mbs=3 (gbs=9 is)")]),
        (["gas=[4,5]"], [("gas", 5, "gbs=8 is not dp*mbs*gas with dp in [1, 2, 4], mbs in [1, 2], gas=5")]),
        (["pp=[1]", "pp_schedule=[auto,zbv]"], [("pp_schedule", "zbv", "no candidate has pp > 1")]),
        (["virtual_stages=[2,4]"], [("virtual_stages", n, "no candidate has pp_schedule=interleaved") for n in (2, 4)]),
        (["pp_schedule=[auto,interleaved]", "virtual_stages=[2,4]"], []),
    ],
)  # fmt: skip
def test_a_value_that_fits_nothing_is_named_with_the_numbers(overrides, lost):
    plan = make_plan(load_config(["model=tiny", *(f"sweep.{o}" for o in overrides)]))
    rows = plan.summary()["without_candidates"]
    assert [(row["axis"], row["value"], row["reason"]) for row in rows] == lost


def test_a_grid_of_millions_is_refused_with_its_size_before_it_is_enumerated():
    words, counts = ",".join(f"every{n}" for n in range(2, 100)), ",".join(map(str, range(1, 65)))
    wide = [
        f"sweep.recompute=[{words}]",
        f"sweep.nodes=[{counts}]",
        "sweep.zero_stage=[0,1,2,3]",
        "sweep.mbs=[auto]",
    ]
    config = load_config(["model=tiny", "sweep.gbs=720720", "sweep.tp=[1,2]", "sweep.pp=[auto]", *wide])
    began = time.process_time()
    with refused(
        "have over 1,000,000 combinations; a sweep may have at most 1,000,000: narrow sweep.recompute (98 values)"
    ):
        make_plan(config)
    assert time.process_time() - began < 3.0, (
        "seconds of a core that may be shared; all layouts take a minute"
    )
