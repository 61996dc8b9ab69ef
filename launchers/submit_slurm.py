"""Submits one job array: `python -P -m ultrabench.launchers.submit_slurm`, its script as JSON on stdin.

A process of its own, because sbatch has no time-out in submitit, and because what it inherits is what
the job inherits. Prints the job id.
"""

import json
import sys
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError

from ultrabench.launchers.slurm_script import ArrayScript
from ultrabench.record import from_dict


def main() -> int:
    """0 and the id on stdout, or 1 and what sbatch said on stderr."""
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
