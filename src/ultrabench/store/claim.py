"""Claims an attempt or an allocation: the process that links its owner file first owns it for ever."""

import contextlib
import errno
import json
import os
import uuid
from pathlib import Path
from typing import Any

from ultrabench.errors import may_pass
from ultrabench.record import content_id
from ultrabench.store.folder import write_whole

_PROCESS = uuid.uuid4().hex
"""Part of the names of this process's unique files; with equal names a claim can be tried again."""


def claim(claims: Path, key: str, owner: dict[str, Any]) -> bool:
    """Whether this call makes this process the owner of `key`; False when it was already claimed.

    A unique file is written and then linked to the owner file by link(2). On NFS the answer of link may be
    lost after the link was made. So the link count of the unique file decides, and not the answer: 2 means
    that the owner file is ours.

    Raises:
        OSError: the disk failed; the same call may be made again and goes on with the claim.
    """
    unique = claims / f".{key}.{_PROCESS}.{content_id(owner)}"
    refused: OSError | None = None
    if not unique.exists():  # an earlier call that failed may already have linked it
        write_whole(unique, json.dumps(owner))
    try:
        os.link(unique, claims / key)
    except OSError as error:
        refused = error
    # If this fails, the unique file stays, so that the next call can find out who won.
    won = unique.stat().st_nlink == 2
    with contextlib.suppress(OSError):
        unique.unlink()
    if refused is not None and not won and refused.errno != errno.EEXIST:
        raise refused
    return won


def owner(claims: Path, key: str) -> dict[str, Any] | None:
    """The content of the claim of `key`; None when there is no claim, empty when its file is damaged.

    Raises:
        OSError: the file cannot be read now, but may be readable later.
    """
    try:
        held = json.loads((claims / key).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        if may_pass(error):
            raise
        return {}
    return held if isinstance(held, dict) else {}


def owner_of(claims: Path, key: str) -> str | None:
    """Name of the allocation that claimed the attempt `key`; None when there is no claim.

    Raises:
        OSError: the file cannot be read now, but may be readable later.
    """
    held = owner(claims, key)
    return None if held is None else str(held.get("allocation", "unreadable"))


GIVEN_UP = "given up"
"""Owner name in the claim of an allocation that a launcher has given up; its agents then run nothing."""


def give_up(claims: Path, allocation: str) -> bool:
    """Claims an allocation in place of its agents, so that they run nothing; returns whether that worked.

    Raises:
        OSError: the disk does not answer now, but may answer later.
    """
    return claim(claims, allocation, {"allocation": GIVEN_UP}) or owner_of(claims, allocation) == GIVEN_UP
