"""Renames and removes the folder of a sweep."""

import json
import secrets
import shutil

from ultrabench.errors import SweepFolderError
from ultrabench.store.folder import SweepFolder, try_to_write, write_whole


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
        json_text = folder.sweep_json.read_text()
        new_text = json.dumps(json.loads(json_text) | {"sweep": new_name}, indent=1) + "\n"
    except (OSError, ValueError, TypeError, RecursionError) as error:
        fact = f"cannot rename {folder.path}: {folder.sweep_json.name} cannot be read ({error})"
        raise SweepFolderError(f"{fact}; see ultrabench sweep status {folder.display_name}") from error
    try:
        try_to_write(
            folder.path.parent
        )  # so that the folder can be renamed after its sweep.json has the new name
        write_whole(folder.sweep_json, new_text)
        try:
            folder.path.rename(renamed_folder.path)
        except OSError:
            write_whole(folder.sweep_json, json_text)
            raise
    except OSError as error:
        remedy = "make it and the folder that holds it writable"
        raise SweepFolderError(f"cannot rename {folder.path}: {error.strerror}; {remedy}") from error
    return renamed_folder
