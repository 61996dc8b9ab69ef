"""Words in braces in a text, such as `{tp}` or `{mbs*gas}`, which become values of a run."""

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from ultrabench.errors import ConfigError, names_one_edit_away

IN_BRACES = re.compile(r"(?<!\$)\{(?P<expression>\s*\w+(?:\s*[-+*]\s*\w+)*\s*)\}")
"""Words and numbers in braces with + - * between them; what a dollar precedes is left to a shell."""
CALCULATION = re.compile(r"(?<!\$)\{(?P<expression>\s*\w+(?:\s*[-+*]\s*\w+)+\s*)\}")
"""A calculation in braces: two or more words and numbers with + - * between them; a word alone is none."""


def command_text(value: object) -> str:
    """The value of a word as text in a command: whole numbers without `.0`."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def names_in(text: str) -> Iterator[str]:
    """The words in braces in a text, without the numbers among them."""
    for match in IN_BRACES.finditer(text):
        yield from _names(match)


def replace_words(
    text: str, words: Mapping[str, Any], where: str, pattern: re.Pattern[str] = IN_BRACES
) -> str:
    """The text in which each expression of known words is replaced by its value; all else stays as it is.

    Args:
        words: word -> its text, or the number to calculate with.
        where: what a message calls the text, such as `kernel.files.config.json`.
        pattern: IN_BRACES or CALCULATION.

    Raises:
        ConfigError: a word differs from a known one by one edit or by capitals, or is calculated with but no number.
    """

    def replacement(match: re.Match[str]) -> str:
        names = _names(match)
        for name in names:
            if name not in words and (similar_names := _similar_names(name, words)):
                remedy = f"did you mean {{{'} or {'.join(similar_names)}}}?"
                raise ConfigError(f"{where} has {match[0]}, and {name} is not a word of a run", remedy)
        if not names or not words.keys() >= set(names):
            return match[0]
        expression = match["expression"].strip()
        return command_text(words[expression] if expression in words else _calculated(match[0], words, where))

    return pattern.sub(replacement, text)


def _names(match: re.Match[str]) -> list[str]:
    return [word for word in re.findall(r"\w+", match["expression"]) if not word.isdecimal()]


def _similar_names(name: str, words: Mapping[str, Any]) -> list[str]:
    """The known words that are probably meant by an unknown one."""
    return [name.lower()] if name.lower() in words else names_one_edit_away(name, words)


def _calculated(braces: str, words: Mapping[str, Any], where: str) -> int | float:
    """The value of an expression in braces; a product comes before a sum.

    Raises:
        ConfigError: the value of one of its words is no number.
    """

    def number(operand: str) -> int | float:
        value = int(operand) if operand.isdecimal() else words[operand]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{where} has {braces}, and {operand}={value} is not a number")
        return value

    terms = re.findall(r"([-+]?)([^-+]+)", "".join(braces.strip("{}").split()))
    products = ((sign, prod(map(number, factors.split("*")))) for sign, factors in terms)
    return sum(-product if sign == "-" else product for sign, product in products)
