"""Values of the package's configuration, for tests that change a few of them, and the refusal of others."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

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


@contextmanager
def refused(line: str, kind: type[UltrabenchError] = ConfigError) -> Iterator[None]:
    """Expects an error of one line that contains `line`."""
    with pytest.raises(kind) as raised:
        yield
    assert line in str(raised.value)
    assert "\n" not in str(raised.value)
