"""The verdict on a sweep from outside: its rows, the witness file, and the faults that were injected."""

from collections import Counter, defaultdict
from typing import Any

import pyarrow.parquet as pq

from tests.chaos.fault import EXPLAINS
from tests.local.conftest import Bench

UNFINISHED = frozenset({"lost", "node_fail", "cancelled", "preempted"})
"""Ends after which a run has to be tried again."""


def judge(
    bench: Bench, sweep: str, records: list[dict[str, Any]], executions: list[list[str]] | None
) -> list[str]:
    """What is wrong with a sweep that is over; adds to each record the ends it explains.

    Args:
        executions: run_id, repeat, attempt of each start of the program; None where nobody wrote them down.
    """
    bench.run("collect", sweep, code=None)
    table = pq.read_table(bench.folder / "results" / sweep / "runs.parquet").to_pylist()
    rows = [row for row in table if row["attempt"] is not None]
    return [
        *_never_lost(table),
        *_never_twice(rows),
        *([] if executions is None else _witnessed(rows, executions)),
        *_explained(rows, records),
    ]


def _key(row: dict[str, Any]) -> str:
    return f"{row['run_id']}.{row['repeat']}.{row['attempt']}"


def _never_lost(table: list[dict[str, Any]]) -> list[str]:
    """Every planned run has an end that stands."""
    latest: dict[str, dict[str, Any]] = {}
    for row in table:
        if row["status"] not in ("rejected", "skipped") and (row["repeat"] or 0) == 0:
            held = latest.get(row["run_id"])
            if held is None or (held["status"] != "ok" and row["attempt"] > held["attempt"]):
                latest[row["run_id"]] = row
    return [
        f"{run} has ended {row['status']} after attempt {row['attempt']} ({row['reason']}) and was left so"
        for run, row in latest.items()
        if row["status"] is None or row["status"] in UNFINISHED
    ]


def _never_twice(rows: list[dict[str, Any]]) -> list[str]:
    """No repeat is ok twice, and none was tried again after it was."""
    by_repeat = defaultdict(list)
    for row in rows:
        by_repeat[row["run_id"], row["repeat"]].append(row)
    found = []
    for (run, repeat), tries in by_repeat.items():
        tries.sort(key=lambda row: row["attempt"])
        if any(row["status"] == "ok" for row in tries[:-1]):
            found.append(f"{run}.{repeat} was tried again after it was ok")
    return found


def _witnessed(rows: list[dict[str, Any]], executions: list[list[str]]) -> list[str]:
    """What ran is what is recorded, once each."""
    counts = Counter(".".join(words) for words in executions)
    ends = {_key(row): row["status"] for row in rows}
    twice = [f"{key} ran {count} times" for key, count in counts.items() if count > 1]
    unknown = [f"{key} ran and is not recorded" for key in counts if key not in ends]
    invented = [
        f"{key} is {end} and never ran"
        for key, end in ends.items()
        if key not in counts and end not in UNFINISHED
    ]
    return [*twice, *unknown, *invented]


def _explained(rows: list[dict[str, Any]], records: list[dict[str, Any]]) -> list[str]:
    """Whatever did not end ok was hit by a fault that explains it; one fault explains one end an allocation."""
    open_ = [(record, name) for record in records for name in record.get("allocations", ())]
    for record in records:
        record["ends"] = []
    found = []
    for row in rows:
        if row["status"] == "ok":
            continue
        fits = [o for o in open_ if o[1] == row["allocation"] and row["status"] in EXPLAINS[o[0]["kind"]]]
        if fits:
            open_.remove(fits[0])
            fits[0][0]["ends"].append(row["status"])
        else:
            found.append(f"{_key(row)} ended {row['status']} in {row['allocation']}: {row['reason']}")
    return found
