"""GPUs as NVML tells, through a small library of our own with the names of the driver's: this needs no GPU.

What it answers is in a file: one line a GPU with uuid, PCI bus, bytes used and in all, MHz, the mask of reasons,
and the pid of one process or 0.
"""

import os
import pwd
import subprocess
import sys
import threading

import pytest

from tests.unit.test_cleanup import OneNode
from ultrabench.agent.ranks import gpus
from ultrabench.agent.ranks.gpus import VisibleGpu, foreign_processes, visible_gpus

GIB = 2**30
SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
struct gpu { char uuid[64], bus[32]; unsigned long long used, total, mask; unsigned mhz, pid; };
static struct gpu now;
static int look(const char *uuid, int number) {
    FILE *file = fopen(getenv("FAKE_GPUS"), "r");
    int found = 0, at = 0;
    while (file && !found && fscanf(file, "%63s %31s %llu %llu %u %llu %u", now.uuid, now.bus, &now.used,
                                    &now.total, &now.mhz, &now.mask, &now.pid) == 7)
        found = uuid ? strcmp(now.uuid, uuid) == 0 : at++ == number;
    if (file) fclose(file);
    return found;
}
int nvmlInitWithFlags(unsigned flags) {
    if (getenv("FAKE_HANG")) sleep(60);
    return getenv("FAKE_FAILURE") ? 9 : 0;
}
const char *nvmlErrorString(int code) { return "error"; }
int nvmlDeviceGetCount_v2(unsigned *count) {
    if (getenv("FAKE_FAILURE")) return 1;
    for (*count = 0; look(NULL, *count); ++*count);
    return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **handle) {
    if (!look(NULL, number)) return 6;
    *handle = strdup(now.uuid);
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    if (!look(uuid, 0)) return 6;
    *handle = strdup(uuid);
    return 0;
}
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) { strncpy(uuid, handle, length); return 0; }
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *out) {
    if (!look(handle, 0)) return 15;
    memset(out, 0, sizeof *out);
    strcpy(out->bus_id, now.bus);
    return 0;
}
int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    if (pid > 4194304) return 6;
    strncpy(name, "/usr/bin/python", length);
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *out) {
    if (!look(handle, 0)) return 15;
    out[0] = now.total; out[1] = now.total - now.used; out[2] = now.used;
    return 0;
}
int nvmlDeviceGetClockInfo(void *handle, unsigned kind, unsigned *out) {
    if (!look(handle, 0) || kind != 1) return 2;
    *out = now.mhz;
    return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *out) {
    if (!look(handle, 0)) return 15;
    *out = now.mask;
    return 0;
}
struct process { unsigned pid; unsigned long long used; unsigned gpu, compute; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *out) {
    if (!look(handle, 0)) return 15;
    if (!now.pid) { *count = 0; return 0; }
    if (*count < 1) { *count = 1; return 7; }
    *count = 1;
    out[0].pid = now.pid; out[0].used = now.used ? now.used : ~0ULL; out[0].gpu = out[0].compute = 0;
    return 0;
}
"""
A, B, C = "00000000:1B:00.0", "00000000:43:00.0", "00000001:C3:00.0"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(SOURCE)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", folder / "nvml.c"], check=True
    )
    return folder


@pytest.fixture
def driver(tmp_path, library, monkeypatch):
    """Sets the answers of this driver, which processes started from here on find."""
    answers = tmp_path / "gpus"

    def tell(*lines: tuple[object, ...]) -> None:
        beside = tmp_path / "gpus.new"
        beside.write_text("".join(" ".join(map(str, line)) + "\n" for line in lines))
        beside.replace(answers)

    tell(("GPU-a", A, 1 * GIB, 80 * GIB, 1980, 0, 0), ("GPU-b", B, 0, 80 * GIB, 1980, 0, 0))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("FAKE_GPUS", str(answers))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tell


def nobody(pid):
    return False


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0", "1", "2"]),
        ("2,0", ["2", "0"]),
        (" 1 ", ["1"]),
        ("GPU-bb22,GPU-aa00", ["2", "0"]),
        ("GPU-bb,0", ["2", "0"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0,7,1", ["0"]),
        ("GPU-aa", []),
        ("MIG-aa00", []),
    ],
)
def test_visible_gpus_are_those_cuda_would_take(driver, monkeypatch, visible, expected):
    buses = {"0": A, "1": B, "2": C}
    uuids = {"0": "GPU-aa00", "1": "GPU-aa11", "2": "GPU-bb22"}
    driver(*((uuids[n], buses[n], 0, GIB, 1980, 0, 0) for n in "012"))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [(g.number, g.uuid, g.bus_id) for g in visible_gpus()] == [
        (n, uuids[n], buses[n]) for n in expected
    ]


def test_every_process_that_is_not_ours_is_named(driver, monkeypatch):
    me, user = os.getpid(), pwd.getpwuid(os.getuid()).pw_name
    driver(
        ("GPU-a", A, GIB, 80 * GIB, 1980, 0, me), ("GPU-b", B, 7, 80 * GIB, 1980, 0, 4242),
        ("GPU-c", C, 0, 80 * GIB, 1980, 0, 99999999),
    )  # fmt: skip
    mine = f"process {me} (python, user {user}) on GPU 0 with 1024 MiB"
    hidden = "process 99999999 (unknown program, unknown user) on GPU 2"
    assert foreign_processes(lambda pid: pid == 4242) == [mine, hidden]
    assert foreign_processes(lambda pid: True) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert foreign_processes(lambda pid: pid == 4242) == [mine]


def test_no_processes_no_complaint(driver):
    assert foreign_processes(nobody) == []


def test_a_failing_driver_knows_nothing(driver, monkeypatch):
    monkeypatch.setenv("FAKE_FAILURE", "1")
    assert visible_gpus() == []
    assert foreign_processes(nobody) == []


def test_a_hanging_driver_is_given_up(driver, monkeypatch):
    monkeypatch.setenv("FAKE_HANG", "1")
    monkeypatch.setattr(gpus, "LIST_S", 1.0)
    assert visible_gpus() == []


def test_without_a_driver_there_are_no_gpus():
    assert visible_gpus() == []
    assert foreign_processes(nobody) == []


ASK = """
import sys, time
from ultrabench.agent.ranks import gpus
gpus.SAMPLE_S = gpus.FREE_S = 0.0
gauge = gpus.GpuGauge([gpus.VisibleGpu(n, u, "") for n, u in (("0", "GPU-a"), ("1", "GPU-b"), ("2", "GPU-gone"))])
print("up", flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""


@pytest.fixture
def gauge(driver):
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", ASK], stdin=pipe, stdout=pipe, text=True)
    assert process.stdout.readline() == "up\n"

    def ask(expression):
        process.stdin.write(expression + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    yield ask, driver
    process.communicate()


def test_clocks_and_what_slows_them(gauge):
    ask, tell = gauge
    ask("gauge.sample()")
    assert ask("gauge.clocks_hz, gauge.slowdowns") == "([1980000000.0, 1980000000.0], set())"
    # No work, and a power cap that was reached, are no troubles; the others are.
    tell(("GPU-a", A, 0, 80 * GIB, 1200, 0x1 | 0x4, 0), ("GPU-b", B, 0, 80 * GIB, 900, 0x8 | 0x40 | 0x80, 0))
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
    tell(("GPU-a", A, used, 80 * GIB, 1980, 0, pid), ("GPU-b", B, 0, 80 * GIB, 1980, 0, 0))
    assert ask("gauge.occupied(lambda: None)") == told


def test_a_gpu_that_fell_off_the_bus_tells_nothing(gauge):
    ask, tell = gauge
    tell()
    ask("gauge.sample()")
    assert ask("gauge.clocks_hz, gauge.occupied(lambda: None)") == "([], None)"


def test_without_a_driver_nothing_is_known():
    gauge = gpus.GpuGauge([VisibleGpu("0", "GPU-none", "")])
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
    node = OneNode(tmp_path, STEPS, "cuda")
    node.wait_for(1)
    assert len(node.ask("node.rank_events()")) == 3
    driver(("GPU-a", A, 41 * GIB, 80 * GIB, 1980, 0x40, 0))
    node.ask("setattr(gpus, 'FREE_S', 0.2)")
    cleaned = node.ask("node.kill()")
    assert cleaned == {
        "left": "GPU 0 still holds 40.0 GiB after the run: no process that is known",
        "sm_clocks_hz": [1980e6], "slowdowns": [],
    }  # fmt: skip
    node.close()


def test_memory_that_the_driver_frees_late_is_waited_for(tmp_path, driver):
    node = OneNode(tmp_path, "here()", "cuda")
    node.wait_for(1)
    driver(("GPU-a", A, 41 * GIB, 80 * GIB, 1980, 0, 0))
    freed = threading.Timer(1.0, driver, [("GPU-a", A, 1 * GIB, 80 * GIB, 1980, 0, 0)])
    freed.start()
    assert node.ask("node.kill()")["left"] is None
    assert not freed.is_alive()
    node.close()
