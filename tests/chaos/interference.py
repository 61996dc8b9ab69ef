"""Faults of others: they look on, launch, ask or forge; and of what lies: clocks, files, Slurm, and programs."""

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.chaos.failures import order
from tests.chaos.fault import Fault
from tests.chaos.target import AWAY_S, Hit, MissedError, Target, jobs, one_of, processes, send, wait_for
from tests.slurm.conftest import Cluster
from tests.slurm.sweeps import slurm_says
from ultrabench.processes import command_line, own_processes, start_time
from ultrabench.store.events import Failed, Result
from ultrabench.store.journal import read_journal

if TYPE_CHECKING:
    from tests.chaos.campaign import Campaign

LOOKS_S = 12.0
"""Seconds for which somebody looks; a launcher records dead allocations as lost in less time."""
STRANGER = 65534
"""Id of the user `nobody`, which exists on every system."""
SETTINGS = ("--nodes", "4", "--gpus", "0", "--no-accounting")
"""Options of the second cluster."""
SAYINGS = {
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: gpu01\r\n\r\n", "null": b"null\n", "nothing": b"",
    "half a hello": b'{"secret": "',
}  # fmt: skip
"""Texts that a port scanner sends to each open port."""
HELD_S = 15.0
"""Seconds for which an unfinished caller stays connected; a launcher ends frozen agents in less time."""
CLEAN_S = 5.0
"""Seconds after the end of a run within which all its processes have to end."""
RUN_S = 60.0
CLOCK = Path(__file__).parent / "clock.py"
OFFSET_S = 1800
LIES_S = 14.0
"""Seconds for which squeue lists no jobs; they are longer than every grace period of a launcher."""
SUBMITS_S = 40.0
"""Seconds within which a launcher that has just started submits its first job, if it has any."""
HANGS_S = 3.0
"""Seconds after which an sbatch that hangs is killed."""
UNKNOWN_S = 70.0
"""Seconds for which squeue then fails; a launcher searches a job without a number for less time."""
SBATCH = 'if [ -e $FLAG ]; then $REAL "$@" > /dev/null; echo $$ >> $HITS; %s; fi\nexec $REAL "$@"'
"""An sbatch that submits and then does something else; `:` submits again."""
FAILING_SQUEUE = (
    'if [ -e $FLAG ]; then if [ -e $HITS ]; then echo "Unable to contact slurm controller" >&2; exit 1; fi\n'
    'else touch $FLAG.over; fi\nexec $REAL "$@"'
)
"""A squeue that works until the first submission, since a launcher first has to see its jobs."""
EMPTY_SQUEUE = 'if [ -e $FLAG ]; then echo $$ >> $HITS; exit 0; fi\nexec $REAL "$@"'
LYING_SACCT = (
    'if [ -e $FLAG ]; then $REAL "$@" | sed -E "s/\\|(RUNNING|PENDING|COMPLETING)\\|/|COMPLETED|/"; exit 0; fi\n'
    'exec $REAL "$@"'
)
UNREADABLE_S = 10.0
"""Seconds for which a claim is unreadable; a launcher records dead allocations as lost in less time."""
DEPTH = 100_000


def _other_user(campaign: "Campaign", fault: Fault) -> Hit:
    """Another user, who may read and write everything, looks at a sweep that no launcher follows.

    Raises:
        MissedError: nothing runs, or programs cannot run as another user on this machine.
    """
    if os.getuid() != 0 or not shutil.which("setpriv"):
        raise MissedError("only root can become another user, by setpriv")
    one_of(lambda: jobs(campaign.sweep), fault)
    campaign.kill_launchers()
    capability = "+dac_override"
    become = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups",
              f"--inh-caps={capability}", f"--ambient-caps={capability}"]  # fmt: skip
    status = [*become, *campaign.bench.command("sweep", "status", campaign.sweep)]
    _look(campaign, fault, [[*status, "--watch"], status])
    _blame(campaign)
    campaign.launch()
    return {"target": f"status by user {STRANGER}"}


def _blame(campaign: "Campaign") -> None:
    """Reports a problem for everything that the other user wrote or submitted, which must be nothing."""
    written = [path for path in campaign.folder.rglob("*") if path.lstat().st_uid == STRANGER]
    submitted = slurm_says("squeue", "-h", "-r", "-t", "all", "-o", "%i %j", f"--user={STRANGER}").split("\n")
    mine = [line for line in submitted if f"ub-{campaign.sweep}-" in line]
    if written or mine:
        campaign.complain(
            f"status by another user wrote {sorted(map(str, written))[:5]}, submitted {mine[:5]}"
        )


def _other_cluster(campaign: "Campaign", fault: Fault) -> Hit:
    """Somebody on the login node of a second cluster watches a sweep of the first one, or launches it too."""
    if len(campaign.clusters) == 1:
        other = Cluster(Path(tempfile.mkdtemp(prefix="ultrabench-other-")))
        other.tool("up", *SETTINGS)
        campaign.clusters.append(other)
    one_of(lambda: jobs(campaign.sweep), fault)
    launches = fault.share % 2
    if fault.share % 4 < 2:  # in these cases no launcher follows the sweep meanwhile
        campaign.kill_launchers()
    words = campaign.launch_words() if launches else ["sweep", "status", campaign.sweep, "--watch"]
    conf = campaign.clusters[1].folder / "slurm.conf"
    _look(campaign, fault, [campaign.bench.command(*words)], SLURM_CONF=str(conf))
    if not campaign.living():
        campaign.launch()
    return {"target": f"{'launch' if launches else 'status --watch'} on another cluster"}


def _look(campaign: "Campaign", fault: Fault, commands: list[list[str]], **variables: str) -> None:
    """Runs commands for some seconds, then ends them and their children."""
    started = [campaign.start(words, f"onlooker.{fault.number}.log", **variables) for words in commands]
    try:
        time.sleep(LOOKS_S)
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _unreadable_claim(campaign: "Campaign", fault: Fault) -> Hit:
    """Kills a leading agent while its claim cannot be read; later the claim is restored."""
    leader, claim = one_of(lambda: _claims_at_work(campaign), fault)
    content = claim.read_bytes()
    claim.write_bytes(b"" if fault.share % 2 else b'\x00\xff{"allocation": [')
    send(signal.SIGKILL, leader.pid)
    time.sleep(UNREADABLE_S)
    claim.write_bytes(content)
    damage = "emptied" if fault.share % 2 else "garbage"
    return {"target": f"claim {claim.name} ({damage}) of {leader}", "allocations": [leader.allocation]}


def _claims_at_work(campaign: "Campaign") -> list[tuple[Target, Path]]:
    """The leading agents, each with its claim of the attempt that runs now."""
    leaders = {leader.allocation: leader for leader in processes(campaign.bench.folder, "leader")}
    claim_by_time = {}
    for path in campaign.folder.glob("claims/*.*.*"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            leader = leaders.get(json.loads(path.read_text()).get("allocation"))
            if leader and not path.name.startswith("."):
                claim_by_time[path.stat().st_mtime_ns, path] = (leader, path)
    latest = {leader.allocation: (leader, path) for _, (leader, path) in sorted(claim_by_time.items())}
    return [latest[name] for name in sorted(latest)]


def _fifo_journal(campaign: "Campaign", fault: Fault) -> Hit:
    """Puts a file that is no journal into the journal's folder, where it stays until the end of the sweep.

    Raises:
        MissedError: there is no such folder yet.
    """
    journal = campaign.folder / "journal"
    if not journal.is_dir():
        raise MissedError("there was nothing to hit")
    role = ("agent", "launcher")[fault.share % 2]
    path = journal / f"{role}-stray-{os.getpid()}-{fault.number}.jsonl"
    nested = '{"v": 1, "event": ' + DEPTH * "[" + DEPTH * "]" + "}\n"
    strays: list[tuple[str, Callable[[], object]]] = [
        ("a FIFO", lambda: os.mkfifo(path)),
        ("a folder", path.mkdir),
        ("a symbolic link to itself", lambda: path.symlink_to(path.name)),
        (f"a file {DEPTH} brackets deep", lambda: path.write_text(nested)),
    ]
    kind, create = strays[fault.share // 2 % 4]
    create()
    return {"target": f"{path.name}: {kind}"}


def _port_scan(campaign: "Campaign", fault: Fault) -> Hit:
    """Connects to the leading agent of an allocation, if possible before its peers do."""
    before = {path for path, _ in _rendezvous_files(campaign.folder)}

    def new() -> list[tuple[Path, dict[str, Any]]]:
        return [m for m in _rendezvous_files(campaign.folder) if m[0] not in before and _of_many(m[0])]

    try:
        (rendezvous, address), when = one_of(new, fault, 0.002), "while its agents met"
    except MissedError:
        (rendezvous, address), when = (
            one_of(lambda: _rendezvous_files(campaign.folder), fault),
            "while it ran",
        )
    summary, payload = [*SAYINGS.items()][fault.share % len(SAYINGS)]
    with contextlib.ExitStack() as calls:
        for _ in range(3):
            with contextlib.suppress(OSError):
                call = socket.create_connection((address["host"], address["port"]), timeout=2.0)
                calls.enter_context(call).sendall(payload)
        time.sleep(AWAY_S if payload.endswith(b"\n") else HELD_S)
    return {"target": f"the leader of {rendezvous.parent.name}, {when}: {summary}"}


def _of_many(rendezvous: Path) -> bool:
    """Whether the allocation has several nodes, so that the leading agent waits for peers."""
    return bool(json.loads((rendezvous.parent / "allocation.json").read_text())["nodes"] > 1)


def _rendezvous_files(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The files in which leading agents have written their address, with their contents."""
    files = []
    for path in sorted(folder.glob("allocations/*/leader*.json")):
        with contextlib.suppress(OSError, ValueError):
            files.append((path, json.loads(path.read_text())))
    return files


def _reforking_children(campaign: "Campaign", fault: Fault) -> Hit:
    """Checks that children which fork all the time are gone soon after their run has ended."""
    hit, mark = order(campaign, fault), f"{campaign.bench.folder}/reforking.{fault.number}"
    key = hit["target"].rpartition(" ")[2]
    wait_for(lambda: _has_ended(campaign.folder / "journal", key), RUN_S)
    wait_for(lambda: not _left(mark), CLEAN_S)
    if pids := _left(mark):
        campaign.complain(f"children of {key} run on {CLEAN_S:g} s after its end: {pids}")
    return {**hit, "allocations": []}


def _left(mark: str) -> list[int]:
    """The living processes with this word; it looks several times, since each lives only milliseconds."""
    pids: set[int] = set()
    for _ in range(5):
        pids |= {pid for pid in own_processes() if mark in command_line(pid) and start_time(pid) is not None}
    return sorted(pids)


def _has_ended(journal: Path, key: str) -> bool:
    """Whether the journal records how an attempt ended."""
    events = (line.event for line in read_journal(journal, lambda warning: None))
    ends = (event for event in events if isinstance(event, Result | Failed))
    return any(f"{end.run_id}.{end.repeat}.{end.attempt}" == key for end in ends)


class Wrappers:
    """Programs that replace Slurm's on the PATH of a launcher, which is started, and lie while a flag exists."""

    def __init__(self, campaign: "Campaign", fault: Fault, scripts: dict[str, str]) -> None:
        folder = campaign.bench.folder / f"bin.{fault.number}"
        folder.mkdir(exist_ok=True)
        self.flag, self.hits = folder / "flag", folder / "hits"
        self.hits.unlink(missing_ok=True)  # an earlier try may have left it
        for program, script in scripts.items():
            real = f"REAL={shutil.which(program)}\nFLAG={self.flag}\nHITS={self.hits}"
            (folder / program).write_text(f"#!/bin/bash\n{real}\n{script}\n")
            (folder / program).chmod(0o755)
        self.flag.touch()
        campaign.kill_launchers()
        campaign.launch(PATH=f"{folder}:{os.environ['PATH']}")

    def __enter__(self) -> "Wrappers":
        return self

    def __exit__(self, *error: object) -> None:
        self.flag.unlink()

    def pids(self) -> list[int]:
        """The pids of the calls that got a false answer, in order."""
        return [int(pid) for pid in self.hits.read_text().split()] if self.hits.exists() else []

    def wait_for_answer(self) -> None:
        """Waits until squeue is called again; the longer it has failed, the less often it is called."""
        wait_for(self.flag.with_name("flag.over").exists, UNKNOWN_S)


def _clock_offset(campaign: "Campaign", fault: Fault) -> Hit:
    """Continues the sweep with a launcher on a host whose clock is half an hour behind or ahead."""
    offset_s = OFFSET_S if fault.share % 2 else -OFFSET_S
    campaign.kill_launchers()
    campaign.launch(program=[str(CLOCK), str(offset_s)])
    return {"target": f"a launcher whose clock is {offset_s:+d} s off"}


def _double_submission(campaign: "Campaign", fault: Fault) -> Hit:
    """For some seconds every submission is made twice, or is made and never answered.

    Raises:
        MissedError: nothing was submitted in time.
    """
    hangs = fault.share >= 50
    hanging = {"sbatch": SBATCH % "exec sleep 90", "squeue": FAILING_SQUEUE}
    fate = "whose answer was lost while squeue failed" if hangs else "made twice"
    with Wrappers(campaign, fault, hanging if hangs else {"sbatch": SBATCH % ":"}) as wrappers:
        one_of(wrappers.pids, fault, patience_s=SUBMITS_S)
        if hangs:
            _let_hang(wrappers)
        else:
            time.sleep(HANGS_S)
    if hangs:
        wrappers.wait_for_answer()
    return {"target": f"{len(wrappers.pids())} submissions {fate}", "costs": 0}


def _let_hang(wrappers: Wrappers) -> None:
    """Makes each call of sbatch hang for a while, and every call of squeue fail."""
    end, killed = time.monotonic() + UNKNOWN_S, 0
    while time.monotonic() < end:
        time.sleep(HANGS_S)
        for pid in wrappers.pids()[killed:]:
            killed += 1
            send(signal.SIGKILL, pid)


def _empty_squeue(campaign: "Campaign", fault: Fault) -> Hit:
    """For some seconds squeue lists no jobs; in half of the cases sacct also says they are completed."""
    scripts = {"squeue": EMPTY_SQUEUE} | ({"sacct": LYING_SACCT} if fault.share % 2 else {})
    one_of(lambda: jobs(campaign.sweep), fault)
    with Wrappers(campaign, fault, scripts) as wrappers:
        one_of(wrappers.pids, fault)
        time.sleep(LIES_S)
        waiting = len(jobs(campaign.sweep, states="PD"))
    target = "squeue lists nothing" + ", sacct calls all jobs completed" * (fault.share % 2)
    # A waiting job gives no sign of life, so it may be submitted again if both programs say that it is over.
    return {"target": target, "costs": waiting if fault.share % 2 else 0}


STRIKES = {
    "other_user": _other_user, "other_cluster": _other_cluster, "port_scan": _port_scan,
    "unreadable_claim": _unreadable_claim, "fifo_journal": _fifo_journal, "clock_offset": _clock_offset,
    "double_submission": _double_submission, "empty_squeue": _empty_squeue, "reforking_children": _reforking_children,
}  # fmt: skip
"""Kind of fault -> the function that injects it, like the table of failures.py."""
