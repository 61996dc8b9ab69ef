"""`sweep.layouts`: the runs of axes one by one, the files that commands write, and entries that cannot be used."""

import json
import random

import pytest

from tests.configs import refused
from tests.unit.sweep.test_config import refusal
from ultrabench.sweep.best_runs import expected_rate_of
from ultrabench.sweep.config.load import config_from_tree, load_config
from ultrabench.sweep.config.sweep_file import require_writable_name, write_sweep_file
from ultrabench.sweep.plan import make_plan, planned_cells
from ultrabench.sweep.recommend import recommendation
from ultrabench.sweep.remedy import reasons_without_candidates

pytestmark = pytest.mark.usefixtures("alone")

HEAD = "# @package _global_\nsweep: {models: [tiny], nodes: [1], seq_len: 64, gbs: 8, layouts: %s}\n"


@pytest.fixture
def listed(alone):
    """Writes the file of a sweep with these layouts; returns the override that chooses it."""

    def write(layouts, text=HEAD):
        path = alone / "ultrabench" / "sweep" / "mine.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text % layouts)
        return "sweep=mine"

    return write


def run_ids(config):
    return {run.run_id for run in make_plan(config).runs}


def test_listed_layouts_are_the_runs_of_axes_and_a_stored_sweep_keeps_them(listed):
    axes = {"pp": 1, "tp": [1, 2], "zero_stage": [0, 1], "mbs": [1, 2]}
    plan = make_plan(load_config([listed(json.dumps(axes)[1:-1], HEAD.replace("layouts: ", ""))]))
    values = [{name: getattr(run.layout, name) for name in axes} for run in plan.runs]
    config = load_config([listed(json.dumps(values[1::2]))])
    assert run_ids(config) == {run.run_id for run in plan.runs[1::2]}
    assert run_ids(config_from_tree(json.loads(json.dumps(config.resolved)))) == run_ids(config)
    ((shape, cell),) = planned_cells(config)
    best = sorted(make_plan(config).runs, key=expected_rate_of, reverse=True)[:2]
    groups = recommendation(config, 2, shape, cell).groups
    assert [run.run_id for group in groups for run in group][:2] == [run.run_id for run in best]


def test_a_cell_for_which_a_sweep_lists_no_layout_is_named(listed):
    entries = [{"model": "tiny", "nodes": nodes, "tp": 1} for nodes in (1, 2)] + [
        {"model": "mini", "nodes": 2, "tp": 1}
    ]
    config = load_config([listed(json.dumps(entries)), "sweep.models=[tiny,mini]", "sweep.nodes=[1,2]"])
    ((cell, reason),) = reasons_without_candidates(make_plan(config)).items()
    assert (cell.model, cell.nodes) == ("mini", 1)
    assert "sweep.layouts lists none for this cell" in reason


@pytest.mark.parametrize(
    ("layouts", "line"),
    [
        ("[]", "sweep.layouts=[] lists no layouts; write [{tp: 2, mbs: 1}"),
        ("tp", "sweep.layouts='tp' lists no layouts"),
        ("[{tp: 1}, 3]", "sweep.layouts[1]: 3 is not a layout"),
        ("[{tp: 1}, {tpp: 2}]", "key of sweep.layouts[1] {tpp: 2}: 'tpp'; did you mean tp?"),
        ("[{dp: 2}]", "sweep.layouts[0] {dp: 2}: dp follows from the GPUs"),
        ("[{tp: [1, 2]}]", "sweep.layouts[0] {tp: [1, 2]}: tp has several values; an entry is one layout"),
        ("[{tp: null}]", "tp has no value"), ("[{ep: auto}]", "ep has several values"),
        ("[{tp: 0}]", "sweep.layouts[0] {tp: 0}: tp=0; must be >= 1"),
        ("[{tp: 2}, {tp: 2, pp: 1}]", "sweep.layouts[1] {tp: 2, pp: 1} is the same layout as sweep.layouts[0] {tp: 2}"),
        ("[{tp: 2}], tp: [1]", "sweep.layouts beside sweep.tp; a sweep either lists layouts or combines "
        "values of axes"),
    ],
)  # fmt: skip
def test_an_entry_that_cannot_be_used_is_named(listed, layouts, line):
    with refused(line):
        load_config([listed(layouts)])


@pytest.mark.parametrize(
    ("layouts", "line"),
    [
        ("[{tp: 1}, {tp: 3}]", "sweep.layouts[1] {tp: 3} cannot run for tiny on 1 node: 2 GPUs are not divisible "
        "by tp=3; change"),
        ("[{mbs: 3}]", "gbs=8 is not divisible by dp*mbs"), ("[{gas: 3}]",
            "gbs=8 is not dp*mbs*gas with dp=2, mbs=1, gas=3"),
        ("[{tp: 2, zero_stage: 1}]", "zero_stage=1 needs dp*cp > 1"),
        ("[{pp: 2}, {pp: 2, pp_schedule: 1f1b}]", "is the same layout as sweep.layouts[0] {pp: 2} for tiny on 1 node"),
        ("[{nodes: 2, tp: 1}]", "sweep.layouts[0] {nodes: 2, tp: 1}: the sweep has no cell of nodes=2; add it"),
    ],
)  # fmt: skip
def test_an_impossible_entry_is_named(listed, layouts, line):
    config = load_config([listed(layouts)])
    with refused(line):
        make_plan(config)


def test_an_override_of_layouts_says_what_it_lacks():
    assert "ultrabench sweep plan --top 2 --write NAME" in refusal("sweep.layouts=[{tp: 2, mbs: 1}]")
    assert "beside sweep.tp" in refusal("+sweep.layouts=[{tp: 2, mbs: 1}]")


def test_an_axis_of_a_sweep_that_lists_layouts_is_answered_with_a_list_that_works(listed):
    sweep = listed("[{tp: 1}]")
    assert refusal(sweep, "sweep.tp=[1,2]").endswith("write 'sweep.layouts=[{tp: 1}, {tp: 2}]'")
    assert len(load_config([sweep, "sweep.layouts=[{tp: 1}, {tp: 2}]"]).axes.listed) == 2


@pytest.mark.parametrize(
    "overrides",
    [
        ["sweep=recommend", "model=llama3-8b", "sweep.nodes=[1,2]", "sweep.gbs=64", "kernel.precision=[bf16,fp8]"],
        ["sweep=recommend", "sweep.models=[llama3-8b,qwen3-30b-a3b]", "sweep.nodes=[2]", "sweep.gbs=32",
            "sweep.pp=[1,4]"],
        ["sweep=playbook", "model=llama3-8b", "sweep.nodes=[1,2]", "sweep.scaling=weak", "measure.max_steps=7",
            "max_p_oom=1"],
        ["sweep=moe", "sweep.nodes=[1]", "kernel.env={A: b}", "launcher=slurm", "launcher.mem=100G",
            "+launcher.sbatch.constraint=x"],
        ["model=tiny", "+sweep.env.NCCL_ALGO=[Ring,Tree]", "profile=nanotron", "repeats=2"],
    ],
)  # fmt: skip
def test_a_written_sweep_runs_exactly_the_chosen_runs_with_the_same_settings(alone, overrides):
    config = load_config([*overrides, "sweep.mbs=[1,2]", "sweep.cp=[1,2]"])
    plan, rng = make_plan(config), random.Random(1)
    layouts = {(run.cell, run.layout) for run in rng.sample(plan.runs, min(12, len(plan.runs)))}
    runs = [run for run in plan.runs if (run.cell, run.layout) in layouts]  # in all variants
    path = require_writable_name("mine", force=False)
    write_sweep_file(path, config, overrides, runs, "chosen")
    written = load_config(["sweep=mine"])
    assert run_ids(written) == {run.run_id for run in runs}
    launcher = config.launcher if config.hardware.device == "cpu" else written.launcher
    same = ("measure", "kernel", "hardware", "profile", "repeats", "max_p_oom", "cluster", "retry")
    assert [getattr(written, name) for name in same] == [getattr(config, name) for name in same]
    assert written.launcher == launcher
    assert written.launcher.name == ("slurm" if config.hardware.device == "cuda" else config.launcher.name)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("playbook", "sweep=playbook is part of ultrabench; choose another name"),
        ("mine", "mine.yaml exists; choose another"),
        ("../x", "a name starts with a letter"), ("a.yaml", "without .yaml"), ("null", "choose another name"),
        ("1e3", "letter"),
    ],
)  # fmt: skip
def test_a_file_is_not_written_over_another_or_under_a_name_that_no_override_takes(listed, name, line):
    listed("[{tp: 1}]")
    with refused(line):
        require_writable_name(name, force=False)
    if name == "mine":
        assert require_writable_name(name, force=True).name == "mine.yaml"
