"""What clusters do to a sweep: it ends as planned, every attempt is recorded, and nothing runs twice."""

import time

import pytest

from tests.chaos.target import hosts, jobs
from tests.slurm.conftest import SETTINGS
from tests.slurm.sweeps import FEW, FEWER, MANY, slurm_says
from tests.sweep_folder import events_of
from ultrabench.store.folder import SweepFolder

pytestmark = pytest.mark.slurm


def test_one_sweep_survives_what_clusters_do_one_after_another(sweeps, slurm, monkeypatch):
    """A requeued job, a node that dies, a cancelled job, a node set down, a slurmctld that starts again."""
    monkeypatch.setenv("STEP_S", "0.25")
    launcher = sweeps.start(*sweeps.launch("fine", *MANY, "retry.max_excluded=2"))

    def job_of_a_new_run():
        """The job that runs the newest run, once a run begins: the trouble reaches that run before it ends."""
        earlier = len(sweeps.executions())

        def new_jobs():
            newest = [line.split() for line in sweeps.executions()[earlier:]][-1:]
            claims = events_of(SweepFolder(sweeps.folder / "results/t"), "claimed")
            allocations = {
                c.allocation for c in claims if [[c.run_id, str(c.repeat), str(c.attempt)]] == newest
            }
            return [job for job in jobs("t", states="R") if job.allocation in allocations]

        sweeps.wait_for(new_jobs)
        return new_jobs()[0]

    sweeps.wait_for(lambda: sweeps.executions())
    # Each job takes runs for 12 s, so that a later one may end before it is requeued.
    requeued = jobs("t", states="R")[-1].job_id
    slurm.run("scontrol", "update", f"jobid={requeued}", "requeue=1")
    slurm.run("scontrol", "requeue", requeued)
    sweeps.wait_for(lambda: '"restart":1' in sweeps.journal())
    # Slurm would requeue it again, instead of ending it, when one of its nodes dies while it still runs.
    slurm_says("scontrol", "update", f"jobid={requeued}", "requeue=0")

    died = hosts(job_of_a_new_run().nodes)[0]
    slurm.tool("node-down", died)
    time.sleep(3)
    slurm.tool("node-up", died)

    cancelled = job_of_a_new_run().job_id
    slurm.run("scancel", cancelled)

    down = hosts(job_of_a_new_run().nodes)[0]
    slurm.run("scontrol", "update", f"nodename={down}", "state=down", "reason=test")
    time.sleep(3)
    slurm_says("scontrol", "update", f"nodename={down}", "state=resume")

    job_of_a_new_run()
    slurm.run("scontrol", "shutdown", "slurmctld")
    time.sleep(4)
    slurm.tool("up", *SETTINGS)

    sweeps.end(launcher, seconds=280)
    rows = sweeps.assert_each_ran_once(runs=40, allowed=frozenset({"cancelled", "lost", "node_fail"}))
    assert any(r["status"] == "cancelled" and r["job_id"] == cancelled for r in rows)
    assert any(r["status"] == "node_fail" and "NODE_FAIL" in r["reason"] for r in rows)
    ends = events_of(SweepFolder(sweeps.folder / "results/t"), "allocation_ended")
    # The node that died took srun along, which would have named it, and was up again before anybody looked.
    assert down in {host for end in ends for host in end.avoid}, "Slurm says which node it lost"


@pytest.mark.parametrize(
    ("behaviour", "end", "suspects"), [("kill_agent", "node_fail", 1), ("kill_leader", "lost", 0)]
)
def test_a_run_that_kills_an_agent_excludes_no_node(sweeps, behaviour, end, suspects):
    """As an OOM killer may: three attempts, each on the silence of an agent alone, and the others are ok."""
    few = ("sweep.nodes=[2]", "sweep.gbs=16", "sweep.zero_stage=0", "sweep.mbs=[1,2,4]", "sweep.gas=null")
    process = sweeps.done(*sweeps.launch(f"1:{behaviour},2:fine,4:fine", *few, "launcher.heartbeat_s=0.5"))
    assert process.returncode == 1, process.stderr
    assert "is excluded" not in process.stdout + process.stderr
    rows = sweeps.rows()
    ends = [(row["status"], row["cause"], len(row["suspect_hosts"] or ())) for row in rows if row["mbs"] == 1]
    # On a slow machine srun may end the leader before it has written what it saw of the other agent.
    assert {*ends} <= {(end, "agent_gone", suspects), ("lost", "agent_gone", 0)}
    assert len(ends) == 3
    assert {row["status"] for row in rows if row["mbs"] > 1} == {"ok"}


def test_a_time_limit_in_the_middle_of_a_run(sweeps):
    """A limit of a minute would be refused, so it is lowered while the job runs."""
    args = ("sweep.nodes=1", "sweep.zero_stage=0", "launcher.allocation_minutes=5")
    refused = sweeps.done(*sweeps.launch("fine", *FEW[1:], *args, "launcher.time_minutes=1"))
    assert (
        refused.returncode,
        "launcher.time_minutes=1; the shortest of 3 runs needs" in refused.stderr,
    ) == (2, True)
    launcher = sweeps.start(
        *sweeps.launch("1:slow_first,2:fine,4:fine", *FEW[1:], *args, "launcher.time_minutes=3")
    )
    sweeps.wait_for(lambda: any(key.endswith(" 0 0") for key in sweeps.executions()) and sweeps.job_ids())
    slurm_says("scontrol", "update", f"jobid={sweeps.job_ids()[0]}", "timelimit=1")
    sweeps.end(launcher)
    rows = sweeps.assert_each_ran_once(runs=3, allowed=frozenset({"cancelled"}))
    cut = [r["reason"] for r in rows if r["status"] == "cancelled"]
    assert len(cut) == 1, "finished runs stay finished"
    assert "SIGUSR2 (the approaching time limit of the job)" in cut[0]


def test_slurm_commands_that_hang_fail_or_lose_their_answer(sweeps):
    """The first job has come to its end before its sbatch is given up and squeue answers."""
    sweeps.fake(
        "sbatch",
        'case $N in 1) $REAL "$@" >/dev/null; sleep 70;; 5) $REAL "$@" >/dev/null; exit 1;; [2-4])\n'
        '  echo "sbatch: error: Socket timed out" >&2; exit 1;; *) exec $REAL "$@";; esac',
    )
    sweeps.fake("squeue", 'case $N in [1-3]) exit 1;; 8) sleep 60;; esac\nexec $REAL "$@"')
    sweeps.run(*sweeps.launch("fine", *FEW, "launcher.poll_s=2"), seconds=280)
    rows = sweeps.assert_each_ran_once(runs=10)
    started = sweeps.count("allocation_started")
    assert len({r["allocation"] for r in rows}) == started, "submitted twice"
    assert sweeps.count("allocation_planned") > started, "what timed out without a job is given up"


def test_a_pending_job_that_cannot_start_is_told_with_a_remedy(sweeps):
    launcher = sweeps.start(*sweeps.launch("fine", *FEWER, "+launcher.sbatch.hold=''"))
    sweeps.wait_for(lambda: sweeps.job_ids())
    assert any("JobHeldUser" in line and "release" in line for line in launcher.stdout)
    while launcher.poll() is None:
        for job in sweeps.job_ids():
            slurm_says("scontrol", "release", job)
        time.sleep(0.5)
    sweeps.end(launcher, seconds=280)
    sweeps.assert_each_ran_once(runs=3)
