"""Keeps secrets in the environment of a user's program in one private file, and never shows them."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ultrabench.errors import ConfigError
from ultrabench.store.folder import write_whole

REDACTED = "<redacted>"
"""The text that replaces the value of a secret in everything that is written, shown or hashed."""
TOO_SHORT_TO_SEARCH = 3
"""Length in characters up to which the value of a secret may be part of another word by chance."""
_SECRET = re.compile("(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?![A-Z])", re.IGNORECASE)
"""Whole words in the name of a variable that mark it as a secret; TOKENIZERS_PARALLELISM is no secret."""


def redacted(env: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The variables with the values of secrets redacted, and those secrets whose values are given."""
    secret = {name: value for name, value in env.items() if _SECRET.search(str(name))}
    given = {name: str(value) for name, value in secret.items() if value != REDACTED}
    return {**env, **dict.fromkeys(secret, REDACTED)}, given


def hide(words: Iterable[str], given: Mapping[str, str]) -> list[str]:
    """The words of a command line with the values of secrets redacted; they can still be parsed."""
    return [_hidden(word, given) for word in words]


def _hidden(word: str, given: Mapping[str, str]) -> str:
    """The word with the values of secrets redacted; they are found by name, as quoting may change a value."""
    for name, value in given.items():
        word = re.sub(rf"(env\.{re.escape(name)}=).*", rf"\1'{REDACTED}'", word, flags=re.DOTALL)
        entry = rf"(\b{re.escape(name)}['\"]?\s*:\s*)('[^']*'|\"[^\"]*\"|[^,}}]*)"
        word = re.sub(entry, rf"\1'{REDACTED}'", word)
        if len(value) > TOO_SHORT_TO_SEARCH and value in word:
            word = f"{word.partition('=')[0]}='{REDACTED}'"
    return word


def revealed(env: Mapping[str, str], file: Path, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables with the values of secrets, which are taken from `given` or from `file`.

    Raises:
        ConfigError: a value is neither given nor in the file.
    """
    known = dict(given or {})
    hidden = [name for name, value in env.items() if value == REDACTED]
    if not known.keys() >= {*hidden} and file.exists():
        known = json.loads(file.read_text()) | known
    if lost := [name for name in hidden if name not in known]:
        raise ConfigError(f"kernel.env.{lost[0]} is kept in {file}, which has no value for it; give it again")
    return {name: known[name] if value == REDACTED else value for name, value in env.items()}


def keep(env: Mapping[str, str], file: Path, given: Mapping[str, str]) -> None:
    """Writes the secrets of `env` to `file`, which only its owner can read; values in the file are kept.

    Raises:
        ConfigError: a value is neither given nor in the file.
    """
    whole = revealed(env, file, given)
    if given:
        secrets = {name: value for name, value in whole.items() if env[name] == REDACTED}
        write_whole(file, json.dumps(secrets), mode=0o600)
