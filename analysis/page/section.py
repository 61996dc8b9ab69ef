"""A section of the page that a study makes: a table of texts, and sentences below it.

A study with a section has a module `page_table.py` with RANKING_COLUMNS, the columns that it reads beside those of a
ranking, and `section(ranking, table, public=...)`, which returns a Section or None.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A section of the page, which no filter changes; without rows it shows only its notes."""

    title: str
    caption: str
    """What stands above the table."""
    heads: Sequence[str]
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
