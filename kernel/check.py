"""Checks that a layout trains correctly: it compares forked ranks with a single process, in fp64.

`python -P -m ultrabench.kernel.check` reads one CheckSpec per line from stdin and answers each with a line
on stdout, a CheckResult. It imports torch but never computes, because children that are forked after a
matrix product in the parent hang.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TextIO

from ultrabench.errors import ConfigError
from ultrabench.kernel import check_rank
from ultrabench.kernel.check_spec import CheckResult, CheckSpec
from ultrabench.kernel.children import run_forked
from ultrabench.processes import die_with_parent
from ultrabench.record import from_dict, to_dict

TIMEOUT_S = 120.0


def run_check(spec: CheckSpec, timeout_s: float = TIMEOUT_S) -> CheckResult:
    """Runs one check with forked ranks; the caller may have imported torch, but must not have used it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ultrabench-check-") as name:
        folder = Path(name)
        bodies = {
            f"rank {rank}": partial(check_rank.run_rank, spec, rank, folder)
            for rank in range(spec.layout.world_size)
        }
        bodies["reference"] = partial(check_rank.run_reference, spec, folder)
        error = run_forked(bodies, folder, timeout_s)
        if error is None:
            last = {"comparison": partial(check_rank.compare, spec, folder)}
            error = run_forked(last, folder, timeout_s)
        seconds = time.monotonic() - start
        if error is not None:
            return CheckResult(passed=False, error=error, seconds=seconds)
        found = json.loads((folder / "differences.json").read_text())
        return from_dict(CheckResult, {**found, "seconds": seconds})


def serve(lines: Iterable[str], out: TextIO) -> None:
    """Answers each CheckSpec line with a CheckResult line, until `lines` ends."""
    for line in lines:
        try:
            result = run_check(from_dict(CheckSpec, json.loads(line)))
        except (ConfigError, ValueError) as error:
            result = CheckResult(passed=False, error=str(error))
        print(json.dumps(to_dict(result)), file=out, flush=True)


if __name__ == "__main__":
    die_with_parent(os.getppid())  # the process that asks may be killed
    serve(sys.stdin, sys.stdout)
