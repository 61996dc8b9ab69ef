"""What a trace in Chrome's format shows: which kernels took the time, and which communication was waited for.

Times of a GPU are those of its kernels. A CPU has none: there an operator's own time stands for a kernel,
without that of the operators it calls, and gloo's threads tell when they communicate.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

TOP = 12
"""Number of kernels that a summary names, the longest first."""


class Span(NamedTuple):
    """A stretch of time of one kernel or operator, in microseconds."""

    start: float
    end: float
    name: str


def summarize(trace: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a mean step of a rank.

    Returns:
        steps and step_time_s; compute_s and communication_s, in which some kernel of that kind ran;
        exposed_communication_s, in which no kernel computed meanwhile; idle_s, in which none ran; top, a
        list of {name, calls, seconds} a step, the longest first.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    told = kernels or [e for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
    spans = [_span(e) for e in told] if kernels else _own_times(told)
    sending = [s for s in spans if _communicates(s)]
    computing = union(s for s in spans if not _communicates(s))
    scale = 1e-6 / max(1, len(steps))
    total = sum(float(e["dur"]) for e in steps) * scale
    compute, communication = length(computing) * scale, length(union(sending)) * scale
    exposed = (length(union([*computing, *sending])) - length(computing)) * scale
    calls, seconds = Counter(e["name"] for e in told), defaultdict[str, float](float)
    for span in spans:
        seconds[span.name] += span.end - span.start
    return {
        "steps": len(steps), "step_time_s": total, "compute_s": compute, "communication_s": communication,
        "exposed_communication_s": exposed, "idle_s": max(0.0, total - compute - exposed),
        "top": [
            {"name": name, "calls": calls[name] / max(1, len(steps)), "seconds": us * scale}
            for name, us in sorted(seconds.items(), key=lambda item: -item[1])[:TOP]
        ],
    }  # fmt: skip


def most_allocated(trace: dict[str, Any]) -> int:
    """Bytes of a CPU that were allocated in the trace and not yet freed, at their most."""
    told = (e["args"] for e in trace["traceEvents"] if e["name"] == "[memory]")
    return max((int(args["Total Allocated"]) for args in told if args["Device Type"] == 0), default=0)


def _communicates(span: Span) -> bool:
    return span.name.startswith(("nccl", "gloo:"))


def _span(event: dict[str, Any]) -> Span:
    return Span(float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"])


def _own_times(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Time of torch's operators in which none that they called ran, and all of gloo's."""
    found: list[Span] = []
    threads: dict[Any, list[Span]] = {}
    for event in events:
        threads.setdefault(event["tid"], []).append(_span(event))
    for spans in threads.values():
        _walk(sorted(spans, key=lambda s: (s.start, -s.end)), found)
    return found


def _walk(spans: list[Span], found: list[Span]) -> None:
    """Cuts the nested spans of one thread into pieces that do not overlap; gloo's stay whole."""
    open_spans: list[Span] = []
    now = 0.0

    def until(end: float) -> None:
        nonlocal now
        top = open_spans[-1] if open_spans else None
        if top and top.name.startswith("aten::") and end > now:
            found.append(Span(now, end, top.name))
        now = max(now, end)

    for span in spans:
        while open_spans and open_spans[-1].end <= span.start:
            until(open_spans[-1].end)
            open_spans.pop()
        if any(s.name.startswith("gloo:") for s in open_spans):
            continue
        until(span.start)
        open_spans.append(span)
        if span.name.startswith("gloo:"):
            found.append(span)
    while open_spans:
        until(open_spans[-1].end)
        open_spans.pop()


def union(spans: Iterable[Span]) -> list[Span]:
    """The time that any of the spans covers, as spans that do not overlap, in order."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and span.start <= found[-1].end:
            found[-1] = found[-1]._replace(end=max(found[-1].end, span.end))
        else:
            found.append(span)
    return found


def length(spans: Iterable[Span]) -> float:
    """Microseconds of spans that do not overlap."""
    return sum(s.end - s.start for s in spans)
