"""Runs one Slurm program, with a time-out."""

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence

TIMEOUT_S = 20.0
_KEPT = {"SLURM_CONF", "SLURM_JWT"}
_DEFAULTS = re.compile(r"(SLURM|SBATCH|SALLOC|SRUN|SQUEUE|SACCT|SCANCEL|SINFO|SCONTROL|SACCTMGR)_")


class CommandError(Exception):
    """A Slurm program failed, timed out or printed an invalid answer; it never leaves `launchers`."""

    def __init__(self, message: str, complaints: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.complaints = complaints
        """The lines that the program wrote to stderr, without empty ones."""


def ask(*words: str, timeout_s: float = TIMEOUT_S, environ: Mapping[str, str] | None = None) -> str:
    """The output of a Slurm program.

    Args:
        environ: all environment variables of the program; by default ours without those that change the
            output of Slurm's programs or the cluster they ask.

    Raises:
        CommandError: the program cannot be started, fails, or was killed after `timeout_s`.
    """
    if environ is None:
        environ = {k: v for k, v in os.environ.items() if k in _KEPT or not _DEFAULTS.match(k)}
        environ |= {"LC_ALL": "C", "SLURM_BITSTR_LEN": "0"}  # 0: squeue prints long ranges in full
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            words, env=environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe,
            encoding="utf-8", errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise CommandError(f"{words[0]}: {error.strerror}") from error
    with process:
        try:
            answer, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"{words[0]}: no answer within {timeout_s:g} s") from error
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        complaints = [line.strip() for line in errors.splitlines() if line.strip()]
        last = complaints[-1][:200] if complaints else "no message"
        raise CommandError(f"{words[0]}: {last} (exit {process.returncode})", complaints)
    return answer
