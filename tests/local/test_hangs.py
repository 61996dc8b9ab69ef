"""Runs that stand still: found, explained by the right rank, and the sweep goes on."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.chaos.target import processes
from tests.local.conftest import PEAK

pytestmark = pytest.mark.local

COLLECTIVE = Path(__file__).parent / "collective.py"


def hung(bench):
    """The row of each run that stood still, and what its agent told, by mbs."""
    found = {}
    for row in bench.rows():
        if row["status"] == "hang":
            attempts = json.loads(bench.run("sweep", "show", row["run_id"], "--json"))["attempts"]
            (told,) = [a["result"] for a in attempts if a["result"]["status"] == "hang"]
            found[row["mbs"]] = row, told
    return found


def test_a_stopped_rank_is_named_and_the_next_run_measures(bench):
    words = [
        "model=tiny", "name=t", "sweep.gbs=8", "sweep.seq_len=32", "sweep.nodes=1", "sweep.tp=1",
        "sweep.pp=1", "sweep.mbs=[1,2]", "sweep.gas=[4,2]", "sweep.zero_stage=0", "measure.warmup_steps=1",
        "measure.loss_step=3", "measure.deadline_floor_s=2", "measure.min_steps=40",
        "measure.max_steps=40", "launcher.preflight=false",
        "retry.backoff_s=0", PEAK,
    ]  # fmt: skip
    launcher = bench.start("sweep", "launch", *words)
    bench.wait_for(bench.measuring)
    os.kill(processes(bench.folder, "rank")[-1].pid, signal.SIGSTOP)
    output, _ = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, output
    ((row, told),) = hung(bench).values()
    stopped = [r for r in told["evidence"]["hang_evidence"] if r["state"] == "T"]
    assert len(stopped) == 1
    rank, host = stopped[0]["rank"], stopped[0]["host"]
    assert row["reason"].startswith(f"rank {rank} on {host} is stopped (state T)")
    assert "no progress for" in row["reason"]
    assert told["suspect_hosts"] == [host]
    others = [r for r in told["evidence"]["hang_evidence"] if r["rank"] != rank]
    assert all("#" in r["collective"] and r["step"] > 1 and r["at"] for r in others)
    assert {r["status"] for r in bench.rows() if r["is_final"]} == {"ok"}
    shown = bench.run("sweep", "show", row["run_id"])
    assert told["evidence"]["hang_cause"] in shown
    stacks = [line for line in shown.splitlines() if line.endswith(".stacks.txt")]
    assert len(stacks) == 1, "a stopped rank cannot answer"
    assert all("kernel/step.py" in (bench.folder / path).read_text() for path in stacks)


def test_ranks_that_stay_away_from_their_collective_are_named(bench):
    command = ",".join(f"'{word}'" for word in ("python", COLLECTIVE, "1:sleep,2:receive"))
    words = bench.overrides("fine", "sweep.nodes=2", "sweep.gbs=8", "sweep.zero_stage=0", "sweep.mbs=[1,2]")
    words += [f"kernel.command=[{command}]", "sweep.gas=[1,2]", "retry.attempts.hang=0"]
    bench.run("sweep", "launch", *words, code=1)
    found = hung(bench)
    # Nobody records what gloo sends; where one rank receives, ranks 1 and 2 are one all-reduce ahead of both.
    for mbs, waiting in ((1, 3), (2, 2)):
        row, told = found[mbs]
        cause = "rank 3 on local-1 never entered all_reduce #6 of group world"
        assert row["reason"].startswith(f"{cause}; {waiting} ranks wait for it")
        assert told["suspect_hosts"] == ["local-1"]
        assert "Rank 3 is in lose_time (local/collective.py:" in told["evidence"]["hang_cause"]
