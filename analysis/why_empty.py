"""Says why a cell has no best run."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from ultrabench.analysis.rows import Row
from ultrabench.result import SLOWER

_UNTRIED = ("rejected", "skipped")


def why_empty(rows: Sequence[Row]) -> tuple[str | None, str]:
    """Status and reason of a cell without a winner, from its final rows.

    What was tried comes first (`12 oom; 3 crash: <reason>`), then what waits (`pending 4`), then
    what a decision skipped; rules that reject layouts count only when nothing else is left. The
    status is null while anything waits.
    """
    by_status: dict[str | None, list[Row]] = defaultdict(list)
    for row in rows:
        by_status[row["status"]].append(row)
    pending = by_status.pop(None, [])
    rejected = by_status.pop("rejected", [])
    order = sorted(by_status, key=lambda s: (s != "ok", s in _UNTRIED, -len(by_status[s]), str(s)))
    alone = len(order) == 1 and not pending
    parts = [_part(str(status), by_status[status], alone) for status in order]
    if pending:
        untried = [i for i, status in enumerate(order) if status in _UNTRIED]
        parts.insert(untried[0] if untried else len(parts), f"pending {_runs(pending)}")
    if not parts:
        return "rejected", _no_valid_layout(rejected)
    return (None if pending else order[0]), "; ".join(parts)


def _part(status: str, rows: Sequence[Row], alone: bool) -> str:
    """One status in words: `all 12 oom`, `3 crash: <first reason>`, `2 ok but suspect: ...`."""
    number = _runs(rows)
    count = f"all {number}" if alone and number > 1 else str(number)
    if status == "ok":
        return _unranked(count, rows)
    reason = next((row["reason"] for row in rows if row["reason"]), None)
    if reason is None or status == "oom":  # the name says enough
        return f"{count} {status}"
    return f"{count} {status}: {reason}"


def _unranked(count: str, rows: Sequence[Row]) -> str:
    """Says why none of the ok runs could win."""
    suspect = next((row["suspect"] for row in rows if row["suspect"]), None)
    if suspect is not None:
        return f"{count} ok but suspect: {suspect}"
    if any(row["stopped"] == SLOWER for row in rows):
        return f"{count} ok but stopped early as slower than the best"
    return f"{count} ok without the number to rank by"


def _no_valid_layout(rejected: Sequence[Row]) -> str:
    """Names the rule that rejects most layouts, with an example of its reason."""
    rules = Counter(row["rule"] for row in rejected)
    rule, number = min(rules.items(), key=lambda item: (-item[1], str(item[0])))
    example = next((row["reason"] for row in rejected if row["rule"] == rule), None)
    return f"no valid layout: {example or rule} ({rule}, {number} of {len(rejected)})"


def _runs(rows: Sequence[Row]) -> int:
    """The number of different runs among the rows."""
    return len({row["run_id"] for row in rows})
