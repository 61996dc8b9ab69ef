"""Plants faults into the kernel, one after the other, and shows which check catches each.

`python -m tests.mutations [--only NAME] [--json] [-o docs/mutations.md]` ends with 1 if a fault is not caught, or if
a check fails without one. Faults are those of tests/parity/planted*.py; they are planted in forked copies of the
server of the parity tests.
"""

import argparse
import datetime
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import Any

import torch

from tests.parity import test_counts, test_dryrun
from tests.parity.conftest import ROOT, Server
from tests.parity.planted import FAULTS
from tests.parity.test_layouts import spec_of
from ultrabench.kernel.requests import TOLERANCE, CheckResult, CheckSpec

MARGIN = 2.0
"""A planted fault must make a difference so many times as large as what is allowed."""
KINDS = {"grad": "gradients", "param": "parameters", "loss": "losses"}
PARITY, IGNORED, DEATH, GROUPS = "parity check", "option_ignored", "end of a rank", "group sequence"
MODELS, REPLICAS, COUNTS, COST, UNIT = (
    "transformers", "comparison of replicas", "counted collectives", "dry run", "unit test",
)  # fmt: skip


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


def checked(server: Server, where: str, fault: str | None) -> Found:
    """The answer of the parity check, also with the errors that it reports."""
    precision = next((word for word in where.split() if word in ("bf16", "fp32")), "fp64")
    result = server.check(replace(spec_of(where), precision=precision), fault)
    if result.error is None:
        share, shown = _worst(result)
        return Found(
            None if result.passed else PARITY if share > MARGIN else "a difference near rounding", shown
        )
    told = result.error.rpartition("Error: ")[2]
    signs = {"IgnoredOptionError": IGNORED, "different groups": GROUPS, "rank 1 has had enough": DEATH}
    return Found(next((by for sign, by in signs.items() if sign in result.error), "an error"), told)


def _worst(result: CheckResult) -> tuple[float, str]:
    """The difference that is largest in relation to what is allowed, and this relation."""
    if result.missing_gradients:
        return math.inf, f"{len(result.missing_gradients)} gradients are missing"
    shares = list[tuple[float, str]]()
    for kind, name in KINDS.items():
        diff, allowed = (getattr(result, f"{kind}_{which}") for which in ("diff", "allowed"))
        if diff is None:
            return math.inf, f"{name} are not finite"
        shares.append((diff / allowed, f"{name} {diff:.0e}, allowed {allowed:.0e}"))
    return max(shares)


def compared(server: Server, _: str, fault: str | None) -> Found:
    """The comparison with the models of transformers."""
    answer = server.ask("call", "tests.unit.kernel.test_independent_model.worst_difference", fault)
    if isinstance(answer, str):
        return Found("an error", answer)
    diff, name = answer
    shown = (
        "not the same parameters have gradients"
        if diff == math.inf
        else f"{diff:.0e}, allowed {TOLERANCE:.0e}"
    )
    return Found(MODELS if diff >= TOLERANCE else None, f"{name}: {shown}")


def replicas(server: Server, where: str, fault: str | None) -> Found:
    """The comparison of the ranks that hold copies of the same parameters, after a step."""
    answer = server.ask("replicas", spec_of(where), fault)
    if not isinstance(answer, str):
        return Found(None, "no copy differs")
    _, sign, text = answer.partition("ReplicasDifferError: ")
    return Found(REPLICAS if sign else "an error", text or answer)


@dataclass(frozen=True)
class Faulty:
    """The server for a test: its ranks have the fault. A call counts the collectives of a layout."""

    server: Server
    fault: str | None

    def ask(self, what: str, spec: CheckSpec) -> Any:
        return self.server.ask(what, spec, self.fault)

    def __call__(self, case: str) -> Any:
        return self.ask("counts", spec_of(case))


def tried(by: str, test: Callable[..., object], *arguments: object) -> Found:
    """What a test says that is called here: the line that does not hold."""
    try:
        test(*arguments)
    except AssertionError as error:
        return Found(by, f"`{traceback.extract_tb(error.__traceback__)[-1].line}`")
    return Found(None, "equal")


def counted(server: Server, where: str, fault: str | None) -> Found:
    """A test of test_counts.py, such as `test_zero 3`."""
    name, *words = where.split()
    return tried(COUNTS, getattr(test_counts, name), Faulty(server, fault), *map(int, words))


def cost(server: Server, where: str, fault: str | None) -> Found:
    """A test of test_dryrun.py, or its comparison of a dry run with the real ranks of a layout."""
    name, *words = where.split()
    if test := vars(test_dryrun).get(name):
        return tried(COST, test, Faulty(server, fault), *map(int, words))
    return tried(COST, test_dryrun.test_a_dry_run_equals_a_real_step, Faulty(server, fault), where)


def called(server: Server, where: str, fault: str | None) -> Found:
    """A unit test without arguments."""
    answer = server.ask("call", f"tests.unit.kernel.{where}", fault)
    if answer is None:
        return Found(None, "passes")
    _, sign, text = answer.partition("AssertionError")
    return Found(UNIT if sign else "an error", (text.lstrip(": ") or "another value") if sign else answer)


CHECKS = {
    **dict.fromkeys((PARITY, IGNORED, DEATH, GROUPS), checked), MODELS: compared, REPLICAS: replicas,
    COUNTS: counted, COST: cost, UNIT: called,
}  # fmt: skip
INITIAL = "test_model.test_initial_values_depend_on_seed_and_name"
TOKENS = "test_data.test_tokens_depend_on_seed_step_and_index_only"
TRANSFORMERS = "one process"
IN_TESTS = tuple(
    starmap(
        Mutation,
        (
            ("drop_tp_all_reduce", PARITY, "tp=2 gas=2 fp32"),
            ("drop_tp_all_reduce", PARITY, "dp=2 tp=2 zero_stage=1 bf16"),
            ("unsummed_rows", PARITY, "tp=2 bf16"),
            ("reversed_tokens", PARITY, "tp=2 bf16"),
            ("wrong_divisor", PARITY, "dp=2 zero_stage=1 gas=2"),
            ("wrong_divisor", PARITY, "dp=2 pp=2 zero_stage=3 gas=2 bf16"),
            ("lost_gradients", PARITY, "dp=2 zero_stage=2 gas=2"),
            ("drop_microbatch", PARITY, "dp=2 gas=4"),
            ("drop_microbatch", PARITY, "pp=2 gas=4 bf16"),
            ("local_norm", PARITY, "dp=2 zero_stage=1"),
            ("skipped_update", REPLICAS, "dp=2"),
            ("ring_sees_the_future", PARITY, "cp=2 bf16"),
            ("lost_key_gradients", PARITY, "cp=2 bf16"),
            ("untied_sum", PARITY, "pp=2 gas=2 tied fp32"),
            ("untied_sum", PARITY, "pp=2 gas=2 zbv tied bf16"),
            ("stale_recompute", PARITY, "full bf16"),
            ("group_of_two", GROUPS, "dp=3"),
            ("no_recompute", IGNORED, "full"),
            ("other_schedule", IGNORED, "pp=2 gas=2"),
            ("gathered_parameters", IGNORED, "zero_stage=3"),
            ("full_for_selective", IGNORED, "selective"),
            ("zero2_as_1", IGNORED, "dp=2 zero_stage=2 gas=2"),
            ("no_bf16", IGNORED, "gas=1 bf16"),
            ("no_compile", IGNORED, "compile"),
            ("any_attention", IGNORED, "gas=1"),
            ("half_the_micro_batches", IGNORED, "gas=4"),
        ),
    )
)
"""What tests/parity/test_faults.py plants."""
OF_THE_MODEL = {
    "no_rope": "llama", "neighbours_rotate": "llama", "no_rope_scaling": "llama-scaled", "fixed_rope_theta": "qwen3",
    "not_causal": "llama", "wrong_scale": "llama", "reordered_groups": "llama", "gelu": "llama",
    "fixed_eps": "llama-scaled", "no_qk_norm": "qwen3", "gate_for_up": "llama", "not_tied": "llama-tied",
}  # fmt: skip
"""Fault -> a model of tests/unit/kernel/test_independent_model.py that shows it; that test plants them, too."""
MORE = starmap(
    Mutation,
    (
        ("forgotten_head_norms", PARITY, "tp=2 qwen"),
        ("scatter_over_dp", PARITY, "dp=2 tp=2 zero_stage=1"),
        ("shifted_vocabulary", PARITY, "tp=2"),
        ("mean_over_wrong_tokens", PARITY, "tp=2"),
        ("norms_one_by_one", COUNTS, "test_tensor_parallel 1"),
        ("half_the_replicas", REPLICAS, "dp=4"),
        ("same_samples", PARITY, "dp=2"),
        ("skipped_update", PARITY, "dp=2 zero_stage=1"),
        ("needless_gathers", COUNTS, "test_zero 3"),
        ("no_prefetch", COUNTS, "test_order"),
        ("ring_without_last_turn", PARITY, "cp=2"),
        ("positions_from_zero", PARITY, "cp=2"),
        ("ring_goes_on", COUNTS, "test_ring"),
        ("untied_sum", REPLICAS, "pp=2 gas=2 tied"),
        ("wrong_targets", PARITY, "pp=2 gas=2"),
        ("weights_twice", PARITY, "pp=2 gas=2 zbv"),
        ("shards_everywhere", IGNORED, "dp=4 zero_stage=1 dp_shard=2 gas=2"),
        ("nothing_kept", COUNTS, "test_recompute"),
        ("every_layer", COST, "test_recomputation_keeps_what_docs_say 1"),
        ("plain_attention", IGNORED, "gas=1"),
        ("keys_like_queries", UNIT, INITIAL),
        ("all_layers_alike", UNIT, INITIAL),
        ("wide_values", UNIT, INITIAL),
        ("same_data", UNIT, TOKENS),
        ("same_sample", UNIT, TOKENS),
        ("copied_targets", UNIT, TOKENS),
        ("gas_of_the_last", COST, "dp=2 zero_stage=2 gas=6"),
        ("no_states", COST, "dp=2 gas=3"),
        ("unseen_gathers", COUNTS, "test_zero 1"),
        ("dead_rank", DEATH, "dp=2"),
    ),
)
MUTATIONS = sorted(
    (*IN_TESTS, *(Mutation(fault, MODELS, TRANSFORMERS) for fault in OF_THE_MODEL), *MORE),
    key=lambda mutation: [*FAULTS].index(mutation.fault),
)


def find(server: Server, mutation: Mutation) -> Found:
    """What the check of `mutation` says when the fault is planted."""
    return CHECKS[mutation.by](server, mutation.where, mutation.fault)


Rows = Sequence[tuple[Mutation, Found]]
"""Each fault, and what its check says when it is planted."""
Passing = dict[tuple[str, str], Found]
"""Check, and layout, model or test -> what the check says without a fault."""


def honest(server: Server, mutations: Sequence[Mutation]) -> Passing:
    """What each check says without a fault, once for each layout, model or test."""
    pairs = dict.fromkeys((PARITY if CHECKS[m.by] is checked else m.by, m.where) for m in mutations)
    return {(by, where): say(f"{by}, {where}", CHECKS[by](server, where, None)) for by, where in pairs}


def say(name: str, found: Found) -> Found:
    """Prints a line of progress."""
    print(f"{name}: {found.by or 'passes'} ({found.shown})", file=sys.stderr, flush=True)
    return found


PAGE = """# Planted faults

A check is worth as much as the faults that it sees. So faults are planted into the kernel, one at a time, by
[`tests/parity/planted.py`](../tests/parity/planted.py), and each must be caught by the check that is meant to see
it ([what the checks are](kernel.md#how-it-is-known-to-be-right)). Where no fault is planted, the same checks must
pass. `make mutations` plants all of them and writes this page; `make test` plants some.

| | |
|---|---|
| command | `{command}` |
| commit | {commit} |
| torch | {torch} |
| hardware | {cores} CPU cores |
| date | {date} |
| duration | {minutes:.0f} minutes |
| faults | {faults}, in {rows} rows |
| caught | {caught} of {rows} |
| checks that pass without a fault | {passing} of {checks} |

The parity check compares a layout with one process that has the same decoder, data and initial values, and passes
with most faults of these, because both have them. `transformers` is the comparison of the decoder on one process
with the six models of [`test_independent_model.py`](../tests/unit/kernel/test_independent_model.py); unit tests see faults
of data and initial values. fp32 and bf16 are the precision of a layout, else it is fp64. What is shown is the
largest difference in relation to what is allowed, what was asked for and ran, or the assertion that fails.

No check sees another value of what defines the training: the betas and the weight decay of AdamW and the largest
gradient norm are constants of [`step.py`](../kernel/step.py), and both sides take them from there. And no check on
CPUs sees faults of code that only GPUs run, such as the ring over the kernels of cuDNN or the groups of NCCL:
[the first hour with GPUs](first-gpu-hour.md) is for these.

| fault | planted in | layout, model or test | caught by | shown |
|---|---|---|---|---|
{table}

Without a fault:

| check | layout, model or test | found |
|---|---|---|
{honest}
"""


def report(rows: Rows, passing: Passing, command: str, seconds: float) -> str:
    """The page of all faults."""
    commit = subprocess.run(
        ("git", "rev-parse", "--short=12", "HEAD"), capture_output=True, text=True, cwd=ROOT
    )
    table = []
    for mutation, found in rows:
        fault = FAULTS[mutation.fault]
        by = mutation.by if found.by == mutation.by else f"**not by {mutation.by}: {found.by or 'passes'}**"
        table.append(
            (
                f"`{mutation.fault}`: {fault.text.rstrip('.')}",
                f"`{fault.place}`",
                mutation.where,
                by,
                found.shown,
            )
        )
    honest = [(by, where, found.shown if found.by is None else f"**{found.by}**: {found.shown}")
              for (by, where), found in passing.items()]  # fmt: skip
    return PAGE.format(
        command=command, commit=commit.stdout.strip(), torch=torch.__version__, cores=os.cpu_count(),
        date=datetime.date.today(), minutes=seconds / 60, faults=len({m.fault for m, _ in rows}), rows=len(rows),
        caught=sum(found.by == mutation.by for mutation, found in rows), checks=len(passing),
        passing=sum(found.by is None for found in passing.values()),
        table="\n".join(map(_row, table)), honest="\n".join(map(_row, honest)),
    )  # fmt: skip


def _row(cells: Sequence[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def main() -> int:
    """Runs the mutations; returns 0 if all are caught and all checks pass without them."""
    given = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    given.add_argument("--only", help="the name of a fault, of planted.py")
    given.add_argument("--json", action="store_true")
    given.add_argument("-o", "--output", type=Path)
    words = given.parse_args()
    mutations = [m for m in MUTATIONS if words.only in (None, m.fault)]
    if not mutations:
        given.error(f"--only {words.only}: must be one of {', '.join(sorted({m.fault for m in MUTATIONS}))}")
    server, start = Server(), time.monotonic()
    passing = honest(server, mutations)
    rows = [(m, say(f"{m.fault}, {m.where}", find(server, m))) for m in mutations]
    server.close()
    if words.output:
        command = f"python -m tests.mutations -o {words.output}"
        words.output.write_text(report(rows, passing, command, time.monotonic() - start))
    if words.json:
        told = [{**asdict(m), "place": FAULTS[m.fault].place, "found": asdict(found)} for m, found in rows]
        without = [{"by": by, "where": where, "found": asdict(f)} for (by, where), f in passing.items()]
        print(json.dumps({"faults": told, "without": without}))
    missed = [f"{m.fault} on {m.where}" for m, found in rows if found.by != m.by]
    broken = [f"{by} on {where}" for (by, where), found in passing.items() if found.by is not None]
    print(f"{len(rows) - len(missed)} of {len(rows)} faults caught", file=sys.stderr)
    for kind, names in (("not caught", missed), ("fails without a fault", broken)):
        print(*(f"{kind}: {name}" for name in names), sep="\n", end="\n" * bool(names), file=sys.stderr)
    return int(bool(missed or broken))


if __name__ == "__main__":
    sys.exit(main())
