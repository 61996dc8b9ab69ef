"""Summarises a trace in Chrome's format: the kernels that took the time, and the exposed communication.

On a GPU the times are those of its kernels. A CPU has no kernels: there the time of an operator counts,
without the time of the operators that it calls, and the threads of gloo show the communication.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

NUM_TOP_KERNELS = 12
"""Number of kernels that a summary names; it begins with the longest."""


class Span(NamedTuple):
    """The time span of one kernel or operator, in microseconds."""

    start_us: float
    end_us: float
    name: str


def summarize(trace: dict[str, Any]) -> dict[str, Any]:
    """How a rank spends the time of a mean step, in seconds.

    Returns:
        steps and step_time_s; compute_s and communication_s, in which a kernel of that kind ran;
        exposed_communication_s, in which kernels communicated and none computed; idle_s, in which no kernel
        ran; top, a list of {name, calls, seconds} per step, the longest first.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    annotations = (e for e in events if e.get("cat") == "user_annotation")
    step_events = [e for e in annotations if e["name"].startswith("ProfilerStep#")]
    kernel_events = [e for e in events if e.get("cat") == "kernel"]
    operator_events = kernel_events or [e for e in events if e.get("cat") in ("cpu_op", "user_annotation")]
    spans = [_span_of(e) for e in operator_events] if kernel_events else exclusive_spans(operator_events)
    comm_spans = merge_spans(span for span in spans if _is_communication(span))
    compute_spans = merge_spans(span for span in spans if not _is_communication(span))
    s_per_us = 1e-6 / max(1, len(step_events))  # from microseconds of all steps to seconds of one
    step_time_s = sum(float(e["dur"]) for e in step_events) * s_per_us
    compute_s, communication_s = (total_us(spans) * s_per_us for spans in (compute_spans, comm_spans))
    exposed_s = (total_us(merge_spans([*compute_spans, *comm_spans])) - total_us(compute_spans)) * s_per_us
    calls_by_name, us_by_name = Counter(e["name"] for e in operator_events), defaultdict[str, float](float)
    for span in spans:
        us_by_name[span.name] += span.end_us - span.start_us
    return {
        "steps": len(step_events), "step_time_s": step_time_s, "compute_s": compute_s,
        "communication_s": communication_s,
        "exposed_communication_s": exposed_s, "idle_s": max(0.0, step_time_s - compute_s - exposed_s),
        "top": [
            {"name": name, "calls": calls_by_name[name] / max(1, len(step_events)), "seconds": kernel_us * s_per_us}
            for name, kernel_us in sorted(us_by_name.items(), key=lambda name_and_us: -name_and_us[1])[:NUM_TOP_KERNELS]
        ],
    }  # fmt: skip


def peak_allocated_bytes(trace: dict[str, Any]) -> int:
    """The largest number of bytes on a CPU that the trace had allocated and not yet freed."""
    memory_events = (e["args"] for e in trace["traceEvents"] if e["name"] == "[memory]")
    cpu_events = (event_args for event_args in memory_events if event_args["Device Type"] == 0)
    return max((int(event_args["Total Allocated"]) for event_args in cpu_events), default=0)


def _is_communication(span: Span) -> bool:
    return span.name.startswith(("nccl", "gloo:"))


def _span_of(event: dict[str, Any]) -> Span:
    return Span(float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"])


def exclusive_spans(events: Iterable[dict[str, Any]]) -> list[Span]:
    """The spans of torch's operators without those of the operators they call, and all spans of gloo.

    The nested spans of a thread are cut into pieces that do not overlap; spans of gloo stay whole.
    """
    pieces: list[Span] = []
    spans_by_thread = defaultdict[Any, list[Span]](list)
    for event in events:
        spans_by_thread[event["tid"]].append(_span_of(event))
    for spans in spans_by_thread.values():
        covered_until_us, open_spans = 0.0, list[Span]()
        spans.sort(key=lambda span: (span.start_us, -span.end_us))
        for span in [*spans, Span(math.inf, math.inf, "the end")]:
            while open_spans:
                inner_span = open_spans[-1]
                piece_end_us = min(inner_span.end_us, span.start_us)
                if inner_span.name.startswith("aten::") and piece_end_us > covered_until_us:
                    pieces.append(Span(covered_until_us, piece_end_us, inner_span.name))
                covered_until_us = max(covered_until_us, piece_end_us)
                if inner_span.end_us > span.start_us:
                    break
                open_spans.pop()
            if any(_is_communication(s) for s in open_spans):
                continue
            covered_until_us = max(covered_until_us, span.start_us)
            open_spans.append(span)
            if _is_communication(span):
                pieces.append(span)
    return pieces


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """The time that the spans cover together, as ordered spans that do not overlap."""
    merged_spans: list[Span] = []
    for span in sorted(spans):
        if merged_spans and span.start_us <= merged_spans[-1].end_us:
            merged_spans[-1] = merged_spans[-1]._replace(end_us=max(merged_spans[-1].end_us, span.end_us))
        else:
            merged_spans.append(span)
    return merged_spans


def total_us(spans: Iterable[Span]) -> float:
    """The total length of spans that do not overlap, in microseconds."""
    return sum(s.end_us - s.start_us for s in spans)
