#!/usr/bin/env python3
"""Manages a real Slurm of simulated nodes on this machine: up, env, down.

Each node has its own slurmd on this host, with its own loopback port. There are also munged, slurmctld and,
for accounting, mariadbd and slurmdbd. Only the hardware of the nodes is simulated. The system's own Slurm,
munge and MariaDB are not used: configuration, key, sockets, data and logs of every daemon are in one folder,
so that clusters run side by side, and `down` only kills their processes and removes the folder. It needs
root, since all slurmd of one host must agree on which user may start jobs as which other user.
"""

import argparse
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for `python -P`
from slurm_daemons import Cluster, ClusterError, Settings, free_port, load, make_database, write_files

PACKAGES = {"munged": "munge", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "srun": "slurm-wlm"}
ACCOUNTING = {"mariadbd": "mariadb-server", "mariadb-install-db": "mariadb-server", "slurmdbd": "slurmdbd"}
"""Program -> its Debian package."""
USABLE = ("idle", "mixed", "allocated", "completing")


def wait(cluster: Cluster, event: str, test: Callable[[], bool], seconds: float = 600.0) -> None:
    """Wait until the test holds; write on stderr what is waited for.

    Raises:
        ClusterError: the test did not hold in time.
    """
    print(f"waiting for {event}", file=sys.stderr)
    end = time.monotonic() + seconds
    while not test():
        if time.monotonic() > end:
            raise ClusterError(f"waited {seconds:.0f} s for {event} in vain; see {cluster.folder}/log", 1)
        time.sleep(0.1)


def kill(cluster: Cluster, node: str | None = None) -> None:
    """Kill every process of a cluster, or of one of its nodes, as a failing power supply would."""

    def gone() -> bool:
        pids = cluster.processes(node)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait(cluster, f"the processes of {node or 'the cluster'} to end", gone)


def works(cluster: Cluster, name: str, started: subprocess.Popen[bytes] | None) -> bool:
    """Return whether a daemon answers.

    Raises:
        ClusterError: this call has started the daemon, and it has ended.
    """
    if started and started.poll() is not None:
        lines = (cluster.folder / f"log/{name}.out").read_text().strip().splitlines()
        raise ClusterError(f"{name} ended at once: {lines[-1] if lines else 'without a word'}", 1)
    match name:
        case "munged":
            return cluster.ask("munge", "-n", "-S", f"{cluster.folder}/munge.socket") is not None
        case "mariadbd":
            return listening(cluster.port + 2)
        case "slurmdbd":
            return listening(cluster.port + 1) and register(cluster)
        case "slurmctld":
            return listening(cluster.port) and "UP" in (cluster.ask("scontrol", "ping") or "")
    return True  # for a slurmd `settled` asks slurmctld


def start(cluster: Cluster, node: str | None = None) -> list[str]:
    """Start the daemons that do not run, with `node` only the slurmd of that node; return their names."""
    running, started = cluster.running(), []
    for name, words in cluster.commands().items():
        if node and name in cluster.nodes and name != node:
            continue
        process = None
        if name not in running:
            process = launch(cluster, name, words)
            started.append(name)
        if not works(cluster, name, process):
            wait(cluster, name, partial(works, cluster, name, process))
    return started


def launch(cluster: Cluster, name: str, words: list[str]) -> subprocess.Popen[bytes]:
    """Start a daemon, which continues after this program; its output goes to a log with its name."""
    if name == "mariadbd" and not (cluster.folder / "database").exists():
        make_database(cluster)
    with (cluster.folder / f"log/{name}.out").open("a") as log:
        return subprocess.Popen(
            words, cwd=cluster.folder, env=cluster.environment(), stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, start_new_session=True,
        )  # fmt: skip


def listening(port: int) -> bool:
    """Return whether a program listens on a port of this host."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def register(cluster: Cluster) -> bool:
    """Return whether slurmdbd knows the cluster, an account and its user; add them if it does not."""
    if "research" in (cluster.ask("sacctmgr", "-n", "-P", "list", "assoc", "user=root") or ""):
        return True
    for words in [
        ["cluster", cluster.name], ["account", "research"],
        ["user", "root", "account=research", "defaultaccount=research"],
    ]:  # fmt: skip
        cluster.ask("sacctmgr", "-i", "add", *words)
    return False


def settled(cluster: Cluster, nodes: list[str]) -> bool:
    """Return whether these nodes can run jobs; resume those that were set down or drained."""
    states = cluster.states()
    bad = [name for name in nodes if states.get(name) not in USABLE]
    for name in bad:
        if states.get(name, "").startswith(("down", "drain")):
            cluster.ask("scontrol", "update", f"nodename={name}", "state=resume")
    return not bad


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make other calls for this folder wait."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if folder.exists() and os.path.samestat(os.fstat(handle), folder.stat()):
                yield
                return
        finally:
            os.close(handle)


def clear(cluster: Cluster) -> None:
    """Cancel the jobs of a cluster, so that each srun ends too; then kill it and empty its folder."""
    jobs = cluster.ask("squeue", "-h", "-o", "%A", seconds=5) if listening(cluster.port) else None
    if jobs:
        cluster.ask("scancel", *jobs.split(), seconds=5)
        with suppress(ClusterError):
            wait(cluster, "jobs to end", lambda: not cluster.ask("squeue", "-h"), seconds=5)
    kill(cluster)
    # cluster.json is removed last, since without it the folder does not count as a cluster.
    for path in sorted(cluster.folder.iterdir(), key=lambda path: path.name == "cluster.json"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def up(folder: Path, settings: Settings) -> str:
    """Start the missing parts of the cluster and wait until it runs a job; return a report."""
    needed = PACKAGES | (ACCOUNTING if settings.accounting else {})
    missing = {package for program, package in needed.items() if not shutil.which(program)}
    if missing:
        raise ClusterError(f"programs are missing: apt-get install {' '.join(sorted(missing))}")
    cluster = load(folder)
    if cluster and cluster.settings != settings:
        if listening(cluster.port) and cluster.ask("squeue", "-h"):
            raise ClusterError(f"a cluster of other settings runs jobs in {folder}: take it down first")
        print("other settings: the cluster that is here goes down first", file=sys.stderr)
        clear(cluster)
        cluster = None
    existed = cluster is not None
    if cluster is None:
        cluster = Cluster(folder=folder, settings=settings, port=free_port(folder, 3 + settings.nodes))
        write_files(cluster)
    started = start(cluster)
    if existed and not started and settled(cluster, cluster.nodes):
        return f"already runs with these settings in {folder}"
    wait(cluster, "all nodes", lambda: settled(cluster, cluster.nodes))
    if "idle" in cluster.states().values():
        wait(cluster, "a job", lambda: cluster.ask("srun", "-N1", "-t1", "true") is not None)
    mended = ", ".join(started) or "nodes"
    return f"repaired in {folder}: {mended}" if existed else f"runs in {folder}"


def down(cluster: Cluster) -> str:
    """Kill a cluster and remove its folder; return a report."""
    clear(cluster)
    cluster.folder.rmdir()
    return f"gone from {cluster.folder}"


def restart_slurmctld(cluster: Cluster) -> str:
    """Kill the controller, if it runs, and start it again; return a report."""
    pid = cluster.running().get("slurmctld")
    if pid:
        os.kill(pid, signal.SIGKILL)
        wait(cluster, "slurmctld to end", lambda: "slurmctld" not in cluster.running())
    start(cluster)
    return "slurmctld has started again"


def node_down(cluster: Cluster, node: str, silent: bool) -> str:
    """Kill all processes of a node; tell Slurm unless `silent`, else Slurm has to notice; return a report."""
    kill(cluster, node)
    if not silent:
        cluster.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=node-down")
    return f"{node} is dead"


def node_up(cluster: Cluster, node: str) -> str:
    """Start the slurmd of a node and make Slurm use the node again; return a report."""
    start(cluster, node)
    wait(cluster, node, lambda: settled(cluster, [node]))
    return f"{node} is back"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    main_parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = main_parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    helps = {
        "up": "bring up a cluster, or what is missing of it", "down": "kill it and remove its folder",
        "env": "print shell lines to eval, after which Slurm's commands find it",
        "restart-slurmctld": "kill -9 the controller, which forgets up to 5 s, and start it again",
        "node-down": "kill -9 all of a node", "node-up": "bring it back",
    }  # fmt: skip
    parsers = {verb: verbs.add_parser(verb, help=text, allow_abbrev=False) for verb, text in helps.items()}
    default = Path(os.environ.get("ULTRABENCH_SLURM_DIR", "/tmp/ultrabench-slurm"))
    for sub in parsers.values():
        sub.add_argument("--dir", type=Path, default=default, help="all of it is in here (%(default)s)")
    numbers = {
        "nodes": (8, "simulated nodes"), "gpus": (8, "GPUs a node; 0 for none"),
        "max-array-size": (101, "MaxArraySize"), "min-job-age": (300, "MinJobAge in seconds"),
        "slurmd-timeout": (10, "SlurmdTimeout in seconds"),
    }  # fmt: skip
    for name, (number, text) in numbers.items():
        parsers["up"].add_argument(f"--{name}", type=int, default=number, help=f"{text} (%(default)s)")
    parsers["up"].add_argument("--no-accounting", dest="accounting", action="store_false", help="no slurmdbd")
    parsers["node-down"].add_argument("--silent", action="store_true", help="leave it to Slurm to find out")
    for verb in ("node-down", "node-up"):
        parsers[verb].add_argument("node", help="such as gpu01")
    return main_parser


def run(args: argparse.Namespace) -> str:
    """Carry out a command line; return the text to print."""
    folder = args.dir.resolve()
    if os.geteuid() != 0:
        raise ClusterError("only root can run several slurmd on one host: use sudo or a container")
    if not re.fullmatch(r"/[\w./-]{1,64}", str(folder)):
        raise ClusterError(
            f"{folder}: Slurm's sockets need a path of at most 65 letters, digits, _ . / and -"
        )
    if args.verb == "up":
        if not (1 <= args.nodes <= 64 and 0 <= args.gpus <= 16):
            raise ClusterError(f"{args.nodes} nodes x {args.gpus} GPUs: nodes can be 1 to 64, GPUs 0 to 16")
        if args.max_array_size < 2:
            raise ClusterError("--max-array-size must be at least 2")
        with locked(folder):
            return up(folder, Settings(**{f.name: getattr(args, f.name) for f in fields(Settings)}))
    cluster = load(folder)
    if cluster is None and args.verb == "down":
        if folder.exists():
            folder.rmdir()  # it is empty, otherwise `load` would have failed
        return f"nothing is in {folder}"
    if cluster is None:
        raise ClusterError(f"no cluster is in {folder}: slurm_cluster.py up makes one")
    if args.verb == "env":
        return f"export SLURM_CONF={cluster.conf}"
    if getattr(args, "node", cluster.nodes[0]) not in cluster.nodes:
        raise ClusterError(f"no node {args.node}: they are {', '.join(cluster.nodes)}")
    with locked(folder):
        if args.verb == "node-down":
            return node_down(cluster, args.node, args.silent)
        if args.verb == "node-up":
            return node_up(cluster, args.node)
        return down(cluster) if args.verb == "down" else restart_slurmctld(cluster)


def main() -> int:
    """Run the command line; return the exit code."""
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"
    try:
        print(run(parser().parse_args()))
    except ClusterError as error:
        print(f"slurm_cluster: {error}", file=sys.stderr)
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
