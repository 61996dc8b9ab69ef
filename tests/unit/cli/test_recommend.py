"""`ultrabench recommend`: its rows, the command that checks one, days and cost, and mistakes."""

import re
import shlex
from collections import Counter

import pytest

from tests.unit.cli.conftest import as_json, one_line
from ultrabench.cli.sweep.plan import layouts_to_try
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.recommend import rounder_batch

WORDS = ("recommend", "model=llama3-8b", "seq_len=8192", "gbs=256", "tp=[1,2]", "pp=1", "cp=1", "mbs=[1,2]")


def test_a_row_holds_a_layout_and_the_command_that_plans_it_alone(ultrabench):
    costs = ("--tokens", "15e12", "--price-per-gpu-hour", "2.5")
    rows = as_json(ultrabench, *WORDS, "nodes=[1,2]", "cluster=local", *costs)["rows"]
    cells = [(nodes, precision) for nodes in (1, 2) for precision in ("bf16", "fp8")]
    assert [(row["nodes"], row["precision"]) for row in rows] == cells
    assert [bool(row["unproven"]) for row in rows] == [precision == "fp8" for _, precision in cells]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(row["gpus"] * row["tokens_per_s_per_gpu"])
        assert row["days"] == pytest.approx(15e12 / row["tokens_per_s"] / 86400)
        assert row["cost"] == pytest.approx(row["days"] * 24 * row["gpus"] * 2.5)
        assert row["days_low"] < row["days"] < row["days_high"]
        _, *verbs = shlex.split(row["command"])
        assert verbs[:2] == ["sweep", "launch"]
        assert verbs[-3:] == ["cluster=local", f"name=recommend-h100x8-{row['precision']}", "launcher=slurm"]
        (run,) = make_plan(load_config(verbs[2:])).runs
        assert (run.run_id, run.prediction.step_time_s) == (row["run_id"], row["step_time_s"])


def test_a_row_has_the_speeds_of_forced_balance_and_of_a_learned_router(ultrabench):
    words = (
        "recommend",
        "model=qwen3-30b-a3b",
        "kernel=megatron-perf",
        "nodes=2",
        "gbs=1024",
        "ep=8",
        "tp=1",
        "pp=1",
    )
    (row,) = as_json(ultrabench, *words)["rows"]
    rates = row["rate_by_routing"]
    assert [*rates] == ["balanced", "learned"]
    assert rates["balanced"] == row["tokens_per_s_per_gpu"] > 1.1 * rates["learned"]
    (learned,) = as_json(ultrabench, *words, "kernel.routing=learned")["rows"]
    assert learned["rate_by_routing"]["learned"] == pytest.approx(rates["learned"])
    page = ultrabench(*words)[1]
    assert f"routing learned {rates['learned']:,.0f} tokens/s/GPU" in page
    assert "\nrouting learned: with tokens that spread unequally over the experts" in page


def test_the_groups_are_those_of_a_plan(ultrabench):
    """A line of `recommend` stands for as many layouts as one of `plan`, and --all shows them in the same order."""
    words = [*(word for word in WORDS if not word.startswith(("pp", "cp"))), "pp=[1,2]", "cp=[1,2,4]"]
    plan_words = [f"sweep.{arg}" if arg[0] != "m" or arg.startswith("mbs") else arg for arg in words[1:]]
    plan = make_plan(load_config(["sweep=recommend", *plan_words]))
    for options, with_similar in (((), False), (("--all",), True)):
        rows = as_json(ultrabench, *words, "precision=bf16", "--top", "2", *options)["rows"]
        plan_rows = layouts_to_try(plan, 2, {}, with_similar=with_similar)
        keys = ("run_id", "group", "similar")
        assert [[row[key] for key in keys] for row in rows] == [
            [row[key] for key in keys] for row in plan_rows
        ]
    assert Counter(row["group"] for row in rows) == {row["group"]: 1 + row["similar"] for row in rows}
    assert rows[0]["similar"] > 0
    _, out, _ = ultrabench(*words, "precision=bf16")
    assert re.search(rf"{rows[0]['layout']} +{rows[0]['similar']} ", out)
    assert (
        f"{rows[0]['similar']} similar layouts are left out: they are within 3 % of the speed of the best"
        in out
    )


@pytest.mark.parametrize(
    ("gbs", "other", "num_gpus"),
    [(513, 512, 8), (520, 512, 64), (100, 96, 64), (256, 256, 512), (512, 512, 8)],
)
def test_the_batch_nearby_that_more_layouts_divide(gbs, other, num_gpus):
    assert rounder_batch(gbs, num_gpus) == other


def test_a_faster_batch_is_named_with_its_speedup(ultrabench):
    words = [word for word in WORDS if not word.startswith(("gbs", "pp", "cp"))]
    words = [*words, "nodes=1", "precision=bf16", "pp=[1,4]", "cp=[1,2]"]
    odd, even = (as_json(ultrabench, *words, f"gbs={gbs}")["rows"][0] for gbs in (513, 512))
    faster, speedup = odd["faster_gbs"], even["tokens_per_s_per_gpu"] / odd["tokens_per_s_per_gpu"] - 1
    assert (faster["gbs"], faster["layout"], even["faster_gbs"]) == (512, even["layout"], None)
    assert faster["speedup"] == pytest.approx(speedup, abs=1e-3)
    assert (
        f"gbs=512 is {100 * speedup:.0f} % faster than gbs=513 ({even['layout']})"
        in ultrabench(*words, "gbs=513")[1]
    )


def test_a_written_sweep_plans_the_rows_and_is_replaced_only_with_force(ultrabench, tmp_path):
    words = (
        *WORDS,
        "nodes=[1,2]",
        "--top",
        "2",
        "--all",
        "--write",
        "best",
        "+kernel.env.HF_TOKEN=hf_0123456789",
    )
    document = as_json(ultrabench, *words)
    path = tmp_path / "ultrabench" / "sweep" / "best.yaml"
    assert document["written"] == str(path)
    plan = make_plan(load_config(["sweep=best"]))
    assert len(plan.runs) > len({(row["nodes"], row["precision"], row["group"]) for row in document["rows"]})
    assert sorted(run.run_id for run in plan.runs) == sorted(row["run_id"] for row in document["rows"])
    assert (plan.config.name, plan.config.launcher.name) == ("best-h100x8", "slurm")
    assert "hf_0123456789" not in path.read_text()
    assert f"--write best: {path} exists; choose another name, or add --force" in one_line(ultrabench, *words)
    _, out, _ = ultrabench(*words, "--force")
    assert out.splitlines()[-1] == "ultrabench sweep launch sweep=best"
    assert "kernel.env.HF_TOKEN; give them to sweep launch again" in out
    best_rows = as_json(ultrabench, *(word for word in words if word != "--all"), "--force")["rows"]
    assert {run.run_id for run in make_plan(load_config(["sweep=best"])).runs} == {
        row["run_id"] for row in best_rows
    }
    for option in ("--write best", "--all"):
        assert "add --top K, such as --top 3" in one_line(ultrabench, "sweep", "plan", *option.split())


def test_a_cell_without_a_layout_keeps_its_line(ultrabench):
    layout = ("tp=8", "pp=1", "cp=1", "gbs=256")
    words = ("recommend", "model=llama3-70b", "nodes=[1,4]", "precision=bf16", *layout)
    first, second = as_json(ultrabench, *words)["rows"]
    assert (first["layout"], second["reason"]) == (None, None)
    code, out, _ = ultrabench(*words)
    assert code == 0
    assert "llama3-70b on 1 node: no layout is likely to fit into 79.11 GiB" in out
    assert "; try nodes=2 (" in out, "in the form that the user wrote"
    assert second["layout"] in out
    assert re.search(
        r"^extrapolated: .* fitted to \(in brackets\), which widens intervals: nodes=4 \(1\)", out, re.M
    )
    alone = ("model=llama3-70b", "hardware=h100x8", "sweep.tp=[8]", "sweep.pp=[1]", "sweep.gbs=64")
    codes = [ultrabench(*words[:2], "nodes=1", *layout)[0], ultrabench("sweep", "plan", *alone)[0]]
    assert codes == [2, 2], "a plan and a recommendation without a layout that fits are refused alike"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--price-per-gpu-hour 2", "--price-per-gpu-hour needs --tokens"), ("node=[1]", "did you mean"),
        ("kernel=probe", "kernel=probe does not train; use kernel=embedded"),
        ("nodes=[1] sweep.nodes=[2]", "sweep.nodes is given twice"),
        ("nodes=[2]", "for example: ultrabench recommend 'nodes=[2]' model=llama3-8b"),
        ("sweep=nope", "unknown sweep 'nope'"),
        ("model=tiny --force", "--force replaces the file of --write; add --write NAME, or leave out --force"),
        ("model=llama3-8b --write playbook", "sweep=playbook is part of ultrabench"),
        ("model=llama3-8b tp=3", "no candidate: 8 GPUs are not divisible by tp=3; choose divisors"),
        ("model=llama3-8b ep=2", "no layout can run: ep=2 needs a model with experts"),
        ("model=llama3-8b kernel=megatron cuda_graph=xx", "unknown value of cuda_graph: 'xx'"),
        ("model=llama3-8b cuda_graph=xx", "did you mean +sweep.flags.cuda_graph=xx, with kernel=megatron?"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(ultrabench, words, line):
    assert line in one_line(ultrabench, "recommend", *words.split())
