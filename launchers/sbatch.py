"""Asks sbatch, from a process of its own that can be killed and inherits only what a job may have."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable

from ultrabench.launchers.inherited import inherited
from ultrabench.launchers.slurm_script import ArrayScript
from ultrabench.record import to_dict

TIMEOUT_S = 60.0


class SubmitError(Exception):
    """sbatch gave no number; says why. The job may have been submitted all the same."""


def submit(script: ArrayScript, environment: Iterable[str]) -> str:
    """The number of the array that sbatch made of `script`.

    Args:
        environment: names of variables that the job inherits beyond the allow-list.

    Raises:
        SubmitError: sbatch refused, failed, or did not answer in time.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ultrabench.launchers.submit_slurm"],
            input=json.dumps(to_dict(script)),
            env={**inherited(os.environ, environment), "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise SubmitError(f"no answer within {TIMEOUT_S:g} s") from error
    last = (done.stdout.split() or [""])[-1]
    if done.returncode == 0 and last.isdigit():
        return last
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    told = [line.partition("error: ")[2] for line in lines if "error: " in line]
    told = told or [line for line in lines if line.startswith("sbatch:")] or lines[-1:]
    raise SubmitError("; ".join(dict.fromkeys(told)) or "it gave no number")
