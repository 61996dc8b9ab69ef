"""The same failure has the same fingerprint wherever and whenever it happens."""

import re
from collections.abc import Sequence

from ultrabench.record import content_id

FRAMES = 3
"""So many of the innermost places in a stack count, those of installed packages left out."""

_FRAME = re.compile(r'^\s*(?:\[rank\d+\]:\s*)?File "([^"]+)", line \d+, in (\S+)', re.MULTILINE)
_PACKAGES = re.compile(r"/(?:site|dist)-packages/|/lib/python\d|^<frozen ")
_VOLATILE = (
    (re.compile(r"(?:/[\w.+@-]+)+/"), ""),  # folders; the name of the file stays
    (re.compile(r"\b0x[0-9a-f]+\b|\b(?=[a-f]*\d)[0-9a-f]{6,}\b", re.IGNORECASE), "#"),
    (re.compile(r"\b\d+(?:[.:]\d+)+\b|\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b"), "#"),
    (re.compile(r"# ?(?:bytes|[KMG]i?B)\b"), "#"),
    (re.compile(r"\s+"), " "),
)


def fingerprint(cause: str, phase: str, line: str, stack: str, hosts: Sequence[str]) -> str:
    """16 hex digits that do not depend on numbers, addresses, folders, ranks, hosts or times.

    Args:
        phase: what the rank was doing.
        line: the line that tells of the failure.
        stack: a text with the traceback, if there is one.
        hosts: names to leave out.
    """
    frames = [(path, name) for path, name in _FRAME.findall(stack) if not _PACKAGES.search(path)]
    places = [f"{path.rpartition('/')[2]}:{name}" for path, name in frames[-FRAMES:]]
    return content_id([cause, phase, places, normalized(line, hosts)])


def normalized(line: str, hosts: Sequence[str]) -> str:
    """The line without what differs from one place or time to another."""
    for host in sorted(hosts, key=len, reverse=True):
        line = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "HOST", line)
    for pattern, replacement in _VOLATILE:
        line = pattern.sub(replacement, line)
    return line.strip()
