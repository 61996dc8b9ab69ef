"""Submits one job array from a process of its own: `python -P -m ultrabench.launchers.slurm.submit`.

submitit gives sbatch no time-out, so the process can be killed; and a job inherits what sbatch inherits, so
the process gets only what a job may have. It reads the script as JSON on stdin and prints the job id.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError

from ultrabench.launchers.slurm.script import ArrayScript
from ultrabench.record import from_dict, to_dict

TIMEOUT_S = 60.0
ALLOWED = (
    "HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LC_*", "TZ", "TMPDIR", "LD_LIBRARY_PATH",
    "VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "SLURM_CONF",
    "MODULEPATH", "MODULESHOME", "MODULES_*", "LOADEDMODULES*", "_LMFILES_*", "LMOD_*", "__LMOD_*",
    "_ModuleTable*", "BASH_ENV", "BASH_FUNC_module*", "BASH_FUNC_ml*", "BASH_FUNC__module_raw*",
    "NCCL_*", "FI_*", "UCX_*", "GLOO_*", "OFI_*",
)  # fmt: skip
"""Names, with * for any ending: what programs need to be found, `module` (in bash a function that comes
through the environment), and what steers collectives.

Everything else stays: an access token in the environment of a login shell has no business in a job.
SLURM_* and SBATCH_* of an enclosing job would be taken for options of ours.
"""


def inherited(environ: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """The variables of `environ` that a job may have."""
    patterns = (*ALLOWED, *more)
    return {k: v for k, v in environ.items() if any(fnmatchcase(k, pattern) for pattern in patterns)}


class SubmitError(Exception):
    """sbatch gave no job number, for the reason given; the job may have been submitted all the same."""


def submit(script: ArrayScript, environment: Iterable[str]) -> str:
    """The number of the array that sbatch made of `script`.

    Args:
        environment: names of variables that the job inherits beyond the allow-list.

    Raises:
        SubmitError: sbatch refused, failed, or did not answer in time.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "ultrabench.launchers.slurm.submit"],
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


def main() -> int:
    """Exit code 0 with the job id on stdout, or 1 with what sbatch said on stderr."""
    script = from_dict(ArrayScript, json.load(sys.stdin))
    Path(script.folder).mkdir(exist_ok=True)
    try:
        print(script.executor().send(script.command))
    except (FailedJobError, FailedSubmissionError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
