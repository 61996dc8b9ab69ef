"""Failures are told apart by type and text, through the exceptions that wrap them."""

import pytest
import torch

from ultrabench.kernel.rank import memory
from ultrabench.kernel.rank.failure import (
    IgnoredOptionError,
    NonFiniteLossError,
    ReplicasDifferError,
    kind_of,
    one_line,
)


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
        (IgnoredOptionError("recompute=full was asked for, none ran"), "option"),
        (ValueError("what"), "exception"),
    ],
)
def test_kind(error, kind):
    """Directly, and as the cause of what a pipeline stage raises."""
    assert kind_of(error) == kind
    wrapped = RuntimeError("failed to run forward")
    wrapped.__cause__ = error
    assert kind_of(wrapped) == kind
    assert one_line(wrapped) == one_line(error)


def test_one_line():
    """Type and first line."""
    assert one_line(ValueError("a\nb")) == "ValueError: a"
    assert one_line(MemoryError()) == "MemoryError"


def test_memory_that_was_freed_before_the_report_counts():
    before = memory._status_bytes("VmData")
    held = bytearray(256 << 20)
    del held
    assert memory.account()["data_bytes"] >= before + (250 << 20)
