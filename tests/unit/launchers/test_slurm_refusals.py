"""What follows from the words of a failed sbatch: it is final, it passes, or Slurm may have taken the job."""

import pytest

from tests.configs import refused
from tests.unit.allocations import jobs_of, made_of, open_sweep
from tests.unit.launchers import played_slurm
from tests.unit.launchers.played_slurm import GRACE_S, A, rows
from ultrabench.launchers.launcher import NotTakenError
from ultrabench.launchers.slurm.launcher import SlurmLauncher
from ultrabench.launchers.slurm.refusal import Failure, failure_of

slurm = played_slurm.slurm
POLICY = (
    "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, "
    "user's size and/or time limits)"
)
PARTITION = "Batch job submission failed: Required partition not available (inactive or drain)"
WORDS = {
    Failure.PASSING: [
        POLICY, PARTITION, f"AssocGrpSubmitJobsLimit; {POLICY}", f"AssocMaxSubmitJobLimit; {POLICY}",
        f"QOSMaxSubmitJobPerUserLimit; {POLICY}", f"QOSGrpNodeLimit; {POLICY}", f"MaxJobsPerAccount; {POLICY}",
        f"AssocGrpCPUMinutesLimit; {POLICY}",
        "Batch job submission failed: Partition in DOWN state",
        "Batch job submission failed: Required node not available (down, drained or reserved)",
        "Batch job submission failed: Requested partition configuration not available now",
        "Batch job submission failed: Unable to contact slurm controller (connect failure)",
        "Batch job submission failed: Resource temporarily unavailable",
        "Slurm temporarily unable to accept job, sleeping and retrying; Batch job submission failed: "
        "Resource temporarily unavailable",
        "Slurm job queue full, sleeping and retrying; Batch job submission failed: "
        "Unable to create job record, try again",
        "Batch job submission failed: Slurm backup controller in standby mode",
        "Batch job submission failed: Rate limit exceeded, please retry momentarily",
        "Batch job submission failed: Requested operation is presently disabled",
        "Batch job submission failed: Invalid authentication credential",
        "Batch job submission failed: Requested reservation not usable now",
        "Batch job submission failed: I/O error writing script/environment to file",
        "Batch job submission failed: Connection refused",
    ],
    Failure.SILENT: [
        "Batch job submission failed: Socket timed out on send/recv operation",
        "Socket timed out on send/recv operation",
        "Batch job submission failed: Unable to contact slurm controller (receive failure)",
        "Batch job submission failed: Unable to contact slurm controller",
        "Batch job submission failed: Zero Bytes were transmitted or received",
        "Slurm temporarily unable to accept job, sleeping and retrying; Batch job submission failed: "
        "Socket timed out on send/recv"
        " operation",
        "sbatch: no answer within 60 s",
    ],
    Failure.FINAL: [
        f"QOSMaxNodePerJobLimit; {POLICY}", f"AssocMaxWallDurationPerJobLimit; {POLICY}", f"QOSMinGRES; {POLICY}",
        f"MaxMemPerLimit; {POLICY}", f"QOSMaxCpuPerNode; {POLICY}",
        "Batch job submission failed: Invalid account or account/partition combination specified",
        "Batch job submission failed: Requested node configuration is not available",
        "Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
        "Batch job submission failed: Access/permission denied", "Invalid feature specification",
        "unrecognized option '--nodess'",
        "Batch job submission failed: Node count specification invalid",
        "Batch job submission failed: Requested reservation is invalid",
        "Batch job submission failed: Invalid partition name specified",
    ],
    Failure.UNKNOWN: ["please name a project; Batch job submission failed: Unspecified error"],
    Failure.UNCLEAR: ["sbatch: no message (exit -9)", "slurmstepd is out of cheese"],
}  # fmt: skip


@pytest.mark.parametrize(("words", "failure"), [(w, failure) for failure in WORDS for w in WORDS[failure]])
def test_words_of_sbatch(words, failure):
    assert failure_of(words) is failure


class Submitter:
    """A launcher with Slurm's programs of a test, and the allocation that it submits."""

    def __init__(self, folder, programs, **launcher):
        self.programs = programs
        self.sweep = open_sweep(folder / "quick", **launcher)
        self.allocations = made_of(self.sweep, jobs_of(self.sweep)[:1])
        self.launcher = SlurmLauncher(self.sweep.config, self.sweep.folder)
        self.sweep.folder.path.mkdir()

    def __call__(self, sbatch, bad_hosts=(), **says):
        self.programs.says |= {"sbatch": sbatch, **says}
        self.programs.write()
        return self.launcher.submit(self.allocations, bad_hosts, pytest.fail)

    def refusal(self, *words, **says):
        text = "".join(f"sbatch: error: {line}\n" for line in words)
        with pytest.raises(NotTakenError) as raised:
            self((text, 1), **says)
        assert words[-1] in raised.value.complaint
        return raised.value


@pytest.fixture
def submit(tmp_path, programs):
    return Submitter(tmp_path, programs)


def test_a_partition_that_takes_no_jobs_is_named_with_its_state(submit, programs):
    partitions = programs.says["partitions"].replace("State=UP", "State=DRAIN", 1)
    refusal = submit.refusal(PARTITION, partitions=partitions)
    assert refusal.waits_for == "partition hopper is DRAIN"
    assert (refusal.may_exist, refusal.is_known, refusal.fewer_may_fit) == (False, True, False)
    assert not list(submit.sweep.folder.scripts.iterdir()), "no script of a job that does not exist is kept"


def test_a_limit_of_the_account_passes_when_other_jobs_end(submit):
    refusal = submit.refusal("AssocGrpSubmitJobsLimit", POLICY)
    assert refusal.waits_for == "the account, QOS or user has as many queued and running jobs as allowed"
    assert "a job of 1 node: AssocGrpSubmitJobsLimit; Batch job" in refusal.complaint
    assert refusal.fewer_may_fit
    assert submit.refusal(POLICY).waits_for == "a limit of the account, QOS or user allows no more jobs now"


CONFIG = "AccountingStorageEnforce = associations,limits\nClusterName = alps\nMaxArraySize = 101\n"


@pytest.mark.parametrize(
    ("assoc", "limit"),
    [("research||||00:05:00||||\n", "limit a job to 5 minutes, it asks for "),
        ("research|||||node=0|||\n", "limit a job to 0 nodes"),
     ("research||||||gres/gpu=0||\n", None)],
)  # fmt: skip
def test_a_size_that_known_limits_forbid_is_refused_at_once(submit, assoc, limit):
    """Accounting did not say which limit it is, as before Slurm 21.08."""
    text = f"sbatch: error: {POLICY}\n"
    if limit is None:  # a limit of GPUs that leaves one node
        assert submit.refusal(POLICY, config=CONFIG, assoc=assoc)
        return
    with refused(f"a job of 1 node: {POLICY}; partition, QOS and account {limit}"):
        submit((text, 1), config=CONFIG, assoc=assoc)


@pytest.mark.parametrize(
    ("bad_hosts", "remedy"),
    [
        ([], "fix launcher.*"),
        (["gpu01", "gpu02"], "to use excluded nodes again, set retry.forgive=[gpu01,gpu02], or fix"),
    ],
)
def test_what_sbatch_refuses_for_ever_is_a_wrong_setting_or_too_many_excluded_nodes(
    submit, bad_hosts, remedy
):
    text = "sbatch: error: Batch job submission failed: Requested node configuration is not available\n"
    with refused(f"Requested node configuration is not available; {remedy}"):
        submit((text, 1), bad_hosts)


def test_a_limit_of_one_job_is_refused_with_what_to_change(submit):
    text = f"sbatch: error: QOSMaxNodePerJobLimit\nsbatch: error: {POLICY}\n"
    with refused("lower launcher.max_nodes= or set launcher.qos="):
        submit((text, 1))


BANNER = "Welcome! Your last job 1 was not found: invalid account\n"


@pytest.mark.parametrize(
    "answer",
    ["Submitted batch job 99\n", f"{BANNER}Submitted batch job 99 on cluster alps\nlogged job 99\n",
        f"{BANNER}99;alps\n"],
)  # fmt: skip
def test_a_job_number_is_read_from_no_banner(submit, answer):
    (job,) = submit(answer).values()
    assert job["job_id"] == "99_0"


@pytest.mark.parametrize("answer", [BANNER, "", "1\nSubmitted batch job 99\n"])
def test_a_job_without_a_number_may_exist(submit, answer):
    """Where the output names no job, or two, squeue has to tell."""
    with pytest.raises(NotTakenError, match="does not name exactly one job") as raised:
        submit(answer)
    assert raised.value.may_exist
    assert list(submit.sweep.folder.scripts.iterdir())


def test_what_sbatch_said_before_it_was_killed_is_quoted(submit, monkeypatch, programs):
    """sbatch itself waits for up to two minutes if Slurm takes no jobs; the last try may have been accepted."""
    monkeypatch.setattr("ultrabench.launchers.slurm.launcher.TIMEOUT_S", 0.5)
    submit.programs.write()
    script = (
        "#!/bin/sh\necho 'sbatch: error: Slurm temporarily unable to accept job, "
        "sleeping and retrying' >&2\nexec /bin/sleep 9\n"
    )
    (programs.folder / "sbatch").write_text(script)
    with pytest.raises(NotTakenError) as raised:
        submit.launcher.submit(submit.allocations, (), pytest.fail)
    assert "no answer within 0.5 s; Slurm temporarily unable to accept job" in raised.value.complaint
    assert raised.value.may_exist


def test_an_sbatch_that_cannot_be_started_makes_no_job(submit):
    with pytest.raises(NotTakenError, match="sbatch: No such file or directory") as raised:
        submit(None)
    assert (raised.value.may_exist, raised.value.is_known) == (False, False)


def test_a_job_without_an_answer_is_found_by_its_name_or_given_up(slurm):
    """Whether an answer that was lost made a job, only squeue knows."""
    slurm.held[A].job = None
    slurm.launcher._unanswered.add(A)
    slurm.lives()
    slurm.lives(("60_0", "PENDING"), after=1000)
    assert slurm.observe().jobs == {A: {"job_id": "60_0", "name": played_slurm.JOB_NAME}}
    assert not slurm.launcher._unanswered
    slurm.launcher._unanswered.add(A)
    slurm.listed = rows()
    slurm.observe()
    assert slurm.ends(after=GRACE_S)[1] == f"Slurm does not know a job of {A}"
