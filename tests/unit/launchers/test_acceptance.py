"""The verdicts of an acceptance run, what is published, and what a launch says without one."""

import json
from dataclasses import replace

import pytest

from ultrabench.errors import ConfigError
from ultrabench.launchers.doctor.acceptance import (
    LAYOUTS,
    Outcome,
    _differing,
    acceptance_folder,
    check_equal,
    check_memory,
    check_speed,
    not_accepted,
    published,
    write_acceptance,
)
from ultrabench.launchers.doctor.check import CheckStatus, failed, passed
from ultrabench.result import RunResult, Status
from ultrabench.run import AttemptKey
from ultrabench.store.folder import SweepFolder
from ultrabench.store.state import AttemptState, SweepState
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan

pytestmark = pytest.mark.usefixtures("alone")

H100 = ("sweep=acceptance", "hardware=h100x8", "launcher=slurm", "cluster=local")
PLAN = make_plan(load_config(["sweep=acceptance-small"]))
OK = RunResult(status=Status.OK, loss_final=6.0, loss_step=5, step_times_s=(0.5,) * 6)
RUNS = PLAN.runs[:3]
ACCEPTED = passed("x").named("a")


def outcome(*ends, runs=RUNS):
    """A trial whose runs ended like this, each by one attempt or a list of them, all in one allocation."""
    attempts = {}
    for run, end in zip(runs, ends, strict=False):
        for number, result in enumerate(end if isinstance(end, list) else [end]):
            key = AttemptKey(run.run_id, 0, number)
            attempts[key] = AttemptState(key=key, allocation="n1-a.0", result=result)
    folder = SweepFolder(acceptance_folder(PLAN.config) / "now" / "trial")
    return Outcome(folder=folder, runs=runs[: len(ends)], state=SweepState(attempts=attempts), stopped=None)


def loss(value):
    return replace(OK, loss_final=value)


@pytest.mark.parametrize(
    ("one", "layouts", "told"),
    [
        (OK, (OK, loss(6.000001)), None),
        (OK, (OK, loss(6.0001)), "1 of 2 layouts have the loss"),
        (OK, (OK, None), "has not run"),
        (OK, (RunResult(status=Status.CRASH, reason="rank 1: no"), OK), "crash, rank 1: no"),
        (RunResult(status=Status.TIMEOUT, reason="slow"), (OK,), "one GPU alone"),
    ],
)
def test_losses(one, layouts, told):
    check = check_equal(outcome(one), outcome(*layouts), "loss")
    assert (check.status is CheckStatus.FAIL) == bool(told)
    assert (told or "2 layouts have the loss of one GPU") in check.told
    assert not told or "ultrabench sweep show " in check.remedy


@pytest.mark.parametrize(
    ("word", "off", "fails"),
    [
        ("loss", 5e-5, False),  # the largest of honest layouts
        ("loss", 1.4e-3, True),  # the copies of a tied embedding have their own gradients
        ("gradient", 8e-4, False),
        ("gradient", 2.6e-2, True),  # gathered tokens in the wrong order
        ("gradient", 1.0, True),  # summed over dp instead of averaged, which AdamW hides from the loss
    ],
)
def test_planted_faults_are_told_from_rounding_in_bf16(word, off, fails):
    runs = make_plan(load_config(H100)).runs[:2]
    end = replace(OK, loss_final=6 * (1 + off), gradient_norm=4 * (1 + off))
    one, layouts = outcome(replace(OK, gradient_norm=4.0), runs=runs), outcome(end, end, runs=runs)
    assert runs[0].spec.kernel.precision == "bf16"
    assert (check_equal(one, layouts, word).status is CheckStatus.FAIL) == fails


def test_an_oom_counts_when_it_is_confirmed():
    oom = RunResult(status=Status.OOM, reason="no memory", confirmed=True)
    assert check_memory(outcome(oom)).status is CheckStatus.PASS
    assert "not confirmed" in check_memory(outcome(replace(oom, confirmed=False))).told
    assert check_memory(outcome(OK)).status is CheckStatus.FAIL


@pytest.mark.parametrize(("share", "status"), [(1.1, CheckStatus.PASS), (0.6, CheckStatus.FAIL)])
def test_our_speed_stands_beside_the_published_one(share, status):
    config = load_config(H100)
    known = published(config)
    plan = make_plan(load_config([*H100, "sweep.seq_len=4096", "sweep.gbs=256", "sweep.pp_schedule=[auto]"]))
    runs = known.choose(plan)
    assert [(r.nodes, r.layout.dp, r.layout.zero_stage) for r in runs] == [(1, 8, 0), (2, 16, 1)]
    step_s = [4096 * 256 / 40149.94 / 8, 4096 * 256 / 38839.82 / 16 / share]
    ends = [replace(OK, step_times_s=(s,) * 6) for s in step_s]
    check = check_speed(known, outcome(*ends, runs=runs))
    assert check.status is status
    assert "40,150 tokens/s/GPU, published 40,150 (100%)" in check.told
    assert f"published 38,840 ({share:.0%})" in check.told


def test_nothing_is_published_of_other_hardware():
    assert published(PLAN.config) is None
    assert published(load_config([*H100, "kernel.precision=fp32"])) is None
    assert published(load_config([*H100, "hardware.gpus_per_node=4"])) is None
    check = check_speed(None, outcome(OK, OK))
    assert check.status is CheckStatus.PASS
    assert "ours: tiny " in check.told
    assert "compare" in check_speed(None, outcome()).told


def test_a_published_file_of_the_user_that_lacks_something(alone):
    for group, text in (
        ("hardware", "gpu: H100-SXM\ngpus_per_node: 8\nnode_link_bytes_per_s: 1e10\nprecision: bf16"),
        ("published", "runs: [{nodes: 1}]"),
    ):
        (alone / "ultrabench" / group).mkdir(parents=True)
        (alone / "ultrabench" / group / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"published/mine.yaml: KeyError\('dp'\); write it as"):
        published(load_config(["sweep=acceptance", "hardware=mine"]))


def test_twelve_layouts_use_every_parallel_form_on_one_and_two_nodes():
    chosen = _differing(make_plan(load_config(H100)))
    assert len({run.run_id for run in chosen}) == LAYOUTS
    for nodes in (1, 2):
        layouts = [run.layout for run in chosen if run.nodes == nodes]
        assert {layout.zero_stage for layout in layouts} == {0, 1, 2, 3}
        assert {layout.pp_schedule for layout in layouts} >= {"none", "1f1b", "interleaved", "zbv"}
        for word in ("dp", "tp", "pp", "cp"):
            assert max(getattr(layout, word) for layout in layouts) > 1


def test_a_large_sweep_wants_an_acceptance_run_that_passed():
    large = load_config([*H100, "sweep.nodes=[1,16]"])
    folder = acceptance_folder(large) / "now"
    assert "has no acceptance run" in not_accepted(large)
    assert "ultrabench doctor --deep launcher=slurm cluster=local hardware=h100x8" in not_accepted(large)
    many = [*H100, "sweep.nodes=[16]"]
    for small in ("sweep.nodes=[8]", "hardware.simulated=true", "launcher=local"):
        others = [word for word in many if not word.startswith(small[:8])]
        assert not_accepted(load_config([*others, small])) is None
    write_acceptance(load_config([*H100, "sweep.nodes=[1]"]), [ACCEPTED], folder, 1.0)
    assert "has no acceptance run" in not_accepted(large), "on one node only"
    write_acceptance(load_config(H100), [ACCEPTED, failed("x", "y").named("b")], folder, 1.0)
    assert "failed its acceptance run (b)" in not_accepted(large)
    path = write_acceptance(load_config(H100), [ACCEPTED], folder, 1.0)
    assert not_accepted(large) is None
    assert json.loads(path.read_text())["gpu_hours"] == 1.0
    path.write_text("{")
    assert "has no acceptance run" in not_accepted(large)
