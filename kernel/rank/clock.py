"""Measures how long a device works."""

import time
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def run_timed(device: torch.device, work: Callable[[], Result]) -> tuple[float, Result]:
    """The seconds from an idle device to the end of `work` on it, and what `work` returns."""
    synchronize = torch.get_device_module(device).synchronize
    synchronize()
    start_s = time.perf_counter()
    result = work()
    synchronize()
    return time.perf_counter() - start_s, result
