"""Faults by which the innocent look guilty: what is slow, full or stopped for a while, and words about others."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from tests import patience
from tests.chaos.failures import fill, order
from tests.chaos.fault import MAX_ATTEMPTS, Fault
from tests.chaos.interference import SUBMITS_S, Wrappers
from tests.chaos.judge import judge, one_at_a_time
from tests.chaos.target import (
    Hit,
    MissedError,
    Target,
    fork_servers,
    jobs,
    nodes_at_work,
    one_of,
    processes,
    send,
    wait_for,
)  # fmt: skip
from tests.chaos.witness import executions_of
from ultrabench.processes import descendants, is_alive, start_time

if TYPE_CHECKING:
    from tests.chaos.campaign import Campaign

CLEANS_S = 60.0
"""Seconds within which the files that a run left are removed, of which each takes 1 ms."""
FULL_S = 8.0
"""Seconds for which the scratch of a node is full; several runs begin meanwhile."""
SUSPENDED_S = 45.0
"""Seconds for which an allocation is suspended; they are more than the time limit of a run."""
FORGETS_S = 20.0
"""Seconds for which sacct answers about another job; several jobs end meanwhile."""
BANNER_S = 3.0
"""Seconds for which sbatch prints a banner after its first call."""
EPILOG_S = 8
EPILOGS_S = 60.0
"""Seconds within which new jobs begin while the epilog of each takes EPILOG_S."""
NEW_JOBS = 3
"""Number of new jobs after whose start enough was seen of a limit of one job."""
LOCAL_LAUNCHERS = 6
LOCAL_S = 120.0
"""Seconds of an idle machine within which all local sweeps have to end."""
LOCAL = ("model=tiny", "launcher=local", "launcher.preflight=false", "launcher.control=false", "sweep.nodes=1",
         "sweep.gbs=2", "sweep.zero_stage=0", "sweep.mbs=1", "sweep.gas=1", "measure.min_steps=6", "retry.backoff_s=0",
         "measure.max_foreign_load=null",
         "++hardware.peak_flops_per_s={fp32:1e11,bf16:1e11}")  # fmt: skip
"""Options of a sweep of one run on this machine."""
BANNER = """if [ -e $FLAG ]; then
echo 'Dear user, your last job 1 used 3 % of its GPUs'; $REAL "$@"; code=$?; echo 'See job 2 of yesterday, too'
echo $$ >> $HITS; exit $code; fi
exec $REAL "$@"
"""
FORGETFUL_SQUEUE = (
    'if [ -e $FLAG ]; then set -o pipefail; $REAL "$@" | sed -E "/\\|($OVER)\\|/d"; exit; fi\nexec $REAL "$@"'
).replace("$OVER", "COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY")
"""A squeue that forgets jobs as soon as they end, as with a small MinJobAge."""
FOREIGN_COLUMNS = ("JobName", "UID", "Submit", "Cluster")
FOREIGN_SACCT = f"""if [ -e $FLAG ]; then echo $$ >> $HITS
exec {shlex.join([sys.executable, str(Path(__file__).with_name("foreign_sacct.py"))])} %s $REAL "$@"; fi
exec $REAL "$@"
"""


def _slow_unlink(campaign: "Campaign", fault: Fault) -> Hit:
    """A run leaves thousands of files on a node, while removing one takes 1 ms on all nodes.

    Raises:
        MissedError: this machine has no C compiler.
    """
    if not campaign.nodes.unlinks_slowly:
        raise MissedError("there is no gcc")
    campaign.nodes.slow_unlink.touch()
    try:
        hit, pattern = order(campaign, fault), f"*/*/*/small_files.{fault.number}"
        wait_for(lambda: not any(campaign.nodes.folder.glob(pattern)), CLEANS_S)
    finally:
        campaign.nodes.slow_unlink.unlink()
    return {**hit, "allocations": []}


def _scratch_full(campaign: "Campaign", fault: Fault) -> Hit:
    """Fills TMPDIR of a node for some seconds.

    Raises:
        MissedError: no file system can be mounted here, or nothing runs.
    """
    if not campaign.nodes.mounted:
        raise MissedError("no file system can be mounted here")
    node = one_of(lambda: nodes_at_work(campaign.sweep), fault)
    filler, hit, end = campaign.nodes.folder / node / "filler", set[str](), time.monotonic() + FULL_S
    with filler.open("wb", buffering=0) as file:
        while time.monotonic() < end:
            fill(file)  # again and again, since the files of each run are removed after it
            hit |= {job.allocation for job in jobs(campaign.sweep, f"--nodelist={node}")}
    filler.unlink()
    return {"target": f"the scratch of {node}", "allocations": sorted(hit)}


def _stop_fork_server(campaign: "Campaign", fault: Fault) -> Hit:
    """Stops the process that forks the ranks of a node, as a program may do with its parent."""
    server = one_of(lambda: fork_servers(campaign.bench.folder), fault)
    send(signal.SIGSTOP, server.pid)
    return {"target": str(server)}


def _kill_agent_always(campaign: "Campaign", fault: Fault) -> Hit:
    """Makes one run kill the agent of one of its nodes in every attempt."""
    hit = order(campaign, fault)
    run = hit["target"].rpartition(" ")[2].rpartition(".")[0]
    return {"target": f"{hit['target']} and later attempts", "run": run, "costs": MAX_ATTEMPTS}


def _suspended_processes(campaign: "Campaign", fault: Fault) -> Hit:
    """Suspends the launcher and all processes of an allocation, as on machines that move,
    for longer than a run may take.
    """
    leader = one_of(lambda: processes(campaign.bench.folder, "leader"), fault)
    suspended = dict[int, int]()
    for launcher in campaign.living():
        _stop(launcher.pid, suspended)
    for agent in _agents(campaign, leader.allocation):
        _stop(agent.pid, suspended)
    for agent in _agents(campaign, leader.allocation):
        for pid in descendants(agent.pid):
            _stop(pid, suspended)
    time.sleep(SUSPENDED_S)
    for pid, started in suspended.items():
        if is_alive(pid, started):
            os.kill(pid, signal.SIGCONT)
    return {"target": f"{len(suspended)} processes of {leader.allocation} and the launcher"}


def _agents(campaign: "Campaign", allocation: str) -> list[Target]:
    agents = (agent for role in ("leader", "follower") for agent in processes(campaign.bench.folder, role))
    return [agent for agent in agents if agent.allocation == allocation]


def _stop(pid: int, stopped: dict[int, int]) -> None:
    """Stops a process and adds its pid and start time to `stopped`."""
    if (started := start_time(pid)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            stopped[pid] = started


def _foreign_accounting(campaign: "Campaign", fault: Fault) -> Hit:
    """For some seconds sacct answers about other jobs with the ids of ours;
    in half of the cases a leading agent dies.
    """
    column = FOREIGN_COLUMNS[fault.share % len(FOREIGN_COLUMNS)]
    kills = fault.share >= 50
    one_of(lambda: jobs(campaign.sweep), fault)
    hit, fakes = list[Target](), {"squeue": FORGETFUL_SQUEUE, "sacct": FOREIGN_SACCT % column}
    with Wrappers(campaign, fault, fakes) as wrappers:
        if kills:
            hit = [one_of(lambda: processes(campaign.bench.folder, "leader"), fault)]
            send(signal.SIGKILL, hit[0].pid)
        end = time.monotonic() + FORGETS_S
        one_of(wrappers.pids, fault, patience_s=SUBMITS_S)
        time.sleep(max(0.0, end - time.monotonic()))
    target = f"{len(wrappers.pids())} answers with another {column}" + "".join(f", {agent}" for agent in hit)
    return {"target": target, "allocations": [agent.allocation for agent in hit]}


def _sbatch_banner(campaign: "Campaign", fault: Fault) -> Hit:
    """For some seconds sbatch prints a banner that names other jobs."""
    with Wrappers(campaign, fault, {"sbatch": BANNER}) as wrappers:
        one_of(wrappers.pids, fault, patience_s=SUBMITS_S)
        time.sleep(BANNER_S)
    return {"target": f"{len(wrappers.pids())} submissions"}


def _long_epilog(campaign: "Campaign", fault: Fault) -> Hit:
    """Limits the sweep to one job while epilogs take long; checks how many jobs hold nodes, as Slurm sees it."""
    with _epilog(campaign):
        campaign.kill_launchers()
        old = {job.job_id for job in jobs(campaign.sweep, states="all")}
        campaign.launch("launcher.max_jobs=1")
        new, end = set[str](), time.monotonic() + EPILOGS_S
        while len(new) < NEW_JOBS and time.monotonic() < end:
            holders = {job.job_id for job in jobs(campaign.sweep, states="R,CF,CG,S,ST,SO,SI")}
            new |= holders - old
            if len(holders) > 1 and holders - old:
                campaign.complain(f"jobs {sorted(holders)} hold nodes at a time under launcher.max_jobs=1")
                break
            time.sleep(0.3)
        campaign.kill_launchers()
        campaign.launch()
    if not new:
        raise MissedError("no job began")
    return {"target": f"the epilogs of {len(new)} jobs"}


@contextlib.contextmanager
def _epilog(campaign: "Campaign") -> Iterator[None]:
    """Makes each node run an epilog of EPILOG_S seconds after each job."""
    conf, script = campaign.cluster.folder / "slurm.conf", campaign.cluster.folder / "epilog"
    script.write_text(f"#!/bin/sh\n/bin/sleep {EPILOG_S}\n")
    script.chmod(0o755)
    before = conf.read_text()
    conf.write_text(f"{before}Epilog={script}\n")
    try:
        campaign.cluster.run("scontrol", "reconfigure")
        yield
    finally:
        conf.write_text(before)
        campaign.cluster.run("scontrol", "reconfigure")


def _local_launchers(campaign: "Campaign", fault: Fault) -> Hit:
    """Launches several sweeps on this machine at once, of which each measures one run; the judge looks at all."""
    sweeps = [f"local{fault.number}x{n}" for n in range(LOCAL_LAUNCHERS)]
    started = [_launch_here(campaign, sweep) for sweep in sweeps]
    deadline = patience.Deadline(LOCAL_S)
    while any(launcher.poll() is None for launcher in started) and not deadline.over():
        time.sleep(0.2)
    for sweep, launcher in zip(sweeps, started, strict=True):
        if launcher.poll() != 0:
            launcher.kill()
            campaign.complain(f"the launcher of {sweep} ended with {launcher.wait()}")
    lines, executions = campaign.bench.executions(), []
    for sweep in sweeps:
        campaign.bench.apart("collect", sweep, seconds=LOCAL_S)
        table = pq.read_table(campaign.results / sweep / "runs.parquet").to_pylist()
        ran = executions_of(sweep, lines)
        executions += ran
        for problem in judge(table, [], ran, 1, 1):
            campaign.complain(f"{sweep}: {problem}")
    if beside := one_at_a_time(executions):
        campaign.complain(f"local sweeps disturb each other {len(beside)} times: {beside[0]}")
    return {"target": f"{LOCAL_LAUNCHERS} launchers on this machine"}


def _launch_here(campaign: "Campaign", sweep: str) -> "subprocess.Popen[bytes]":
    command = campaign.bench.command(
        "sweep", "launch", f"name={sweep}", *campaign.program_options(sweep), *LOCAL
    )
    # Sweeps of tests share this machine with campaigns, and do not wait for them.
    return campaign.start(command, f"{sweep}.log", ULTRABENCH_MACHINE=str(campaign.bench.folder))


STRIKES = {
    "slow_unlink": _slow_unlink, "scratch_full": _scratch_full, "stop_fork_server": _stop_fork_server,
    "kill_agent_always": _kill_agent_always, "foreign_accounting": _foreign_accounting,
    "suspended_processes": _suspended_processes, "local_launchers": _local_launchers,
    "sbatch_banner": _sbatch_banner, "long_epilog": _long_epilog,
}  # fmt: skip
"""Kind of fault -> the function that injects it, like the table of failures.py."""
