"""Small real file systems that can be filled and made read-only, for code that runs beside the tests."""

import sys
from pathlib import Path
from textwrap import dedent

from tests import patience

ROOT = Path(__file__).resolve().parents[1]

PRELUDE = """
import os, subprocess, sys, threading, time
from pathlib import Path
disk = Path(sys.argv[1]) / "disk"
disk.mkdir(exist_ok=True)

def mount(*words):
    subprocess.run(["mount", *words], check=True)

def fill():
    with open(disk / "ballast", "ab", buffering=0) as ballast:
        for size in (65536, 4096, 1):
            try:
                while ballast.write(b"x" * size) == size:
                    pass
            except OSError:
                continue

def free():
    (disk / "ballast").unlink()

def read_only(on):
    mount("-o", "remount," + ("ro" if on else "rw"), str(disk))

def later(seconds, act, *words):
    threading.Timer(seconds, act, words).start()

mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk))
"""


def on_a_small_disk(folder: Path, code: str) -> str:
    """What `code` prints; for it, `disk` is a folder of 256 KiB with `fill`, `free`, `read_only` and `later`."""
    words = [
        "unshare", "--map-root-user", "--mount", sys.executable, "-c", PRELUDE + dedent(code), str(folder),
    ]  # fmt: skip
    process = patience.run(words, 280, cwd=ROOT)
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr}"
    return process.stdout
