"""Runs that stand still: found, explained by the right rank, and the sweep goes on."""

import json
import os
import signal

import pytest

from tests.chaos.target import processes
from tests.local.conftest import AT_ONCE, EMBEDDED, MEASURING, axes

pytestmark = pytest.mark.local


def hung(bench):
    """The row of each run that stood still, and what its agent told, by mbs."""
    hung_by_mbs = {}
    for row in bench.rows():
        if row["status"] == "hang":
            attempts = json.loads(bench.run("sweep", "show", row["run_id"], "--json"))["attempts"]
            result, *_ = [a["result"] for a in attempts if a["result"]["status"] == "hang"]
            hung_by_mbs.setdefault(row["mbs"], (row, result))
    return hung_by_mbs


def test_a_stopped_rank_and_a_killed_one_are_named_and_their_runs_measured_again(bench):
    """Of the embedded kernel: the first is a hang, and in the run that follows the other is a crash."""
    sizes = axes(gbs=8, nodes=1, tp=1, pp=1, mbs=[1, 2], gas=[4, 2], zero_stage=0)
    steps = ("measure.deadline_floor_s=2", "measure.min_steps=40", "measure.max_steps=40")
    launcher = bench.start("sweep", "launch", *EMBEDDED, *sizes, *steps, *AT_ONCE)
    bench.wait_for(bench.measuring)
    os.kill(processes(bench.folder, "rank")[-1].pid, signal.SIGSTOP)
    bench.wait_for(lambda: '"status":"hang"' in bench.journal(), 120)
    begun = bench.journal().count(MEASURING)
    bench.wait_for(lambda: bench.journal().count(MEASURING) > begun)
    os.kill(processes(bench.folder, "rank")[-1].pid, signal.SIGKILL)
    bench.end(launcher, seconds=200)
    (reason,) = (row["reason"] for row in bench.rows() if row["status"] == "crash")
    assert "killed by SIGKILL, which ultrabench did not send" in reason
    ((row, result),) = hung(bench).values()
    stopped = [r for r in result["evidence"]["hang_evidence"] if r["state"] == "T"]
    assert len(stopped) == 1
    rank, host = stopped[0]["rank"], stopped[0]["host"]
    assert row["reason"].startswith(f"rank {rank} on {host} is stopped (state T)")
    assert "no progress for" in row["reason"]
    assert (result["began_on"], result["suspect_hosts"]) == ([host], []), "one node cannot be compared"
    others = [r for r in result["evidence"]["hang_evidence"] if r["rank"] != rank]
    # The first rank that measures is reported; others may still be on their way there from step 1.
    assert all("#" in r["collective"] and r["step"] >= 1 and r["at"] for r in others)
    assert {r["status"] for r in bench.rows() if r["is_final"]} == {"ok"}
    shown = bench.run("sweep", "show", row["run_id"])
    assert result["evidence"]["hang_cause"] in shown
    stacks = [line for line in shown.splitlines() if line.endswith(".stacks.txt")]
    assert len(stacks) == 1, "a stopped rank cannot answer"
    assert all("kernel/step.py" in (bench.folder / path).read_text() for path in stacks)


def test_a_run_that_moves_again_while_it_is_examined_goes_on(bench):
    """It stood still for longer than its deadline, as on a host that had no time for it: one look decides nothing."""
    bench.run(*bench.launch("until_asked", nodes=2, gbs=8, mbs=2))
    assert [(row["status"], row["num_steps_measured"]) for row in bench.rows()] == [("ok", 10)]


def test_ranks_that_stay_away_from_their_collective_are_named(bench):
    bench.run(*bench.launch("receive", "retry.attempts.hang=0", nodes=2, gbs=8, mbs=2), code=1)
    ((row, result),) = hung(bench).values()
    assert len(bench.executions()) == 2, "it may have been the node, so it was tried once more"
    # Nobody records what gloo sends: rank 0 receives, and ranks 1 and 2 are one all-reduce ahead of both.
    cause = "rank 3 on local-1 never entered all_reduce #6 of group world"
    assert row["reason"].startswith(f"{cause}; 2 ranks wait for it")
    assert (result["began_on"], result["suspect_hosts"]) == (["local-1"], []), "it is one of two ranks"
    assert "Rank 3 is in lose_time (local/program.py:" in result["evidence"]["hang_cause"]
