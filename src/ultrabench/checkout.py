"""Finds out which version of ultrabench's sources runs: the commit of its clone, and the changes since."""

import os
import subprocess
from pathlib import Path

import ultrabench

GIT_TIMEOUT_S = 10.0
"""Seconds for an answer of git."""
_HOOK_VARIABLES = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX"}
"""Variables that git sets in a hook; they would make git look at the repository of the hook."""


def commit_sha() -> str | None:
    """The commit of the clone that is imported; None for an installed package, even inside another clone."""
    sha = _git_output("rev-parse", "HEAD") if _is_in_clone() else None
    return None if sha is None else sha.decode().strip()


def uncommitted_patch() -> bytes:
    """The changes to tracked files of the clone since its commit, as a patch; empty when there are none."""
    diff_arguments = ("diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")
    return (_git_output(*diff_arguments) if _is_in_clone() else None) or b""


def _is_in_clone() -> bool:
    """Whether git tracks our own sources; a package may also be installed inside somebody else's clone."""
    return _git_output("ls-files", "--error-unmatch", "__init__.py") is not None


def _git_output(*arguments: str) -> bytes | None:
    """The standard output of git in the folder of our sources; None when git fails or does not answer."""
    command = ["git", "-C", str(Path(ultrabench.__file__).resolve().parent), *arguments]
    env = {name: value for name, value in os.environ.items() if name not in _HOOK_VARIABLES}
    try:
        return subprocess.run(command, env=env, capture_output=True, timeout=GIT_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
