"""Says which sweep a folder holds: its id stays the same whatever its path and name, and a copy gets one of its own."""

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from ultrabench.errors import SweepFolderError, may_pass
from ultrabench.store.allocation import read_allocation
from ultrabench.store.claim import claim, claim_content
from ultrabench.store.events import Copied, Line
from ultrabench.store.folder import SweepFolder
from ultrabench.store.journal import JournalWriter, read_journal
from ultrabench.store.state import fold
from ultrabench.store.sweep_json import (
    FolderLocation,
    SweepJson,
    location_of,
    read_sweep_json,
    update_sweep_json,
)

OLD_COPY = "unknown"
"""What `copy_of` says of a copy whose original has no id, since an earlier version wrote it."""

_IDENTITY_FIELDS = ("id", "sweep", "first_name", "place", "copy_of")
"""Fields of sweep.json that say which sweep a folder holds."""


def new_sweep_id() -> str:
    """A random id for a sweep, 16 hexadecimal digits."""
    return secrets.token_hex(8)


def ensure_identity(folder: SweepFolder, say: Callable[[str], None] = lambda message: None) -> SweepJson:
    """The content of sweep.json, after a sweep without an id, a moved folder and a copy were put in order.

    A command calls this before it first writes to a sweep: an old folder gets an id, a moved one keeps its id, and a
    copy gets a new id and gives up the jobs of its original.

    Raises:
        SweepFolderError: sweep.json cannot be read or written.
    """
    sweep_json, location = read_sweep_json(folder), location_of(folder)
    if sweep_json.id and sweep_json.place == location:
        return sweep_json
    original = _original_of(folder, sweep_json, location)
    try:
        if original is not None:
            fact = f"{folder.path} is a copy of {original}"
            say(f"{fact}: it becomes a sweep of its own, without the jobs of {original}")
            copied_event = _copied_event(folder, sweep_json)
            copy_of = copied_event.copy_of
            JournalWriter(folder.journal, "copy").write(copied_event)
            for lease_path in folder.leases.glob("*.json"):  # of launchers that follow the original
                lease_path.unlink(missing_ok=True)
            sweep_json = replace(
                sweep_json,
                id=_first_id(folder, copy_of),
                copy_of=copy_of,
                sweep=folder.path.name,
                first_name="",
            )
        elif not sweep_json.id:
            sweep_json = replace(sweep_json, id=_first_id(folder, "first"), first_name=sweep_json.sweep)
        sweep_json = replace(sweep_json, place=location)
        update_sweep_json(folder, {name: getattr(sweep_json, name) for name in _IDENTITY_FIELDS})
    except OSError as error:
        failure = f"cannot write {folder.sweep_json}: {error.strerror}; make it writable or free space"
        raise (error if may_pass(error) else SweepFolderError(failure)) from error
    return sweep_json


def lines_of_new_copy(folder: SweepFolder) -> tuple[Line, ...]:
    """The line that `ensure_identity` would write into the journal of a copy; none for other folders.

    With it, commands that only read count no jobs of the original as those of a copy.

    Raises:
        SweepFolderError: sweep.json cannot be read.
    """
    sweep_json, location = read_sweep_json(folder), location_of(folder)
    has_identity = sweep_json.id and sweep_json.place == location
    if has_identity or _original_of(folder, sweep_json, location) is None:
        return ()
    return (Line(event=_copied_event(folder, sweep_json), writer="copy", seq=0, time=0.0),)


def _copied_event(folder: SweepFolder, sweep_json: SweepJson) -> Copied:
    """The line by which a copy gives up the jobs of its original."""
    return Copied(copy_of=sweep_json.id or OLD_COPY, allocations=_allocation_names(folder))


def _allocation_names(folder: SweepFolder) -> tuple[str, ...]:
    """The allocations that the journal or their own files name."""
    names = {*fold(read_journal(folder.journal)).allocations}
    with contextlib.suppress(FileNotFoundError):
        names |= {entry.name for entry in os.scandir(folder.allocations) if entry.is_dir()}
    return tuple(sorted(names))


def _first_id(folder: SweepFolder, occasion: str) -> str:
    """A new id; of commands that ask at the same time, all get the same one."""
    folder.claims.mkdir(exist_ok=True)
    key = f"identity-{occasion}"
    claim(folder.claims, key, {"id": new_sweep_id()})
    return str((claim_content(folder.claims, key) or {}).get("id") or new_sweep_id())


def _original_of(folder: SweepFolder, sweep_json: SweepJson, location: FolderLocation) -> Path | None:
    """The folder of which this one is a copy; None for one that stayed, was moved, or whose original is gone."""
    if not sweep_json.id:
        return _original_by_allocations(folder, sweep_json)
    recorded_location = sweep_json.place
    if recorded_location is None or (location.device, location.inode) == (
        recorded_location.device,
        recorded_location.inode,
    ):
        return None
    recorded_path = Path(recorded_location.path)
    for path in (
        recorded_path,
        *_folders_with_inode(recorded_location, recorded_path.parent, folder.path.resolve().parent),
    ):
        if _id_in(path) == sweep_json.id and not is_same_folder(path, folder.path):
            return path
    return None


def _folders_with_inode(recorded_location: FolderLocation, *parents: Path) -> Iterator[Path]:
    """The folders in `parents` that have the recorded inode, such as an original that was renamed
    after it was copied.
    """
    for parent in parents:
        with contextlib.suppress(OSError):
            for entry in os.scandir(parent):
                if entry.inode() == recorded_location.inode:
                    yield Path(entry.path)


def _original_by_allocations(folder: SweepFolder, sweep_json: SweepJson) -> Path | None:
    """The folder that the allocations of a sweep without an id name, if it exists and holds the same sweep."""
    with contextlib.suppress(OSError, SweepFolderError):
        for name in sorted(os.listdir(folder.allocations)):
            with contextlib.suppress(SweepFolderError):
                path = Path(read_allocation(folder.allocations / name).sweep_dir)
                has_allocation = (path / "allocations" / name / "allocation.json").exists()
                is_other = has_allocation and not is_same_folder(path, folder.path)
                if is_other and read_sweep_json(SweepFolder(path)).provenance == sweep_json.provenance:
                    return path
                return None
    return None


def _id_in(path: Path) -> str | None:
    """The id in the sweep.json of a folder; None where there is none."""
    try:
        content = json.loads((path / "sweep.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content.get("id") if isinstance(content, dict) else None


def is_same_folder(path: Path, other_path: Path) -> bool:
    """Whether two paths lead to one folder, also by a link, a bind mount, or two mounts of one file system."""
    try:
        stat, other_stat = path.stat(), other_path.stat()
    except OSError:
        return False
    if stat.st_ino != other_stat.st_ino or stat.st_dev == other_stat.st_dev:
        return os.path.samestat(stat, other_stat)
    # Two file systems may use the same number, and two mounts of one file system may have different devices.
    probe_name = f".probe-{secrets.token_hex(8)}"
    try:
        (path / probe_name).touch()
        return (other_path / probe_name).exists()
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            (path / probe_name).unlink()
