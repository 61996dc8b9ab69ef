"""Faults by which it is unclear whose a sweep is: links, new names, hidden launchers, late answers,
and what cannot start.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from tests import patience
from tests.chaos.failures import order
from tests.chaos.fault import Fault
from tests.chaos.interference import STRANGER, SUBMITS_S, Wrappers
from tests.chaos.judge import judge
from tests.chaos.refusals import JOBS_AT_A_TIME
from tests.chaos.target import AWAY_S, Hit, MissedError, jobs, one_of, wait_for
from tests.chaos.witness import executions_of
from ultrabench.store.claim import GIVEN_UP, owner_of

if TYPE_CHECKING:
    from tests.chaos.campaign import Campaign

IDLE_S = 120.0
"""Seconds within which a sweep that no launcher follows has no jobs any more, so that it can be renamed."""
RENAMED_S = 8.0
"""Seconds for which a sweep is followed under another name."""
BESIDE_S = 12.0
"""Seconds for which a launcher in a PID namespace of its own follows the sweep, too."""
FOLLOWED = " follows it"
"""What a command says that needs an idle sweep and sees a launcher."""
HANGS_S = 20
"""Seconds for which sbatch hangs before it submits the job; they are more than all grace periods of a launcher."""
HANGING_SBATCH = f'if [ -e $FLAG ]; then echo $$ >> $HITS; sleep {HANGS_S}; fi\nexec $REAL "$@"'
RUN_END_S = 30.0
"""Seconds within which a run ends that has taken an order."""
VARIANTS_S = 240.0
"""Seconds within which a sweep of two interpreters has to end, of which one does not start on nodes."""
BAD_PYTHON = f"""#!/bin/bash
[ -n "$SLURM_JOB_ID" ] && {{ echo "python: error while loading shared libraries: libnowhere.so" >&2; exit 127; }}
exec {sys.executable} "$@"
"""


def _linked_results(campaign: "Campaign", fault: Fault) -> Hit:
    """Continues the sweep by another path of the results, a link or a bind mount, by which it may not be deleted."""
    one_of(lambda: jobs(campaign.sweep), fault)
    path = campaign.bench.folder / f"other.{fault.number}"
    is_mounted = bool(fault.share % 2) and campaign.mount_again(path)
    if not is_mounted:
        path.symlink_to(campaign.results)
    campaign.kill_launchers()
    words = ("sweep", "rm", campaign.sweep, "--results-dir", str(path))
    _require_refused(campaign, lambda: jobs(campaign.sweep), " is in use (", *words)
    campaign.launch(f"results_dir={path}")
    return {"target": f"the results by a {'bind mount' if is_mounted else 'link'}"}


def _rename(campaign: "Campaign", fault: Fault) -> Hit:
    """Renames the sweep as soon as it may be renamed, continues it under the new name for a while,
    and renames it back.
    """
    one_of(lambda: jobs(campaign.sweep), fault)
    campaign.kill_launchers()
    name, new_name = campaign.sweep, f"{campaign.sweep}-moved"
    num_refused = _rename_when_idle(campaign, name, new_name)
    command = campaign.bench.command("sweep", "resume", new_name)
    launcher = campaign.start(command, f"renamed.{fault.number}.log")
    wait_for(lambda: launcher.poll() is not None or jobs(name), SUBMITS_S)
    time.sleep(RENAMED_S)
    launcher.kill()
    launcher.wait()
    num_refused += _rename_when_idle(campaign, new_name, name)
    campaign.launch()
    return {"target": f"{name}, {num_refused} refusals"}


def _rename_when_idle(campaign: "Campaign", name: str, new_name: str) -> int:
    """Renames a sweep whose last jobs may still run; returns how often that was refused."""
    deadline, num_refused = patience.Deadline(IDLE_S), 0
    while True:
        process = campaign.bench.apart("sweep", "rename", name, new_name, "--yes", seconds=IDLE_S)
        if process.returncode == 0:
            return num_refused
        num_refused += 1
        if deadline.over() or "in use" not in process.stderr:
            campaign.complain(f"rename to {new_name} failed: {process.stderr[-300:]}")
            raise MissedError("it could not be renamed")
        time.sleep(1.0)


def _hidden_pids(campaign: "Campaign", fault: Fault) -> Hit:
    """Somebody who does not see the process of the launcher wants to delete or rename the sweep, or launches it, too.

    Raises:
        MissedError: this machine allows no such view.
    """
    if os.getuid() != 0 or not shutil.which("unshare") or not shutil.which("setpriv"):
        raise MissedError("only root can hide processes, by unshare and setpriv")
    one_of(campaign.living, fault)
    capability = "+dac_override"
    become = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups",
              f"--inh-caps={capability}", f"--ambient-caps={capability}"]  # fmt: skip
    mount = 'mount -t proc -o hidepid=2 proc /proc && exec "$@"'
    hides = bool(fault.share % 2)
    view = ["unshare", "--mount", "bash", "-c", mount, "-", *become] if hides else _NAMESPACE
    for words in (("sweep", "rm", campaign.sweep), ("sweep", "rename", campaign.sweep, "new")):
        _require_refused(campaign, campaign.living, FOLLOWED, *words, view=view)
    if hides:
        return {"target": f"rm and rename by user {STRANGER} behind hidepid=2"}
    command = [*_NAMESPACE, *campaign.bench.command(*campaign.launch_words())]
    beside = campaign.start(command, f"onlooker.{fault.number}.log")
    time.sleep(BESIDE_S)
    os.killpg(beside.pid, signal.SIGKILL)
    beside.wait()
    return {"target": "rm, rename and launch in another PID namespace"}


_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""Runs a command in a PID namespace of its own."""


def _require_refused(
    campaign: "Campaign", is_alive: Callable[[], object], why: str, *words: str, view: Sequence[str] = ()
) -> None:
    """Reports a problem if a command that needs an idle sweep does not find it in use.

    It is not confirmed, so that it harms nothing. The sweep must be alive before and after it,
    since it may end meanwhile.

    Args:
        why: a part of the message, since jobs would hide that a launcher is not seen.
        view: a program and its arguments that limit what the command sees.
    """
    was_alive = is_alive()
    command = [*view, *campaign.bench.command(*words)]
    process = patience.run(command, IDLE_S, cwd=campaign.bench.folder, env=campaign.bench.environment())
    if was_alive and is_alive() and (process.returncode != 2 or why not in process.stderr):
        campaign.complain(f"{' '.join(words)} did not find it in use: {process.stderr[-300:]}")


def _hanging_sbatch(campaign: "Campaign", fault: Fault) -> Hit:
    """While sbatch hangs, another launcher follows the sweep, somebody wants to delete it,
    or the launcher is killed.
    """
    beside = ("launch", "rm and rename", "kill and launch")[fault.share % 3]
    with Wrappers(campaign, fault, {"sbatch": HANGING_SBATCH}) as wrappers:
        one_of(wrappers.pids, fault, patience_s=SUBMITS_S)
        old_names, submitters = _given_up(campaign), campaign.living()
        if beside == "rm and rename":
            for words in (("sweep", "rm", campaign.sweep), ("sweep", "rename", campaign.sweep, "new")):
                _require_refused(campaign, campaign.living, FOLLOWED, *words)
        else:
            if "kill" in beside:
                campaign.kill_launchers()
            campaign.launch()
        time.sleep(HANGS_S)
    live_submitters = [launcher for launcher in submitters if launcher.poll() is None]
    if live_submitters and (names := sorted(_given_up(campaign) - old_names)):
        campaign.complain(f"{', '.join(names)} were given up while their launcher waited for sbatch")
    num_tries = len(wrappers.pids())
    # A job that appears after its launcher was killed runs nothing.
    costs = JOBS_AT_A_TIME * num_tries if "kill" in beside else 0
    return {"target": f"{beside} beside {num_tries} submissions", "costs": costs}


def _given_up(campaign: "Campaign") -> set[str]:
    """The allocations of the sweep that launchers have claimed so that they run nothing."""
    claims = campaign.folder / "claims"
    return {path.name for path in claims.glob("n*.*") if owner_of(claims, path.name) == GIVEN_UP}


def _bad_variant(campaign: "Campaign", fault: Fault) -> Hit:
    """Beside the sweep launches another one with two interpreters, of which one does not start on nodes; judges that,
    too.
    """
    name, is_first = f"variants{fault.number}", fault.share % 2 == 0
    bad_python = campaign.bench.folder / f"python.{fault.number}"
    bad_python.write_text(BAD_PYTHON)
    bad_python.chmod(0o755)
    pythons = [str(bad_python), sys.executable] if is_first else [sys.executable, str(bad_python)]
    words = [f"name={name}" if word == f"name={campaign.sweep}" else word for word in campaign.launch_words()]
    options = (*campaign.program_options(name), f"+sweep.python=[{','.join(pythons)}]", *VARIANTS)
    launcher = campaign.start(campaign.bench.command(*words, *options), f"{name}.log")
    deadline = patience.Deadline(VARIANTS_S)
    while launcher.poll() is None and not deadline.over():
        time.sleep(0.2)
    if launcher.poll() is None:
        launcher.kill()
        launcher.wait()
        campaign.complain(f"{name} did not end in {VARIANTS_S:g} s")
    campaign.bench.apart("collect", name, seconds=IDLE_S)
    table = pq.read_table(campaign.results / name / "runs.parquet").to_pylist()
    record = {"kind": fault.kind, "variant": str(bad_python), "allocations": [], "costs": len(pythons) * 3}
    executions = executions_of(name, campaign.bench.executions())
    problems = judge(table, [record], executions, len({row["allocation"] for row in table}), 1)
    good_rows = [row for row in table if json.loads(row["variant"])["python"] == sys.executable]
    bad_runs = {row["run_id"] for row in table} - {row["run_id"] for row in good_rows}
    ok_ids = {row["run_id"] for row in table if row["status"] == "ok"}
    problems += [
        f"{row['run_id']} of the good interpreter is not ok"
        for row in good_rows
        if row["run_id"] not in ok_ids
    ]
    failed_ids = {row["run_id"] for row in table if (row["status"], row["cause"]) == ("crash", "not_started")}
    problems += [f"{run} of the bad interpreter has not failed" for run in sorted(bad_runs - failed_ids)]
    for problem in problems:
        campaign.complain(f"{name}: {problem}")
    return {
        "target": f"{len(bad_runs)} runs of a bad interpreter, {'first' if is_first else 'last'} in the list"
    }


VARIANTS = ("launcher.max_jobs=1", "launcher.pack=1", "sweep.nodes=[1]", "sweep.gbs=4", "sweep.zero_stage=[0]",
            "sweep.mbs=[1,2]", "sweep.gas=null")  # fmt: skip
"""Options of a small sweep that submits one job at a time."""


def _full_at_end(campaign: "Campaign", fault: Fault) -> Hit:
    """A run fills the disk of the results when it ends; the space is free again some seconds later.

    Raises:
        MissedError: the results have no file system of their own, or the run did not come to its end.
    """
    if not campaign.mounted:
        raise MissedError("no file system can be mounted here")
    hit, full = order(campaign, fault), campaign.bench.folder / "taken" / f"{fault.number}.full"
    wait_for(full.exists, RUN_END_S)
    if not full.exists():
        raise MissedError("the run did not come to its end")
    time.sleep(AWAY_S)
    (campaign.results / f"filler.{fault.number}").unlink()
    return {"target": f"the results folder at the end of {hit['target']}", "allocations": []}


STRIKES = {
    "linked_results": _linked_results, "rename": _rename, "hidden_pids": _hidden_pids,
    "hanging_sbatch": _hanging_sbatch, "bad_variant": _bad_variant, "full_at_end": _full_at_end,
}  # fmt: skip
"""Kind of fault -> the function that injects it, like the table of failures.py."""
