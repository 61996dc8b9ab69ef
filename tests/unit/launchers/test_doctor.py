"""`ultrabench doctor` with programs on PATH that say what Slurm 22.05 said, shortened."""

import json
import os
from types import SimpleNamespace

import pytest

from tests.unit.cli.conftest import ultrabench  # noqa: F401
from tests.unit.launchers.conftest import CONFIG, NODES, PARTITIONS, PATTERNS, UNENFORCED
from ultrabench.launchers.slurm.query import NoAnswerError


@pytest.fixture
def doctor(programs, alone, ultrabench):  # noqa: F811
    """Runs `ultrabench doctor --json`: exit code, checks by name, stderr."""

    def run(*words, says=None):
        programs.says |= says or {}
        programs.write()
        code, out, stderr = ultrabench("doctor", *words, "--json")
        checks = json.loads(out) if out else []
        assert all(set(c) == {"name", "status", "finding", "remedy"} for c in checks)
        assert all(bool(c["remedy"]) == (c["status"] in ("warn", "fail")) for c in checks), checks
        return code, {c["name"]: c for c in checks}, stderr

    return run


def test_a_site_without_fault(doctor, programs, alone):
    code, checks, stderr = doctor("--wait", "0")
    assert code == 0
    assert {c["status"] for name, c in checks.items() if name != "job"} == {"pass"}
    assert checks["job"]["status"] == "skip"
    assert "launcher=slurm: Slurm responds here" in stderr
    expected = (
        "hopper (the default): UP, 8 nodes, no time limit; others: debug: UP, "
        "2 nodes (2 per job), up to 30 min; "
    )
    assert expected in checks["partition"]["finding"]
    assert list(alone.iterdir()) == [], "it leaves nothing behind"
    assert not [line for line in programs.asked if line.startswith("sbatch")]


DRAINED = "hopper|3|16|2000|idle|gpu:h100:8\nhopper|5|16|2000|drained|gpu:h100:8\n"
SILENT = "hopper|1|16|2000|mixed|gpu:h100:8\nhopper|7|16|2000|down*|gpu:h100:8\n"
MIXED = NODES.replace("hopper|8|", "hopper|5|") + "hopper|3|64|4000|idle|gpu:a100:4\n"
REASONS = "gpu[04-08]|drained|bad fan | in rack 2\n"
DOWN = PARTITIONS.replace("State=UP", "State=DOWN", 1)
UNRECORDED = UNENFORCED.replace("slurmdbd", "none")
ABSENT = dict.fromkeys(("queue", "scancel"))
LARGE = ("launcher.partition=debug", "sweep.nodes=[1,2,4]", "launcher.time_minutes=60")
GPUS = "hardware=h100x8", "sweep.nodes=[1]"


@pytest.mark.parametrize(
    ("says", "words", "expected"),
    [
        (ABSENT, (), {"programs": ("fail", "not on PATH: squeue, scancel")}),
        (ABSENT | dict.fromkeys(("sbatch", "ping")), (), {"programs": ("fail", "launcher=local")}),
        ({"sacct": None}, (), {"programs": ("warn", "without sacct, jobs that squeue no longer lists")}),
        ({"version of squeue": "slurm 23.11.1\n"}, (), {"programs": ("warn", "two versions of Slurm are mixed")}),
        ({"ping": ("Slurmctld(primary) at vm is DOWN\n", 1)}, (), {"slurmctld": ("fail", "vm is DOWN")}),
        ({"config": ("slurm_load_ctl_conf error\n", 1)}, (), {"slurmctld": ("fail", "slurm_load_ctl_conf error")}),
        ({"partitions": DOWN}, (),
         {"partition": ("fail", "launcher.partition= (debug)"),
             "job": ("skip", "none submitted because partition failed")}),
        ({"partitions": PARTITIONS.replace("Nodes=8", "Nodes=0")}, ("sweep.nodes=[1]",),
            {"partition": ("fail", "no nodes")}),
        ({}, ("launcher.partition=hoper",), {"partition": ("fail", "did you mean hopper?")}),
        ({"nodes": DRAINED, "reasons": REASONS}, ("launcher.mem=1900M",),
         {"nodes": ("warn", "3 of 8 up; gpu[04-08] drained (bad fan | in rack 2)", "nothing to do"),
             "node size": ("pass",)}),
        ({"nodes": SILENT}, ("sweep.nodes=[1,2]", "launcher.mem=0"),
         {"nodes": ("warn", "runs of 2 nodes wait"), "node size": ("pass",)}),
        ({"nodes": "hopper|8|16|2000|drained|gpu:h100:8\n"}, (), {"nodes": ("fail", "0 of 8 up", "sinfo -R")}),
        ({"nodes": ""}, GPUS, dict.fromkeys(("nodes", "GPUs", "node size"), ("warn", "sinfo does not list"))),
        ({}, (GPUS[0], *LARGE),
         {"GPUs": ("pass",), "limits": ("warn", "use fewer nodes", "lower launcher.time_minutes=")}),
        ({"config": CONFIG}, (), {"account": ("pass", "QOS normal, short"),
            "GPUs": ("pass", "needs no GPU", "give the hardware=")}),
        ({"config": CONFIG}, (*GPUS, "hardware.gpus_per_node=16", "launcher.account=Research", "launcher.qos=short",
            "launcher.mem=3G"),
         {"GPUs": ("fail", "hardware.gpus_per_node=8"), "account": ("pass",),
             "node size": ("fail", "launcher.mem=2000M")}),
        ({"config": CONFIG}, (*GPUS, "hardware.gpus_per_node=4", "launcher.account=physics", "launcher.mem=1gb"),
         {"GPUs": ("warn", "hardware.gpus_per_node=8"), "account": ("fail", "launcher.account=physics",
             "one of research"),
          "node size": ("pass",)}),
        ({"config": CONFIG}, (*GPUS, "launcher.gres='gpu:h100:4'", "launcher.account=guests", "launcher.cpus=17"),
         {"GPUs": ("fail", "launcher.gres=gpu:h100:4 asks for 4"), "account": ("fail", "one of research"),
          "node size": ("fail", "launcher.cpus=16")}),
        ({"config": CONFIG}, (*GPUS, "launcher.gres=gpu:8", "launcher.account=guests", LARGE[0]),
         {"GPUs": ("pass",), "account": ("pass",)}),
        ({"config": CONFIG}, ("hardware=h200x8", "launcher.qos=long"),
         {"GPUs": ("fail", "hardware= of these nodes"), "account": ("fail", "one of normal, short")}),
        ({"config": CONFIG, "assoc": "", "nodes": MIXED}, GPUS,
         {"GPUs": ("warn", "3 nodes of 64 CPUs, 4000 MB, gpu:a100:4", "launcher.sbatch.constraint="),
             "account": ("fail", "ask the site")}),
        ({"config": CONFIG, "assoc": ("No.\n", 1), "sacct": ("", 1)}, (),
         {"account": ("warn", "ask the site"), "accounting": ("warn",
             "works without sacct: jobs that squeue no longer lists are judged")}),
        ({"config": UNRECORDED}, (), {"accounting": ("warn", "jobs are not recorded")}),
        ({}, ("results_dir=/dev/null/results",), {"results folder": ("fail", "results_dir=")}),
    ],
)  # fmt: skip
def test_what_slurm_says(doctor, says, words, expected):
    code, checks, _ = doctor("launcher=slurm", *words, "--wait", "0", says=says)
    for check, (status, *texts) in expected.items():
        outcome = checks[check]
        assert outcome["status"] == status, outcome
        assert all(text in f"{outcome['finding']}; {outcome['remedy']}" for text in texts), outcome
    assert code == (int("fail" in {c["status"] for c in checks.values()}) if "job" in checks else 3)


NAME = "ub-.doctor-abcdef01-checkup"


@pytest.mark.parametrize(
    ("says", "words", "finding", "remedy", "cancelled"),
    [
        ({"sbatch": ("sbatch: error: Batch job submission failed: Invalid account\n", 1)}, (),
         "Batch job submission failed: Invalid account", "set launcher.account=", True),
        ({"sbatch": ("sbatch: error: Invalid colour\n", 1)}, (), "Invalid colour", "+launcher.sbatch.*", True),
        ({"queue": "7_[0]|7|PENDING|0:00||Priority|NAME\n"}, (), "is pending (Priority)", "the cluster is busy", True),
        ({"queue": "7_[0]|7|PENDING|0:00||PartitionTimeLimit|NAME\n"}, (), "PartitionTimeLimit",
         "lower launcher.time_minutes=", True),
        ({"queue": "7_0|7|RUNNING|0:01|gpu01|None|NAME\n"}, (), "is running on gpu01", "if the node is only slow",
            True),
        ({"queue": "7_0|7|FAILED|0:01|gpu01|NonZeroExitCode|NAME\n"}, ("--wait", "9"),
         "FAILED (NonZeroExitCode) on gpu01; exit code 3:0, no report; it wrote no ", "results_dir=", False),
    ],
)  # fmt: skip
def test_a_job_that_does_not_run(doctor, programs, monkeypatch, says, words, finding, remedy, cancelled):
    monkeypatch.setattr(
        "ultrabench.launchers.doctor.checkup.uuid.uuid4", lambda: SimpleNamespace(hex="abcdef01" * 4)
    )
    says = {key: text.replace("NAME", NAME) if key == "queue" else text for key, text in says.items()}
    code, checks, notes = doctor("launcher=slurm", "launcher.grace_s=0.5", "--wait", "0.2", *words, says=says)
    assert code == 1
    assert finding in checks["job"]["finding"]
    assert remedy in checks["job"]["remedy"]
    assert "queue" not in says or "job 7 " in notes, "progress tells how the job is"
    cancels = [line for line in programs.asked if line.startswith("scancel")]
    assert cancels == cancelled * [f"scancel --user={os.getuid()} --name={NAME}"]


def test_an_sbatch_without_an_answer_is_no_fault_of_the_configuration(doctor, monkeypatch):
    def submit(*arguments):
        raise NoAnswerError("sbatch: nothing")

    monkeypatch.setattr("ultrabench.launchers.slurm.launcher.submit", submit)
    monkeypatch.setattr("ultrabench.launchers.doctor.checkup.FIND_S", 0.0)
    code, checks, _ = doctor("launcher=slurm", "launcher.grace_s=0.5", "--wait", "1")
    assert (code, checks["job"]["remedy"]) == (1, "slurmctld is slow or unreachable: try again")


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("launcher=local", "--write"), 2, "leave launcher=local out"),
        (("--write", "--name", "a/b"), 3, "there is no sbatch on PATH"),
        (("--partition", "debug"), 2, "set launcher.partition=debug"),
    ],
)
def test_mistakes_where_there_is_no_slurm(doctor, words, code, line):
    exit_code, _, stderr = doctor(*words, says=dict.fromkeys(PATTERNS))
    assert (exit_code, line in stderr) == (code, True), stderr


def test_write(doctor, programs, alone):
    words = ("cluster=alps", "--write", "--name", "alps", "--wait", "0")
    code, checks, _ = doctor(*words)
    assert code == 0
    assert checks["partition"]["finding"].startswith("hopper (the default)")
    path = alone / "ultrabench/cluster/alps.yaml"
    assert "partition: hopper\ngres: gpu:h100:8\n" in path.read_text()
    questions = "\n".join(programs.asked)
    for question in ("scontrol show config", "scontrol --all", "sinfo --all", "show assoc", "show user"):
        assert questions.count(question) == 1, "Slurm is asked once for the file and the checks"
    code, checks, stderr = doctor(*words)
    assert (code, checks) == (2, {})
    assert "alps.yaml exists; give --force" in stderr
    assert doctor(*words, "--force")[0] == 0
    assert [p.name for p in path.parent.iterdir()] == ["alps.yaml"]


def test_write_for_one_partition(doctor, alone):
    words = ("--write", "--name", "short", "sweep.nodes=[1]", "--wait", "0", "--partition")
    code, checks, _ = doctor(*words, "debug")
    assert (code, checks["partition"]["finding"].partition(":")[0]) == (0, "debug")
    assert "partition: debug\n" in (alone / "ultrabench/cluster/short.yaml").read_text()
    code, _, stderr = doctor(*words, "debog")
    assert (code, "did you mean debug?" in stderr) == (2, True)
