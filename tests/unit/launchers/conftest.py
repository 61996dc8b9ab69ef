"""Slurm's programs as shell scripts, which print what Slurm 22.05 printed, shortened."""

import pytest

CONFIG = """Configuration data as of 2026-11-21T09:18:27
AccountingStorageEnforce = associations,limits,qos
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = alps
MaxArraySize            = 101
PowerPlugin             =
SLURM_VERSION           = 22.05.8

Slurmctld(primary) at vm is UP
"""
PARTITIONS = """\
PartitionName=hopper Default=YES QoS=N/A MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP TotalNodes=8
PartitionName=debug Default=NO QoS=part MaxNodes=2 MaxTime=00:30:00 State=UP TotalNodes=2 TRES=cpu=32,node=2
PartitionName=secret Default=NO QoS=N/A MaxNodes=UNLIMITED MaxTime=2-12:00:00 State=DOWN TotalNodes=8
"""
NODES = """\
hopper|8|16|2000|idle|gpu:h100:8(S:0-1)
debug|2|16|2000|idle|gpu:h100:8(S:0-1)
"""
ASSOCIATIONS = """research|||77|02:00:00|||normal,short|short
research|debug|5|||node=3||normal|normal
guests|debug||||||normal|
root|||||||normal|
"""
UNENFORCED = CONFIG.replace("associations,limits,qos", "none")
PATTERNS = {
    "version of squeue": "squeue:--version", "version": "*:--version", "sbatch": "sbatch:*", "queue": "squeue:*",
    "sacct": "sacct:*", "scancel": "scancel:*", "ping": "scontrol:ping", "config": "scontrol:*config*",
    "partitions": "scontrol:*partition*", "job": "scontrol:*job*", "reasons": "sinfo:*list-reasons*",
    "hostnames": "scontrol:*hostnames?gpu?06-07?", "nodes": "sinfo:*", "assoc": "sacctmgr:*assoc*",
    "user": "sacctmgr:*user*", "qos": "sacctmgr:*qos*",
}  # fmt: skip
"""An answer of Slurm -> the program that gives it, and its arguments, as a pattern of the shell."""


class Programs:
    """Slurm's programs in a folder, which is all of PATH.

    `says` is what they print: a text, or a text and an exit code; None where the program is missing.
    """

    def __init__(self, folder):
        self.folder = folder
        self.says = dict.fromkeys(PATTERNS, "") | {
            "config": UNENFORCED, "partitions": PARTITIONS, "nodes": NODES, "assoc": ASSOCIATIONS,
            "ping": "Slurmctld(primary) at vm is UP\n", "sbatch": "Submitted batch job 7\n", "user": "research\n",
            "job": "JobId=7 ExitCode=3:0\n", **dict.fromkeys(("version of squeue", "version"), "slurm-wlm 22.05.8\n"),
        }  # fmt: skip

    def write(self):
        script, programs, missing = f'#!/bin/sh\necho "${{0##*/}} $*" >> {self.folder}/asked\n', set(), set()
        for key, pattern in PATTERNS.items():
            program, output = pattern.partition(":")[0], self.says[key]
            (missing if output is None else programs).add(program)
            text, code = output if isinstance(output, tuple) else (output or "", 0)
            answer = f"/bin/cat {'>&2 ' * bool(code)}<<'END'\n{text}END\nexit {code}"
            script += f'case "${{0##*/}}:$*" in {pattern}) {answer};; esac\n'
        for name in programs - missing - {"*"}:
            (self.folder / name).write_text(script)
            (self.folder / name).chmod(0o755)

    @property
    def asked(self):
        lines = (self.folder / "asked").read_text().splitlines()
        return [line for line in lines if not line.endswith("--version")]


@pytest.fixture
def programs(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return Programs(folder)
