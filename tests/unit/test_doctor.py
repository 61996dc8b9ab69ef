"""`ultrabench doctor` with programs on PATH that say what Slurm 22.05 said, shortened."""

import json
import stat
import sys

import pytest

from ultrabench.cli import main as cli

CONFIG = """\
AccountingStorageEnforce = {enforce}
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
DOWN = "Slurmctld(primary) at vm is DOWN\n"
UP = "Slurmctld(primary) at vm is UP\n"


class Site:
    """Slurm's programs in a folder, which is all of PATH."""

    def __init__(self, folder):
        self.folder = folder
        self.config, self.partitions, self.nodes, self.ping = (
            CONFIG.format(enforce="none"),
            PARTITIONS,
            NODES,
            UP,
        )
        self.associations, self.reasons, self.queue, self.sacct = ASSOCIATIONS, "", "", 0
        self.sbatch = ("Submitted batch job 7\n", 0)

    def write(self):
        text, code = self.sbatch
        self._program("sbatch", ("*", text, code))
        self._program(
            "scontrol", ("ping", self.ping, int(self.ping != UP)), ("*show?config*", self.config, 0),
            ("*show?partition*", self.partitions, 0), ("*show?job*", "JobId=7 ExitCode=3:0\n", 0),
        )  # fmt: skip
        self._program("sinfo", ("*list-reasons*", self.reasons, 0), ("*", self.nodes, 0))
        self._program("sacct", ("*", "", self.sacct))
        self._program("sacctmgr", ("*show?assoc*", self.associations, 0), ("*show?user*", "research\n", 0))
        self._program("squeue", ("*", self.queue, 0))
        self._program("scancel", ("*", "", 0))

    def _program(self, name, *cases):
        lines = [
            f"echo {name} $* >> {self.folder}/asked",
            'case "$*" in *--version*) echo slurm-wlm 22.05.8;;',
        ]
        for pattern, text, code in cases:
            stream = "" if code == 0 else " >&2"
            lines.append(f"{pattern}) /bin/cat{stream} <<'END'\n{text}END\nexit {code};;")
        path = self.folder / name
        path.write_text("\n".join(["#!/bin/sh", *lines, "esac", ""]))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    @property
    def asked(self):
        return (self.folder / "asked").read_text()


@pytest.fixture
def site(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("ULTRABENCH_CONFIG_DIR", str(tmp_path / "nobody"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return Site(tmp_path / "bin")


@pytest.fixture
def doctor(site, monkeypatch, capsys):
    """Runs `ultrabench doctor --json`: exit code, checks by name, stderr."""

    def run(*words, write=True):
        if write:
            site.write()
        monkeypatch.setattr(sys, "argv", ["ultrabench", "doctor", *words, "--json"])
        with pytest.raises(SystemExit) as left:
            cli.main()
        said = capsys.readouterr()
        checks = json.loads(said.out) if said.out else []
        assert all(set(c) == {"name", "status", "told", "remedy"} for c in checks)
        assert all(bool(c["remedy"]) == (c["status"] in ("warn", "fail")) for c in checks), checks
        return left.value.code, {c["name"]: c for c in checks}, said.err

    return run


def test_a_site_without_fault(doctor, site, tmp_path):
    code, checks, said = doctor("--wait", "0")
    assert code == 0
    assert {c["status"] for name, c in checks.items() if name != "job"} == {"pass"}
    assert checks["job"]["status"] == "skip"
    assert "launcher=slurm: Slurm answers here" in said
    assert "hopper (the default): UP, 8 nodes, no time limit; others: debug" in checks["partition"]["told"]
    assert list((tmp_path / "here").iterdir()) == [], "it leaves nothing behind"
    assert "sbatch -" not in site.asked.replace("sbatch --version", "")


def test_no_slurm(doctor):
    code, checks, _ = doctor("launcher=slurm", write=False)
    assert code == 3
    assert checks["programs"]["status"] == "fail"
    assert "sbatch, squeue, scontrol, scancel" in checks["programs"]["told"]
    assert "launcher=local" in checks["programs"]["remedy"]


def test_slurmctld_does_not_answer(doctor, site):
    site.ping = DOWN
    code, checks, _ = doctor("launcher=slurm")
    assert code == 3
    assert checks["slurmctld"]["status"] == "fail"
    assert checks["everything else"]["status"] == "skip"


def test_a_partition_that_is_down(doctor, site):
    site.partitions = PARTITIONS.replace("State=UP", "State=DOWN", 1)
    code, checks, _ = doctor()
    assert code == 1
    assert checks["partition"]["status"] == "fail"
    assert "launcher.partition= (debug)" in checks["partition"]["remedy"]
    assert checks["job"]["status"] == "skip"


def test_an_unknown_partition(doctor):
    code, checks, _ = doctor("launcher.partition=hoper")
    assert code == 1
    assert "did you mean hopper?" in checks["partition"]["remedy"]


@pytest.mark.parametrize(
    ("nodes", "status"),
    [
        ("hopper|3|16|2000|idle|gpu:h100:8\nhopper|5|16|2000|drained|gpu:h100:8\n", "warn"),
        ("hopper|1|16|2000|mixed|gpu:h100:8\nhopper|7|16|2000|down*|gpu:h100:8\n", "warn"),
        ("hopper|8|16|2000|drained|gpu:h100:8\n", "fail"),
    ],
)
def test_drained_nodes_and_why(doctor, site, nodes, status):
    site.nodes, site.reasons = nodes, "gpu[04-08]|drained|bad fan | in rack 2\n"
    code, checks, _ = doctor("--wait", "0", "sweep.nodes=[1,2]")
    assert checks["nodes"]["status"] == status
    assert "gpu[04-08] drained (bad fan | in rack 2)" in checks["nodes"]["told"]
    assert code == int(status == "fail")


@pytest.mark.parametrize(
    ("words", "status", "remedy"),
    [
        (("hardware=h100x8",), "pass", ""),
        (("hardware=cpu",), "pass", ""),
        (("hardware=h100x8", "hardware.gpus_per_node=16"), "fail", "hardware.gpus_per_node=8"),
        (("hardware=h100x8", "hardware.gpus_per_node=4"), "warn", "hardware.gpus_per_node=8"),
        (("hardware=h100x8", "launcher.gres='gpu:h100:4'"), "fail", "launcher.gres"),
        (("hardware=h100x8", "launcher.gres=gpu:8"), "pass", ""),
        (("hardware=h200x8",), "fail", "hardware= that is there"),
    ],
)
def test_gpus_that_slurm_knows(doctor, words, status, remedy):
    _, checks, _ = doctor("launcher=slurm", *words, "--wait", "0")
    assert checks["GPUs"]["status"] == status
    assert remedy in (checks["GPUs"]["remedy"] or "")


def test_nodes_that_differ(doctor, site):
    site.nodes = NODES.replace("hopper|8|", "hopper|5|") + "hopper|3|64|4000|idle|gpu:a100:4\n"
    _, checks, _ = doctor("hardware=h100x8", "--wait", "0")
    assert "3 nodes of 64 CPUs, 4000 MB, gpu:a100:4" in checks["GPUs"]["told"]
    assert "launcher.constraint=" in checks["GPUs"]["remedy"]


@pytest.mark.parametrize(
    ("word", "status"), [("mem=3G", "fail"), ("mem=1900M", "pass"), ("mem=0", "pass"), ("cpus=17", "fail")]
)
def test_what_a_node_has(doctor, word, status):
    _, checks, _ = doctor("launcher=slurm", f"launcher.{word}", "--wait", "0")
    assert checks["node size"]["status"] == status


def test_limits_that_bite(doctor):
    code, checks, _ = doctor(
        "launcher.partition=debug", "sweep.nodes=[1,2,4]", "launcher.time_minutes=60", "--wait", "0"
    )
    assert code == 0
    assert checks["limits"]["status"] == "warn"
    assert "leave out what is larger" in checks["limits"]["remedy"]
    assert "lower launcher.time_minutes=" in checks["limits"]["remedy"]


@pytest.mark.parametrize(
    ("words", "status", "remedy"),
    [
        ((), "pass", None),
        (("launcher.account=Research", "launcher.qos=short"), "pass", None),
        (("launcher.account=physics",), "fail", "one of research"),
        (("launcher.account=guests",), "fail", "one of research"),
        (("launcher.account=guests", "launcher.partition=debug"), "pass", None),
        (("launcher.qos=long",), "fail", "one of normal, short"),
    ],
)
def test_accounts_where_they_are_enforced(doctor, site, words, status, remedy):
    site.config = CONFIG.format(enforce="associations,limits,qos")
    _, checks, _ = doctor("launcher=slurm", *words, "--wait", "0")
    assert checks["account"]["status"] == status
    assert (remedy or "") in (checks["account"]["remedy"] or "")


def test_nobody_without_an_account(doctor, site):
    site.config, site.associations = CONFIG.format(enforce="associations"), ""
    code, checks, _ = doctor("--wait", "0")
    assert (code, checks["account"]["status"]) == (1, "fail")
    assert "ask the site" in checks["account"]["remedy"]


def test_without_accounting(doctor, site):
    site.sacct = 1
    code, checks, _ = doctor("--wait", "0")
    assert (code, checks["accounting"]["status"]) == (0, "warn")
    assert (
        "works without: jobs that squeue has forgotten are judged by the journal alone"
        in checks["accounting"]["told"]
    )


def test_a_results_folder_that_cannot_be(doctor, tmp_path):
    (tmp_path / "file").touch()
    code, checks, _ = doctor(f"results_dir={tmp_path}/file/results")
    assert code == 1
    assert checks["results folder"]["status"] == "fail"
    assert "results_dir=" in checks["results folder"]["remedy"]
    assert checks["job"]["status"] == "skip"


def test_a_job_that_is_refused(doctor, site):
    site.sbatch = ("sbatch: error: Batch job submission failed: Invalid account\n", 1)
    code, checks, _ = doctor()
    assert code == 1
    assert checks["job"]["told"].endswith("Batch job submission failed: Invalid account")
    assert checks["job"]["remedy"] == "set launcher.account="


@pytest.mark.parametrize(
    ("row", "told", "remedy"),
    [
        ("7_[0]|7|PENDING|0:00||Priority|x\n", "waits (Priority)", "the cluster is busy"),
        (
            "7_[0]|7|PENDING|0:00||PartitionTimeLimit|x\n",
            "PartitionTimeLimit",
            "lower launcher.time_minutes=",
        ),
        ("7_0|7|RUNNING|0:01|gpu01|None|x\n", "runs on gpu01", "if the node is only slow"),
    ],
)
def test_a_job_that_takes_too_long_is_cancelled(doctor, site, row, told, remedy):
    site.queue = row
    code, checks, said = doctor("--wait", "0.2")
    assert code == 1
    assert told in checks["job"]["told"]
    assert told in said, "progress says why"
    assert remedy in checks["job"]["remedy"]
    assert "scancel 7\n" in site.asked


def test_a_job_that_fails_without_a_word(doctor, site):
    site.queue = "7_0|7|FAILED|0:01|gpu01|NonZeroExitCode|x\n"
    code, checks, _ = doctor("launcher=slurm", "launcher.grace_s=0.5")
    assert code == 1
    assert "exit code 3:0" in checks["job"]["told"]
    assert "it wrote no " in checks["job"]["told"]
    assert "results_dir=" in checks["job"]["remedy"]
    assert "scancel" not in site.asked.replace("scancel --version", "")


def test_write_is_for_slurm(doctor):
    for words, code, line in (
        (("launcher=local", "--write"), 2, "leave launcher=local out"),
        (("--write",), 3, "there is no sbatch on PATH"),
        (("--write", "--name", "a/b"), 3, "there is no sbatch on PATH"),
    ):
        got, _, said = doctor(*words, write=False)
        assert (got, line in said) == (code, True), said


def test_write(doctor, site, tmp_path):
    code, checks, _ = doctor("--write", "--name", "alps", "--wait", "0")
    assert code == 0
    assert checks["partition"]["told"].startswith("hopper (the default)")
    path = tmp_path / "here/ultrabench/cluster/alps.yaml"
    assert "partition: hopper\ngres: gpu:h100:8\n" in path.read_text()
    for question in ("scontrol show config", "scontrol --all", "sinfo --all", "show assoc", "show user"):
        assert site.asked.count(question) == 1, "Slurm is asked once for the file and the checks"
    code, checks, said = doctor("--write", "--name", "alps", "--wait", "0")
    assert (code, checks) == (2, {})
    assert "alps.yaml exists; give --force" in said
    assert doctor("--write", "--name", "alps", "--wait", "0", "--force")[0] == 0
    assert doctor("--write", "--name", "local", "--wait", "0")[0] == 2
    assert [p.name for p in path.parent.iterdir()] == ["alps.yaml"]


def test_write_for_one_partition(doctor, tmp_path):
    words = ("--write", "--partition", "debug", "--name", "short", "sweep.nodes=[1]", "--wait", "0")
    code, checks, _ = doctor(*words)
    assert (code, checks["partition"]["told"].partition(":")[0]) == (0, "debug")
    (path,) = (tmp_path / "here/ultrabench/cluster").iterdir()
    text = path.read_text()
    assert (path.name, "partition: debug\n" in text, "# nodes: 2, 2 up; of one job: 2" in text) == (
        "short.yaml", True, True
    )  # fmt: skip
    code, _, said = doctor("--write", "--partition", "debog", "--name", "other", "--wait", "0")
    assert (code, "did you mean debug?" in said) == (2, True)
    code, _, said = doctor("--partition", "debug", "--wait", "0")
    assert (code, "set launcher.partition=debug" in said) == (2, True)
