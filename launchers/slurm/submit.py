"""Submits a job array; the job inherits only the environment variables that a job may have."""

import os
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from ultrabench.launchers.slurm.command import CommandError, ask
from ultrabench.launchers.slurm.script import JobScript
from ultrabench.store.folder import write_whole

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


def submit(script: JobScript, environment: Iterable[str]) -> str:
    """The number of the array that sbatch made of `script`.

    Args:
        environment: names of variables that the job inherits beyond the allow-list.

    Raises:
        CommandError: sbatch refused it, failed, or gave no number in time, for the reason given; the job may have
            been submitted all the same.
    """
    script.path.parent.mkdir(exist_ok=True)
    write_whole(script.path, script.text)
    try:
        answer = ask(["sbatch", str(script.path)], TIMEOUT_S, inherited(os.environ, environment))
    except CommandError as error:
        lines = [line.strip() for line in error.complaints.splitlines() if line.strip()]
        told = [line.partition("error: ")[2] for line in lines if "error: " in line]
        told = told or [line for line in lines if line.startswith("sbatch:")] or lines[-1:]
        raise CommandError("; ".join(dict.fromkeys(told)) or str(error)) from error
    number = re.search(r"\bjob (\d+)", answer)
    if number is None:
        raise CommandError(f"it gave no number: {answer.strip()[:200]!r}")
    return number[1]
