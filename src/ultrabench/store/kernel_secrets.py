"""Secrets in the environment of a user's program: kept in one file for its owner, shown nowhere."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ultrabench.errors import ConfigError
from ultrabench.store.folder import write_whole

REDACTED = "<redacted>"
"""Stands for the value of a secret in everything that is written or shown, and in what is hashed."""
TOO_SHORT_TO_SEARCH = 3
"""Characters of a value that may well stand in a word by chance."""
_SECRET = re.compile("(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?![A-Z])", re.IGNORECASE)
"""What the name of a variable with a secret has in it, as a whole word: TOKENIZERS_PARALLELISM is none."""


def redacted(env: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The variables with secrets redacted, and the secrets whose values are given."""
    secret = {name: value for name, value in env.items() if _SECRET.search(str(name))}
    given = {name: str(value) for name, value in secret.items() if value != REDACTED}
    return {**env, **dict.fromkeys(secret, REDACTED)}, given


def hide(words: Iterable[str], given: Mapping[str, str]) -> list[str]:
    """The words of a command line without the secrets given in it; they can still be parsed."""
    return [_hidden(word, given) for word in words]


def _hidden(word: str, given: Mapping[str, str]) -> str:
    """The word with the values of secrets replaced, found by name: a value may be spelled in many ways."""
    for name, value in given.items():
        word = re.sub(rf"(env\.{re.escape(name)}=).*", rf"\1'{REDACTED}'", word, flags=re.DOTALL)
        word = re.sub(
            rf"(\b{re.escape(name)}['\"]?\s*:\s*)('[^']*'|\"[^\"]*\"|[^,}}]*)", rf"\1'{REDACTED}'", word
        )
        if len(value) > TOO_SHORT_TO_SEARCH and value in word:
            word = f"{word.partition('=')[0]}='{REDACTED}'"
    return word


def revealed(env: Mapping[str, str], file: Path, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables with the values of secrets, as they are given or as `file` holds them.

    Raises:
        ConfigError: a value is neither given nor in the file.
    """
    known = dict(given or {})
    hidden = [name for name, value in env.items() if value == REDACTED]
    if not known.keys() >= {*hidden} and file.exists():
        known = json.loads(file.read_text()) | known
    lost = [name for name in hidden if name not in known]
    if lost:
        raise ConfigError(f"kernel.env.{lost[0]} is kept in {file}, which has no value for it; give it again")
    return {name: known[name] if value == REDACTED else value for name, value in env.items()}


def keep(env: Mapping[str, str], file: Path, given: Mapping[str, str]) -> None:
    """Writes the secrets of `env` to `file`, which only its owner can read; old values stay.

    Raises:
        ConfigError: a value is neither given nor in the file.
    """
    whole = revealed(env, file, given)
    if given:
        secrets = {name: value for name, value in whole.items() if env[name] == REDACTED}
        write_whole(file, json.dumps(secrets), mode=0o600)
