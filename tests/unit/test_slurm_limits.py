"""What scontrol, sinfo and sacctmgr of Slurm 22.05 printed, shortened."""

import getpass

import pytest

from ultrabench.errors import ClusterError, ConfigError
from ultrabench.launchers.slurm.query import CommandError
from ultrabench.launchers.slurm.site import Site as RealSite

CONFIG = """Configuration data as of 2026-11-21T09:18:27
AccountingStorageEnforce = associations,limits,qos
AccountingStorageTRES   = cpu,mem,energy,node,billing,fs/disk,vmem,pages,gres/gpu
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = alps
KillWait                = 30 sec
MaxArraySize            = 101
MaxJobCount             = 10000
MinJobAge               = 300 sec
PowerPlugin             =
SLURM_CONF              = /etc/slurm/slurm.conf
SLURM_VERSION           = 22.05.8

Slurmctld(primary) at vm is UP
"""
PARTITIONS = """\
PartitionName=hopper AllowGroups=ALL AllowAccounts=ALL Default=YES QoS=N/A DefaultTime=NONE Hidden=NO \
MaxNodes=UNLIMITED MaxTime=UNLIMITED MinNodes=0 Nodes=gpu[01-08] State=UP TotalCPUs=128 TotalNodes=8 \
JobDefaults=(null) TRES=cpu=128,mem=16000M,node=8,billing=128,gres/gpu=64
PartitionName=debug AllowGroups=ALL AllowAccounts=ALL Default=NO QoS=part DefaultTime=00:10:00 Hidden=NO \
MaxNodes=2 MaxTime=00:30:00 MinNodes=0 Nodes=gpu[01-02] State=UP TotalCPUs=32 TotalNodes=2
PartitionName=secret AllowGroups=ALL AllowAccounts=research Default=NO QoS=N/A DefaultTime=NONE Hidden=YES \
MaxNodes=UNLIMITED MaxTime=2-12:00:00 MinNodes=0 Nodes=gpu[01-08] State=DOWN TotalCPUs=128 TotalNodes=8
"""
NODES = """hopper|1|16|2000|down*|gpu:h100:8
hopper|3|16|2000|idle|gpu:h100:8
hopper|1|16|2000|mixed|gpu:h100:8
hopper|1|16|2000|drained|gpu:h100:8
hopper|2|64|515000|idle~|gpu:a100:4(S:0-1),gpu:v100:2(S:0)
debug|2|16|2000|maint|(null)
"""
ASSOCIATIONS = """research|||77|02:00:00|||normal,short|short
research|debug|5|||node=3||normal|normal
root|||||||normal|
"""
QOSES = {
    "part": "part||||1-00:00:00|node=6||node=5",
    "short": "short|DenyOnLimit|3|20|00:30:00|gres/gpu=16|gres/gpu=24,node=4|",
    "strong": "strong|DenyOnLimit,OverPartQOS|||UNLIMITED|node=1||",
    "normal": "normal|||||||",
    "other": "other|||||||",
}


class Programs:
    """Answers for the programs; the words of sacctmgr it was asked with stay in `asked`."""

    def __init__(self, **changed):
        self.texts = {
            "config": CONFIG,
            "partition": PARTITIONS,
            "sinfo": NODES,
            "assoc": ASSOCIATIONS,
        } | changed
        self.asked = []

    def __call__(self, *words):
        if words[0] == "sacctmgr":
            self.asked.append(words)
        kind = next((k for k in ("config", "partition", "assoc", "user", "qos", "sinfo") if k in words), None)
        if kind == "user":
            return self.texts.get("user", "research\n")
        if kind == "qos":
            names = words[6].removeprefix("name=").split(",")
            # In its own order, not in that of the question.
            return "".join(f"{QOSES[name]}\n" for name in sorted(QOSES, reverse=True) if name in names)
        text = self.texts[kind]
        if text is None:
            raise CommandError(f"{words[0]}: Unable to contact slurm controller (connect failure) (exit 1)")
        return text


def read_limits(partition=None, account=None, qos=None, *, ask):
    return RealSite(ask).limits(partition, account, qos)


def test_the_default_partition_and_its_nodes():
    limits = read_limits(ask=Programs())
    assert (limits.name, limits.state, limits.is_default) == ("hopper", "UP", True)
    assert (limits.total_nodes, limits.up_nodes) == (8, 6)
    assert (limits.cpus_per_node, limits.mem_mb_per_node, limits.gpus_per_node) == (16, 2000, 8)
    assert limits.gres == "gpu:h100:8"
    assert limits.kinds == (
        "6 nodes of 16 CPUs, 2000 MB, gpu:h100:8",
        "2 nodes of 64 CPUs, 515000 MB, gpu:a100:4(S:0-1),gpu:v100:2(S:0)",
    )
    assert limits.max_time_minutes is None
    assert (limits.cluster, limits.accounting, limits.max_array_size) == ("alps", True, 101)


@pytest.mark.parametrize(
    ("partition", "account", "qos", "limits"),
    [
        # max_nodes, max_nodes_per_user, max_submit, max_jobs, max_wall_minutes
        (None, None, None, (2, 3, 20, 3, 30)),
        ("hopper", "Research", "short", (2, 3, 20, 3, 30)),
        ("hopper", "research", "normal", (None, None, 77, None, 120)),
        ("hopper", "root", None, (None, None, None, None, None)),
        ("debug", None, None, (2, None, None, 5, 1440)),
        ("debug", None, "short", (2, 4, 20, 3, 1440)),
        ("debug", None, "strong", (1, None, None, 5, 1440)),
        ("hopper", "nobody's", None, (None, None, None, None, None)),
    ],
)
def test_limits_of_qos_and_account(partition, account, qos, limits):
    programs = Programs()
    told = read_limits(partition, account, qos, ask=programs)
    found = (told.max_nodes, told.max_nodes_per_user, told.max_submit, told.max_jobs, told.max_wall_minutes)
    assert found == limits
    assert f"user={getpass.getuser()}" in programs.asked[0]
    assert "cluster=alps" in programs.asked[0]


def test_limits_that_are_not_enforced_are_none():
    programs = Programs(config=CONFIG.replace("associations,limits,qos", "associations,nojobs"))
    limits = read_limits(ask=programs)
    assert (limits.max_submit, limits.max_wall_minutes, limits.accounting) == (None, None, False)
    assert programs.asked == []


@pytest.mark.parametrize("gone", ["sinfo", "assoc"])
def test_a_source_that_fails_leaves_its_values_open(gone):
    limits = read_limits(ask=Programs(**{gone: None}))
    assert limits.total_nodes == 8
    assert (limits.up_nodes is None) == (gone == "sinfo")
    assert (limits.max_submit is None) == (gone == "assoc")


def test_other_partitions():
    found = {p.name: p for p in RealSite(Programs()).partitions}
    assert list(found) == ["hopper", "debug", "secret"]
    debug, secret = found["debug"], found["secret"]
    assert (debug.max_nodes, debug.max_time_minutes) == (2, 30)
    assert (debug.partition_qos, debug.up_nodes, debug.gpus_per_node, debug.gres) == ("part", 0, 0, None)
    assert (secret.state, secret.max_time_minutes, secret.up_nodes) == ("DOWN", 3600, None)


@pytest.mark.parametrize(
    ("partition", "said", "error", "told"),
    [
        ("hoper", {}, ConfigError, r"launcher.partition 'hoper'; did you mean hopper\?"),
        (None, {"partition": PARTITIONS.replace("Default=YES", "Default=NO")}, ConfigError,
         r"set launcher.partition= \(hopper, debug, secret\)"),
        (None, {"config": None}, ClusterError, "connect failure.*login node"),
        (None, {"partition": None}, ClusterError, "connect failure.*login node"),
    ],
)  # fmt: skip
def test_a_partition_that_cannot_be_read(partition, said, error, told):
    with pytest.raises(error, match=told):
        read_limits(partition, ask=Programs(**said))


def test_the_real_programs_are_asked_by_default(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="not on PATH: sbatch"):
        RealSite().limits(None, None, None)
