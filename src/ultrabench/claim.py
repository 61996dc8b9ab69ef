"""The claim of an attempt: made at most once, by whoever links its owner file first."""

import json
import os
import uuid
from pathlib import Path
from typing import Any


def claim(claims: Path, key: str, owner: dict[str, Any]) -> bool:
    """Whether this process now owns the attempt `key`; False when somebody already does.

    A unique file is written and link(2)ed to the owner file. On NFS the answer of link may get
    lost after it was done, so not the answer but the link count of the unique file decides: 2 means
    that the owner file is ours.
    """
    unique = claims / f".{key}.{uuid.uuid4().hex}"
    with unique.open("w", encoding="utf-8") as file:
        json.dump(owner, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(unique, claims / key)
    except OSError:
        pass
    won = unique.stat().st_nlink == 2
    unique.unlink()
    return won


def owner(claims: Path, key: str) -> dict[str, Any] | None:
    """What the owner of the attempt `key` wrote; None when nobody claimed it, empty if unreadable."""
    try:
        held = json.loads((claims / key).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def owner_of(claims: Path, key: str) -> str | None:
    """Name of the allocation that claimed the attempt `key`; None when nobody did."""
    held = owner(claims, key)
    return None if held is None else str(held.get("allocation", "unreadable"))
