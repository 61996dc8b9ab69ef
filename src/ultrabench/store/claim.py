"""The claim of an attempt or an allocation: whoever links its owner file first has it, and nobody else ever will."""

import contextlib
import errno
import json
import os
import uuid
from pathlib import Path
from typing import Any

from ultrabench.errors import may_pass
from ultrabench.record import content_id

_PROCESS = uuid.uuid4().hex
"""Part of the names of the unique files of this process, by which a claim can be tried again."""


def claim(claims: Path, key: str, owner: dict[str, Any]) -> bool:
    """Whether this process now owns the attempt `key`; False when somebody already does.

    A unique file is written and link(2)ed to the owner file. On NFS the answer of link may get
    lost after it was done, so not the answer but the link count of the unique file decides: 2 means
    that the owner file is ours.

    Raises:
        OSError: the disk did not let it be tried; the same call again finishes what this one began.
    """
    unique = claims / f".{key}.{_PROCESS}.{content_id(owner)}"
    refused: OSError | None = None
    try:
        with unique.open("w", encoding="utf-8") as file:
            json.dump(owner, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        _remove(unique)
        raise
    try:
        os.link(unique, claims / key)
    except OSError as error:
        refused = error
    # Should this fail, the unique file stays: by it the next try finds out who won.
    won = unique.stat().st_nlink == 2
    _remove(unique)
    if refused is not None and not won and refused.errno != errno.EEXIST:
        raise refused
    return won


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def owner(claims: Path, key: str) -> dict[str, Any] | None:
    """What the owner of the attempt `key` wrote; None when nobody claimed it, empty if that is no claim.

    Raises:
        OSError: the file cannot be read now, but may be later.
    """
    try:
        held = json.loads((claims / key).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        if may_pass(error):
            raise
        return {}
    except (ValueError, RecursionError):
        return {}
    return held if isinstance(held, dict) else {}


def owner_of(claims: Path, key: str) -> str | None:
    """Name of the allocation that claimed the attempt `key`; None when nobody did.

    Raises:
        OSError: the file cannot be read now, but may be later.
    """
    held = owner(claims, key)
    return None if held is None else str(held.get("allocation", "unreadable"))


GIVEN_UP = "given up"
"""Owner name in the claim of an allocation that a launcher has given up; agents that find it run nothing."""


def give_up(claims: Path, allocation: str) -> bool:
    """Whether no agent of this allocation will ever run anything: a launcher claims it in their place.

    Raises:
        OSError: the disk does not tell now, but may later.
    """
    return claim(claims, allocation, {"allocation": GIVEN_UP}) or owner_of(claims, allocation) == GIVEN_UP
