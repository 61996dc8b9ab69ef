"""Runs a command under a kernel that refuses hard links: `python -m tests.without_links ERRNO COMMAND...`.

A seccomp filter answers link(2) and linkat(2) with the error number, as exFAT, some FUSE and SMB mounts do,
for the command and everything it starts.
"""

import ctypes
import errno
import os
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LINK_CALLS = {"x86_64": (86, 265), "aarch64": (37, 37)}
"""Numbers of link and linkat."""


class Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32),
    ]  # fmt: skip


class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_uint16), ("filter", ctypes.POINTER(Instruction))]


def refuse_links(number: int) -> None:
    """Has the kernel answer every hard link of this process and its children with `number`."""
    link, linkat = LINK_CALLS[os.uname().machine]
    code = (Instruction * 5)(
        Instruction(LOAD, 0, 0, 0),  # the number of the system call
        Instruction(JUMP_IF_EQUAL, 1, 0, link),
        Instruction(JUMP_IF_EQUAL, 0, 1, linkat),
        Instruction(RETURN, 0, 0, ERRNO | number),
        Instruction(RETURN, 0, 0, ALLOW),
    )
    libc = ctypes.CDLL(None, use_errno=True)
    program = Program(len(code), code)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp is not allowed here")


if __name__ == "__main__":
    refuse_links(getattr(errno, sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
