"""Lists of host names as Slurm writes them, such as gpu[01-04,07],login1."""

import re
from collections.abc import Iterator
from itertools import product

from ultrabench.errors import ConfigError

MAX_HOSTS = 100_000
"""Largest number of names that one list may stand for."""
_PART = re.compile(r"[^\[\],]+|\[[^\[\]]*\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """The names that a list stands for, in its order and without repetition.

    Raises:
        ConfigError: the text is no list of hosts, or stands for more than MAX_HOSTS names.
    """
    names = dict.fromkeys(name for term in _terms(text) for name in _expand_term(term, text))
    return tuple(names)


def _terms(text: str) -> Iterator[str]:
    """The parts of a list between its outer commas."""
    depth, start = 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if character == "," and not depth:
            yield text[start:position].strip()
            start = position + 1
    yield text[start:].strip()


def _expand_term(term: str, text: str) -> Iterator[str]:
    parts = _PART.findall(term)
    if "".join(parts) != term:
        raise ConfigError(f"{text!r} is not a list of hosts", "write it as in gpu[01-04,07]")
    choices = [_numbers(part[1:-1], text) if part.startswith("[") else [part] for part in parts]
    num_names = 1
    for choice in choices:
        num_names *= len(choice)
    if num_names > MAX_HOSTS:
        raise ConfigError(f"{text!r} stands for {num_names} hosts, more than {MAX_HOSTS}", "name fewer hosts")
    yield from ("".join(words) for words in product(*choices) if words)


def _numbers(ranges_text: str, text: str) -> list[str]:
    """The numbers of ranges such as 01-04,07, with as many digits as they are written with."""
    numbers = list[str]()
    for range_text in ranges_text.split(","):
        match = _RANGE.fullmatch(range_text.strip())
        if not match:
            raise ConfigError(f"{text!r} is not a list of hosts", "write it as in gpu[01-04,07]")
        first, last = match[1], match[2] or match[1]
        if int(last) - int(first) >= MAX_HOSTS:
            raise ConfigError(f"{text!r} stands for more than {MAX_HOSTS} hosts", "name fewer hosts")
        numbers += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return numbers
