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
MAX_UNSEARCHED_CHARS = 3
"""Length in characters up to which the value of a secret may be part of another word by chance."""
_SECRET_WORDS = re.compile("(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?![A-Z])", re.IGNORECASE)
"""Whole words in the name of a variable that mark it as a secret; TOKENIZERS_PARALLELISM is no secret."""


def is_secret(name: str) -> bool:
    """Whether the name of a variable says that its value is a secret."""
    return _SECRET_WORDS.search(name) is not None


def redact_env(env: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The variables with the values of secrets redacted, and those secrets whose values are given."""
    secret_env = {name: value for name, value in env.items() if is_secret(str(name))}
    secret_by_name = {name: str(value) for name, value in secret_env.items() if value != REDACTED}
    return {**env, **dict.fromkeys(secret_env, REDACTED)}, secret_by_name


def redact_arguments(arguments: Iterable[str], secret_by_name: Mapping[str, str]) -> list[str]:
    """The words of a command line with the values of secrets redacted; they can still be parsed."""
    return [_redact_argument(argument, secret_by_name) for argument in arguments]


def _redact_argument(argument: str, secret_by_name: Mapping[str, str]) -> str:
    """The word with the values of secrets redacted; they are found by name, as quoting may change a value."""
    for name, value in secret_by_name.items():
        argument = re.sub(rf"(env\.{re.escape(name)}=).*", rf"\1'{REDACTED}'", argument, flags=re.DOTALL)
        entry_pattern = rf"(\b{re.escape(name)}['\"]?\s*:\s*)('[^']*'|\"[^\"]*\"|[^,}}]*)"
        argument = re.sub(entry_pattern, rf"\1'{REDACTED}'", argument)
        if len(value) > MAX_UNSEARCHED_CHARS and value in argument:
            argument = f"{argument.partition('=')[0]}='{REDACTED}'"
    return argument


def reveal_env(
    env: Mapping[str, str], secrets_file: Path, secret_by_name: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The variables with the values of secrets, which are taken from `secret_by_name` or from `secrets_file`.

    Raises:
        ConfigError: a value is neither given nor in the file.
    """
    known_secrets = dict(secret_by_name or {})
    redacted_names = [name for name, value in env.items() if value == REDACTED]
    if not known_secrets.keys() >= {*redacted_names} and secrets_file.exists():
        known_secrets = json.loads(secrets_file.read_text()) | known_secrets
    if missing_names := [name for name in redacted_names if name not in known_secrets]:
        raise ConfigError(f"{secrets_file} has no value for kernel.env.{missing_names[0]}; give it again")
    return {name: known_secrets[name] if value == REDACTED else value for name, value in env.items()}


def write_secrets(env: Mapping[str, str], secrets_file: Path, secret_by_name: Mapping[str, str]) -> None:
    """Writes the secrets of `env` to `secrets_file`, which only its owner can read; values in the file are kept.

    Raises:
        ConfigError: a value is neither given nor in the file.
    """
    env_with_secrets = reveal_env(env, secrets_file, secret_by_name)
    if secret_by_name:
        secrets = {name: value for name, value in env_with_secrets.items() if env[name] == REDACTED}
        write_whole(secrets_file, json.dumps(secrets), mode=0o600)
