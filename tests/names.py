"""Counts local names that do not say what they hold, such as `found` or `told`, and lists each place.

Run as `python -m tests.names`; it fails when more than MAX_PERCENT of all assigned names are vague.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_VAGUE_NAMES = """
    found told held given known own at word one both again said seen made kept left there here same this that those
    what which such many more most each every some any thing things stuff it res ret tmp temp item items data2 obj
    result2 foo aux misc been done gone got put taken wanted asked meant named called
"""
VAGUE = frozenset(_VAGUE_NAMES.split())
"""Names that a reader has to look up at their assignment: participles, pronouns and fillers."""
MAX_PERCENT = 1.0
_IN_JAVASCRIPT = re.compile(r"""
    \b(?:const|let)\s+([^=;]+?)\s*(?:=|;|\bof\b)  # variables, destructured ones included
    | \bfunction\s*\w*\s*\(([^)]*)\)              # parameters
    | \(([^()]*)\)\s*=>
    | (\b\w+)\s*=>
""", re.VERBOSE)  # fmt: skip
"""What assigns names in a script of the page."""


class Assignment(NamedTuple):
    """One place where a name gets a value."""

    path: Path
    line: int
    name: str


def assignments(path: Path) -> Iterator[Assignment]:
    """Every name that a file assigns: variables, targets of loops, `as` names and parameters."""
    if path.suffix == ".js":
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for match in _IN_JAVASCRIPT.finditer(line.partition("//")[0]):
                names = re.findall(r"[A-Za-z_]\w*(?!\w*\s*:)", match[match.lastindex or 0])
                yield from (Assignment(path, number, name) for name in names)
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Assignment(path, node.lineno, node.id)
        elif isinstance(node, ast.arg):
            yield Assignment(path, node.lineno, node.arg)


def tracked_files(*folders: str) -> list[Path]:
    """The Python files and scripts of the page that git tracks in these folders."""
    patterns = [f"{folder}/*.{suffix}" for folder in folders for suffix in ("py", "js")]
    words = ["git", "ls-files", "-z", "--", *patterns]
    names = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split("\0")
    return [Path(name) for name in names if name and Path(name).is_file()]


def main() -> int:
    """Lists the vague names in the folders of the arguments, by default all of the repository;
    returns the exit code.
    """
    assigned = [place for path in tracked_files(*(sys.argv[1:] or ["."])) for place in assignments(path)]
    vague = [place for place in assigned if place.name.strip("_") in VAGUE]
    for place in vague:
        print(f"{place.path}:{place.line} {place.name}")
    share = 100 * len(vague) / max(1, len(assigned))
    print(
        f"{len(vague)} of {len(assigned):,} assigned names are vague: {share:.1f} %, at most {MAX_PERCENT:g} %"
    )
    return int(share > MAX_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
