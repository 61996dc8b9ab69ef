"""A training program of a user's that fails in a chosen way: python faulty.py FAULT [RANK].

The ranks sum a number over gloo again and again; rank RANK (1) commits the fault in the third step.
"""

import ctypes
import datetime
import json
import mmap
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist

fault, culprit = sys.argv[1].removeprefix("peers_sleep_"), int((*sys.argv[2:], "1")[0])
peers_sleep = fault != sys.argv[1]
rank = int(os.environ["RANK"])
report = open(os.environ["ULTRABENCH_REPORT"], "a", buffering=1)


def say(event, **values):
    print(json.dumps({"event": event, **values}), file=report)


def limited(extra):
    used = int(open("/proc/self/status").read().partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + extra, resource.RLIM_INFINITY))


def bus_error():
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        held = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        held[0] = 1


def write_to_full_disk():
    with open("/dev/full", "w") as file:
        file.write("checkpoint")


def caught_memory_error():
    try:
        bytearray(2**60)
    except MemoryError:
        traceback.print_exc()
    print("CUDA out of memory. Tried to allocate 2.00 GiB: retrying with a smaller batch", flush=True)


libc = ctypes.CDLL(None)
FAULTS = {
    "exception": lambda: torch.zeros(2, 3) @ torch.zeros(2, 3),
    "key_error": lambda: {}["model.layers.31.weight"], "assertion": lambda: check(1, 2),
    "c_assertion": lambda: libc.__assert_fail(b"size > 0", b"kernel.c", 12, b"launch"),
    "cpu_oom": lambda: (limited(2**26), torch.zeros(2**28)),
    "memory_error": lambda: (limited(2**26), bytearray(2**30)), "host_oom": lambda: bytearray(b"1") * 2**32,
    "bad_alloc": lambda: ctypes.CDLL("libstdc++.so.6")._Znwm(ctypes.c_size_t(2**62)),
    "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "sigfpe": lambda: os.kill(os.getpid(), signal.SIGFPE), "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort, "bus_error": bus_error,
    "import_error": lambda: __import__("flash_attention_that_is_not_installed"),
    "missing_library": lambda: ctypes.CDLL("libcudart.so.9.9"),
    "undefined_symbol": lambda: libc.ncclCommThatIsTooNew, "disk_full": write_to_full_disk,
    "exit_early": lambda: os._exit(0), "exit_3": lambda: os._exit(3),
    "refused": lambda: socket.create_connection(("127.0.0.1", 1)),
    "caught_then_killed": lambda: (caught_memory_error(), os.kill(os.getpid(), signal.SIGKILL)),
    "caught_then_fine": caught_memory_error, "late": lambda: time.sleep(1000),
}  # fmt: skip


def check(a, b):
    assert a == b, f"gradients differ: {a} and {b}"


patience = datetime.timedelta(seconds=2 if fault == "late" else 600)
say("phase", name="process_group")
dist.init_process_group("gloo", timeout=patience)
say("phase", name="train")
for step in range(1, 11):
    if step == 3 and rank == culprit and fault in FAULTS:
        FAULTS[fault]()
    elif step == 3 and peers_sleep:
        time.sleep(1000)
    value = torch.tensor([float("nan") if fault == "nan" and step == 3 else 1.0])
    dist.all_reduce(value)
    say("step", step=step, seconds=0.01, loss=float(value))
say("done")
