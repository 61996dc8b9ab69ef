"""The verdicts of an acceptance run, what is published, and what a launch says without one."""

import json
from dataclasses import replace

import pytest

from tests.configs import refused
from tests.unit.allocations import key_of, told, with_launcher
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
from ultrabench.store.folder import SweepFolder
from ultrabench.store.state import SweepState
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan

pytestmark = pytest.mark.usefixtures("alone")

H100 = ("sweep=acceptance", "hardware=h100x8", "launcher=slurm", "cluster=local")
PLAN = make_plan(load_config(["sweep=acceptance-small"]))
OK = RunResult(status=Status.OK, loss_final=6.0, loss_step=5, gradient_norm=4.0, step_times_s=(0.5,) * 6)
RUNS = PLAN.runs[:3]
ACCEPTED = passed("x").named("a")


def outcome(*ends, runs=RUNS):
    """A trial whose runs ended like this, each by one attempt."""
    state = SweepState()
    for run, end in zip(runs, ends, strict=False):
        told(state, run, None)
        state.attempts[key_of(run)].result = end
    folder = SweepFolder(acceptance_folder(PLAN.config) / "now" / "trial")
    return Outcome(folder=folder, runs=runs[: len(ends)], state=state, stopped=None)


def off(share):
    """The end of a run whose loss and gradient are off by a share of those of OK."""
    return replace(OK, loss_final=6 * (1 + share), gradient_norm=4 * (1 + share))


@pytest.mark.parametrize(
    ("word", "one", "second", "wrong"),
    [
        ("loss", OK, off(5e-5), None),  # the largest of honest layouts
        ("loss", OK, off(1.4e-3), "1 of 2 layouts match the loss"),  # the copies of a tied embedding differ
        ("gradient", OK, off(8e-4), None),
        (
            "gradient",
            OK,
            off(2.6e-2),
            "1 of 2 layouts match the gradient",
        ),  # gathered tokens in the wrong order
        ("loss", OK, None, "has not run"),
        ("loss", OK, RunResult(status=Status.CRASH, reason="rank 1: no"), "crash, rank 1: no"),
        ("loss", RunResult(status=Status.TIMEOUT, reason="slow"), OK, "one GPU alone"),
    ],
)
def test_planted_faults_are_told_from_rounding_in_bf16(word, one, second, wrong):
    runs = make_plan(load_config(H100)).runs[:2]
    assert runs[0].spec.kernel.precision == "bf16"
    check = check_equal(outcome(one, runs=runs), outcome(OK, second, runs=runs), word)
    assert (check.status is CheckStatus.FAIL) == bool(wrong)
    assert (wrong or f"2 of 2 layouts match the {word} of one GPU at step ") in check.told
    assert not wrong or "ultrabench sweep show " in check.remedy


OOM = RunResult(status=Status.OOM, reason="no memory", confirmed=True)


@pytest.mark.parametrize(
    ("end", "status", "told"),
    [(OOM, CheckStatus.PASS, "no memory"), (replace(OOM, confirmed=False), CheckStatus.FAIL, "not confirmed"),
     (OK, CheckStatus.FAIL, "ok")],
)  # fmt: skip
def test_an_oom_counts_when_it_is_confirmed(end, status, told):
    check = check_memory(outcome(end))
    assert (check.status, told in check.told) == (status, True)


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
    assert "ours: tiny " in check_speed(None, outcome(OK, OK)).told
    assert check_speed(None, outcome()).status is CheckStatus.PASS


def test_a_published_file_of_the_user_that_lacks_something(alone):
    files = {"hardware": "gpu: H100-SXM\ngpus_per_node: 8\nnode_link_bytes_per_s: 1e10\nprecision: bf16",
             "published": "runs: [{nodes: 1}]"}  # fmt: skip
    for group, text in files.items():
        (alone / "ultrabench" / group).mkdir(parents=True)
        (alone / "ultrabench" / group / "mine.yaml").write_text(text)
    with refused("published/mine.yaml lacks the key dp; write it like"):
        published(load_config(["sweep=acceptance", "hardware=mine"]))


@pytest.mark.parametrize("nodes", [1, 2])
def test_twelve_layouts_use_every_parallel_form_on_one_and_two_nodes(nodes):
    chosen = _differing(make_plan(load_config(H100)))
    assert len({run.run_id for run in chosen}) == LAYOUTS
    layouts = [run.layout for run in chosen if run.nodes == nodes]
    assert {layout.zero_stage for layout in layouts} == {0, 1, 2, 3}
    assert {layout.pp_schedule for layout in layouts} >= {"none", "1f1b", "interleaved", "zbv"}
    assert min(max(getattr(layout, word) for layout in layouts) for word in ("dp", "tp", "pp", "cp")) > 1


def test_a_large_sweep_wants_an_acceptance_run_that_passed():
    large, two, one = (load_config([*H100, f"sweep.nodes={nodes}"]) for nodes in ("[1,16]", "[1,2]", "[1]"))
    folder = acceptance_folder(large) / "now"
    assert "ultrabench doctor --deep launcher=slurm cluster=local hardware=h100x8" in not_accepted(large)
    path = write_acceptance(one, [ACCEPTED], folder, 1.0)
    assert "has no acceptance run" in not_accepted(large), "on one node only"
    write_acceptance(two, [ACCEPTED, failed("x", "y").named("b")], folder, 1.0)
    assert "failed its acceptance run (b)" in not_accepted(large)
    assert not_accepted(replace(large, axes=replace(large.axes, nodes=(8,)))) is None
    assert not_accepted(replace(large, hardware=replace(large.hardware, simulated=True))) is None
    assert not_accepted(with_launcher(large, name="local")) is None
    write_acceptance(two, [ACCEPTED], folder, 1.0)
    assert not_accepted(large) is None
    assert json.loads(path.read_text())["gpu_hours"] == 1.0
    path.write_text("{")
    assert "has no acceptance run" in not_accepted(large)
