"""Summarises a trace in Chrome's format: the kernels that took the time, and the exposed communication.

On a GPU the times are those of its kernels. A CPU has no kernels: there the time of an operator counts,
without the time of the operators that it calls, and the threads of gloo show the communication.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

TOP_KERNELS = 12
"""Number of kernels that a summary names; it begins with the longest."""


class Span(NamedTuple):
    """The time span of one kernel or operator, in microseconds."""

    start: float
    end: float
    name: str


def summarize(trace: dict[str, Any]) -> dict[str, Any]:
    """How a rank spends the time of a mean step, in seconds.

    Returns:
        steps and step_time_s; compute_s and communication_s, in which a kernel of that kind ran;
        exposed_communication_s, in which kernels communicated and none computed; idle_s, in which no kernel
        ran; top, a list of {name, calls, seconds} per step, the longest first.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    operators = kernels or [e for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
    spans = [_span(e) for e in operators] if kernels else exclusive_spans(operators)
    comm_spans = [s for s in spans if _communicates(s)]
    compute_spans = merge(s for s in spans if not _communicates(s))
    scale_s = 1e-6 / max(1, len(steps))
    step_time_s = sum(float(e["dur"]) for e in steps) * scale_s
    compute_s, communication_s = total_us(compute_spans) * scale_s, total_us(merge(comm_spans)) * scale_s
    exposed_s = (total_us(merge([*compute_spans, *comm_spans])) - total_us(compute_spans)) * scale_s
    calls, us_by_name = Counter(e["name"] for e in operators), defaultdict[str, float](float)
    for span in spans:
        us_by_name[span.name] += span.end - span.start
    return {
        "steps": len(steps), "step_time_s": step_time_s, "compute_s": compute_s, "communication_s": communication_s,
        "exposed_communication_s": exposed_s, "idle_s": max(0.0, step_time_s - compute_s - exposed_s),
        "top": [
            {"name": name, "calls": calls[name] / max(1, len(steps)), "seconds": us * scale_s}
            for name, us in sorted(us_by_name.items(), key=lambda name_and_us: -name_and_us[1])[:TOP_KERNELS]
        ],
    }  # fmt: skip


def most_allocated(trace: dict[str, Any]) -> int:
    """The largest number of bytes on a CPU that the trace had allocated and not yet freed."""
    memory_events = (e["args"] for e in trace["traceEvents"] if e["name"] == "[memory]")
    return max(
        (int(args["Total Allocated"]) for args in memory_events if args["Device Type"] == 0), default=0
    )


def _communicates(span: Span) -> bool:
    return span.name.startswith(("nccl", "gloo:"))


def _span(event: dict[str, Any]) -> Span:
    return Span(float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"])


def exclusive_spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """The spans of torch's operators without those of the operators they call, and all spans of gloo.

    The nested spans of a thread are cut into pieces that do not overlap; spans of gloo stay whole.
    """
    pieces: list[Span] = []
    spans_by_thread = defaultdict[Any, list[Span]](list)
    for event in events:
        spans_by_thread[event["tid"]].append(_span(event))
    for spans in spans_by_thread.values():
        covered_us, open_spans = 0.0, list[Span]()
        for span in [*sorted(spans, key=lambda s: (s.start, -s.end)), Span(math.inf, math.inf, "the end")]:
            while open_spans:
                inner_span = open_spans[-1]
                piece_end_us = min(inner_span.end, span.start)
                if inner_span.name.startswith("aten::") and piece_end_us > covered_us:
                    pieces.append(Span(covered_us, piece_end_us, inner_span.name))
                covered_us = max(covered_us, piece_end_us)
                if inner_span.end > span.start:
                    break
                open_spans.pop()
            if any(_communicates(s) for s in open_spans):
                continue
            covered_us = max(covered_us, span.start)
            open_spans.append(span)
            if _communicates(span):
                pieces.append(span)
    return pieces


def merge(spans: Iterable[Span]) -> list[Span]:
    """The time that the spans cover together, as ordered spans that do not overlap."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].end:
            merged[-1] = merged[-1]._replace(end=max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def total_us(spans: Iterable[Span]) -> float:
    """The total length of spans that do not overlap, in microseconds."""
    return sum(s.end - s.start for s in spans)
