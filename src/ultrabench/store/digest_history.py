"""What GPUs computed in the past: the preflights of all sweeps of a results folder, and calls of `doctor --verify`.

The latter are kept in RESULTS_DIR/gpu-digests, a file for each host, to which a line of JSON is appended.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ultrabench.device_digest import DatedDigest, dated_digests
from ultrabench.store.events import DECODERS
from ultrabench.store.folder import SweepFolder, sweep_dirs
from ultrabench.store.journal import read_journal
from ultrabench.store.state import fold

FOLDER_NAME = "gpu-digests"
"""Name of the folder in the results folder."""
VERIFIED = "doctor --verify"
"""Source of digests that no preflight computed."""


def append_verified(
    results_dir: Path, host: str, digests: list[dict[str, Any]], time_s: float
) -> list[DatedDigest]:
    """Adds the digests of the devices of a host, as their chain wrote them; returns them.

    Raises:
        OSError: the folder cannot be written.
    """
    path = results_dir / FOLDER_NAME / f"{host}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    line = {"time": time_s, "nodes": [{"host": host, "digests": digests}]}
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    return [*_dated(line)]


def verified_digests(results_dir: Path) -> Iterator[DatedDigest]:
    """The digests that `append_verified` has added; damaged lines are left out."""
    folder = results_dir / FOLDER_NAME
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            for text in (folder / name).read_text(encoding="utf-8", errors="replace").splitlines():
                with contextlib.suppress(ValueError):
                    yield from _dated(json.loads(text))


def _dated(line: Any) -> Iterator[DatedDigest]:
    if isinstance(line, dict) and isinstance(time_s := line.get("time"), int | float):
        yield from dated_digests(line.get("nodes"), f"{VERIFIED} {time_s}", time_s)


def past_digests(results_dir: Path) -> Iterator[DatedDigest]:
    """All digests that a results folder has; sweeps that cannot be read are left out."""
    for path in sweep_dirs(results_dir):
        with contextlib.suppress(OSError):
            decoders = {"preflight": DECODERS["preflight"]}
            yield from fold(read_journal(SweepFolder(path).journal, decoders=decoders)).digests()
    yield from verified_digests(results_dir)
