"""Claims an attempt or an allocation: the process that links its owner file first owns it for ever."""

import contextlib
import errno
import json
import os
import re
import uuid
from pathlib import Path
from typing import Any

from ultrabench.allowed import require_safe_names
from ultrabench.errors import ConfigError, may_pass
from ultrabench.record import content_id
from ultrabench.store.folder import write_whole
from ultrabench.store.state import SweepState

_PROCESS_TOKEN = uuid.uuid4().hex
"""Part of the names of this process's unique files; with equal names a claim can be tried again."""


def claim(claims_dir: Path, key: str, owner_facts: dict[str, Any]) -> bool:
    """Whether this call makes this process the owner of `key`; False when it was already claimed.

    A unique file is written and then linked to the owner file by link(2). On NFS the answer of link may be
    lost after the link was made. So the link count of the unique file decides, and not the answer: 2 means
    that the owner file is ours.

    Raises:
        OSError: the disk failed; the same call may be made again and goes on with the claim.
    """
    unique_file = claims_dir / f".{key}.{_PROCESS_TOKEN}.{content_id(owner_facts)}"
    link_error: OSError | None = None
    if not unique_file.exists():  # an earlier call that failed may already have linked it
        write_whole(unique_file, json.dumps(owner_facts))
    try:
        os.link(unique_file, claims_dir / key)
    except OSError as error:
        link_error = error
    # If this fails, the unique file stays, so that the next call can find out who won.
    is_owner = unique_file.stat().st_nlink == 2
    with contextlib.suppress(OSError):
        unique_file.unlink()
    if link_error is not None and not is_owner and link_error.errno != errno.EEXIST:
        raise link_error
    return is_owner


def claim_content(claims_dir: Path, key: str) -> dict[str, Any] | None:
    """The content of the claim of `key`; None when there is no claim, empty when its file is damaged.

    Raises:
        OSError: the file cannot be read now, but may be readable later.
    """
    try:
        content = json.loads((claims_dir / key).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        if may_pass(error):
            raise
        return {}
    return content if isinstance(content, dict) else {}


def owner_of(claims_dir: Path, key: str) -> str | None:
    """Name of the allocation that claimed the attempt `key`; None when there is no claim.

    Raises:
        OSError: the file cannot be read now, but may be readable later.
    """
    content = claim_content(claims_dir, key)
    if content is None:
        return None
    name = content.get("allocation")
    with contextlib.suppress(ConfigError):
        if isinstance(name, str):
            require_safe_names([] if name == GIVEN_UP else [name])
            return name
    return "unreadable"


_ATTEMPT_NAME = re.compile(r"\w+\.\d+\.\d+")
"""Names of the claims of attempts; those of allocations have one dot."""


def unrecorded_attempts(claims_dir: Path, state: SweepState) -> list[str]:
    """The claimed attempts of which the journal says nothing, although the jobs that claimed them are over.

    They show that lines or files of the journal are damaged or missing.
    """
    recorded_keys = {str(key) for key in state.attempts}
    with contextlib.suppress(OSError):
        attempt_keys = sorted(filter(_ATTEMPT_NAME.fullmatch, os.listdir(claims_dir)))
        keys = (key for key in attempt_keys if key not in recorded_keys)
        owners = ((key, state.allocations.get(owner_of(claims_dir, key) or "")) for key in keys)
        return [key for key, owner in owners if owner is None or owner.ended is not None]
    return []


GIVEN_UP = "given up"
"""Owner name in the claim of an allocation that a launcher has given up; its agents then run nothing."""


def give_up(claims_dir: Path, allocation_name: str) -> bool:
    """Claims an allocation in place of its agents, so that they run nothing; returns whether that worked.

    Raises:
        OSError: the disk does not answer now, but may answer later.
    """
    has_claimed = claim(claims_dir, allocation_name, {"allocation": GIVEN_UP})
    return has_claimed or owner_of(claims_dir, allocation_name) == GIVEN_UP
