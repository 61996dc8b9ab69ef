"""Commands and remedies that ultrabench prints are whole on any terminal, and run when they are copied."""

import fcntl
import json
import os
import re
import shlex
import struct
import sys
import termios
import threading

import pytest
import typer

from tests.messages import GOLDEN
from tests.unit.cli.conftest import QUICK
from tests.unit.sweep.test_remedies import OVERRIDE
from ultrabench.cli import main as cli
from ultrabench.cli.tables import plain_text, say

WIDTHS = (60, 80, 120)
COMMAND = re.compile(r"\bultrabench((?: (?:'[^']*'|[\w./=\[\]{},:+@%-]+))+)")
"""A command as a shell reads it; sentences about ultrabench look the same, but begin with no name of a command."""
GROUPS = {"sweep", "kernel", "predict"}
SMALL = ("model=llama3-8b", "tp=[1,2]", "pp=1", "cp=1", "mbs=[1,2]", "gbs=256", "recompute=[none,full]")
CASES = [
    (("sweep", "status"), 1), (("sweep", "top"), 1), (("sweep", "show", QUICK.runs[0].run_id), 0),
    (("sweep", "show", "0000"), 1),
    (("sweep", "pause"), 1), (("heatmap", "results/quick-cpu/plan.parquet"), 1),
    (("compare", "published", "a.parquet"), 1),
    (("plan",), 1), (("recommend", *SMALL), 1), (("recommend", *SMALL, "--write", "best"), 1),
    (("recommend", "nodes=[1]"), 2),
    (("sweep", "plan", "--top", "1", "--write", "one"), 1),
    (("sweep", "plan", "hardware=h100x8", "model=llama3-70b", "sweep.tp=[8]", "sweep.pp=[1]", "sweep.mbs=[1]"), 0),
]  # fmt: skip


def on_terminal(width, call, monkeypatch):
    """What `call` prints on a pseudo-terminal of this width."""
    parent, child = os.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    chunks = []

    def read():
        try:
            while chunk := os.read(parent, 65536):
                chunks.append(chunk)
        except OSError:
            return  # the other end is closed

    reader = threading.Thread(target=read)
    reader.start()
    with monkeypatch.context() as patch, os.fdopen(child, "w") as stream:
        patch.setenv("COLUMNS", str(width))
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        call()
    reader.join()
    os.close(parent)
    return plain_text(b"".join(chunks).decode().replace("\r\n", "\n"))


def commands_in(text):
    """The commands in a text, as the words that follow `ultrabench`; a sentence ends them."""
    known_names = typer.main.get_command(cli.app).commands
    for match in COMMAND.finditer(text):
        words = re.split(r"[.,:](?= |$)", match[1])[0]
        if (words := shlex.split(words)) and words[0] in known_names and words != [words[0]]:
            yield words


@pytest.mark.parametrize(("words", "num_commands"), CASES)
def test_printed_commands_are_whole_on_any_terminal_and_run(
    ultrabench, sweep, monkeypatch, words, num_commands
):
    arguments = [*words, "--force"] if "--write" in words else words
    _, out, err = ultrabench(*arguments)
    commands = [*commands_in(out + err)]
    assert len(commands) == num_commands, out + err
    for width in WIDTHS:
        monkeypatch.setattr(sys, "argv", ["ultrabench", *arguments])

        def call():
            with pytest.raises(SystemExit):
                cli.main()

        shown = on_terminal(width, call, monkeypatch)
        assert [*commands_in(shown)] == commands
        assert [*OVERRIDE.findall(shown)] == [*OVERRIDE.findall(out + err)]
    for command in commands:
        is_run = command[:1] == ["recommend"] and "--write" in command and "--force" not in command
        is_launch = command[:2] == ["sweep", "launch"]
        command = ["sweep", "plan", *command[2:]] if is_launch else command
        code, _, err = ultrabench(*command, *([] if is_run or is_launch else ["--help"]))
        assert code == 0, err


@pytest.mark.parametrize("width", WIDTHS)
def test_no_message_is_broken(monkeypatch, width):
    messages = [row["message"] for row in json.loads(GOLDEN.read_text())]
    shown = on_terminal(width, lambda: say(*messages), monkeypatch)
    assert shown.splitlines() == messages
