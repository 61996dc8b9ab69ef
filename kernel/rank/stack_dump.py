"""Writes the stacks and the last collectives of a rank when signals ask for them."""

import faulthandler
import json
import os
import signal
import threading
from pathlib import Path
from typing import IO

import torch

from ultrabench.kernel.rank.flight_recorder import last_collectives
from ultrabench.rank_report import COLLECTIVES_SUFFIX, STACKS_SUFFIX, Report

_open_stack_files: list[IO[str]] = []


def dump_on_signals(report: Report) -> None:
    """Answers SIGUSR1 with the Python stacks and SIGUSR2 with the last collectives, beside the report.

    There are two signals because the second answer needs the interpreter lock, which a thread that hangs in C
    may hold. Call it in the main thread; it starts one thread, which sleeps. Other programs may use it too.
    """
    stacks_file = open(f"{report.path}{STACKS_SUFFIX}", "w")  # noqa: SIM115 - faulthandler writes to it
    _open_stack_files.append(stacks_file)
    faulthandler.register(signal.SIGUSR1, file=stacks_file, all_threads=True)
    signal_read_fd, signal_write_fd = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(signal_write_fd, False)
    # A handler in Python would wait for the main thread, which may be blocked in a collective. C code writes
    # a byte to the pipe instead, in whichever thread the signal arrives.
    signal.set_wakeup_fd(signal_write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGUSR2, lambda *_: None)
    signal.siginterrupt(signal.SIGUSR2, False)
    dump_path = Path(f"{report.path}{COLLECTIVES_SUFFIX}")
    threading.Thread(target=_answer_signals, args=(signal_read_fd, dump_path), daemon=True).start()
    report.write("stack_dump", pid=os.getpid())


def _answer_signals(signal_read_fd: int, dump_path: Path) -> None:
    while signal_byte := os.read(signal_read_fd, 1):
        if signal_byte[0] != signal.SIGUSR2:
            continue
        memory_bytes = _device_memory_bytes()
        dump = {"groups": last_collectives(), "memory": memory_bytes}
        temporary_path = dump_path.with_name(f"{dump_path.name}.new")
        temporary_path.write_text(json.dumps(dump))
        temporary_path.rename(dump_path)


def _device_memory_bytes() -> dict[str, int]:
    """Bytes of the caching allocator; the driver is not asked, since it may hang.

    From then on this thread uses the GPU whose memory the process holds. It would look at GPU 0 otherwise, and
    begin a context there when it asks which collectives have ended.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    torch.cuda.set_device(max(range(torch.cuda.device_count()), key=torch.cuda.memory_reserved))
    return {"allocated_bytes": torch.cuda.memory_allocated(), "reserved_bytes": torch.cuda.memory_reserved()}
