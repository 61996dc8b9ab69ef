"""The folder of a sweep: the paths of its files, and how a SWEEP argument is resolved to a folder."""

import contextlib
import os
import secrets
import shlex
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ultrabench.errors import ClusterError, SweepFolderError, unknown_name
from ultrabench.record import content_id
from ultrabench.run import AttemptKey


class _PathInFolder:
    """An attribute of `SweepFolder` that is a path inside the folder."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, folder: "SweepFolder", owner: type) -> Path:
        return folder.path.joinpath(*self._parts)


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """The paths of one sweep: sweep.json, plan.parquet, journal/, claims/, allocations/, logs/."""

    path: Path
    sweep_json = _PathInFolder("sweep.json")
    """Path of sweep.json, which holds what all runs of the sweep share and is written once."""
    plan = _PathInFolder("plan.parquet")
    """Path of plan.parquet, which holds every candidate with its decision."""
    journal = _PathInFolder("journal")
    """Folder of the journal files, one for each writer."""
    claims = _PathInFolder("claims")
    """Folder of the claims, one file for each attempt, which names its owner."""
    allocations = _PathInFolder("allocations")
    """Folder that holds one folder for each allocation, written before it is submitted."""
    secrets = _PathInFolder("allocations", "secrets.json")
    """File with the secrets of the training program's environment, which only its owner can read."""
    leases = _PathInFolder("leases")
    """Folder of the leases, one file for each launcher that follows the sweep."""
    scripts = _PathInFolder("scripts")
    """Folder of the job scripts that were submitted."""
    pause = _PathInFolder("pause")
    """File made by `sweep pause`; while it exists, agents begin no new run."""

    @property
    def name(self) -> str:
        """Name of the sweep, which is that of its folder."""
        return self.path.name

    @property
    def display_name(self) -> str:
        """The SWEEP argument of commands that users copy: its name if it is in ./results, else its path."""
        return shlex.quote(self.name if self.path.parent == Path.cwd() / "results" else str(self.path))

    def log_folder(self, key: AttemptKey) -> Path:
        """Folder of the logs and the evidence of one attempt."""
        return self.path / "logs" / key.run_id / f"{key.repeat}.{key.attempt}"

    def checkpoint(self, folder: Path, sweep_id: str, key: AttemptKey | Literal["*"]) -> Path:
        """Where in `folder`, which sweeps may share, an attempt saves its state; * makes a pattern for all of them.

        Args:
            sweep_id: id of the sweep; empty for a sweep of an earlier version, which used the path of its folder.
        """
        return folder / f"checkpoint-{(sweep_id or content_id(str(self.path)))[:8]}-{key}"

    def require_writable(self) -> None:
        """Makes a folder where this one is or will be, and removes it again.

        Raises:
            SweepFolderError: the folder cannot be written.
        """
        existing_folder = next(path for path in (self.path, *self.path.parents) if path.exists())
        try:
            try_to_write(existing_folder)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> SweepFolderError:
        failure_text = f"cannot write the results folder {self.path}: {error.strerror}"
        return SweepFolderError(f"{failure_text}; choose another with results_dir=FOLDER")

    def create(self) -> None:
        """Makes the folder and its subfolders, and checks that hard links work, which claims need.

        Raises:
            SweepFolderError: the folder cannot be written, or its file system has no hard links.
        """
        test_file = self.claims / f".probe-{uuid.uuid4().hex}"
        try:
            for folder in (self.journal, self.claims, self.allocations):
                folder.mkdir(parents=True, exist_ok=True)
            test_file.write_text("")
            _require_links(test_file)
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            with contextlib.suppress(OSError):
                test_file.unlink()

    def require_present(self) -> None:
        """Raises when the folder was deleted or renamed while the sweep runs.

        Raises:
            ClusterError: the folder is gone.
        """
        try:
            self.sweep_json.stat()
        except (FileNotFoundError, NotADirectoryError):
            failure = f"the results folder {self.path} is gone: deleted, renamed or no longer mounted"
            raise ClusterError(f"{failure}; restore it and launch again (jobs end by themselves)") from None
        except OSError:
            return  # a file server that does not answer has not lost the folder


def try_to_write(folder: Path) -> None:
    """Makes a folder inside this one and removes it again; raises OSError if that is impossible."""
    os.rmdir(tempfile.mkdtemp(dir=folder, prefix=".probe-"))


def _require_links(test_file: Path) -> None:
    """Raises SweepFolderError unless the file system of `test_file` can give it a second name."""
    link_path, reason = test_file.with_name(f"{test_file.name}.2"), "the link count stays 1"
    try:
        os.link(test_file, link_path)
        if test_file.stat().st_nlink == 2:
            return
    except OSError as error:
        reason = str(error.strerror)
    finally:
        with contextlib.suppress(OSError):
            link_path.unlink()
    failure = f"the file system of {test_file.parents[1]} has no hard links ({reason}), without which"
    raise SweepFolderError(f"{failure} a run may be made twice; choose another with results_dir=FOLDER")


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Writes `content` to a temporary file beside `path` and renames it, so that no reader sees half a file.

    Raises:
        OSError: the file could not be written; the temporary file is removed.
    """
    # Nobody can foresee the name, so that no file or link of somebody else is written through.
    temp_path, new_flags = path.with_name(f".{path.name}.{secrets.token_hex(8)}"), os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(temp_path, "wb", opener=lambda name, flags: os.open(name, flags | new_flags, mode)) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temp_path.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temp_path.unlink()
        raise


def find_sweep(sweep: str | None, results_dir: Path = Path("results")) -> SweepFolder:
    """The sweep that a SWEEP argument means: a path, or a name under `results_dir`; None means the newest.

    Raises:
        SweepFolderError: there is no such sweep.
    """
    if sweep is not None and sweep.endswith(".parquet") and not Path(sweep).is_dir():
        remedy = f"name a sweep, or read the file: ultrabench sweep top {sweep}, or ultrabench report {sweep}"
        raise SweepFolderError(f"{sweep} is a file of results, not the folder of a sweep; {remedy}")
    if sweep is not None:
        paths = Path(sweep), results_dir / sweep
        for path in paths:
            if _may_be_sweep(path):
                return SweepFolder(path.absolute())
        for path in paths:
            if (path / "journal").is_dir():
                remedy = "wait if a launch is starting, else run the launch command again (results are kept)"
                raise SweepFolderError(f"{path / 'sweep.json'} is missing; {remedy}")
    folders = sweep_dirs(results_dir)
    if sweep is not None and folders:
        raise SweepFolderError(unknown_name("sweep", sweep, (folder.name for folder in folders)))
    if not folders:
        problem_text = f"no sweep {sweep!r}: there is no sweep" if sweep else "no sweep"
        raise SweepFolderError(f"{problem_text} in {results_dir}/; start one with: ultrabench sweep launch")
    return SweepFolder(newest_first(folders)[0].absolute())


def sweep_dirs(results_dir: Path) -> list[Path]:
    """The folders of all sweeps in `results_dir`, sorted by name; of several links to one folder, only the first.

    A folder whose name begins with a dot is being removed and does not count.
    """
    folders = [folder for folder in results_dir.glob("[!.]*") if _may_be_sweep(folder)]
    folder_by_real_path: dict[Path, Path] = {}
    for folder in sorted(folders, key=lambda folder: (folder.is_symlink(), folder)):
        folder_by_real_path.setdefault(folder.resolve(), folder)
    return sorted(folder_by_real_path.values())


def _may_be_sweep(folder: Path) -> bool:
    """Whether a folder has a sweep.json, or may not be searched for one."""
    try:
        (folder / "sweep.json").lstat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def newest_first(folders: Iterable[Path]) -> list[Path]:
    """The folders of sweeps, the one that was written last first."""
    return sorted(sorted(folders), key=last_written_s, reverse=True)


def last_written_s(folder: Path) -> float:
    """Time stamp of the newest journal file of a sweep, or of its sweep.json if it has no journal."""
    times_s = [mtime_s(path, follow_symlinks=False) for path in folder.glob("journal/*.jsonl")]
    return max(times_s, default=mtime_s(folder / "sweep.json"))


def mtime_s(path: Path, *, follow_symlinks: bool = True) -> float:
    """Time stamp of a file in seconds since 1970; 0 if the file is gone or cannot be seen."""
    try:
        return path.stat(follow_symlinks=follow_symlinks).st_mtime
    except OSError:
        return 0.0
