"""Plants faults into the kernel, one after the other, and shows which check catches each.

`python -m tests.mutations [--only NAME]` writes the tables of tests/mutations.md, or prints those of one fault; it ends
with 1 if a fault is not caught, or if a check fails without one. The faults are those of tests/parity/planted*.py,
which name the checks that must see them.
"""

import argparse
import datetime
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch

from tests.parity import test_counts, test_dryrun
from tests.parity.conftest import ROOT, Server
from tests.parity.planted import FAULTS
from tests.parity.server import compared_replicas
from tests.parity.test_layouts import spec_of
from ultrabench.kernel.check.parity import run_check
from ultrabench.kernel.requests import FP64_TOLERANCE, CheckResult

PAGE = ROOT / "tests" / "mutations.md"
RULE = "|---|---|---|---|---|---|\n"
"""The line of the page after which its rows begin."""
MARGIN = 2.0
"""A planted fault must make a difference so many times as large as what is allowed."""


@dataclass(frozen=True)
class Found:
    """What a check says: who found a fault, None if nobody did, and the evidence."""

    by: str | None
    shown: str


@dataclass(frozen=True)
class Mutation:
    """A fault, the check that must catch it, and the layout, model or test with which it does."""

    fault: str
    by: str
    where: str

    def row(self, finding: Found, honest: Found) -> str:
        """The row of the page."""
        fault, by = FAULTS[self.fault], finding.by if finding.by == self.by else f"**{finding.by}**"
        without = honest.shown if honest.by is None else f"**{honest.by}**: {honest.shown}"
        cells = (f"`{self.fault}`: {fault.text}", f"`{fault.place}`", self.where, by, finding.shown, without)
        return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


def checked(server: Server, where: str) -> Found:
    """The parity check, also with the errors that it reports."""
    result = server.ask(run_check, spec_of(where))
    if result.error is None:
        share, difference_text = _worst(result)
        near = "parity" if share > MARGIN else "a difference near rounding"
        return Found(None if result.passed else near, difference_text)
    error_text = result.error.rpartition("Error: ")[2]
    signs = {"IgnoredOptionError": "ignored", "different groups": "groups", "rank 1 has had enough": "death"}
    return Found(next((by for sign, by in signs.items() if sign in result.error), "an error"), error_text)


def _worst(result: CheckResult) -> tuple[float, str]:
    """The difference that is largest in relation to what is allowed, and this relation."""
    if result.missing_gradients:
        return math.inf, f"{len(result.missing_gradients)} gradients are missing"
    shares = list[tuple[float, str]]()
    for kind, name in (("grad", "gradients"), ("param", "parameters"), ("loss", "losses")):
        diff, allowed = (getattr(result, f"{kind}_{part}") for part in ("diff", "allowed"))
        if diff is None:
            return math.inf, f"{name} are not finite"
        shares.append((diff / allowed, f"{name} {diff:.0e}, allowed {allowed:.0e}"))
    return max(shares)


def compared(server: Server, where: str) -> Found:
    """The comparison with a model of transformers."""
    test = import_module("tests.unit.kernel.test_independent_model")
    answer = server.ask(test.worst_difference, where)
    if isinstance(answer, str):
        return Found("an error", answer)
    difference = "not the same parameters have gradients" if answer == math.inf else f"{answer:.0e}"
    return Found(
        "transformers" if answer >= FP64_TOLERANCE else None, f"{difference}, allowed {FP64_TOLERANCE:.0e}"
    )


def replicas(server: Server, where: str) -> Found:
    """The comparison of the ranks that hold copies of the same parameters, after a step."""
    answer = server.ask(compared_replicas, spec_of(where))
    if not isinstance(answer, str):
        return Found(None, "no copy differs")
    _, sign, text = answer.partition("ReplicasDifferError: ")
    return Found("replicas" if sign else "an error", text or answer)


def tried(server: Server, where: str) -> Found:
    """A test of test_counts.py or test_dryrun.py, which is called here: the line that does not hold."""
    name, _, arg = where.partition(" ")
    args = [int(arg) if arg.isdecimal() else arg] if arg else []
    try:
        (vars(test_counts) | vars(test_dryrun))[name](server, *args)
    except AssertionError as error:
        by = "counts" if name in vars(test_counts) else "cost"
        return Found(by, f"`{traceback.extract_tb(error.__traceback__)[-1].line}`")
    return Found(None, "equal")


def called(server: Server, where: str) -> Found:
    """A unit test without arguments, of the kernel or of the package that is named before its module."""
    module, _, name = where.rpartition(".")
    path = module if "." in module else f"kernel.{module}"
    answer = server.ask(getattr(import_module(f"tests.unit.{path}"), name))
    if answer is None:
        return Found(None, "passes")
    _, sign, text = answer.partition("AssertionError")
    return Found("unit" if sign else "an error", (text.lstrip(": ") or "another value") if sign else answer)


CHECKS = {
    "parity": checked, "ignored": checked, "death": checked, "groups": checked, "transformers": compared,
    "replicas": replicas, "counts": tried, "cost": tried, "unit": called,
}  # fmt: skip
"""Check of a fault -> how it is asked."""
MUTATIONS = [
    Mutation(name, by, where)
    for name, fault in FAULTS.items()
    for by, places in fault.cases_by_check.items()
    for where in places
]


def find(server: Server, mutation: Mutation) -> Found:
    """What the check of `mutation` says when its fault is planted."""
    server.fault = mutation.fault
    try:
        return CHECKS[mutation.by](server, mutation.where)
    finally:
        server.fault = None


def found_by_all(server: Server, only: str | None) -> Iterator[tuple[Mutation, Found, Found]]:
    """Each fault, and what its check says with and without it; prints a line of progress."""

    @cache
    def honest(check: Callable[[Server, str], Found], where: str) -> Found:
        return check(server, where)

    for mutation in MUTATIONS:
        if only in (None, mutation.fault):
            finding, right = find(server, mutation), honest(CHECKS[mutation.by], mutation.where)
            print(f"{mutation}: {finding}; without it: {right}", file=sys.stderr, flush=True)
            yield mutation, finding, right


def main() -> int:
    """Runs the mutations; returns 0 if all are caught and all checks pass without them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=sorted(FAULTS), metavar="NAME", help="a fault of planted*.py")
    only, server, start = parser.parse_args().only, Server(), time.monotonic()
    rows = [*found_by_all(server, only)]
    server.close()
    table = "\n".join(mutation.row(finding, honest) for mutation, finding, honest in rows)
    caught = sum(finding.by == mutation.by for mutation, finding, _ in rows)
    passing = sum(honest.by is None for *_, honest in rows)
    commit = subprocess.check_output(("git", "rev-parse", "--short=12", "HEAD"), text=True, cwd=ROOT).strip()
    run = (
        f"{caught} of {len(rows)} rows are caught, and {passing} checks pass without a fault: commit {commit}, torch "
        f"{torch.__version__}, {os.cpu_count()} CPU cores, {datetime.date.today()}, "
        f"{(time.monotonic() - start) / 60:.0f} minutes."
    )
    head, mark, _ = PAGE.read_text().partition(RULE)
    head = "\n".join(run if " rows are caught, " in line else line for line in head.splitlines())
    if only is None:
        PAGE.write_text(f"{head}\n{mark}{table}\n")
    print(table if only else run)
    return int(caught < len(rows) or passing < len(rows))


if __name__ == "__main__":
    sys.exit(main())
