"""What one rank does beside training: its environment, failures, memory, watching threads, and traces."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.unit.kernel.fake_gpu import CAPACITY_BYTES, FRAGMENTED_BYTES, GIB, INDEX, NAME, NUM_GPUS, FakeGpu
from ultrabench.kernel import mesh
from ultrabench.kernel.compat import GROUP_TIMEOUT
from ultrabench.kernel.rank import environment, memory, progress, stack_dump
from ultrabench.kernel.rank.failure import (
    IgnoredOptionError,
    NonFiniteLossError,
    ReplicasDifferError,
    error_line,
    kind_of,
)
from ultrabench.kernel.rank.timeline import Span, merge_spans, peak_allocated_bytes, summarize, total_us


def test_variables_that_steer_a_run_are_recorded(monkeypatch):
    """Not those of launchers, and no folder of a cache, which would make each job an environment of its own."""
    steering = ["CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "NCCL_TOPO_FILE", "NVTE_FLASH_ATTN",
                "PYTORCH_ALLOC_CONF", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCHINDUCTOR_MAX_AUTOTUNE"]  # fmt: skip
    others = ["CUDA_VISIBLE_DEVICES", "CUDA_CACHE_PATH", "CUDA_MPS_PIPE_DIRECTORY", "NCCL_DEBUG_FILE", "TORCH_HOME",
              "TORCH_FR_DUMP_TEMP_FILE", "TORCHELASTIC_RUN_ID", "TORCHINDUCTOR_CACHE_DIR", "HF_TOKEN"]  # fmt: skip
    monkeypatch.setattr(environment.os, "environ", dict.fromkeys(steering + others, "1"))
    assert [*environment.facts()["variables"]] == sorted(steering)


@pytest.mark.parametrize(
    ("environ", "cuda", "set_to"),
    [
        ({}, "12.8", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({}, None, {}),
        ({"PYTORCH_ALLOC_CONF": ""}, "12.8", {"PYTORCH_ALLOC_CONF": ""}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, "12.8", {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}),
    ],
)
def test_segments_can_grow_unless_the_user_says_otherwise(monkeypatch, environ, cuda, set_to):
    """Either name of the variable counts, and only GPUs have that allocator."""
    monkeypatch.setattr(environment.os, "environ", environ)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    environment.set_allocator_default()
    assert environ == set_to


def test_the_device_is_prepared_and_groups_wait_long_before_the_first_is_made(monkeypatch):
    """The allocator is configured, and groups of all axes have the long time-out."""
    steps, c10d = list[Any](), dist.distributed_c10d

    def make_group(*_, **__):
        steps.extend((c10d.default_pg_timeout, c10d.default_pg_nccl_timeout))

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(c10d, name, None)
    monkeypatch.setattr(environment, "set_allocator_default", lambda: steps.append("allocator"))
    monkeypatch.setattr(dist, "init_process_group", make_group)
    mesh.join_process_group(environment.use_device("cpu", 0))
    assert steps == ["allocator", GROUP_TIMEOUT, GROUP_TIMEOUT]


def test_a_micro_batch_counts_when_its_gpu_has_finished_it():
    """The thread that watches uses that GPU, since a new thread would look at GPU 0."""
    gpu, counted = FakeGpu(), threading.Semaphore(0)
    with gpu.installed():
        record = progress.device_progress(environment.use_device("cuda", INDEX), counted.release)
        for _ in range(2):
            gpu.launch("micro-batch", 1.0)
            record()
        gpu.launch("the next one", 1.0)
        assert not counted.acquire(timeout=3 * progress.POLL_S)
        gpu.host_s = 1.5
        assert counted.acquire(timeout=10)
        assert not counted.acquire(timeout=3 * progress.POLL_S)
        gpu.host_s = 2.5
        assert counted.acquire(timeout=10)


def test_the_thread_that_tells_of_collectives_uses_the_gpu_of_its_rank():
    """It is the one with the memory of this process; a new thread would look at GPU 0."""
    gpu = FakeGpu()
    gpu.allocate(20)
    with gpu.installed():
        told = stack_dump._device_memory_bytes()
    assert told == {"allocated_bytes": 20, "reserved_bytes": 20 + FRAGMENTED_BYTES}


def test_the_facts_of_a_node_are_those_of_its_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
    with FakeGpu().installed():
        facts = environment.facts()
    names = "gpus", "gpu_name", "gpu_mem_bytes", "nccl_version"
    assert [facts[name] for name in names] == [NUM_GPUS, NAME, CAPACITY_BYTES, "2.30.1"]


def test_what_explains_a_lack_of_memory_is_that_of_the_gpu_in_use():
    gpu = FakeGpu()
    gpu.allocate(70 * GIB)
    gpu.allocated -= 30 * GIB
    with gpu.installed():
        environment.use_device("cuda", INDEX)
        usage = memory.usage()
    held = 70 * GIB + FRAGMENTED_BYTES
    expected = {"free_bytes": CAPACITY_BYTES - held, "total_bytes": CAPACITY_BYTES, "torch_bytes": held}
    assert {name: usage[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), "comm"),
        (torch.distributed.DistBackendError("NCCL error in: x.cpp"), "comm"),
        (NonFiniteLossError("loss is nan at step 3"), "non_finite"),
        (ReplicasDifferError("copies of the same parameters differ"), "replicas"),
        (IgnoredOptionError("requested recompute=full, but ran none"), "option"),
        (ValueError("what"), "exception"),
    ],
)
def test_failures_are_told_apart_by_type_and_text(error, kind):
    """Directly, and as the cause of what a pipeline stage raises."""
    wrapped = RuntimeError("failed to run forward\nin a stage")
    assert error_line(wrapped) == "RuntimeError: failed to run forward"
    wrapped.__cause__ = error
    assert kind_of(error) == kind_of(wrapped) == kind
    assert error_line(wrapped) == f"{type(error).__name__}: {error}".removesuffix(": ")


def test_memory_that_was_freed_before_the_report_counts():
    before = memory._status_bytes("VmData")
    block = bytearray(256 << 20)
    del block
    assert memory.usage()["data_bytes"] >= before + (250 << 20)


MICRO = 1e-6


def event(cat, name, start, end, tid=1):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid}


STEPS = [event("user_annotation", f"ProfilerStep#{n}", n * 100, n * 100 + 100) for n in (1, 2)]


def test_of_a_gpu_communication_is_exposed_where_no_other_kernel_runs():
    summary = summarize({"traceEvents": [
        *STEPS,
        event("cpu_op", "aten::mm", 100, 101),
        event("kernel", "gemm", 110, 150, tid=7),
        event("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", 140, 170, tid=20),
        event("kernel", "gemm", 210, 220, tid=7),
        event("gpu_memcpy", "Memcpy DtoD", 150, 160, tid=7),
        {"ph": "i", "name": "[memory]", "args": {"Device Type": 1, "Total Allocated": 5}},
    ]})  # fmt: skip
    assert [(k["name"][:4], k["calls"]) for k in summary.pop("top")] == [("gemm", 1.0), ("nccl", 0.5)]
    parts = {"step_time_s": 100, "compute_s": 25, "communication_s": 15, "idle_s": 65}
    parts["exposed_communication_s"] = 10
    assert summary == pytest.approx({"steps": 2} | {name: time * MICRO for name, time in parts.items()})


def test_of_a_cpu_an_operator_counts_without_those_it_calls_and_a_wait_is_no_work():
    summary = summarize({"traceEvents": [
        *STEPS,
        event("cpu_op", "aten::linear", 100, 140),
        event("cpu_op", "aten::mm", 110, 130),
        event("cpu_op", "_c10d_functional::wait_tensor", 140, 190),
        event("user_annotation", "gloo:all_gather", 120, 180, tid=2),
        event("cpu_op", "aten::view", 121, 122, tid=2),
    ]})  # fmt: skip
    assert all(kernel["calls"] == 0.5 for kernel in summary["top"])
    spent = {kernel["name"]: kernel["seconds"] / MICRO for kernel in summary["top"]}
    assert spent == pytest.approx({"gloo:all_gather": 30, "aten::linear": 10, "aten::mm": 10})
    assert summary["compute_s"] == summary["exposed_communication_s"] == pytest.approx(20 * MICRO)


def test_the_most_memory_is_that_of_the_host():
    allocations = [(0, 10), (0, 30), (1, 99), (0, 20)]
    events = [{"name": "[memory]", "args": {"Device Type": d, "Total Allocated": b}} for d, b in allocations]
    assert [peak_allocated_bytes({"traceEvents": trace_events}) for trace_events in (events, [])] == [30, 0]


def test_spans_that_touch_or_hold_each_other_are_one():
    spans = [Span(5, 6, "c"), Span(0, 4, "a"), Span(1, 2, "b"), Span(4, 5, "d"), Span(8, 9, "e")]
    assert [(s.start_us, s.end_us) for s in merge_spans(spans)] == [(0, 6), (8, 9)]
    assert total_us(merge_spans(spans)) == 7
