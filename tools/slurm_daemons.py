"""The parts of a cluster of simulated nodes: its settings, ports, files, daemons and processes."""

import json
import os
import secrets
import shutil
import socket
import subprocess
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

DAEMONS = {"munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "slurmstepd"}

SLURM_CONF = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
InactiveLimit=10
SlurmdTimeout={slurmd_timeout}
MinJobAge={min_job_age}
MaxArraySize={max_array_size}
{accounting}
{gres}
NodeName={nodes} NodeHostname={host} NodeAddr=127.0.0.1 Port={node_ports} CPUs=16 Sockets=1 \
CoresPerSocket=16 ThreadsPerCore=1 RealMemory=2000 {node_gres}
PartitionName=hopper Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=debug Nodes={debug_nodes} MaxTime=30 MaxNodes=2 State=UP
"""

SLURMDBD_CONF = """\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={storage_port}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm
"""


class ClusterError(Exception):
    """A message of one line and the exit code: 2 for a mistake of the user, 1 for a cluster that fails."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a cluster; clusters with equal settings are alike."""

    nodes: int
    gpus: int
    """Number of GPUs per node."""
    accounting: bool
    max_array_size: int
    min_job_age: int
    """Seconds for which squeue and scontrol still show a finished job."""
    slurmd_timeout: int
    """Seconds after which a node that does not answer is set down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster in a folder; ports from `port` on are for slurmctld, slurmdbd, mariadbd and each node."""

    folder: Path
    settings: Settings
    port: int

    @property
    def conf(self) -> Path:
        """The file slurm.conf, which Slurm's commands find through SLURM_CONF."""
        return self.folder / "slurm.conf"

    @property
    def name(self) -> str:
        """The ClusterName, which is different for each folder."""
        return f"ultrabench{zlib.crc32(bytes(self.folder)):08x}"

    @property
    def nodes(self) -> list[str]:
        """The names of the nodes."""
        return [f"gpu{i:02d}" for i in range(1, self.settings.nodes + 1)]

    def commands(self) -> dict[str, list[str]]:
        """The command line of each daemon, in the order they start; a slurmd has the name of its node."""
        root, conf = self.folder, str(self.conf)
        by_name = {
            "munged": [
                "munged", "--foreground", "--force", f"--socket={root}/munge.socket", f"--key-file={root}/munge.key",
                f"--pid-file={root}/munged.pid", f"--seed-file={root}/munge.seed", f"--log-file={root}/log/munge",
            ]
        }  # fmt: skip
        if self.settings.accounting:
            by_name["mariadbd"] = [
                "mariadbd", "--no-defaults", "--user=root", f"--datadir={root}/database", "--skip-name-resolve",
                f"--socket={root}/mariadb.socket", "--bind-address=127.0.0.1", f"--port={self.port + 2}",
                f"--pid-file={root}/mariadb.pid", "--innodb-flush-log-at-trx-commit=0", f"--tmpdir={root}",
            ]  # fmt: skip
            by_name["slurmdbd"] = ["slurmdbd", "-D"]
        by_name["slurmctld"] = ["slurmctld", "-D", "-f", conf]
        return by_name | {node: ["slurmd", "-D", "-N", node, "-f", conf] for node in self.nodes}

    def environment(self) -> dict[str, str]:
        """The environment of daemons and Slurm's commands, without variables of allocations and defaults."""
        variables = {
            k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SQUEUE", "SACCT"))
        }
        return variables | {"SLURM_CONF": str(self.conf), "LC_ALL": "C.UTF-8"}

    def ask(self, *words: str, stdin: str | None = None, seconds: float = 20.0) -> str | None:
        """The output of a command; None if it failed."""
        try:
            process = subprocess.run(
                words, env=self.environment(), input=stdin, capture_output=True, text=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return None
        return process.stdout if process.returncode == 0 else None

    def processes(self, node: str | None = None) -> dict[int, list[str]]:
        """Pid -> command line of this cluster's daemons and tasks, with `node` only those of that node."""
        lines = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.owns(process, node):
                    lines[int(process.name)] = (process / "cmdline").read_text().rstrip("\0").split("\0")
            except OSError:  # the process has ended, or is a zombie
                continue
        return lines

    def owns(self, process: Path, node: str | None) -> bool:
        """Whether the process of this /proc folder belongs to this cluster."""
        # slurmstepd overwrites its environment with its title, but keeps the log of its slurmd open.
        if Path(os.readlink(process / "exe")).name.split("-")[0] in DAEMONS:  # Debian: slurmd-wlm
            opened = f"{self.folder}/log/{node}.log" if node else f"{self.folder}/"
            return any(os.readlink(fd).startswith(opened) for fd in (process / "fd").iterdir())
        # The shell of a user has SLURM_CONF too, but is on no node.
        words = (process / "environ").read_bytes().split(b"\0")
        place = f"SLURMD_NODENAME={node or ''}".encode()
        on_node = place in words if node else any(variable.startswith(place) for variable in words)
        return on_node and f"SLURM_CONF={self.conf}".encode() in words

    def running(self) -> dict[str, int]:
        """Name of a daemon, as in `commands` -> its pid, for the daemons that run."""
        names = {tuple(words): name for name, words in self.commands().items()}
        ours = {tuple(words): pid for pid, words in self.processes().items()}
        return {names[words]: pid for words, pid in ours.items() if words in names}

    def states(self) -> dict[str, str]:
        """The state of each node in Slurm's words: idle, mixed, down*, ..."""
        words = (self.ask("sinfo", "-h", "-N", "-p", "hopper", "-o", "%N %T") or "").split()
        return dict(zip(words[::2], words[1::2], strict=True))


def write_files(cluster: Cluster) -> None:
    """Make the folder of a cluster; cluster.json comes last, so that no incomplete folder counts as one."""
    folder, settings, names = cluster.folder, cluster.settings, f"gpu[01-{cluster.settings.nodes:02d}]"
    for name in ["log", "state", "dev", *(f"spool/{node}" for node in cluster.nodes)]:
        (folder / name).mkdir(parents=True, exist_ok=True)
    devices = f"NodeName={names} Name=gpu Type=h100 File={folder}/dev/nvidia[0-{settings.gpus - 1}]\n"
    for i in range(settings.gpus):
        (folder / f"dev/nvidia{i}").symlink_to("/dev/null")  # slurmd requires a character device
    accounting = [
        "AccountingStorageType=accounting_storage/slurmdbd", "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={cluster.port + 1}", f"AccountingStoragePass={folder}/munge.socket",
        "AccountingStorageTRES=gres/gpu" if settings.gpus else "",
    ]  # fmt: skip
    password = secrets.token_hex(16)
    files = {
        "slurm.conf": SLURM_CONF.format(
            name=cluster.name, host=socket.gethostname().split(".")[0], folder=folder, port=cluster.port,
            slurmd_timeout=settings.slurmd_timeout, min_job_age=settings.min_job_age,
            max_array_size=settings.max_array_size, accounting="\n".join(accounting) * settings.accounting,
            gres="GresTypes=gpu" if settings.gpus else "", nodes=names,
            node_ports=f"[{cluster.port + 3}-{cluster.port + 2 + settings.nodes}]",
            node_gres=f"Gres=gpu:h100:{settings.gpus}" if settings.gpus else "",
            debug_nodes=",".join(cluster.nodes[:2]),
        ),
        "gres.conf": devices if settings.gpus else "",
        "slurmdbd.conf": SLURMDBD_CONF.format(
            port=cluster.port + 1, storage_port=cluster.port + 2, folder=folder, password=password
        ),
        "database.sql": f"FLUSH PRIVILEGES;\nGRANT ALL ON slurm.* TO slurm@127.0.0.1 IDENTIFIED BY '{password}';\n",
        "munge.key": secrets.token_hex(64),
        "cluster.json": json.dumps({"port": cluster.port, "settings": asdict(settings)}),
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).touch(0o644 if name in ("slurm.conf", "gres.conf") else 0o600)
        (folder / name).write_text(text)


def load(folder: Path) -> Cluster | None:
    """Return the cluster of a folder; None if the folder does not exist or is empty.

    Raises:
        ClusterError: the folder holds something else.
    """
    record = folder / "cluster.json"
    if record.exists():
        words = json.loads(record.read_text())
        return Cluster(folder=folder, settings=Settings(**words["settings"]), port=words["port"])
    if folder.exists() and any(folder.iterdir()):
        raise ClusterError(f"{folder} is not empty and holds no cluster; name another folder with --dir")
    return None


def make_database(cluster: Cluster) -> None:
    """Make the data folder of mariadbd, with the user of slurmdbd in it."""
    new = cluster.folder / "database.new"
    shutil.rmtree(new, ignore_errors=True)
    options = ("--no-defaults", "--user=root", "--skip-name-resolve", "--skip-test-db")
    # A server that starts removes the temporary tables of all others in the same --tmpdir, /tmp by default.
    temporary = f"--tmpdir={cluster.folder}"
    places = (f"--datadir={new}", f"--extra-file={cluster.folder}/database.sql", temporary)
    command = ("mariadb-install-db", *options, *places)
    try:
        subprocess.run(
            command, env=cluster.environment(), capture_output=True, text=True, timeout=600, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ClusterError(
            f"{error}; its folder is {new}; it said: {error.stdout} {error.stderr}", 1
        ) from error
    new.rename(cluster.folder / "database")


def free_port(folder: Path, count: int) -> int:
    """Return the first of `count` free ports in a row, below those that Linux gives to connections."""
    first = zlib.crc32(bytes(folder)) % 200
    for block in range(200):
        port = 10000 + (first + block) % 200 * 100
        try:
            for i in range(count):
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind(("", port + i))
        except OSError:
            continue
        return port
    raise ClusterError("no free ports between 10000 and 30000", 1)
