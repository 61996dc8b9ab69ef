"""Values of the package's configuration, for tests that change a few of them, and the refusal of others."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from ultrabench.errors import ConfigError, UltrabenchError
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import Plan
from ultrabench.sweep.running.attempts import Launch, next_attempts

_DEFAULT = load_config(["launcher=slurm", "model=tiny"])


def measure(**words):
    """The default measuring policy with some other values."""
    return replace(_DEFAULT.measure, **words)


def retry(**words):
    """The default retry policy, without pauses, with some other values."""
    return replace(_DEFAULT.retry, **{"backoff_s": 0.0, **words})


def left(runs, state, alive=frozenset(), *, repeats=1, confirm=1, policy=None, canary=False, **words):
    """What is left to do of a sweep of these runs, by default once each."""
    config = replace(
        _DEFAULT, repeats=repeats, retry=policy or retry(), measure=measure(confirm=confirm),
        launcher=replace(_DEFAULT.launcher, control=canary),
    )  # fmt: skip
    return next_attempts(Plan(config=config, candidates=tuple(runs)), state, alive, Launch(**words))


def write_config(name: str, text: str, folder: str = "ultrabench") -> None:
    """Writes a file of the user's configuration, such as hardware/mine, below the working folder."""
    path = Path(folder) / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Message(NamedTuple):
    """A message about a user's mistake that a test expects."""

    test: str
    """The test, such as tests/unit/words/test_layout.py::test_what_cannot_be[tp]."""
    words: tuple[str, ...]
    """The command line or the overrides; empty if the test called a function."""
    text: str


MESSAGES: list[Message] = []
"""The messages of this session, of which `python -m tests.messages` makes a page."""


def expected(text: str, words: Iterable[str] = ()) -> None:
    """Notes that the present test expects this message for these words."""
    MESSAGES.append(Message(os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0], tuple(words), text))


@contextmanager
def refused(
    line: str = "", kind: type[UltrabenchError] = ConfigError, match: str | None = None
) -> Iterator[None]:
    """Expects an error of one line that contains `line`, and a match of the regular expression `match`."""
    with pytest.raises(kind, match=match) as raised:
        yield
    loads = [entry.frame.f_locals for entry in raised.traceback if entry.name == "load_config"]
    expected(str(raised.value), loads[0]["overrides"] if loads else ())
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
