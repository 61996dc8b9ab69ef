"""Follows the remedies that messages print, as a user would who copies them: they must lead somewhere."""

import json
import re
import shlex

import pytest

from tests.messages import GOLDEN
from tests.unit.sweep import test_config

pytestmark = pytest.mark.usefixtures("alone")

(MARK,) = test_config.test_what_cannot_be_used_is_told_in_one_line.pytestmark
CASES = [
    *(overrides for overrides, _ in MARK.args[1]), *(row["overrides"] for row in json.loads(GOLDEN.read_text())),
    ["kernel=command", "kernel.command=[python,a.py,{foo}]"], ["kernel=command", "kernel.command=[python,a b,{tp}:x]"],
    ["name=ünï"], ["name=a:b"], ["kernel=command", "kernel.command=[x]", "kernel.env={A: b:c}"],
]  # fmt: skip
OVERRIDE = re.compile(
    r"(?:write|did you mean|add|it:|, with|such as|them:|quotes:|each:) "
    r"""('[^']*=(?:[^']|'"[^"]*"')*'|[+\w][\w./]*=[^\s;?]+)"""
)
"""A remedy in a message: a word or two that announce it, and the override as a shell reads it."""
PLACEHOLDER = re.compile(r"NAME|VALUE|PATH|PROGRAM|=\.\.\.|\[A,B\]")
ROUNDS = 4
"""Largest number of remedies that are followed one after the other."""


def key(override):
    return override.lstrip("+~").partition("=")[0]


def following(overrides, message):
    """The overrides after the remedies of a message; None where it names none that can be copied."""
    remedies = [shlex.split(text.rstrip(",:)"))[0] for text in OVERRIDE.findall(message)]
    remedies = [remedy for remedy in remedies if not PLACEHOLDER.search(remedy)]
    remedies = remedies if message.endswith("?") else remedies[:1]
    others = {override: [other for other in overrides if other != override] for override in overrides}
    several = len(overrides) > 1
    if not remedies:
        return None
    refused = [old for old in overrides if not several or test_config.refusal(*others[old]) != message][:1]
    stays = [old for old in overrides if old not in refused and key(old) not in map(key, remedies)]
    return [*remedies, *stays]


@pytest.mark.parametrize("overrides", CASES, ids=" ".join)
def test_what_a_message_says_to_write_is_not_refused_in_turn(overrides):
    messages = []
    for _ in range(ROUNDS):
        message = test_config.refusal(*overrides)
        assert message not in messages, "the remedy leads back to the same message"
        if message is None or (new := following(overrides, message)) is None:
            return
        messages.append(message)
        overrides = new
    pytest.fail(f"no end after {ROUNDS} remedies: {messages}")
