"""What a launch on a cluster asks before it writes or submits anything."""

import io
import re
import sys
from dataclasses import replace

import pytest
import typer

from tests.unit.allocations import PLAN
from tests.unit.cli.conftest import one_line
from ultrabench.cli.sweep.consent import ask_for_budget
from ultrabench.errors import ConfigError
from ultrabench.store.events import AllocationEnded
from ultrabench.store.jobs_seen import JobLimits
from ultrabench.store.state import AllocationState, SweepState
from ultrabench.sweep.running.price import BUDGET_FACTOR, reckon

CONTROLLER = """#!/bin/sh
echo "scontrol $*" >> asked
case "$*" in
*config*) echo "ClusterName = alps"; echo "MaxArraySize = 101";;
*) echo "PartitionName=hopper Default=YES MaxNodes=UNLIMITED MaxTime=04:00:00 State=UP TotalNodes=8";;
esac
"""
PRICE = reckon(PLAN).gpu_hours
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
    return ask_for_budget(plan, reckon(plan, state, cluster.max_limit_s), state, cluster, given, yes)


@pytest.fixture
def typed(monkeypatch):
    """Sits at a terminal and types an answer."""
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
    cells = [line.split() for line in lines if line.startswith("tiny")]
    count = {n: sum(c.nodes == n for c in PLAN.runs) for n in (1, 2)}
    assert [cell[:4] for cell in cells] == [
        ["tiny", "1", "2", str(count[1])],
        ["tiny", "2", "4", str(count[2])],
    ]
    rest = [float(line.split()[-1]) for line in lines if " starts of jobs" in line]
    assert sum(float(cell[4]) for cell in cells) + sum(rest) == pytest.approx(PRICE, rel=0.01)
    assert float(next(line for line in lines if line.startswith("all")).split()[-1]) == pytest.approx(
        PRICE, rel=0.01
    )
    told = next(line for line in lines if "jobs, the largest" in line)
    assert re.search(
        r"^2 jobs, the largest of 2 nodes for up to \d+m\d\ds; at most 8 jobs and 2 nodes at a time; "
        r"done in \w+ at the earliest; used so far: 2 GPU hours$",
        told,
    )


def test_the_limit_of_the_partition_is_that_of_the_largest_job(capsys):
    ask(100.0, cluster=replace(CLUSTER, max_limit_s=90.0))
    assert "for up to 1m30s;" in capsys.readouterr().err


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
    assert ask_for_budget(PLAN, reckon(PLAN, under_way), under_way, CLUSTER, 0.0, False) == 0.0


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


def test_a_no_writes_and_submits_nothing(ultrabench, site, typed):
    typed("n\n")
    code, _, said = ultrabench("sweep", "launch", "launcher=slurm", "model=tiny")
    assert code == 130
    assert "Launch, and stop at" in said
    assert [p.name for p in site.iterdir()] == ["asked"]


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["sweep.nodes=[1,4]"], "by default a sweep takes 2: set launcher.max_nodes=4"),
        (["launcher.partition=hoper"], "unknown launcher.partition 'hoper'; did you mean hopper?"),
    ],
)
def test_what_the_site_does_not_give_is_said_first(ultrabench, site, overrides, line):
    assert line in one_line(ultrabench, "sweep", "launch", "launcher=slurm", "model=tiny", *overrides)
    assert [p.name for p in site.iterdir()] == ["asked"]


@pytest.mark.parametrize("hours", ["inf", "nan", "-1", "1e400", "many"])
@pytest.mark.parametrize("launcher", ["local", "slurm"])
def test_a_budget_is_a_number(ultrabench, site, hours, launcher):
    words = ("sweep", "launch", f"launcher={launcher}", "model=tiny", "--max-gpu-hours", hours)
    assert "--max-gpu-hours" in one_line(ultrabench, *words)
    assert list(site.iterdir()) == []
