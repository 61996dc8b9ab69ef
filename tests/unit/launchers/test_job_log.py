"""Which line of a job's log says why nothing ran."""

import pytest

from ultrabench.launchers.job_log import telling_line
from ultrabench.launchers.local import vanished_end

SRUN_END = (
    "srun: error: gpu02: task 1: Exited with exit code 1\n"
    "srun: Terminating StepId=77.0\n"
    "slurmstepd: error: *** STEP 77.0 ON gpu01 CANCELLED AT 2025-11-24T10:00:00 ***\n"
    "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
)
TRACEBACK = 'Traceback (most recent call last):\n  File "/src/a.py", line 3, in <module>\n    import torch\n'


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("loading modules\n/var/spool/job77/slurm_script: line 5: module: command not found\n" + SRUN_END,
         "/var/spool/job77/slurm_script: line 5: module: command not found"),
        (TRACEBACK + "ModuleNotFoundError: No module named 'torch'\n" + SRUN_END,
            "ModuleNotFoundError: No module named 'torch'"),
        ("slurmstepd: error: execve(): python: No such file or directory\n" + SRUN_END,
         "slurmstepd: error: execve(): python: No such file or directory"),
        ("pyxis: importing docker image\nslurmstepd: error: pyxis: failed to import docker image\n" + SRUN_END,
         "slurmstepd: error: pyxis: failed to import docker image"),
        ("warning: no error so far\nultrabench: cannot use /x: Permission denied; "
        "was the results folder moved?\n" + SRUN_END,
         "ultrabench: cannot use /x: Permission denied; was the results folder moved?"),
        # Without a line that looks like an error: the last one that is not srun's.
        ("starting\nbye\n" + SRUN_END, "bye"),
        (SRUN_END, "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."),
        ("0: starting\n1: bash: line 1: python3.12: command not found\n" + SRUN_END,
            "bash: line 1: python3.12: command not found"),
        (TRACEBACK, "import torch"),
        ("", ""),
    ],
)  # fmt: skip
def test_the_first_line_that_tells_why_is_quoted(tmp_path, log, line):
    (tmp_path / "job.log").write_text(log)
    assert telling_line(tmp_path) == (tmp_path / "job.log", line)


def test_of_the_logs_of_several_nodes_the_first_with_an_error_is_quoted(tmp_path):
    (tmp_path / "submitit").mkdir()
    for name, text in (
        ("0_0.err", "starting\n"),
        ("0_1.err", "OSError: no space\n"),
        ("0_2.err", "KeyError: 'x'\n"),
    ):
        (tmp_path / "submitit" / name).write_text(text)
    assert telling_line(tmp_path) == (tmp_path / "submitit/0_1.err", "OSError: no space")
    (tmp_path / "submitit/0_1.err").write_text("")
    (tmp_path / "submitit/0_2.err").write_text("\n")
    assert telling_line(tmp_path) == (tmp_path / "submitit/0_0.err", "starting")


def test_a_folder_without_logs_quotes_nothing(tmp_path):
    assert telling_line(tmp_path) == (tmp_path, "")


def test_agents_that_disappear_with_kills_for_lack_of_memory_are_no_loss_of_the_machine():
    lost, killed = (vanished_end("n1-a.0", 3.0, has_kills=has_kills) for has_kills in (False, True))
    assert (lost.status, lost.cause, lost.certain, lost.held_s) == ("lost", None, True, 3.0)
    assert (killed.status, killed.cause) == ("oom", "host_oom")
    assert "Linux killed processes because the host ran out of memory" in killed.reason
