"""Reads and writes sweep.json, which holds what all runs share and is written at the first launch."""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ultrabench
from ultrabench.errors import ConfigError, SweepFolderError
from ultrabench.hardware import Hardware, Peak
from ultrabench.kernel_config import KernelConfig
from ultrabench.model_shape import ModelShape
from ultrabench.record import from_dict, to_dict
from ultrabench.run import Workload
from ultrabench.store.events import SCHEMA_VERSION
from ultrabench.store.folder import SweepFolder, write_whole

FULL_SHARE = 0.9
"""Smallest share of the cores with which a measurement of their peak counts as undisturbed by other programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderLocation:
    """Where the folder of a sweep is."""

    path: str
    """Real path, without links."""
    device: int
    """Number of its file system, which may differ between hosts."""
    inode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepJson:
    """The content of sweep.json."""

    sweep: str
    """Name of the sweep."""
    id: str = ""
    """Random hexadecimal digits by which the sweep is known whatever its path and name; empty if an earlier version
    wrote the file and nothing was written since."""
    first_name: str = ""
    """Name of a sweep of an earlier version when it got its id, by which trackers know it; empty for others."""
    place: FolderLocation | None = None
    """Where the folder was when it was last written; a copy is known by another place."""
    copy_of: str = ""
    """Id of the sweep whose folder was copied to make this one; empty if this is no copy."""
    cluster: str | None
    hardware: Hardware
    kernel: KernelConfig
    kernel_digest: str
    """Digest of the training program at the first launch."""
    models: tuple[ModelShape, ...]
    """Models of the first launch; later launches may have others."""
    workload: Workload
    core_flops_per_s: float | None = None
    """Measured rate of one CPU core; None where the hardware table has a rate."""
    cores: int | None = None
    """CPU cores of the machine that launched the sweep."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Facts of the machine that launched the sweep."""
    provenance: dict[str, Any]
    """Who launched what, from where, and with which version of ultrabench."""
    config: dict[str, Any]
    """The resolved configuration of the first launch."""

    @property
    def key(self) -> str:
        """Eight hex digits by which trackers know the sweep, also after it was renamed."""
        return key_of(self.first_name or self.id or self.sweep)

    def peak(self, nodes: int, precision: str) -> Peak | None:
        """The peak rate of one rank, which mfu is relative to; None where it is unknown."""
        if not self.hardware.peak_flops_per_s and (self.core_flops_per_s is None or self.cores is None):
            return None
        peak = self.hardware.peak(precision, nodes, self.core_flops_per_s, self.cores or 1)
        core_share = self.environment.get("peak_core_share")
        if self.hardware.peak_flops_per_s or not isinstance(core_share, float) or core_share >= FULL_SHARE:
            return peak
        return replace(peak, core_share=core_share)


_REMEDY = "delete it and run the launch command again (the journal holds the results)"
"""What to do with a sweep.json that cannot be used."""


def read_sweep_json(folder: SweepFolder) -> SweepJson:
    """The content of sweep.json in a folder.

    Raises:
        SweepFolderError: there is no such file, it cannot be read, or it has another schema version.
    """
    if content := find_sweep_json(folder):
        return content
    raise SweepFolderError(f"no sweep.json in {folder.path}; is it a sweep folder?")


def find_sweep_json(folder: SweepFolder) -> SweepJson | None:
    """The content of sweep.json in a folder; None when there is no such file.

    Raises:
        SweepFolderError: the file cannot be read, or has another schema version.
    """
    path = folder.sweep_json
    try:
        if not (json_text := path.read_text()):
            raise SweepFolderError(f"{path} is empty, perhaps after a crash of the file system; {_REMEDY}")
        json_value = json.loads(json_text)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise SweepFolderError(
            f"a parent of {folder.path} is a file; choose another results_dir=FOLDER"
        ) from error
    except OSError as error:
        raise SweepFolderError(f"cannot read {path}: {error.strerror}; is it a sweep folder?") from error
    except (ValueError, RecursionError) as error:
        raise SweepFolderError(f"{path} is damaged ({error}); {_REMEDY}") from error
    _require_schema(path, json_value)
    try:
        return from_dict(SweepJson, json_value, where="sweep.json", skip_unknown=True)
    except (ConfigError, ValueError, TypeError) as error:
        fact = getattr(error, "fact", error)
        raise SweepFolderError(f"{path} is damaged ({fact}); {_REMEDY}") from error


def _require_schema(path: Path, json_value: Any) -> None:
    """Raises SweepFolderError unless the content of the file at `path` has the schema version of this ultrabench."""
    version = json_value.get("schema_version") if isinstance(json_value, dict) else None
    if not isinstance(version, int):
        raise SweepFolderError(f"{path} has no schema_version; is it a sweep folder?")
    if version != SCHEMA_VERSION:
        provenance = json_value.get("provenance")
        writer_version = provenance.get("version") if isinstance(provenance, dict) else None
        writer_text = f"written by ultrabench {writer_version or 'of an unknown version'}"
        fact = f"{path} has schema {version}, {writer_text}"
        rule = f"ultrabench {ultrabench.__version__} reads schema {SCHEMA_VERSION} only"
        remedy = "read it with the version that wrote it, or launch again into another folder with name=NAME"
        raise SweepFolderError(f"{fact}; {rule}: {remedy}")


def write_sweep_json(folder: SweepFolder, content: SweepJson) -> None:
    """Writes sweep.json; a reader sees the whole new file or the old one.

    Raises:
        OSError: the file could not be written.
    """
    json_value = {"schema_version": SCHEMA_VERSION, **to_dict(content)}
    write_whole(folder.sweep_json, json.dumps(json_value, indent=1) + "\n")


def key_of(text: str) -> str:
    """Eight hex digits that stand for the id or the name of a sweep."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def location_of(folder: SweepFolder) -> FolderLocation:
    """Where the folder of a sweep is now.

    Raises:
        SweepFolderError: the folder cannot be read.
    """
    try:
        stat = folder.path.stat()
    except OSError as error:
        raise SweepFolderError(
            f"cannot read {folder.path}: {error.strerror}; is it a sweep folder?"
        ) from error
    return FolderLocation(path=str(folder.path.resolve()), device=stat.st_dev, inode=stat.st_ino)


def update_sweep_json(folder: SweepFolder, values: dict[str, Any]) -> None:
    """Writes some values into sweep.json; those that only other versions know stay.

    Raises:
        OSError: the file could not be written.
    """
    json_value = json.loads(folder.sweep_json.read_text())
    changes = {name: to_dict(v) if isinstance(v, FolderLocation) else v for name, v in values.items()}
    write_whole(folder.sweep_json, json.dumps(json_value | changes, indent=1) + "\n")


def create_sweep_json(folder: SweepFolder, content: SweepJson) -> SweepJson:
    """Writes sweep.json in one step unless it exists; returns its content, which may be another launch's.

    The complete file is linked to its name, so that of two launches of one new name exactly one creates the sweep. The
    link count decides, since on NFS the answer of link may be lost.

    Raises:
        OSError: the file could not be written.
        SweepFolderError: the file of another launch cannot be read.
    """
    temp_folder = SweepFolder(folder.path / f".new-{secrets.token_hex(8)}")
    temp_folder.path.mkdir()
    try:
        write_sweep_json(temp_folder, content)
        with contextlib.suppress(FileExistsError):
            os.link(temp_folder.sweep_json, folder.sweep_json)
        return content if temp_folder.sweep_json.stat().st_nlink == 2 else read_sweep_json(folder)
    finally:
        shutil.rmtree(temp_folder.path, ignore_errors=True)
