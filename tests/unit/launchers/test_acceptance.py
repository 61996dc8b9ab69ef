"""The verdicts of an acceptance run, what is published, and what a launch says without one."""

import json
from dataclasses import replace

import pytest

from tests.configs import refused
from tests.unit.allocations import with_launcher
from tests.unit.analysis.tables import row, table_of
from ultrabench.cli import run_acceptance
from ultrabench.cli.run_acceptance import check_equal, check_memory, check_speed, comparable_rates
from ultrabench.launchers.doctor.acceptance import acceptance_folder, acceptance_warning, write_acceptance
from ultrabench.launchers.doctor.check import CheckStatus, failure, success
from ultrabench.store.folder import SweepFolder
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan, pairs_of, with_unselected_rejected
from ultrabench.sweep.remedy import nothing_fits

pytestmark = pytest.mark.usefixtures("alone")

H100 = ("sweep=acceptance", "hardware=h100x8", "launcher=slurm", "cluster=local")
ACCEPTED = success("x").named("a")


@pytest.fixture
def rows_of(monkeypatch):
    """Gives the rows of a sweep as an acceptance run reads them."""

    def rows(*columns):
        monkeypatch.setattr(run_acceptance, "collect", lambda folders, warn: table_of(*columns))
        return run_acceptance.final_rows(SweepFolder(FOLDER))

    return rows


FOLDER = acceptance_folder(load_config(H100)) / "now" / "layouts"


def off(share, status="ok", **columns):
    """The columns of a run whose loss and gradient are off by a share of those of one GPU."""
    return row("a", status=status, loss_final=6 * (1 + share), gradient_norm=4 * (1 + share), **columns)


CRASH = row("a", status="crash", reason="rank 1: no")


@pytest.mark.parametrize(
    ("quantity", "first", "second", "problem"),
    [
        ("loss", off(0), off(5e-5), None),  # the largest of honest layouts
        ("loss", off(0), off(1.4e-3), "1 of 2 layouts match the loss"),  # the copies of a tied embedding differ
        ("loss", off(0), off(1.4e-3, status="invalid", tokens_per_s_per_gpu=1.0), "1 of 2 layouts match the loss"),
        ("loss", off(0), off(0, status="invalid", reason="replicas differ"), "invalid, replicas differ"),
        ("gradient", off(0), off(8e-4), None),
        ("gradient", off(0), off(2.6e-2), "1 of 2 layouts match the gradient"),  # tokens in the wrong order
        ("loss", off(0), row("a", status=None), "has not run"),
        ("loss", off(0), CRASH, "crash, rank 1: no"),
        ("loss", row("a", status="timeout", reason="slow"), off(0), "one GPU alone: 8B dp8 "),
    ],
)  # fmt: skip
def test_planted_faults_are_told_from_rounding_in_bf16(rows_of, quantity, first, second, problem):
    check = check_equal(rows_of(first, off(0), second), quantity)
    assert (check.status == CheckStatus.FAIL) == bool(problem)
    assert (problem or f"2 of 2 layouts match the {quantity} of one GPU: ") in check.finding
    assert not problem or "ultrabench sweep show a " in check.remedy


OOM = {"status": "oom", "reason": "no memory", "predicted_peak_mem_bytes": 2**40}


@pytest.mark.parametrize(
    ("columns", "status", "message"),
    [(OOM | {"confirmed": True}, CheckStatus.PASS, "no memory"), (OOM, CheckStatus.FAIL, "not confirmed"),
     (OOM | {"status": "ok"}, CheckStatus.FAIL, "ok")],
)  # fmt: skip
def test_an_oom_counts_when_it_is_confirmed(rows_of, columns, status, message):
    check = check_memory(*rows_of(row("a") | columns))
    assert (check.status, message in check.finding) == (status, True)


PLAYBOOK = {"model": "1B", "seq_len": 4096, "gbs": 256, "precision": "bf16", "hardware": "h100x8"}


@pytest.mark.parametrize(("share", "status"), [(1.1, CheckStatus.PASS), (0.6, CheckStatus.FAIL)])
def test_our_speed_stands_beside_the_published_one(rows_of, share, status):
    assert [rate.nodes for rate in comparable_rates(load_config(H100))] == [1, 2]
    rows_of(row("a", 40149.94, **PLAYBOOK), row("b", share * 38839.82, nodes=2, **PLAYBOOK))
    check = check_speed(SweepFolder(FOLDER), has_published_rates=True)
    assert check.status is status
    assert (
        "40,150 tokens/s/GPU, 100% of the published rate (40,150, nanotron; https://hugging" in check.finding
    )
    assert f"{share:.0%} of the published rate (38,840, " in check.finding
    rows_of(CRASH | PLAYBOOK)
    assert "crash, rank 1: no" in check_speed(SweepFolder(FOLDER), has_published_rates=True).finding
    rows_of(row("a", suspect="throttled", **PLAYBOOK))
    assert check_speed(SweepFolder(FOLDER), has_published_rates=True).status is CheckStatus.FAIL


def test_nothing_is_published_of_other_hardware(rows_of):
    assert comparable_rates(load_config(["sweep=acceptance-small"])) == []
    assert comparable_rates(load_config([*H100, "kernel.precision=fp32"])) == []
    rows_of(row("a", 50.0), CRASH, row("b", 70.0))
    assert "ours: 8B dp8 " in (finding := check_speed(SweepFolder(FOLDER), has_published_rates=False).finding)
    assert finding.endswith(": 70 tokens/s/GPU")


def test_a_published_file_of_the_user_that_lacks_something(alone):
    (alone / "ultrabench" / "published").mkdir(parents=True)
    (alone / "ultrabench" / "published" / "mine.yaml").write_text("runs: [{nodes: 1}]")
    with refused("runs of mine.yaml"):
        comparable_rates(load_config(H100))


@pytest.mark.parametrize("nodes", [1, 2])
def test_twelve_layouts_use_every_parallel_form_on_one_and_two_nodes(nodes):
    plan = make_plan(load_config(H100))
    assert len({run.run_id for run in plan.runs}) == 12
    layouts = [run.layout for run in plan.runs if run.nodes == nodes]
    assert {layout.zero_stage for layout in layouts} == {0, 1, 2, 3}
    assert {layout.pp_schedule for layout in layouts} >= {"none", "1f1b", "interleaved", "zbv"}
    assert min(max(getattr(layout, axis) for layout in layouts) for axis in ("dp", "tp", "pp", "cp")) > 1


def test_a_plan_says_of_the_other_layouts_that_they_are_left_out_and_null_takes_them_all():
    plan, unlimited = (make_plan(load_config([*H100, *words])) for words in ((), ["sweep.max_runs=null"]))
    reasons = {c.reason for c in plan.candidates if c.rule == "max_runs"}
    assert reasons == {"not among the sweep.max_runs=12 that cover most pairs of axis values"}
    trained = [c for c in plan.candidates if c.rule in (None, "max_runs")]
    assert {run.run_id for run in unlimited.runs} == {c.run_id for c in trained}
    assert all(c.valid and c.trainable for c in trained)
    assert plan.config.max_p_oom == 0.001, "a sweep file may set what config.yaml sets, too"


def test_a_cell_whose_fitting_layouts_were_not_selected_is_not_said_to_need_more_memory():
    words = ("sweep=layouts", "hardware=a100-40x8", "sweep.nodes=[1,2]")
    capped, unlimited = (make_plan(load_config([*words, f"sweep.max_runs={cap}"])) for cap in ("1", "null"))
    assert len(capped.runs) == 1
    assert {run.cell for run in unlimited.runs} > {run.cell for run in capped.runs}
    assert not [*nothing_fits(capped)]
    assert not [*nothing_fits(unlimited)]


def test_the_selected_runs_are_those_that_add_the_most_new_pairs_one_after_another():
    plan = make_plan(load_config([*H100, "sweep.max_runs=null"]))
    remaining, covered, num_selected = [*plan.runs], set(), 20
    for _ in range(num_selected):
        gains = [len(pairs_of(run) - covered) for run in remaining]
        covered |= pairs_of(remaining.pop(gains.index(max(gains))))
    selected = [run for run in with_unselected_rejected(plan.runs, num_selected) if run.runs]
    assert {run.run_id for run in selected} == {run.run_id for run in plan.runs} - {
        run.run_id for run in remaining
    }


def test_a_large_sweep_wants_an_acceptance_run_that_passed():
    large, two, lone = (load_config([*H100, f"sweep.nodes={nodes}"]) for nodes in ("[1,16]", "[1,2]", "[1]"))
    folder = acceptance_folder(large) / "now"
    assert "ultrabench doctor --deep launcher=slurm cluster=local hardware=h100x8" in acceptance_warning(
        large
    )
    path = write_acceptance(lone, [ACCEPTED], folder, 1.0)
    assert "has no acceptance run" in acceptance_warning(large), "on one node only"
    write_acceptance(two, [ACCEPTED, failure("x", "y").named("b")], folder, 1.0)
    assert "failed its acceptance run (b)" in acceptance_warning(large)
    assert acceptance_warning(replace(large, axes=replace(large.axes, nodes=(8,)))) is None
    assert acceptance_warning(replace(large, hardware=replace(large.hardware, simulated=True))) is None
    assert acceptance_warning(with_launcher(large, name="local")) is None
    write_acceptance(two, [ACCEPTED], folder, 1.0)
    assert acceptance_warning(large) is None
    assert json.loads(path.read_text())["gpu_hours"] == 1.0
    path.write_text("{")
    assert "has no acceptance run" in acceptance_warning(large)
