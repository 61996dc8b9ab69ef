"""Makes docs/reference/messages.md: the messages about a user's mistakes, as the tests expect them.

Run as `python -m tests.messages`; with `--check` it writes nothing, and fails if the page differs.
"""

import argparse
import difflib
import json
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from ultrabench import __version__

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests" / "unit"
PAGE = ROOT / "docs" / "reference" / "messages.md"
GOLDEN = ROOT / "tests" / "fixtures" / "messages.json"
HELPERS = frozenset({"expected", "one_line", "refused", "refusal"})
"""Functions of the tests that expect a message."""
CALLS = re.compile(r"\bone_line\(\s*ultrabench|\bwith refused\(|\btest_config import refusal")
"""Calls of these functions, of which modules of the product have some of the same name."""
SUBJECTS = {
    "Command line": ("cli/",),
    "Configuration": ("project/test_fixtures", "sweep/", "words/test_quantity"),
    "Models and hardware": ("sweep/test_checkpoint_config", "sweep/test_layered_models", "words/test_hardware",
        "words/test_model_shape"),
    "Layouts and predictions": ("analysis/studies/predictions", "cli/test_recommend", "predict/", "sweep/test_grid",
        "words/test_layout"),
    "Kernels and logs": (
        "agent/test_log_sources", "kernel/", "sweep/test_program_logs", "words/test_kernel_config",
        "words/test_placeholders",
    ),
    "Launching": ("cli/test_launch", "cli/test_pause", "sweep/test_launcher", "sweep/test_price"),
    "Results": ("analysis/",),
    "Figures": (
        "analysis/test_comm", "analysis/test_figures", "analysis/test_heatmap", "cli/test_plot",
        "cli/test_predicted_figures",
    ),
    "Import and export": ("analysis/studies/import", "analysis/studies/export"),
    "Cluster": ("analysis/studies/nodes", "launchers/"),
}  # fmt: skip
"""Heading -> how the names of its test files in tests/unit begin; the longest beginning of a name counts."""
OF_PROGRAMS = ("store/", "words/test_run")
"""Tests of files that programs write, so that what is wrong in them is no mistake of a user."""
SIMILAR = 0.65
"""Similarity of difflib from which one of two messages stands for both; names and values count as equal."""
MANY = 6
"""Number of overrides from which those that most tests of a file give are left out."""
HEAD = """# Messages

This page is generated: `python -m tests.messages` runs the tests of mistakes and writes down the messages that they
expect. A message is one line that says what was given, the rule with its numbers, and what to do; the exit code is 2,
or 3 if the cluster or a disk could not be used.

Messages without a command or overrides above them come first in a section; they name what was given. Of messages that
differ in a few words, one is shown. `(known: ...)` stands for a list of names, `...` for overrides that matter less.
"""


class Entry(NamedTuple):
    """A message, and what it is about."""

    test: str
    """The test that expects it."""
    words: tuple[str, ...]
    """The command line or the overrides; empty if the test called a function."""
    text: str

    @property
    def subject(self) -> str:
        """Its heading."""
        return str(subject_of(self.test))


def subject_of(test: str) -> str | None:
    """The heading of a test or file of tests/unit; None for tests of files that programs write.

    Raises:
        LookupError: no heading has it.
    """
    name = test.removeprefix("tests/unit/")
    if name.startswith(OF_PROGRAMS):
        return None
    matches = [
        (len(begin), subject)
        for subject, begins in SUBJECTS.items()
        for begin in begins
        if name.startswith(begin)
    ]
    if not matches:
        raise LookupError(f"{test} expects messages; give it a heading in SUBJECTS of tests/messages.py")
    return max(matches)[1]


def files_with_messages() -> list[str]:
    """The files of tests/unit that expect messages, in the order of their names."""
    return [
        path.relative_to(ROOT).as_posix()
        for path in sorted(TESTS.rglob("test_*.py"))
        if CALLS.search(path.read_text())
    ]


def stable(text: str, scratch: str = "/tmp") -> str:
    """The text with examples in place of what differs between machines, users, versions and days."""
    text = re.sub(rf"{re.escape(scratch)}/\w+(/cwd)?(?!\w)", "/scratch", text)
    for value, example in ((f"{ROOT}/", ""), (sys.executable, "python"), (str(Path.home()), "~")):
        text = text.replace(value, example)
    text = text.replace(f"ultrabench {__version__}", "ultrabench X.Y.Z")
    text = re.sub(rf"process \d+ on {re.escape(socket.gethostname())}", "process 4711 on login1", text)
    text = re.sub(r"this machine has [\d,.]+ GiB", "this machine has 16 GiB", text)
    text = re.sub(r"\b20\d\d-\d\d-\d\d\b", "2026-01-31", text)
    text = re.sub(r"(?<=-)(?=[a-f]*\d)[0-9a-f]{8}\b", "0123abcd", text)
    return re.sub(r"\(known: [^()]*\)", "(known: ...)", text)


def as_code(words: Iterable[str]) -> str:
    """Words of a command line as code of Markdown; one with a space or quotes is quoted."""
    marks = {arg: '"' if "'" in arg else "'" * bool(re.search(r'[\s"]|^$', arg)) for arg in words}
    line = " ".join(f"{marks[arg]}{arg}{marks[arg]}" for arg in words)
    return f"`` {line} ``" if "`" in line else f"`{line}`"


def as_text(message: str) -> str:
    """A message as text of Markdown that shows it letter by letter."""
    text = re.sub(r"[\\*`]|(?<!\w)_|_(?!\w)|(?<=])(?=[(\[])", r"\\\g<0>", message)
    return re.sub(r"<(?=[\w/!?])", "&lt;", re.sub(r"&(?=#?\w+;)", "&amp;", text))


def golden() -> frozenset[str]:
    """The messages that tests hold to the letter, which the page always shows."""
    return frozenset(stable(row["message"]) for row in json.loads(GOLDEN.read_text(encoding="utf-8")))


def collect() -> list[Entry]:
    """Runs the tests; returns each message, without what differs between machines.

    Raises:
        SystemExit: a test failed.
    """

    class Only:
        """A plugin of pytest that leaves out tests that expect no message."""

        @staticmethod
        def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
            items[:] = [case for case in items if HELPERS.intersection(case.function.__code__.co_names)]

    with TemporaryDirectory() as scratch:
        folder = f"{Path(scratch).resolve()}/t"
        files = [name for name in files_with_messages() if subject_of(name)]
        for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):  # messages name the cache of models
            os.environ.pop(name, None)
        code = pytest.main(["-q", "-p", "no:cacheprovider", f"--basetemp={folder}", *files], plugins=[Only()])
        if code:
            sys.exit(f"the tests failed (exit {int(code)}), so that no page was made")
        from tests.configs import MESSAGES  # only pytest may import what it rewrites

        return [
            Entry(test, tuple(stable(arg, folder) for arg in words), stable(text, folder))
            for test, words, text in MESSAGES
        ]


def shortened(entries: list[Entry]) -> Iterator[Entry]:
    """The entries of a file, where `...` stands for the overrides that most of those with many have."""
    long = [entry.words for entry in entries if len(entry.words) >= MANY and entry.words[0] != "ultrabench"]
    uses = Counter(chain.from_iterable(long))
    for entry in entries:
        rare = tuple(arg for arg in entry.words if 2 * uses[arg] < len(long))
        yield entry._replace(words=("...", *rare)) if len(long) > 2 and entry.words in long else entry


def are_alike(a: list[str], b: list[str]) -> bool:
    """Whether two messages differ in a few words only."""
    matcher = difflib.SequenceMatcher(a=a, b=b)
    return matcher.quick_ratio() >= SIMILAR and matcher.ratio() >= SIMILAR


def distinct(entries: Iterable[Entry]) -> list[Entry]:
    """The entries whose message is not like one before them, and all golden ones, in the order of the page."""
    always, order = golden(), [*SUBJECTS]
    tokens_of, shown = dict[str, list[str]](), list[Entry]()
    for entry in sorted(
        entries, key=lambda e: (e.text not in always, order.index(e.subject), e.words, e.text)
    ):
        tokens = ["..." if re.search(r"[\d='/\[]", token) else token for token in entry.text.split()]
        if entry.text in tokens_of:
            continue
        if entry.text in always or not any(are_alike(tokens, other) for other in tokens_of.values()):
            tokens_of[entry.text] = tokens
            shown.append(entry)
    return sorted(shown, key=lambda e: (order.index(e.subject), e.words, e.text))


def page(entries: list[Entry]) -> str:
    """The text of the page."""
    by_file = groupby(sorted(entries), key=lambda entry: entry.test.partition("::")[0])
    shown = distinct(entry for _, group in by_file for entry in shortened([*group]))
    parts = [HEAD]
    for subject, group in groupby(shown, key=lambda entry: entry.subject):
        parts.append(f"\n## {subject}\n")
        for words, alike in groupby(group, key=lambda entry: entry.words):
            mark = ":   " if words else "- "
            parts += ["\n", f"{as_code(words)}\n" * bool(words)]
            parts += [f"{mark}{as_text(entry.text)}\n" for entry in alike]
    return "".join(parts)


def main() -> int:
    """Writes the page, or compares it; returns the exit code."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--check", action="store_true", help="write nothing; fail if the page differs")
    check, text = arguments.parse_args().check, page(collect())
    if not check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    difference = [
        *difflib.unified_diff(PAGE.read_text(encoding="utf-8").splitlines(), text.splitlines(), n=0)
    ]
    print("\n".join(difference[2:]))
    return int(bool(difference))


if __name__ == "__main__":
    sys.exit(main())
