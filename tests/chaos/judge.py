"""Judges a sweep by its rows, the witness file, the number of its jobs, and the injected faults."""

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.fault import EXPLAINS, MAX_ATTEMPTS
from tests.chaos.witness import Execution

UNFINISHED = frozenset({"lost", "node_fail", "cancelled", "preempted"})
"""Ends after which a run has to be repeated."""
CUT_SHORT = frozenset({"slower_than_best", "time_limit"})
"""Reasons for which an ok run may have been ended before its program was done."""
JOBS_A_LAUNCH = 2
"""Number of useless jobs that a launch may submit, because another launcher had just submitted the same."""

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class SlurmView:
    """What Slurm knows about the jobs of a sweep, and what the sweep told Slurm and its journal about them."""

    job_ids: Mapping[str, set[str]] = field(default_factory=dict)
    """Allocation -> its jobs in the accounting of Slurm."""
    nodes: Mapping[str, set[str]] = field(default_factory=dict)
    """Allocation -> the nodes of these jobs."""
    journal: Rows = ()
    """The events of the journal that can be read."""
    excluded: frozenset[str] = frozenset()
    """The nodes that no job of the sweep was to use."""
    age_s: float = float("inf")
    """Seconds since the sweep was opened."""


def judge(
    table: Rows,
    records: Rows,
    executions: Sequence[Execution] | None,
    jobs: int,
    launches: int,
    view: SlurmView = SlurmView(),
) -> list[str]:
    """The problems of a sweep that is over; it also adds to each record the ends it explains.

    Args:
        table: rows of the sweep as `collect` writes them.
        executions: the executions that the program recorded; None if the program records none.
        jobs: the number of submitted jobs.
        launches: the number of launchers that followed the sweep.
    """
    rows, limit = [row for row in table if row["attempt"] is not None], most_jobs(table, records, launches)
    return [
        *_never_lost(table, {record.get("run") for record in records}),
        *_never_twice(rows),
        *_confirmed(rows),
        *([] if executions is None else [*_witnessed(rows, executions), *one_at_a_time(executions)]),
        *_explained(rows, records),
        *_blamed(rows, records, view),
        *_left_on_bad_nodes(rows, records),
        *_accounted(view, twice="double_submission" in {record["kind"] for record in records}),
        *([f"{jobs} jobs were submitted, more than {limit}"] if jobs > limit else []),
    ]


def most_jobs(table: Rows, records: Rows, launches: int) -> int:
    """The largest number of jobs that a sweep may use, which depends on its plan and on the faults.

    It is one for each planned run, although an allocation usually has several; one for each start after that which
    screened a run; one for each allocation that a fault hit, whose run is repeated in another job; and a few for each
    launch. A fault may set its own number of jobs with `costs`.
    """
    planned = {row["run_id"] for row in table if row["status"] not in ("rejected", "skipped")}
    fault_jobs = sum(record.get("costs", len(record.get("allocations", ()))) for record in records)
    return len(planned) + len(_later_starts(table)) + fault_jobs + JOBS_A_LAUNCH * launches


def _later_starts(rows: Rows) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Run and repeat -> the attempts of each start after the one that screened a run; control runs are none."""
    screened = {row["run_id"] for row in rows if row.get("screened")}
    starts = defaultdict(list)
    for row in rows:
        if row["run_id"] in screened and row["repeat"] and row.get("control") != row["run_id"]:
            starts[row["run_id"], row["repeat"]].append(row)
    return starts


def allocation_events(journal: Path) -> Iterator[dict[str, Any]]:
    """The readable events of a journal that are about an allocation."""
    for path in sorted(journal.glob("*-*-*-*.jsonl")):
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            try:
                event = json.loads(line)
                about = {type(event["event"]), type(event["allocation"])}
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
            if about == {str}:
                yield event


def submitted_jobs(journal: Path) -> int:
    """The number of allocations that were certainly submitted as jobs, by the journal."""
    kinds = ("submitted", "adopted", "allocation_started")
    return len({event["allocation"] for event in allocation_events(journal) if event["event"] in kinds})


def excluded_nodes(launcher_logs: Iterable[str]) -> frozenset[str]:
    """The nodes that launchers said they exclude; job scripts also name nodes that only one run avoids."""
    return frozenset(node for log in launcher_logs for node in re.findall(r"node (\S+) is excluded", log))


def _key(row: dict[str, Any]) -> str:
    return f"{row['run_id']}.{row['repeat']}.{row['attempt']}"


def _never_lost(table: Rows, doomed: set[str | None]) -> list[str]:
    """Problems with the rule that every planned run has a final end.

    Args:
        doomed: runs, as RUN_ID.REPEAT, that a fault hit in every attempt.
    """
    latest: dict[str, dict[str, Any]] = {}
    for row in table:
        if row["status"] not in ("rejected", "skipped") and (row["repeat"] or 0) == 0:
            previous = latest.get(row["run_id"])
            if previous is None or (previous["status"] != "ok" and row["attempt"] > previous["attempt"]):
                latest[row["run_id"]] = row
    return [
        f"{run} has ended {row['status']} after attempt {row['attempt']} ({row['reason']}) and was left so"
        for run, row in latest.items()
        if row["status"] is None or (row["status"] in UNFINISHED and f"{run}.0" not in doomed)
    ]


def _never_twice(rows: Rows) -> list[str]:
    """Problems with the rule that no repeat is ok twice, or is repeated after it was ok."""
    by_repeat = defaultdict(list)
    for row in rows:
        by_repeat[row["run_id"], row["repeat"]].append(row)
    problems = []
    for (run, repeat), tries in by_repeat.items():
        tries.sort(key=lambda row: row["attempt"])
        oks = [row["attempt"] for row in tries if row["status"] == "ok"]
        if len(oks) > 1:
            problems.append(f"{run}.{repeat} is ok {len(oks)} times: attempts {oks}")
        elif oks and oks[0] != tries[-1]["attempt"]:
            problems.append(f"{run}.{repeat} was tried again after it was ok")
    return problems


def _confirmed(rows: Rows) -> list[str]:
    """Problems with the rule that a start in full follows those that screened runs, in each cell, and is not lost."""
    problems = []
    for (run, repeat), tries in _later_starts(rows).items():
        last = max(tries, key=lambda row: row["attempt"])
        if last["status"] in UNFINISHED:
            problems.append(f"{run}.{repeat} has ended {last['status']} and was left so")
    cells = defaultdict(list)
    for row in rows:
        if row["status"] == "ok":
            cells[row.get("nodes")].append(bool(row.get("screened")))
    problems += [
        f"on {nodes} nodes, {len(screened)} runs were screened and none was measured in full"
        for nodes, screened in cells.items()
        if all(screened)
    ]
    return problems


def _witnessed(rows: Rows, executions: Iterable[Execution]) -> list[str]:
    """Problems with the rule that each execution is recorded once, and ok only if the program was done."""
    counts = Counter(execution.key for execution in executions)
    complete = {execution.key for execution in executions if execution.ended}
    problems = [f"{key} ran {count} times" for key, count in counts.items() if count > 1]
    ends = {_key(row): row for row in rows}
    problems += [f"{key} ran and is not recorded" for key in counts if key not in ends]
    for key, row in ends.items():
        is_unstarted = row["status"] in UNFINISHED or row.get("cause") == "not_started"
        if key not in counts and not is_unstarted:
            problems.append(f"{key} is {row['status']} and never ran")
        if key in counts.keys() - complete and row["status"] == "ok" and row.get("stopped") not in CUT_SHORT:
            problems.append(f"{key} is ok and its program never came to its end")
    return problems


def one_at_a_time(executions: Sequence[Execution]) -> list[str]:
    """Problems with the rule that executions of one attempt, run, allocation or node never overlap."""
    problems = []
    for first, second in itertools.combinations(executions, 2):
        shared = ""
        if first.key.rpartition(".")[0] == second.key.rpartition(".")[0]:
            shared = f"of the same run in {first.allocation} and {second.allocation}"
        elif first.allocation == second.allocation:
            shared = f"in {first.allocation}"
        elif first.host == second.host:
            shared = f"on {first.host}"
        if shared and first.beside(second):
            problems.append(f"{first.key} and {second.key} ran at the same time, {shared}")
    return problems


def _explained(rows: Rows, records: Rows) -> list[str]:
    """Problems with the rule that a fault explains each end but ok; a fault explains one per allocation."""
    open_ = [(record, name) for record in records for name in record.get("allocations", ())]
    open_ += [(record, record["run"]) for record in records if "run" in record for _ in range(MAX_ATTEMPTS)]
    for record in records:
        record["ends"] = []
    problems = []
    for row in rows:
        if row["status"] == "ok":
            continue
        places = {row["allocation"], _key(row).rpartition(".")[0]}
        bad = [record for record in records if record.get("node") in (row.get("began_on") or ())]
        unstarted = [record for record in records if record["kind"] == "no_agent" or "variant" in record]
        if bad and row["status"] == "crash":
            bad[0]["ends"].append("crash")
            continue
        if unstarted and row["status"] in ("lost", "crash") and row.get("cause") == "not_started":
            unstarted[0]["ends"].append(row["status"])
            continue
        ends = {row["status"], f"{row['status']} {row.get('cause')}"}
        fits = [o for o in open_ if o[1] in places and ends & EXPLAINS[o[0]["kind"]]]
        if fits:
            open_.remove(fits[0])
            fits[0][0]["ends"].append(row["status"])
        else:
            problems.append(f"{_key(row)} ended {row['status']} in {row['allocation']}: {row['reason']}")
    return problems


def _blamed(rows: Rows, records: Rows, view: SlurmView) -> list[str]:
    """Problems with the rule that a node is excluded only if a fault hit an allocation on it.

    A run that takes every allocation away is itself at fault, so that it explains no exclusion.
    """
    hit = {name for record in records for name in record.get("allocations", ())}
    guilty = {node for name in hit for node in view.nodes.get(name, ())}
    guilty |= {node for row in rows if row["allocation"] in hit for node in row.get("hostnames") or ()}
    guilty |= {record["node"] for record in records if "node" in record}
    return [f"{node} was excluded, although no fault hit it" for node in sorted(view.excluded - guilty)]


def _left_on_bad_nodes(rows: Rows, records: Rows) -> list[str]:
    """Problems with the rule that a run that fails only on bad nodes ends ok on others; controls are not repeated."""
    bad, ends = {record["node"] for record in records if "node" in record}, defaultdict(list)
    for row in rows:
        if row["repeat"] == 0:
            ends[row["run_id"]].append(row)
    return [
        f"{run} failed only on {','.join(sorted(bad))}, and was not tried elsewhere"
        for run, tries in ends.items()
        if bad and all(row["status"] == "crash" and bad & {*(row.get("began_on") or ())} for row in tries)
    ]


def _accounted(view: SlurmView, twice: bool) -> list[str]:
    """Problems with the rule that the journal names the jobs that Slurm ran, and possible times of theirs.

    Args:
        twice: whether jobs were submitted twice; accounting has no row of the second one, which was cancelled in the
            queue.
    """
    problems = []
    for event in view.journal:
        name, job_id = event["allocation"], (event.get("job") or {}).get("job_id")
        ids = view.job_ids.get(name, set())
        if event["event"] in ("submitted", "adopted") and job_id and ids and job_id not in ids and not twice:
            problems.append(f"the journal calls {name} job {job_id}, Slurm calls it {', '.join(sorted(ids))}")
        if (held_s := event.get("held_s") or 0.0) > view.age_s:
            problems.append(f"{name} held its nodes for {held_s:g} s, longer than the sweep exists")
    return problems
