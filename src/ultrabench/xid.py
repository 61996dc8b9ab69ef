"""The Xid events of NVIDIA's driver: what each number means, and whether it proves that a GPU failed.

Source: the Xid catalogue of docs.nvidia.com/deploy/xid-errors (analyzing-xid-catalog, October 2025).
A number is FATAL if the catalogue wants the GPU or the node reset or examined, APPLICATION if only the program has to
start again, and INFORMATIONAL if it can be ignored, or only announces another one. Numbers that the catalogue calls
unused are not listed; 61 is, since older drivers write it for a halted micro-controller.
"""

import re
from enum import StrEnum
from typing import NamedTuple


class XidClass(StrEnum):
    """What an Xid says about the GPU."""

    FATAL = "fatal"
    APPLICATION = "application"
    INFORMATIONAL = "informational"


MEMORY_XIDS = frozenset({48, 64, 94, 95, 140, 171, 172})
"""Xids of errors in a GPU's memory that ECC could not correct."""
FATAL_XIDS = MEMORY_XIDS | {
    46,
    54,
    61,
    62,
    74,
    79,
    109,
    110,
    119,
    120,
    136,
    143,
    151,
    155,
    156,
    158,
    167,
    169,
}
"""Xids after which the GPU or the node needs a reset or a repair. 94 (a contained memory error) is a
fault of the GPU too."""
APPLICATION_XIDS = frozenset({
    8, 11, 13, 25, 31, 32, 39, 40, 41, 43, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, *range(82, 87), 88, 89,
    *range(96, 106),
    *range(126, 136), 139,
})  # fmt: skip
"""Xids that a program causes, such as 31 (a page fault) and 13 (an exception in a GPU kernel)."""
LINK_XIDS = frozenset(range(144, 151))
"""Xids of NVLink 5; their text says which errors are not fatal, so that only the program has to start again."""
RECOVERY_XID = 154
"""The Xid with which the driver says what the GPU needs now; without a need it is informational."""

_XID_LINE = re.compile(
    r"\bxid\b(?: error)?(?: \([^)\n]*\): | ?[:=] ?|(?<=error) )(\d{1,3})\b(.*)", re.IGNORECASE
)
_NONFATAL_TEXT = re.compile(r"\bnon-?fatal\b", re.IGNORECASE)
_NO_RECOVERY_TEXT = re.compile(r"\bto 0x0\b|\bto \S* ?\(None\)", re.IGNORECASE)


class Xid(NamedTuple):
    """An Xid in a line of a log."""

    number: int
    xid_class: XidClass

    @property
    def is_memory_error(self) -> bool:
        """Whether the memory of the GPU failed."""
        return self.number in MEMORY_XIDS


def xid_of(line: str) -> Xid | None:
    """The Xid that a line of the kernel's log, or a copy of it in another log, reports; None if it reports none."""
    match = _XID_LINE.search(line)
    return Xid(int(match[1]), xid_class(int(match[1]), match[2])) if match else None


def xid_class(number: int, text: str = "") -> XidClass:
    """The class of an Xid; `text` is what its line says after the number."""
    is_fatal_link = number in LINK_XIDS and not _NONFATAL_TEXT.search(text)
    needs_recovery = number == RECOVERY_XID and "changed" in text and not _NO_RECOVERY_TEXT.search(text)
    if number in FATAL_XIDS or is_fatal_link or needs_recovery:
        return XidClass.FATAL
    return XidClass.APPLICATION if number in APPLICATION_XIDS | LINK_XIDS else XidClass.INFORMATIONAL
