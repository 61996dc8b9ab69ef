"""What jobs inherit from the launcher's environment: an allow-list, never everything."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

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
