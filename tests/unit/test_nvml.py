"""GPUs as NVML tells, through a small library of our own with the names of the driver's: this needs no GPU.

What it answers is in a file: one line a GPU with uuid, bytes used and in all, MHz, the mask of reasons, a pid or 0.
"""

import os
import subprocess
import sys
import threading

import pytest

from tests.unit.test_clean import OneNode
from ultrabench.agent import nvml
from ultrabench.agent.gpus import VisibleGpu

GIB = 2**30
SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
struct gpu { char uuid[64]; unsigned long long used, total, mask; unsigned mhz, pid; };
static struct gpu now;
static int look(const char *uuid) {
    FILE *file = fopen(getenv("FAKE_GPUS"), "r");
    int found = 0;
    while (file && !found && fscanf(file, "%63s %llu %llu %u %llu %u", now.uuid, &now.used, &now.total,
                                    &now.mhz, &now.mask, &now.pid) == 6)
        found = strcmp(now.uuid, uuid) == 0;
    if (file) fclose(file);
    return found;
}
int nvmlInitWithFlags(unsigned flags) { return 0; }
const char *nvmlErrorString(int code) { return "error"; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (!look(uuid)) return 6;
    *handle = strdup(uuid);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *out) {
    if (!look(handle)) return 15;
    out[0] = now.total; out[1] = now.total - now.used; out[2] = now.used;
    return 0;
}
int nvmlDeviceGetClockInfo(void *handle, unsigned kind, unsigned *out) {
    if (!look(handle) || kind != 1) return 2;
    *out = now.mhz;
    return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *out) {
    if (!look(handle)) return 15;
    *out = now.mask;
    return 0;
}
struct process { unsigned pid; unsigned long long used; unsigned gpu, compute; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *out) {
    if (!look(handle)) return 15;
    if (!now.pid) { *count = 0; return 0; }
    if (*count < 1) { *count = 1; return 7; }
    *count = 1;
    out[0].pid = now.pid; out[0].used = now.used; out[0].gpu = out[0].compute = 0;
    return 0;
}
"""


@pytest.fixture
def driver(tmp_path):
    """The environment of a host with this driver, and what sets its answers."""
    (tmp_path / "nvml.c").write_text(SOURCE)
    library = tmp_path / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "nvml.c"], check=True)
    gpus = tmp_path / "gpus"

    def tell(*lines: tuple[object, ...]) -> None:
        beside = tmp_path / "gpus.new"
        beside.write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))
        beside.replace(gpus)

    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\ncase $1 in *uuid,pci*) echo "3, GPU-a, 00000000:1B:00.0";; esac\n')
    smi.chmod(0o755)
    tell(("GPU-a", 1 * GIB, 80 * GIB, 1980, 0, 0), ("GPU-b", 0, 80 * GIB, 1980, 0, 0))
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return {"LD_LIBRARY_PATH": str(tmp_path), "FAKE_GPUS": str(gpus), "PATH": path}, tell


ASK = """
import sys, time
from ultrabench.agent import nvml
from ultrabench.agent.gpus import VisibleGpu
nvml.SAMPLE_S = nvml.PATIENCE_S = 0.0
gauge = nvml.GpuGauge([VisibleGpu(n, u, "") for n, u in (("0", "GPU-a"), ("1", "GPU-b"), ("2", "GPU-gone"))])
print("up", flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""


@pytest.fixture
def gauge(driver):
    environment, tell = driver
    process = subprocess.Popen(
        [sys.executable, "-c", ASK], env={**os.environ, **environment},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "up\n"

    def ask(expression):
        process.stdin.write(expression + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    yield ask, tell
    process.communicate()


def test_clocks_and_what_slows_them(gauge):
    ask, tell = gauge
    ask("gauge.sample()")
    assert ask("gauge.clocks_hz, gauge.slowdowns") == "([1980000000.0, 1980000000.0], set())"
    # No work, and a power cap that was reached, are no troubles; the others are.
    tell(("GPU-a", 0, 80 * GIB, 1200, 0x1 | 0x4, 0), ("GPU-b", 0, 80 * GIB, 900, 0x8 | 0x40 | 0x80, 0))
    ask("gauge.sample()")
    assert ask("gauge.clocks_hz[2:]") == "[1200000000.0, 900000000.0]"
    assert (
        ask("sorted(gauge.slowdowns)") == "['hardware slowdown', 'hardware thermal slowdown', 'power brake']"
    )
    ask("gauge.clear()")
    assert ask("gauge.clocks_hz, gauge.slowdowns") == "([], set())"


@pytest.mark.parametrize(
    ("used", "pid", "told"),
    [
        (1 * GIB, 0, "None"),
        (int(2.5 * GIB), 0, "None"),
        (13 * GIB, 77, "GPU 0 still holds 12.0 GiB after the run: process 77"),
        (13 * GIB, 0, "GPU 0 still holds 12.0 GiB after the run: no process that is known"),
    ],
)
def test_memory_has_to_be_as_free_as_before(gauge, used, pid, told):
    ask, tell = gauge
    tell(("GPU-a", used, 80 * GIB, 1980, 0, pid), ("GPU-b", 0, 80 * GIB, 1980, 0, 0))
    assert ask("gauge.occupied(lambda: None)") == told


def test_a_gpu_that_fell_off_the_bus_tells_nothing(gauge):
    ask, tell = gauge
    tell()
    ask("gauge.sample()")
    assert ask("gauge.clocks_hz, gauge.occupied(lambda: None)") == "([], None)"


def test_without_a_driver_nothing_is_known():
    gauge = nvml.GpuGauge([VisibleGpu("0", "GPU-none", "")])
    gauge.sample()
    assert gauge.occupied(lambda: None) is None
    assert gauge.clocks_hz == []


STEPS = """
import json
report = open(os.environ["ULTRABENCH_REPORT"], "a", buffering=1)
for step in range(3):
    print(json.dumps({"event": "step", "step": step, "seconds": 0.1}), file=report)
here()
"""


def test_a_node_samples_its_gpus_and_says_which_one_is_not_free(tmp_path, driver):
    environment, tell = driver
    node = OneNode(tmp_path, STEPS, "cuda", **environment)
    node.wait_for(1)
    assert len(node.ask("node.news()")) == 3
    tell(("GPU-a", 41 * GIB, 80 * GIB, 1980, 0x40, 0))
    node.ask("setattr(nvml, 'PATIENCE_S', 0.2)")
    cleaned = node.ask("node.kill()")
    assert cleaned == {
        "left": "GPU 3 still holds 40.0 GiB after the run: no process that is known",
        "sm_clocks_hz": [1980e6], "slowdowns": [],
    }  # fmt: skip
    node.close()


def test_memory_that_the_driver_frees_late_is_waited_for(tmp_path, driver):
    environment, tell = driver
    node = OneNode(tmp_path, "here()", "cuda", **environment)
    node.wait_for(1)
    tell(("GPU-a", 41 * GIB, 80 * GIB, 1980, 0, 0))
    freed = threading.Timer(1.0, tell, [("GPU-a", 1 * GIB, 80 * GIB, 1980, 0, 0)])
    freed.start()
    assert node.ask("node.kill()")["left"] is None
    assert not freed.is_alive()
    node.close()
