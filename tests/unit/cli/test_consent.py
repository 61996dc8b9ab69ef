"""What a launch on a cluster asks before it writes or submits anything."""

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import typer

from tests.unit.allocations import PLAN
from tests.unit.cli.conftest import one_line
from ultrabench.cli.sweep.consent import ask_for_budget, ask_for_this_machine
from ultrabench.errors import ConfigError
from ultrabench.processes import busy_share
from ultrabench.store.events import AllocationEnded
from ultrabench.store.jobs_seen import JobLimits
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.running.price import BUDGET_FACTOR, price_of

CONTROLLER = """#!/bin/sh
echo "scontrol $*" >> asked
case "$*" in
*config*) echo "ClusterName = alps"; echo "MaxArraySize = 101";;
*) echo "PartitionName=hopper Default=YES MaxNodes=UNLIMITED MaxTime=04:00:00 State=UP TotalNodes=8";;
esac
"""
PRICE = price_of(PLAN).gpu_hours
CLUSTER = JobLimits(max_jobs=8, max_nodes=2)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def after(used):
    """The state of a sweep whose only allocation has used so many GPU hours and tried nothing."""
    held_s = 3600 * used / PLAN.config.hardware.gpus_per_node
    end = AllocationEnded(allocation="a", reason="done", held_s=held_s)
    return SweepState(allocations={"a": AllocationState(name="a", ends={end.job: end})})


def ask(given=None, *, plan=PLAN, used=0.0, yes=False, cluster=CLUSTER):
    state = after(used)
    return ask_for_budget(plan, price_of(plan, state, cluster.max_limit_s), state, cluster, given, yes)


@pytest.fixture
def typed(monkeypatch):
    """Sits at a terminal of an idle machine and types an answer."""
    monkeypatch.setattr("ultrabench.cli.sweep.consent.busy_share", lambda seconds: 0.1)
    return lambda text: monkeypatch.setattr(sys, "stdin", Terminal(text))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A cluster that can be asked for its limits; any other program of Slurm's fails the test."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(CONTROLLER)
    for name in ("sinfo", "sacctmgr", "sbatch", "squeue", "sacct", "scancel"):
        (folder / name).write_text(f"#!/bin/sh\necho {name} >> asked\nexit 1\n")
    for path in folder.iterdir():
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def test_the_price_is_shown_by_cell(capsys, typed):
    typed("y\n")
    ask(used=2.0)
    lines = capsys.readouterr().err.splitlines()
    batch = "sequences of 64 tokens, global batch 8 (512 tokens), fp32, kernel embedded"
    assert lines[0] == f"sweep quick-cpu: tiny (328 k parameters) on cpu, {batch}"
    cells = [line.split() for line in lines if line.startswith("tiny")]
    count = {n: sum(c.nodes == n for c in PLAN.runs) for n in (1, 2)}
    assert [cell[:4] for cell in cells] == [["tiny", f"{n}", f"{2 * n}", f"{count[n]}"] for n in (1, 2)]
    rest = [float(line.split()[-1]) for line in lines if "starts of jobs: 2" in line]
    assert sum(float(cell[4]) for cell in cells) + sum(rest) == pytest.approx(PRICE, rel=0.01)
    middle, low, to, high = next(line for line in lines if line.startswith("all")).split()[-4:]
    assert float(middle) == pytest.approx(PRICE, rel=0.01)
    assert float(low) < PRICE < float(high)
    assert to == "to"
    assert all(float(cell[5]) < float(cell[4]) < float(cell[7]) for cell in cells)
    told = r"2 jobs of 0\.\d+ to [\d.]+ predicted minutes \(launcher.allocation_minutes=20\), time limit \d+ minutes"
    assert re.fullmatch(told, lines[-3])
    most = "at most 8 jobs and 2 nodes at a time, and 2 nodes in a job"
    assert re.search(f"^{most}; done in \\w+ at the earliest; used so far: 2 GPU hours$", lines[-2])


def test_the_limit_of_the_partition_is_that_of_the_largest_job(capsys):
    ask(100.0, cluster=replace(CLUSTER, max_limit_s=240.0))
    assert "time limit 4 minutes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "agreed"), [("y\n", True), ("yes\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_a_person_is_asked(typed, capsys, answer, agreed):
    typed(answer)
    if agreed:
        assert ask(used=1.0) == pytest.approx(1.0 + BUDGET_FACTOR * PRICE)
    else:
        with pytest.raises(typer.Abort):
            ask()
    assert "Launch, and stop at" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "told"),
    [(["model=8B", "max_p_oom=1"], "GiB a rank, which has 2. Launch?"),
     (["model=80B", "hardware.mem_bytes=9e12"], "hours on this machine. Launch?")],
)  # fmt: skip
def test_a_person_is_asked_before_this_machine_works_for_hours_or_for_nothing(typed, capsys, overrides, told):
    plan = make_plan(load_config(overrides))
    price = price_of(plan)
    typed("n\n")
    with pytest.raises(typer.Abort):
        ask_for_this_machine(plan, price, yes=False)
    said = capsys.readouterr().err
    assert told in said
    assert said.startswith(f"sweep quick-cpu: {plan.config.models[0].name} (")
    assert " on cpu, sequences of 64 tokens" in said
    ask_for_this_machine(plan, price, yes=True)
    idle = make_plan(load_config(["model=tiny"]))
    ask_for_this_machine(idle, price_of(idle), yes=False)
    assert capsys.readouterr().err == ""


def test_a_busy_machine_is_told(monkeypatch, capsys):
    plan = make_plan(load_config(["model=tiny"]))
    monkeypatch.setattr("ultrabench.cli.sweep.consent.busy_share", lambda seconds: 0.9)
    ask_for_this_machine(plan, price_of(plan), yes=True)
    assert "other programs use 90% of this machine's cores" in capsys.readouterr().err


def test_the_share_of_busy_cores_is_measured():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        used = max(busy_share(0.3) for _ in range(3))
        busy.kill()
    assert 0.9 / os.cpu_count() <= used <= 1


@pytest.mark.parametrize("stdin", [io.StringIO("y\n"), None])
@pytest.mark.parametrize(("used", "yes"), [(1.0, False), (1.0, True), (123456.7, False)])
def test_without_a_terminal_a_number_has_to_be_given(monkeypatch, stdin, used, yes):
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(ConfigError, match=r"^no terminal to ask .* --max-gpu-hours [\d.]+$") as caught:
        ask(yes=yes, used=used)
    # The number it names is enough for what was predicted.
    number = float(str(caught.value).split()[-1])
    assert number == pytest.approx(used + BUDGET_FACTOR * PRICE, rel=0.01)
    assert ask(number, used=used) == number


def test_who_gives_a_number_or_says_yes_is_not_asked(typed):
    typed("")
    assert ask(0.5) == 0.5
    assert ask(yes=True) == pytest.approx(BUDGET_FACTOR * PRICE)


def test_a_budget_that_the_first_job_would_break_is_refused_unless_jobs_are_under_way():
    with pytest.raises(ConfigError, match="the first job needs"):
        ask(0.0)
    under_way = SweepState(allocations={"a": AllocationState(name="a")})
    assert ask_for_budget(PLAN, price_of(PLAN, under_way), under_way, CLUSTER, 0.0, False) == 0.0


@pytest.mark.parametrize(("given", "used", "budget"), [(None, 3.0, 3.0), (7.0, 3.0, 7.0)])
def test_where_nothing_is_left_to_do_nobody_is_asked(monkeypatch, capsys, given, used, budget):
    monkeypatch.setattr(sys, "stdin", None)
    assert ask(given, plan=replace(PLAN, candidates=()), used=used) == budget
    assert capsys.readouterr().err == ""


def test_a_launch_without_a_terminal_writes_and_submits_nothing(ultrabench, site):
    code, out, said = ultrabench("sweep", "launch", "launcher=slurm", "model=tiny")
    assert (code, out) == (2, "")
    assert said.splitlines()[-1].startswith("ultrabench: no terminal to ask whether 0.1")
    assert [p.name for p in site.iterdir()] == ["asked"]
    assert "sbatch" not in (site / "asked").read_text()


H100 = (
    "launcher=slurm", "hardware=h100x8", "sweep=playbook", "model=8B", "sweep.nodes=[1]", "max_p_oom=1",
    "sweep.strategy=exhaustive",
)  # fmt: skip
LEFT_OUT = r"(\d+) runs of 115 left out, since no job may be long enough: a job needs \d+ minutes"


def test_a_limit_that_is_too_short_is_told_before_anything_is_submitted(ultrabench, site):
    some = ("sweep", "launch", *H100, "launcher.time_minutes=20")
    code, _, said = ultrabench(*some)
    assert code == 2, "it asks for consent first"
    lines = said.splitlines()
    found = re.match(LEFT_OUT, lines[-4])
    assert found
    (site.parent / "bin/scontrol").write_text(CONTROLLER.replace("04:00:00", "00:02:00"))
    told = one_line(ultrabench, "sweep", "launch", *H100)
    assert told.startswith("partition, QOS and account allow a job 2 minutes; the shortest job of 115 runs")
    assert [p.name for p in site.iterdir()] == ["asked"]
    plan = json.loads(ultrabench("sweep", "plan", *some[2:], "--json")[1])
    assert (plan["rejected"]["time_limit"], plan["runs"]) == (int(found[1]), 115 - int(found[1]))
    assert re.match(LEFT_OUT, plan["notes"][-2])
    assert "launcher.time_minutes=1; the" in one_line(
        ultrabench, "sweep", "plan", *H100, "launcher.time_minutes=1"
    )


def test_a_no_writes_and_submits_nothing(ultrabench, site, typed):
    typed("n\n")
    code, _, said = ultrabench("sweep", "launch", "launcher=slurm", "model=tiny")
    assert code == 130
    assert "Launch, and stop at" in said
    assert [p.name for p in site.iterdir()] == ["asked"]


@pytest.mark.parametrize("hours", ["inf", "nan", "-1", "1e400", "many"])
@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_a_budget_is_a_number(ultrabench, site, hours, launcher):
    words = ("sweep", "launch", f"launcher={launcher}", "model=tiny", "--max-gpu-hours", hours)
    assert "--max-gpu-hours" in one_line(ultrabench, *words)
    assert list(site.iterdir()) == []
