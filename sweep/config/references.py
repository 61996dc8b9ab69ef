"""Says where a wrong reference such as `${HOME}` stands in a configuration, and what is wrong with it."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from ultrabench.sweep.config.files import search_path

_REFERENCE = re.compile(r"(?<!\\)\$\{(?:[^{}]*\}|[^{}'\"\s]*)")
"""A reference to a setting, or the beginning of one; a backslash before it leaves it to a shell."""
_FAULTS: tuple[tuple[str, str, str], ...] = (
    (r"Interpolation key '(?P<name>[^']+)' not found", r"\$\{{\s*{name}\s*\}}",
     "${{{name}}} is not a setting; for a shell variable on the nodes write \\${{{name}}}"),
    (r"Environment variable '(?P<name>[^']+)' not found", r"\$\{{\s*oc\.env:\s*{name}\s*\}}",
     "${{oc.env:{name}}} needs the environment variable {name}, which is not set here; set it, or give a default: "
     "${{oc.env:{name},VALUE}}"),
    (r"Unsupported interpolation type (?P<name>\S+)", r"\$\{{\s*{name}:",
     "${{{name}:...}} is unknown; write ${{oc.env:NAME}} for a variable of your shell, or \\${{{name}:...}} for "
     "a shell on the "
     "nodes"),
)  # fmt: skip
"""Message of OmegaConf -> pattern of the reference in a text, and what a user reads."""


def wrong_reference(error: BaseException, overrides: Sequence[str]) -> str | None:
    """One line about the reference that OmegaConf could not resolve: file, key, cause and remedy;
    None for other errors.
    """
    from omegaconf.errors import GrammarParseError, InterpolationResolutionError, OmegaConfBaseException

    cause = next((e for e in (error, error.__cause__) if isinstance(e, OmegaConfBaseException)), None)
    if isinstance(cause, GrammarParseError):
        path, key, text = _place(_unreadable_reference, overrides)
        reference = _unreadable_reference(text) or "${"
        fault = f"{reference} is not a reference to a setting; for a shell on the nodes write \\{reference}"
    elif isinstance(cause, InterpolationResolutionError) or "nterpolation" in type(cause).__name__:
        path, key, fault = None, "", " ".join(str(cause).partition("\n")[0].split())
        for message, pattern, sentence in _FAULTS:
            if match := re.search(message, str(cause)):
                name = match["name"]
                in_text = re.compile(r"(?<!\\)" + pattern.format(name=re.escape(name)))
                path, key, _ = _place(in_text.search, overrides)
                fault = sentence.format(name=name)
    else:
        return None
    assert isinstance(cause, OmegaConfBaseException)
    key = str(cause.full_key or key) if path is None else key
    return f"{path}: {key}: {fault}" if path else f"{key}: {fault}"


def _unreadable_reference(text: str) -> str | None:
    """The first reference of a text that OmegaConf cannot read; None if it can read all."""
    from omegaconf import OmegaConf
    from omegaconf.errors import GrammarParseError

    for match in _REFERENCE.finditer(text):
        try:
            OmegaConf.create({"text": match[0]})
        except GrammarParseError:
            return match[0]
    return None


def _place(has_fault: Callable[[str], Any], overrides: Sequence[str]) -> tuple[Path | None, str, str]:
    """The file, the key and the text with a wrong reference; no file if an override has it, or none is found.

    Files that an override names come first.
    """
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if has_fault(value):
            return None, key, value
    words = " ".join(overrides)
    paths = [path for folder in search_path()[:-1] for path in sorted(folder.rglob("*.yaml"))]
    for path in sorted(paths, key=lambda path: f"{path.parent.name}={path.stem}" not in words):
        for key, text in _texts(_values(path), ""):
            if has_fault(text):
                is_of_group = path.parent.name != "sweep" or key.partition(".")[0] == "sweep"
                return path, f"{path.parent.name}.{key}" if is_of_group else key, text
    return None, "", ""


def _values(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Dotted key -> text, for all texts in nested settings; the place in a list is in brackets."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _texts(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            yield from _texts(part, f"{key}[{index}]")
