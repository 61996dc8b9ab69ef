"""`ultrabench doctor` with programs on PATH that say what Slurm 22.05 said, shortened."""

import json
import os
import stat

import pytest

from tests.unit.cli.conftest import ultrabench  # noqa: F401

CONFIG = """\
AccountingStorageEnforce = none
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = alps
MaxArraySize            = 101
SLURM_VERSION           = 22.05.8
"""
PARTITIONS = """\
PartitionName=hopper AllowAccounts=ALL Default=YES QoS=N/A MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP TotalNodes=8
PartitionName=debug AllowAccounts=ALL Default=NO QoS=N/A MaxNodes=2 MaxTime=00:30:00 State=UP TotalNodes=2
"""
NODES = """\
hopper|8|16|2000|idle|gpu:h100:8(S:0-1)
debug|2|16|2000|idle|gpu:h100:8(S:0-1)
"""
ASSOCIATIONS = """\
research|||||||normal,short|normal
guests|debug||||||normal|
"""
UP = "Slurmctld(primary) at vm is UP\n"


class Site:
    """Slurm's programs in a folder, which is all of PATH; `says` is what each of them prints, `fails` its exit code."""

    def __init__(self, folder):
        self.folder, self.missing, self.version = folder, (), {}
        self.says = {"config": CONFIG, "partitions": PARTITIONS, "nodes": NODES, "ping": UP, "reasons": "", "queue": "",
                     "assoc": ASSOCIATIONS, "sbatch": "Submitted batch job 7\n", "sacct": ""}  # fmt: skip
        self.fails = {}

    def write(self):
        programs = {
            "sbatch": {"*": "sbatch"}, "squeue": {"*": "queue"}, "sacct": {"*": "sacct"}, "scancel": {"*": "nothing"},
            "scontrol": {"ping": "ping", "*config*": "config", "*partition*": "partitions", "*show?job*": "job"},
            "sinfo": {"*list-reasons*": "reasons", "*": "nodes"},
            "sacctmgr": {"*show?assoc*": "assoc", "*show?user*": "user"},
        }  # fmt: skip
        says = self.says | {"nothing": "", "job": "JobId=7 ExitCode=3:0\n", "user": "research\n"}
        for name in programs.keys() - set(self.missing):
            version = self.version.get(name, "slurm-wlm 22.05.8")
            lines = [f"echo {name} $* >> {self.folder}/asked", f'case "$*" in *--version*) echo {version};;']
            for pattern, key in programs[name].items():
                code = self.fails.get(key, 0)
                lines.append(
                    f"{pattern}) /bin/cat {'>&2 ' * bool(code)}<<'END'\n{says[key]}END\nexit {code};;"
                )
            path = self.folder / name
            path.write_text("\n".join(["#!/bin/sh", *lines, "esac", ""]))
            path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def change(self, key, text, code=0):
        self.says[key], self.fails[key] = text, code

    @property
    def asked(self):
        lines = (self.folder / "asked").read_text().splitlines()
        return [line for line in lines if not line.endswith("--version")]


@pytest.fixture
def site(tmp_path, alone, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return Site(tmp_path / "bin")


@pytest.fixture
def doctor(site, ultrabench):  # noqa: F811
    """Runs `ultrabench doctor --json`: exit code, checks by name, stderr."""

    def run(*words, write=True):
        if write:
            site.write()
        code, out, said = ultrabench("doctor", *words, "--json")
        checks = json.loads(out) if out else []
        assert all(set(c) == {"name", "status", "told", "remedy"} for c in checks)
        assert all(bool(c["remedy"]) == (c["status"] in ("warn", "fail")) for c in checks), checks
        return code, {c["name"]: c for c in checks}, said

    return run


def test_a_site_without_fault(doctor, site, alone):
    code, checks, said = doctor("--wait", "0")
    assert code == 0
    assert {c["status"] for name, c in checks.items() if name != "job"} == {"pass"}
    assert checks["job"]["status"] == "skip"
    assert "launcher=slurm: Slurm answers here" in said
    assert "hopper (the default): UP, 8 nodes, no time limit; others: debug" in checks["partition"]["told"]
    assert list(alone.iterdir()) == [], "it leaves nothing behind"
    assert not [line for line in site.asked if line.startswith("sbatch")]


@pytest.mark.parametrize(
    ("says", "missing", "check", "text"),
    [
        ({}, ("squeue", "scancel"), "programs", "not on PATH: squeue, scancel"),
        ({}, ("sbatch", "squeue", "scontrol", "scancel"), "programs", "launcher=local"),
        ({"ping": "Slurmctld(primary) at vm is DOWN\n"}, (), "slurmctld", "vm is DOWN"),
        ({"config": "slurm_load_ctl_conf error\n"}, (), "slurmctld", "slurm_load_ctl_conf error"),
    ],
)
def test_a_slurm_that_cannot_be_asked(doctor, site, says, missing, check, text):
    site.missing = missing
    for key, said in says.items():
        site.change(key, said, 1)
    code, checks, _ = doctor("launcher=slurm")
    assert (code, checks[check]["status"], "job" in checks) == (3, "fail", False)
    assert text in f"{checks[check]}"


DRAINED = "hopper|3|16|2000|idle|gpu:h100:8\nhopper|5|16|2000|drained|gpu:h100:8\n"
SILENT = "hopper|1|16|2000|mixed|gpu:h100:8\nhopper|7|16|2000|down*|gpu:h100:8\n"
MIXED = NODES.replace("hopper|8|", "hopper|5|") + "hopper|3|64|4000|idle|gpu:a100:4\n"
REASONS = "gpu[04-08]|drained|bad fan | in rack 2\n"
DOWN = PARTITIONS.replace("State=UP", "State=DOWN", 1)
ENFORCED = CONFIG.replace("none", "associations,limits,qos")
UNRECORDED = CONFIG.replace("slurmdbd", "none")
LARGE = ("launcher.partition=debug", "sweep.nodes=[1,2,4]", "launcher.time_minutes=60")
GPUS = "hardware=h100x8", "sweep.nodes=[1]"


@pytest.mark.parametrize(
    ("says", "words", "expected"),
    [
        ({"partitions": DOWN}, (), {"partition": ("fail", "launcher.partition= (debug)")}),
        ({"partitions": PARTITIONS.replace("Nodes=8", "Nodes=0")}, ("sweep.nodes=[1]",), {"partition": ("fail", "no nodes")}),
        ({}, ("launcher.partition=hoper",), {"partition": ("fail", "did you mean hopper?")}),
        ({"nodes": DRAINED, "reasons": REASONS}, ("launcher.mem=1900M",),
         {"nodes": ("warn", "3 of 8 up; gpu[04-08] drained (bad fan | in rack 2)", "nothing to do"), "node size": ("pass",)}),
        ({"nodes": SILENT}, ("sweep.nodes=[1,2]", "launcher.mem=0"),
         {"nodes": ("warn", "runs of 2 nodes wait"), "node size": ("pass",)}),
        ({"nodes": "hopper|8|16|2000|drained|gpu:h100:8\n"}, (), {"nodes": ("fail", "0 of 8 up", "sinfo -R")}),
        ({"nodes": ""}, GPUS, dict.fromkeys(("nodes", "GPUs", "node size"), ("warn", "sinfo does not tell"))),
        ({}, (GPUS[0], *LARGE),
         {"GPUs": ("pass",), "limits": ("warn", "leave out what is larger", "lower launcher.time_minutes=")}),
        ({"config": ENFORCED}, (), {"account": ("pass", "QOS normal, short"), "GPUs": ("pass", "needs none", "name the hardware=")}),
        ({"config": ENFORCED}, (*GPUS, "hardware.gpus_per_node=16", "launcher.account=Research", "launcher.qos=short", "launcher.mem=3G"),
         {"GPUs": ("fail", "hardware.gpus_per_node=8"), "account": ("pass",), "node size": ("fail", "launcher.mem=2000M")}),
        ({"config": ENFORCED}, (*GPUS, "hardware.gpus_per_node=4", "launcher.account=physics", "launcher.mem=some"),
         {"GPUs": ("warn", "hardware.gpus_per_node=8"), "account": ("fail", "launcher.account=physics", "one of research"),
          "node size": ("fail", "such as 500G")}),
        ({"config": ENFORCED}, (*GPUS, "launcher.gres='gpu:h100:4'", "launcher.account=guests", "launcher.cpus=17"),
         {"GPUs": ("fail", "launcher.gres=gpu:h100:4 asks for 4"), "account": ("fail", "one of research"),
          "node size": ("fail", "launcher.cpus=16")}),
        ({"config": ENFORCED}, (*GPUS, "launcher.gres=gpu:8", "launcher.account=guests", LARGE[0]),
         {"GPUs": ("pass",), "account": ("pass",)}),
        ({"config": ENFORCED}, ("hardware=h200x8", "launcher.qos=long"),
         {"GPUs": ("fail", "hardware= that is there"), "account": ("fail", "one of normal, short")}),
        ({"config": ENFORCED, "assoc": "", "nodes": MIXED}, GPUS,
         {"GPUs": ("warn", "3 nodes of 64 CPUs, 4000 MB, gpu:a100:4", "launcher.sbatch.constraint="), "account": ("fail", "ask the site")}),
        ({"config": ENFORCED, "assoc": ("No.\n", 1), "sacct": ("", 1)}, (),
         {"account": ("warn", "ask the site"), "accounting": ("warn", "works without: jobs that squeue has forgotten are judged")}),
        ({"config": UNRECORDED}, (), {"accounting": ("warn", "jobs are not recorded")}),
        ({}, ("results_dir=/dev/null/results",), {"results folder": ("fail", "results_dir=")}),
    ],
)  # fmt: skip
def test_what_slurm_says(doctor, site, says, words, expected):
    for key, said in says.items():
        site.change(key, *([said] if isinstance(said, str) else said))
    code, checks, _ = doctor("launcher=slurm", *words, "--wait", "0")
    for check, (status, *texts) in expected.items():
        found = checks[check]
        assert found["status"] == status, found
        assert all(text in f"{found['told']}; {found['remedy']}" for text in texts), found
    assert code == int("fail" in {c["status"] for c in checks.values()})


def test_programs_that_are_missing_or_mixed(doctor, site):
    site.version = {"squeue": "slurm 23.11.1"}
    assert "two are mixed" in doctor("--wait", "0")[1]["programs"]["remedy"]
    (site.folder / "sacct").unlink()
    site.missing = ("sacct",)
    assert "without sacct jobs that squeue has forgotten" in doctor("--wait", "0")[1]["programs"]["told"]


@pytest.mark.parametrize(
    ("says", "words", "told", "remedy", "cancelled"),
    [
        ({"sbatch": ("sbatch: error: Batch job submission failed: Invalid account\n", 1)}, (),
         "Batch job submission failed: Invalid account", "set launcher.account=", True),
        ({"sbatch": ("sbatch: error: Invalid colour\n", 1)}, (), "Invalid colour", "+launcher.sbatch.*", True),
        ({"queue": "7_[0]|7|PENDING|0:00||Priority|NAME\n"}, (), "waits (Priority)", "the cluster is busy", True),
        ({"queue": "7_[0]|7|PENDING|0:00||PartitionTimeLimit|NAME\n"}, (), "PartitionTimeLimit",
         "lower launcher.time_minutes=", True),
        ({"queue": "7_0|7|RUNNING|0:01|gpu01|None|NAME\n"}, (), "runs on gpu01", "if the node is only slow", True),
        ({"queue": "7_0|7|FAILED|0:01|gpu01|NonZeroExitCode|NAME\n"}, ("--wait", "9"),
         "FAILED (NonZeroExitCode) on gpu01; exit code 3:0, no report; it wrote no ", "results_dir=", False),
        ({"partitions": DOWN}, (), "none submitted, because partition failed", "", False),
    ],
)  # fmt: skip
def test_a_job_that_does_not_run(doctor, site, monkeypatch, says, words, told, remedy, cancelled):
    monkeypatch.setattr("ultrabench.launchers.doctor.checkup.uuid.uuid4", FixedId)
    for key, said in says.items():
        said, *code = [said] if isinstance(said, str) else said
        site.change(key, said.replace("NAME", "ub-.doctor-abcdef01-checkup"), *code)
    code, checks, said = doctor("launcher=slurm", "launcher.grace_s=0.5", "--wait", "0.2", *words)
    assert code == 1
    assert told in checks["job"]["told"]
    assert remedy in (checks["job"]["remedy"] or "")
    assert "queue" not in says or "job 7 " in said, "progress tells how the job is"
    assert [line for line in site.asked if line.startswith("scancel")] == cancelled * [
        f"scancel --user={os.getuid()} --name=ub-.doctor-abcdef01-checkup"
    ]


class FixedId:
    hex = "abcdef01" * 4


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("launcher=local", "--write"), 2, "leave launcher=local out"),
        (("--write",), 3, "there is no sbatch on PATH"),
        (("--write", "--name", "a/b"), 3, "there is no sbatch on PATH"),
        (("--partition", "debug"), 2, "set launcher.partition=debug"),
    ],
)
def test_mistakes_where_there_is_no_slurm(doctor, words, code, line):
    got, _, said = doctor(*words, write=False)
    assert (got, line in said) == (code, True), said


def test_write(doctor, site, alone):
    words = ("cluster=alps", "--write", "--name", "alps", "--wait", "0")
    code, checks, _ = doctor(*words)
    assert code == 0
    assert checks["partition"]["told"].startswith("hopper (the default)")
    path = alone / "ultrabench/cluster/alps.yaml"
    assert "partition: hopper\ngres: gpu:h100:8\n" in path.read_text()
    asked = "\n".join(site.asked)
    for question in ("scontrol show config", "scontrol --all", "sinfo --all", "show assoc", "show user"):
        assert asked.count(question) == 1, "Slurm is asked once for the file and the checks"
    code, checks, said = doctor(*words)
    assert (code, checks) == (2, {})
    assert "alps.yaml exists; give --force" in said
    assert doctor(*words, "--force")[0] == 0
    assert doctor("--write", "--name", "local", "--wait", "0")[0] == 2
    assert [p.name for p in path.parent.iterdir()] == ["alps.yaml"]


def test_write_for_one_partition(doctor, alone):
    words = ("--write", "--partition", "debug", "--name", "short", "sweep.nodes=[1]", "--wait", "0")
    code, checks, _ = doctor(*words)
    assert (code, checks["partition"]["told"].partition(":")[0]) == (0, "debug")
    text = (alone / "ultrabench/cluster/short.yaml").read_text()
    assert "partition: debug\n" in text
    assert "# UP, 2 nodes (2 a job), up to 30 min; nodes up: 2" in text
    code, _, said = doctor("--write", "--partition", "debog", "--name", "other", "--wait", "0")
    assert (code, "did you mean debug?" in said) == (2, True)
