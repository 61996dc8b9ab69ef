"""Where the time of a traced step goes, by part of the model, beside what each part must move.

A kernel of a GPU belongs to the operator that launched it, whose shapes and name tell its part. On CPUs the operators
themselves count. What no rule knows is `the rest`, and the table names the longest of each part.
"""

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import layer_work

from ultrabench.cli.tables import three_digits
from ultrabench.hardware import Hardware
from ultrabench.kernel.rank.timeline import Span, exclusive_spans, merge_spans, total_us
from ultrabench.run import RunSpec

LONGEST = 3
"""Number of kernels that a summary names for each part."""
_PRODUCTS = ("mm", "addmm", "_scaled_mm")
_FUSED_ATTENTION = ("flash", "fmha", "sdpa", "attention", "attn")
"""Parts of the names of kernels of attention."""
_OF_OPTIMIZER = ("_fused_adamw_", "_foreach_norm", "_foreach_mul_", "linalg_vector_norm")
_OF_SCALES = ("clamp", "log2", "floor", "exp2", "reciprocal", "mul")
"""Operators of eager layers that compute the scales of a matrix M x K, M x 1, or multiply its rows by them."""
_OF_FUSED_SCALES = ("exp2", "linalg_vector_norm")
"""Operators that the name of a generated kernel holds if it computes scales; nothing else in a layer uses them."""

Dims = list[list[int]]
"""The sizes of each argument of an operator; of what is no tensor, an empty list."""


class Kernel(NamedTuple):
    """A kernel of a GPU, or the own time of an operator on a CPU."""

    span: Span
    """Its times in microseconds, and its name."""
    operator: str
    """The operator that launched it, without its namespace; empty where the trace has none."""
    dims: Dims
    dtype: str = ""
    """That of the first argument of the operator, as the profiler names it; of a copy it is what is written."""


def kernels_of(trace: dict[str, Any]) -> Iterator[Kernel]:
    """The kernels of a trace in Chrome's format; the own times of operators where it has none."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    by_id = {event["args"].get("External id"): event for event in operators}
    launched = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    for event in launched:
        operator = by_id.get(event["args"].get("External id"), {"name": "", "args": {}})
        yield _kernel(Span(event["ts"], event["ts"] + event["dur"], event["name"]), operator)
    if not launched:
        # Own times keep the name of an event only, so each event gets its number for a name.
        numbered = [
            {**event, "name": f"aten::{n}"} if event["name"].startswith("aten::") else event
            for n, event in enumerate(operators)
        ]
        for span in exclusive_spans(numbered):
            operator = operators[int(span.name.removeprefix("aten::"))]
            yield _kernel(span._replace(name=operator["name"]), operator)


def _kernel(span: Span, operator: dict[str, Any]) -> Kernel:
    sizes = [size if isinstance(size, list) else [] for size in operator["args"].get("Input Dims", [])]
    flat = [[n for n in size if isinstance(n, int)] for size in sizes]
    dtype = next(iter(operator["args"].get("Input type", [])), "")
    return Kernel(span, operator["name"].rpartition("::")[2], flat, dtype)


def part_of(kernel: Kernel, spec: RunSpec) -> str:
    """The part of the model, one of `layer_work.PARTS`, that a kernel belongs to."""
    shape, tokens = spec.shape, spec.layout.mbs * spec.workload.seq_len
    name = kernel.span.name.lower()
    if kernel.operator in _PRODUCTS:
        matrices = [size for size in kernel.dims if len(size) == 2]
        edges = next((a + b[1:] for a, b in pairwise(matrices) if a[1] == b[0]), [])
        if shape.vocab_size in edges:
            return layer_work.HEAD
        widths = [*edges]
        if tokens in widths:
            widths.remove(tokens)
        return layer_work.FEED_FORWARD if shape.intermediate_size in widths else layer_work.ATTENTION_PRODUCTS
    of_logits = any(size[1:] == [shape.vocab_size] and size[0] != shape.hidden_size for size in kernel.dims)
    if of_logits or "softmax" in name:
        return layer_work.LOSS
    if spec.kernel.precision == "fp8" and _is_cast(kernel):
        return layer_work.CASTS
    if name.startswith("triton_"):  # its name may hold those of operators beside it, such as attention
        return layer_work.POINTWISE
    if any(text in kernel.operator or text in name for text in _FUSED_ATTENTION):
        return layer_work.ATTENTION
    if "embedding" in kernel.operator or "embedding" in name:
        return layer_work.EMBEDDING
    if kernel.operator in _OF_OPTIMIZER:
        return layer_work.OPTIMIZER
    if any(_is_of_tokens(size, tokens) for size in kernel.dims):
        return layer_work.POINTWISE
    return layer_work.REST


def _is_cast(kernel: Kernel) -> bool:
    """Whether a kernel computes or applies the scales of fp8, or writes fp8 without being a product."""
    if "_fused_" in kernel.span.name and any(text in kernel.span.name for text in _OF_FUSED_SCALES):
        return True
    if kernel.operator == "linalg_vector_norm":  # that of clipping is of gradients in fp32
        return kernel.dtype == "c10::BFloat16"
    scales = any(len(size) == 2 and size[1] == 1 for size in kernel.dims)
    return kernel.dtype.startswith("c10::Float8") or (kernel.operator in _OF_SCALES and scales)


def _is_of_tokens(size: list[int], tokens: int) -> bool:
    """Whether the first one or two sizes of a tensor, or the first and third, are those of the tokens."""
    return len(size) > 1 and (
        size[0] == tokens or size[0] * size[1] == tokens or (len(size) == 4 and size[0] * size[2] == tokens)
    )


def summary(trace: dict[str, Any], spec: RunSpec, hardware: Hardware) -> dict[str, Any]:
    """The seconds of a mean step by part, with the work of each part and what bounds it.

    Kernels that run at the same time count in each of their parts; idle_s is the time in which none ran.
    """
    steps = [
        e
        for e in trace["traceEvents"]
        if str(e.get("name")).startswith("ProfilerStep#") and e.get("cat") == "user_annotation"
    ]
    scale, step_s = 1e-6 / max(1, len(steps)), sum(e["dur"] for e in steps) * 1e-6 / max(1, len(steps))
    seconds_by_name = {part: Counter[str]() for part in layer_work.PARTS}
    spans = list[Span]()
    for kernel in kernels_of(trace):
        part = part_of(kernel, spec)
        seconds_by_name[part][kernel.span.name] += (kernel.span.end_us - kernel.span.start_us) * scale
        spans.append(kernel.span)
    work, parts = layer_work.step_work(spec), []
    for part in (name for name in layer_work.PARTS if name in work or name == layer_work.REST):
        row = {
            "part": part,
            "in_layers": part in layer_work.OF_LAYERS,
            "seconds": float(seconds_by_name[part].total()),
            "flops": None,
            "bytes": None,
        }
        if part in work:
            row |= work[part]._asdict()
            limit = layer_work.bound(part, work[part], hardware, spec.kernel.precision)
            row |= {"bound_by": limit and limit[0], "bound_s": limit and limit[1]}
        row["longest"] = [{"name": n, "seconds": s} for n, s in seconds_by_name[part].most_common(LONGEST)]
        parts.append(row)
    busy_s = total_us(merge_spans(spans)) * scale
    return {
        "model": spec.shape.name, "num_hidden_layers": spec.shape.num_hidden_layers, "seq_len": spec.workload.seq_len,
        "mbs": spec.layout.mbs, "recompute": spec.layout.recompute, "precision": spec.kernel.precision,
        "compile": spec.kernel.compile, "run_id": spec.run_id, "hardware": hardware.name, "steps": len(steps),
        "step_time_s": step_s, "idle_s": max(0.0, step_s - busy_s), "parts": parts,
    }  # fmt: skip


def markdown(document: dict[str, Any]) -> str:
    """The table of a summary."""
    layers = document["num_hidden_layers"]
    compiled = "compiled" if document["compile"] else "eager"
    title = (
        f"{document['model']}, {layers} layers, {document['precision']}, {compiled}, "
        f"recompute={document['recompute']}"
    )
    batch = f"mbs={document['mbs']}, seq_len={document['seq_len']}"
    lines = [
        f"# {title}, {batch}", "",
        *([f"{document['gpu_name']}, torch {document['torch_version']}, commit {document['git_commit']}, "
        f"{document['date']}.", ""]
          if "gpu_name" in document else []),
        f"A traced step takes {1e3 * document['step_time_s']:.4g} ms, {1e3 * document['idle_s']:.3g} ms of which "
        "no kernel runs. "
        "The last two columns are what bounds a part at the rates of the data sheet, "
        "and the share of these rates that it reaches.", "",
        "| part | ms a step | ms a layer | GFLOP | MB | bound by | ms at that rate | share |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in document["parts"]:
        ms, limit_s = 1e3 * row["seconds"], row.get("bound_s")
        cells = [
            row["part"], f"{ms:.4g}", f"{ms / layers:.3g}" if row["in_layers"] else "",
            three_digits(row["flops"] / 1e9) if row["flops"] else "",
            three_digits(row["bytes"] / 1e6) if row["bytes"] else "",
            row.get("bound_by") or "", f"{1e3 * limit_s:.4g}" if limit_s else "",
            f"{100 * limit_s / row['seconds']:.0f} %" if limit_s and row["seconds"] else "",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def read_trace(run_folder: Path) -> dict[str, Any]:
    """The trace of rank 0 of a run.

    Raises:
        OSError: the run has none.
    """
    with gzip.open(run_folder / "profile" / "rank0" / "trace.json.gz") as file:
        trace: dict[str, Any] = json.load(file)
    return trace
