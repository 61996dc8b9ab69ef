"""The history of what GPUs computed bit by bit, as the command shows it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from ultrabench.device_digest import DatedDigest, differences
from ultrabench.errors import counted


def device_histories(digests: Sequence[DatedDigest], since_s: float = 0.0) -> list[dict[str, Any]]:
    """The entry `gpus` of `ultrabench nodes --json`: the results of each device in the order of time.

    All results are compared; those before `since_s`, in seconds since 1970, are left out of the histories.
    """
    difference_by_result = {(d.dated.source, d.dated.host, d.dated.number): d for d in differences(digests)}
    by_device = defaultdict[tuple[str, ...], list[DatedDigest]](list)
    for dated in sorted(digests, key=lambda dated: (dated.host, dated.number, dated.time_s)):
        if dated.time_s >= since_s:
            by_device[dated.identity].append(dated)
    histories = list[dict[str, Any]]()
    for results in by_device.values():
        results.sort(key=lambda dated: dated.time_s)
        last, history = results[-1], list[dict[str, Any]]()
        for dated in results:
            difference = difference_by_result.get((dated.source, dated.host, dated.number))
            history.append({
                "time": datetime.fromtimestamp(dated.time_s, UTC).isoformat(timespec="seconds"),
                "host": dated.host, "source": dated.source, "setup": dated.digest.setup,
                "against": difference and str(difference.against),
                "parts": [*difference.parts] if difference else [],
                "difference": difference and difference.text,
            })  # fmt: skip
        device = {"host": last.host, "number": last.number, "device": last.digest.device}
        histories.append({**device, "history": history})
    return histories


def history_lines(histories: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line with the number of compared devices, and one for each that differs; none without digests."""
    if not histories:
        return
    num_results = sum(len(device["history"]) for device in histories)
    differing = [d for d in histories if any(result["against"] for result in d["history"])]
    differ_text = f"{len(differing)} {'differs' if len(differing) == 1 else 'differ'}"
    compared_text = f"{counted(len(histories), 'device')} in {counted(num_results, 'result')}"
    yield f"Compared bit by bit: {compared_text}; {differ_text}."
    for device in differing:
        wrong = [result for result in device["history"] if result["against"]]
        days = ", ".join(dict.fromkeys(result["time"][:10] for result in wrong))
        count_text = f"{len(wrong)} of {counted(len(device['history']), 'result')} on {days}"
        yield f"{device['host']}: {wrong[-1]['difference']} ({count_text})"
