"""What is read from traces: of a GPU by its kernels, of a CPU by the own times of operators."""

import pytest

from ultrabench.kernel.rank.timeline import Span, length, most_allocated, summarize, union

MICRO = 1e-6


def event(cat, name, start, end, tid=1):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid}


STEPS = [event("user_annotation", f"ProfilerStep#{n}", n * 100, n * 100 + 100) for n in (1, 2)]


def test_of_a_gpu_communication_is_exposed_where_no_other_kernel_runs():
    seen = summarize({"traceEvents": [
        *STEPS,
        event("cpu_op", "aten::mm", 100, 101),
        event("kernel", "gemm", 110, 150, tid=7),
        event("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", 140, 170, tid=20),
        event("kernel", "gemm", 210, 220, tid=7),
        event("gpu_memcpy", "Memcpy DtoD", 150, 160, tid=7),
        {"ph": "i", "name": "[memory]", "args": {"Device Type": 1, "Total Allocated": 5}},
    ]})  # fmt: skip
    assert seen["steps"] == 2
    assert seen["step_time_s"] == pytest.approx(100 * MICRO)
    assert seen["compute_s"] == pytest.approx(50 / 2 * MICRO)
    assert seen["communication_s"] == pytest.approx(30 / 2 * MICRO)
    assert seen["exposed_communication_s"] == pytest.approx(20 / 2 * MICRO)
    assert seen["idle_s"] == pytest.approx((200 - 50 - 20) / 2 * MICRO)
    assert [(k["name"][:4], k["calls"]) for k in seen["top"]] == [("gemm", 1.0), ("nccl", 0.5)]


def test_of_a_cpu_an_operator_counts_without_those_it_calls_and_a_wait_is_no_work():
    seen = summarize({"traceEvents": [
        *STEPS,
        event("cpu_op", "aten::linear", 100, 140),
        event("cpu_op", "aten::mm", 110, 130),
        event("cpu_op", "_c10d_functional::wait_tensor", 140, 190),
        event("user_annotation", "gloo:all_gather", 120, 180, tid=2),
        event("cpu_op", "aten::view", 121, 122, tid=2),
    ]})  # fmt: skip
    spent = {k["name"]: (k["calls"], k["seconds"] * 2 / MICRO) for k in seen["top"]}
    assert spent == {
        "gloo:all_gather": (0.5, pytest.approx(60)),
        "aten::linear": (0.5, pytest.approx(20)),
        "aten::mm": (0.5, pytest.approx(20)),
    }
    assert seen["compute_s"] == pytest.approx(40 / 2 * MICRO)
    assert seen["exposed_communication_s"] == pytest.approx(40 / 2 * MICRO)


def test_the_most_memory_is_that_of_the_host():
    told = [(0, 10), (0, 30), (1, 99), (0, 20)]
    events = [{"name": "[memory]", "args": {"Device Type": d, "Total Allocated": b}} for d, b in told]
    assert most_allocated({"traceEvents": events}) == 30
    assert most_allocated({"traceEvents": []}) == 0


def test_spans_that_touch_or_hold_each_other_are_one():
    spans = [Span(5, 6, "c"), Span(0, 4, "a"), Span(1, 2, "b"), Span(4, 5, "d"), Span(8, 9, "e")]
    assert [(s.start, s.end) for s in union(spans)] == [(0, 6), (8, 9)]
    assert length(union(spans)) == 7
