"""Renames and removes the folder of a sweep."""

import json
import secrets
import shutil
from pathlib import Path

from ultrabench.errors import SweepFolderError
from ultrabench.store.folder import SweepFolder, write_whole


def require_own_folder(folder: SweepFolder) -> SweepFolder:
    """The folder of a sweep by its real path, after a check that it holds a sweep and nothing else.

    Raises:
        SweepFolderError: it is a link, or lacks the journal or the plan.
    """
    if folder.path.is_symlink():
        remedy = "remove the link by hand, or name the folder itself"
        raise SweepFolderError(f"{folder.path} is a link to {folder.path.readlink()}; {remedy}")
    for path in (folder.sweep_json, folder.journal):
        if not path.exists() or path.is_symlink():
            raise SweepFolderError(f"{path} is missing or a link; is it a sweep folder?")
    return SweepFolder(folder.path.resolve())


def remove_sweep(folder: SweepFolder) -> None:
    """Deletes the folder of a sweep and all in it; links in it are deleted, and what they point at stays.

    The folder first gets a name that no sweep can have and then loses its sweep.json, so that a part of it that is left
    after an error or a crash is not taken for a sweep.

    Raises:
        SweepFolderError: something could not be deleted; the message names what is left.
    """
    removed_path = folder.path.with_name(f".removed-{folder.name}-{secrets.token_hex(4)}")
    try:
        folder.path.rename(removed_path)
        SweepFolder(removed_path).sweep_json.unlink()
        shutil.rmtree(removed_path)
    except OSError as error:
        path = removed_path if removed_path.exists() else folder.path
        fact = f"cannot delete {error.filename or path}: {error.strerror}"
        raise SweepFolderError(f"{fact}; {path} is left: make it writable and delete it by hand") from error


def rename_sweep(folder: SweepFolder, new_name: str) -> SweepFolder:
    """Renames the folder of a sweep and the sweep in its sweep.json; files that were exported keep the old name.

    Raises:
        SweepFolderError: there is something of that name, or the folder cannot be renamed.
    """
    renamed_folder = SweepFolder(folder.path.with_name(new_name))
    if renamed_folder.path.exists() or renamed_folder.path.is_symlink():
        raise SweepFolderError(f"{renamed_folder.path} exists; choose another name, or remove it first")
    try:
        folder.path.rename(renamed_folder.path)
        _write_name_in_json(renamed_folder.sweep_json, new_name)
    except OSError as error:
        raise SweepFolderError(f"cannot rename {folder.path}: {error.strerror}; make it writable") from error
    return renamed_folder


def _write_name_in_json(sweep_json: Path, new_name: str) -> None:
    json_value = json.loads(sweep_json.read_text())
    write_whole(sweep_json, json.dumps(json_value | {"sweep": new_name}, indent=1) + "\n")
