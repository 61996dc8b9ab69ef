"""What a launch asks before it writes or submits anything, and what it says while it runs."""

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import typer

from tests.configs import refused
from tests.unit.allocations import PLAN, told
from tests.unit.cli.conftest import QUICK, one_line, record
from ultrabench.cli.sweep.consent import ask_for_budget, ask_for_this_machine
from ultrabench.cli.sweep.launch import first_lines, launch_differences, what_continues
from ultrabench.cli.sweep.live import Display, attempt_line
from ultrabench.errors import ConfigError
from ultrabench.processes import busy_share
from ultrabench.result import Status
from ultrabench.store.events import AllocationEnded, Launched
from ultrabench.store.jobs_seen import JobLimits
from ultrabench.store.journal import read_journal
from ultrabench.store.state import AllocationState, SweepState, fold
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
SLOW_CORE = 3e9
NOTHING = replace(PLAN, candidates=())
CLUSTER = JobLimits(max_jobs=8, max_nodes=2)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def ask(budget=None, *, plan=PLAN, used=0.0, yes=False):
    """The budget of a sweep whose only allocation has used so many GPU hours and tried nothing."""
    held_s = 3600 * used / PLAN.config.hardware.gpus_per_node
    end = AllocationEnded(allocation="a", reason="done", held_s=held_s)
    state = SweepState(allocations={"a": AllocationState(name="a", ends={end.job: end})})
    return ask_for_budget(plan, price_of(plan, state), state, CLUSTER, budget, yes)


@pytest.fixture
def typed(monkeypatch):
    """Sits at a terminal and types an answer."""
    return lambda text: monkeypatch.setattr(sys, "stdin", Terminal(text))


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A cluster that can be asked for its limits; any other program of Slurm's fails the test."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("scontrol", "sinfo", "sacctmgr", "sbatch", "squeue", "sacct", "scancel"):
        other = f"#!/bin/sh\necho {name} >> asked\nexit 1\n"
        (folder / name).write_text(CONTROLLER if name == "scontrol" else other)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    facts = {"core_flops_per_s": SLOW_CORE, "cores": 2}
    monkeypatch.setattr("ultrabench.launchers.open_sweep.probe_machine", lambda measures_peak: facts)
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def test_the_price_is_shown_by_cell(capsys, typed):
    typed("y\n")
    assert ask(used=2.0) == pytest.approx(2.0 + BUDGET_FACTOR * PRICE)
    lines = capsys.readouterr().err.splitlines()
    batch = "sequences of 64 tokens, global batch 8 (512 tokens), fp32, kernel embedded"
    assert lines[0] == f"sweep quick-cpu: tiny (328 k parameters) on cpu, {batch}"
    cells = [line.split() for line in lines if line.startswith("tiny")]
    count = {n: sum(c.nodes == n for c in PLAN.runs) for n in (1, 2)}
    assert [cell[:4] for cell in cells] == [["tiny", f"{n}", f"{2 * n}", f"{count[n]}"] for n in (1, 2)]
    starts, total = (next(line for line in lines if line.startswith(w)) for w in ("starts of jobs: 2", "all"))
    middle, low, high = re.findall(r"[\d.]+", total)[-3:]
    assert float(low) < PRICE < float(high)
    parts = sum(float(cell[4]) for cell in cells) + float(starts.split()[-1])
    assert [float(middle), parts] == pytest.approx([PRICE, PRICE], rel=0.01)
    intervals = [map(float, cell[5].strip("()").split("-")) for cell in cells]
    assert all(low < float(cell[4]) < high for cell, (low, high) in zip(cells, intervals, strict=True))
    jobs = r"2 jobs of 0\.\d+ to [\d.]+ predicted minutes \(launcher.allocation_minutes=20\), time limit \d+ minutes"
    assert re.fullmatch(jobs, lines[-3])
    limits = "at most 8 jobs and 2 nodes at a time, 2 nodes per job"
    times = r"done in \w+ \(\w+ to \w+\) if no job waits in the queue"
    assert re.search(f"^{limits}; {times}; used so far: 2 GPU hours$", lines[-2])


@pytest.mark.parametrize(
    ("overrides", "text"),
    [(["model=8B", "max_p_oom=1"], "GiB a rank, and a rank has 2.00 GiB. Launch?"),
     (["model=80B", "hardware.mem_bytes=9e12"], "hours on this machine. Launch?")],
)  # fmt: skip
def test_a_person_is_asked_before_this_machine_works_for_hours_or_for_nothing(typed, capsys, overrides, text):
    plan = make_plan(load_config(overrides))
    price = price_of(plan)
    typed("n\n")
    with pytest.raises(typer.Abort):
        ask_for_this_machine(plan, price, yes=False)
    begin = rf"sweep quick-cpu: {plan.config.models[0].name} \(.* on cpu, sequences of 64 tokens"
    assert re.match(f"{begin}(.*\n)+.*{re.escape(text)}", capsys.readouterr().err)
    ask_for_this_machine(plan, price, yes=True)
    assert capsys.readouterr().err == ""


def test_a_busy_machine_is_told_and_nobody_asked_about_minutes(monkeypatch, capsys, typed):
    typed("")
    monkeypatch.setattr("ultrabench.cli.sweep.consent.busy_share", lambda seconds: 0.9)
    ask_for_this_machine(QUICK, price_of(QUICK), yes=False)
    assert "other programs use 90% of this machine's cores" in capsys.readouterr().err


def test_the_share_of_busy_cores_is_measured():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        used = max(busy_share(0.3) for _ in range(3))
        busy.kill()
    assert 0.9 / os.cpu_count() <= used <= 1


@pytest.mark.parametrize(
    ("stdin", "used", "yes"), [(io.StringIO("y\n"), 1.0, False), (None, 1.0, True), (None, 123456.7, False)]
)
def test_without_a_terminal_a_number_has_to_be_given(monkeypatch, stdin, used, yes):
    monkeypatch.setattr(sys, "stdin", stdin)
    line = r"^[\d.,]+ GPU hours are predicted, .* --max-gpu-hours [\d.]+$"
    with pytest.raises(ConfigError, match=line) as caught:
        ask(yes=yes, used=used)
    # The number it names is enough for what was predicted.
    number = float(str(caught.value).split()[-1])
    assert number == pytest.approx(used + BUDGET_FACTOR * PRICE, rel=0.01)
    assert ask(number, used=used) == number


def test_a_budget_that_the_first_job_would_break_is_refused_unless_jobs_are_under_way():
    with refused("the first job needs"):
        ask(0.0)
    under_way = SweepState(allocations={"a": AllocationState(name="a")})
    assert ask_for_budget(PLAN, price_of(PLAN, under_way), under_way, CLUSTER, 0.0, False) == 0.0


@pytest.mark.parametrize(
    ("limit", "yes", "plan", "budget"),
    [(0.5, False, PLAN, 0.5), (None, True, PLAN, BUDGET_FACTOR * PRICE), (None, False, NOTHING, 0.4),
        (7.0, False, NOTHING, 7.0)],
)  # fmt: skip
def test_who_gives_a_number_or_says_yes_or_has_nothing_left_is_not_asked(typed, limit, yes, plan, budget):
    typed("")
    used = 0.4 if plan is NOTHING else 0.0
    assert ask(limit, plan=plan, used=used, yes=yes) == pytest.approx(budget)


@pytest.mark.parametrize(
    ("answer", "code", "line"), [("", 2, "ultrabench: 0.1"), ("n\n", 130, "Launch, ")]
)  # fmt: skip
def test_without_consent_a_launch_writes_and_submits_nothing(ultrabench, site, typed, answer, code, line):
    if answer:
        typed(answer)
    exit_code, out, err = ultrabench("sweep", "launch", "launcher=slurm", "model=tiny")
    assert (exit_code, out.strip()) == (code, "")
    assert f"\n{line}" in err
    assert [p.name for p in site.iterdir()] == ["asked"]
    assert "sbatch" not in (site / "asked").read_text()


def test_the_price_asked_about_is_that_of_the_measured_machine_and_of_no_other(ultrabench, site, typed):
    """A plan says a range that holds it, since it measures nothing."""
    words = ("launcher=slurm", "sweep.nodes=[1]")
    plan = json.loads(ultrabench("sweep", "plan", *words, "--json")[1])
    typed("n\n")
    _, _, err = ultrabench("sweep", "launch", *words)
    asked, low, high = map(
        float, re.search(r"^([\d.]+) GPU hours, ([\d.]+) to ([\d.]+) with", err, re.M).groups()
    )
    measured = price_of(make_plan(load_config([*words]), core_flops_per_s=SLOW_CORE, cores=2))
    assert asked == pytest.approx(measured.gpu_hours, rel=0.01)
    assert asked > 2 * plan["predicted_gpu_hours"]
    plan_low, plan_high = plan["predicted_gpu_hours_interval"]
    assert plan_low < low < high < plan_high
    assert "measuring its cores" in err


H100 = (
    "launcher=slurm", "hardware=h100x8", "sweep=playbook", "model=8B", "sweep.nodes=[1]", "max_p_oom=1",
    "sweep.strategy=exhaustive",
)  # fmt: skip
LEFT_OUT = r"(\d+) runs of 115 excluded, such as one for which a job needs \d+ minutes"


def test_a_limit_that_is_too_short_is_told_before_anything_is_submitted(ultrabench, site):
    command = ("sweep", "launch", *H100, "launcher.time_minutes=20")
    code, _, err = ultrabench(*command)
    assert code == 2, "it asks for consent first"
    (number,) = re.findall(LEFT_OUT, err)
    (site.parent / "bin/scontrol").write_text(CONTROLLER.replace("04:00:00", "00:02:00"))
    refusal = one_line(ultrabench, "sweep", "launch", *H100)
    assert refusal.startswith("partition, QOS and account limit a job to 2 minutes; the shortest of 115 runs")
    assert [p.name for p in site.iterdir()] == ["asked"]
    plan = json.loads(ultrabench("sweep", "plan", *command[2:], "--json")[1])
    assert (plan["rejected"]["time_limit"], plan["runs"]) == (int(number), 115 - int(number))
    assert any(re.match(LEFT_OUT, line) for line in plan["notes"])
    too_short = "launcher.time_minutes=1"
    assert f"{too_short}; the" in one_line(ultrabench, "sweep", "plan", *H100, too_short)


@pytest.mark.parametrize(("launcher", "hours"), [("local", "nan"), ("slurm", "inf"), ("slurm", "-1")])
def test_a_budget_is_a_number(ultrabench, site, launcher, hours):
    words = ("sweep", "launch", f"launcher={launcher}", "model=tiny", "--max-gpu-hours", hours)
    assert "--max-gpu-hours" in one_line(ultrabench, *words)
    assert list(site.iterdir()) == []


def test_a_launch_tells_its_new_runs_and_those_of_earlier_launches_apart(sweep):
    ids = [run.run_id for run in QUICK.runs]
    for run in QUICK.runs[2:4]:
        record(sweep, run, status=Status.OOM, reason="no memory")
    state = fold(read_journal(sweep.journal))
    assert [*launch_differences(state, set(ids), old_settled_ids=set())] == []
    new, earlier = launch_differences(state, set(ids[1:]), old_settled_ids=set(ids[:2]))
    assert new == "new in this launch: 2 runs settled (2 oom)"
    assert earlier == "in earlier launches only: 1 run settled (1 ok)"


def test_a_launch_tells_how_many_runs_are_left(sweep):
    record(sweep, QUICK.runs[2], status=Status.CANCELLED, reason="ended by SIGTERM")
    state, total = fold(read_journal(sweep.journal)), len(QUICK.runs)
    journal = SimpleNamespace(path=next(sweep.journal.iterdir()))

    def line(plan, state):
        facts = {"config": plan.config, "plan": plan, "folder": sweep, "journal": journal, "lease": None}
        return [*first_lines(SimpleNamespace(**facts, state=lambda: state), price_of(plan, state))][1]

    assert f": {total} runs, " in line(QUICK, SweepState())
    assert f": {total - 2} of {total} runs left, " in line(QUICK, state)
    twice = replace(QUICK, config=replace(QUICK.config, repeats=2))
    assert f": {total - 2} of {total} runs left, repeats of 1 measured run left, " in line(twice, state)
    for run in QUICK.runs:
        record(sweep, run, attempt=1)
    assert f": repeats of {total} measured runs left, " in line(twice, fold(read_journal(sweep.journal)))


def test_lines_of_a_launch_count_settled_runs_and_tell_what_is_tried_again_or_skipped(capsys):
    state = SweepState(launched=Launched(generation=1, config=QUICK.config.resolved))
    display, (run, too_large), total = Display("q", QUICK.runs, "cpu"), QUICK.runs[1:3], len(QUICK.runs)

    def lines(*attempt, **result):
        display.show(told(state, *attempt, **result), frozenset())
        return capsys.readouterr().err

    assert lines(QUICK.runs[-1], None) == ""
    retried = rf"\[0/{total}\] .*; will be retried in 30 s at the earliest\n"
    assert re.fullmatch(retried, lines(run, Status.CRASH, cause="killed"))
    given_up = lines(run, Status.CRASH, attempt=1, cause="killed")
    assert re.fullmatch(rf"\[1/{total}\] ((?!retried).)*\n", given_up)
    assert re.fullmatch(rf"\[1/{total}\] .*; will be retried\n", lines(too_large, Status.OOM, confirmed=True))
    why = f"dominated by {too_large.run_id}, which ran out of memory"
    two_lines = rf"\[2/{total}\] .*\n\[3/{total}\] skipped {QUICK.runs[0].run_id} .*: {why}.*\n"
    assert re.fullmatch(two_lines, lines(too_large, Status.OOM, attempt=1, confirmed=True))


def test_lines_of_a_launch_count_repeats_apart_from_settled_runs(capsys):
    twice = {**QUICK.config.resolved, "repeats": 2}
    state, runs = SweepState(launched=Launched(generation=1, config=twice)), QUICK.runs[:2]
    display = Display("q", runs, "cpu")
    display.show(state, frozenset())
    for repeat, run in product((0, 1, 2), runs):
        display.show(told(state, run, Status.OK, repeat=repeat), frozenset())
    counts = [line.partition("]")[0] + "]" for line in capsys.readouterr().err.splitlines()]
    assert counts[:4] == [f"[{n}/2, repeats {k}/2]" for n, k in ((1, 0), (2, 0), (2, 1), (2, 2))]
    assert counts[4:] == [f"[2/2, repeats 2/2, repeats of the best {n}]" for n in (1, 2)]


def test_the_line_of_a_finished_run_tells_mfu_memory_and_what_is_wrong_with_it():
    flops_per_step = QUICK.runs[0].shape.flops_per_token(64) * QUICK.runs[0].spec.tokens_per_step
    run = replace(QUICK.runs[0], peak_flops_per_s=4 * flops_per_step / 0.1 / 2)

    def line(caveat=None, status=Status.OK, **result):
        (attempt,) = told(SweepState(), run, status, **result).attempts.values()
        rendered = attempt_line(run, attempt, caveat)
        return rendered.plain.partition(": ")[2], rendered.style

    text, style = line(peak_mem_reserved_bytes=3 << 29)
    assert (text.startswith("ok, 25.0 % MFU, 1.50 GiB, "), style) == (True, "green")
    kernel = replace(run.spec.kernel, precision="fp8")
    (attempt,) = told(SweepState(), run, Status.OK, peak_mem_reserved_bytes=3 << 29).attempts.values()
    in_fp8 = replace(run, spec=replace(run.spec, kernel=kernel))
    assert ": ok, 25.0 % MFU of fp8, 1.50 GiB, " in attempt_line(in_fp8, attempt).plain
    assert line("throttled")[0].endswith(" (throttled)")
    text, style = line(stopped="slower_than_best")
    assert ("slower than the best of its cell" in text, style) == (True, "yellow")
    assert line(status=Status.OOM, reason="no memory") == ("oom, no memory", "red")
    (attempt,) = told(SweepState(), run, Status.OK).attempts.values()
    assert f" 1 node {run.spec.label()}: ok" in attempt_line(run, attempt).plain
    plain_line = attempt_line(run, attempt, columns=("model", "nodes", "seq_len", "gbs")).plain
    assert f" 1 node seq_len=64 gbs={run.cell.gbs} {run.spec.label()}: ok" in plain_line


@pytest.mark.parametrize(("allocations", "text"), [
    ({}, "nothing was running"),
    ({"a": AllocationState(name="a")}, "what was being submitted may still start"),
    ({"a": AllocationState(name="a"), "b": AllocationState(name="b", job={"host": "n"})},
     "runs on this machine continue"),
])  # fmt: skip
def test_a_launch_that_ends_by_a_signal_says_what_goes_on(allocations, text):
    sweep = SimpleNamespace(state=lambda: SweepState(allocations=allocations))
    assert what_continues(sweep, False) == text


def test_a_launch_that_ends_while_its_folder_is_away_says_what_jobs_do():
    def away():
        raise OSError("Stale file handle")

    assert what_continues(SimpleNamespace(state=away), True) == "submitted jobs keep running"
