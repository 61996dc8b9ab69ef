"""Which texts a process can take as a word of its command or as a variable of its environment (execve(2))."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ultrabench.errors import ConfigError

MAX_WORD_BYTES = 131_071
"""Largest size of a word or of a variable NAME=VALUE: MAX_ARG_STRLEN of Linux, 32 pages of 4 KiB,
with the final NUL."""
MAX_TOTAL_BYTES = 1 << 20
"""Largest size of a command with its variables: half of what Linux takes with the usual stack limit of 8 MiB, since the
environment of the job needs space, too."""


def require_process_texts(
    settings: Mapping[Any, Any], where: str = "", own_paths: Iterable[str] = ()
) -> None:
    """Raises for the first text in nested settings that no process can take; no message shows a value,
    which may be secret.

    Args:
        where: dotted name of the settings, which begins the names in messages.
        own_paths: names of settings that are paths, which may be no UTF-8.

    Raises:
        ConfigError: names the setting, the rule and what to do.
    """
    for name, text in _texts(settings, where):
        if fault := _fault(text, may_be_bytes=name in own_paths):
            raise ConfigError(f"{name} {fault}", setting=name)


def _texts(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Dotted name -> text, for all texts and keys in nested settings."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            printable_key = str(key).encode("ascii", "backslashreplace").decode()[:60].replace("\0", "\\0")
            part_name = f"{name}.{printable_key}".removeprefix(".")
            yield part_name, str(key)
            yield from _texts(part, part_name)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part, name)


def _fault(text: str, may_be_bytes: bool = False) -> str | None:
    """Why no process can take a text; None if one can."""
    if "\0" in text:
        position = text.index("\0") + 1
        return f"has a NUL as character {position}, which ends a word of a command or a variable; remove it"
    try:
        num_bytes = len(text.encode(errors="surrogateescape" if may_be_bytes else "strict"))
    except UnicodeEncodeError as error:
        return f"is not UTF-8 at character {error.start + 1}; write it in UTF-8, or put it into a file"
    if num_bytes > MAX_WORD_BYTES:
        rule = f"Linux takes at most {MAX_WORD_BYTES:,} in one word or variable"
        return f"has {num_bytes:,} bytes; {rule}: put it into a file and name the file"
    return None


def require_command(words: Iterable[str], env: Mapping[str, str | None] | None = None) -> None:
    """Raises for a command with variables that no process can take: a word, or all of them, are too long.

    Raises:
        ConfigError: names the limit and what to do.
    """
    words = [*words]
    require_process_texts({"kernel.command": words})
    variables = [f"{name}={value}" for name, value in (env or {}).items() if value is not None]
    total_bytes = sum(len(text.encode(errors="surrogateescape")) + 1 for text in (*words, *variables))
    if total_bytes > MAX_TOTAL_BYTES:
        fact = f"kernel.command with its variables has {total_bytes:,} bytes"
        rule = f"at most {MAX_TOTAL_BYTES:,} are safe on all nodes"
        raise ConfigError(f"{fact}; {rule}: put long texts into files", setting="kernel.command")


def require_variables(values_by_name: Mapping[Any, Any], where: str) -> None:
    """Raises for a variable whose name or size no environment can have.

    Raises:
        ConfigError: names the variable, the rule and what to do.
    """
    for name, value in values_by_name.items():
        if not str(name) or "=" in str(name):
            rule = "the name of a variable is not empty and has no '='"
            raise ConfigError(f"{where}: {name!r:.60}; {rule}: rename it", setting=where)
        for text in map(str, value if isinstance(value, list | tuple) else (value,)):
            num_bytes = len(f"{name}={text}".encode(errors="surrogateescape"))
            if num_bytes > MAX_WORD_BYTES:
                rule = f"Linux takes at most {MAX_WORD_BYTES:,} with the name"
                remedy = "put it into a file and name the file"
                raise ConfigError(f"{where}.{name} has {num_bytes:,} bytes; {rule}: {remedy}", setting=where)
