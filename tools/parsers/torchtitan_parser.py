"""Judges commands with torchtitan's own configuration; runs in torchtitan's Python, and imports nothing of ultrabench.

Arguments: the folder with torchtitan's sources, or with its unpacked wheel, and the compute capability of the GPUs,
which it does not ask for. Reads a JSON list of commands on stdin, each with `arguments` and `env`, and writes on stdout
the version and why each is refused, or null.
"""

import contextlib
import importlib.metadata
import io
import json
import os
import sys
from pathlib import Path

from replaced_modules import replace_missing

REPLACED = (
    "grain", "torchdata", "datasets", "tokenizers", "torchao", "wandb", "safetensors", "huggingface_hub", "PIL",
    "tensorboard",
)  # fmt: skip
"""Packages of data and metrics, which are replaced where they are not installed, since no option needs them."""


def refusal(command: dict) -> str | None:
    """Why torchtitan refuses a command; None if it accepts all words and their values."""
    from torchtitan.config import ConfigManager

    error_text, paths = io.StringIO(), sys.path.copy()
    sys.path[:0] = filter(None, command["env"].get("PYTHONPATH", "").split(":"))
    try:
        with contextlib.redirect_stderr(error_text), contextlib.redirect_stdout(error_text):
            ConfigManager().parse_args(command["arguments"])
    except SystemExit:
        lines = [line.strip(" |│") for line in error_text.getvalue().splitlines()]
        return " ".join(line for line in lines if line and line[0] not in "╭╰─")[:300]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    finally:
        sys.path[:] = paths
    return None


def version_of(checkout: str) -> str:
    """The version of a wheel, or the one that the sources name."""
    for package in importlib.metadata.distributions(name="torchtitan", path=[checkout]):
        return package.version
    return Path(checkout, "assets", "version.txt").read_text().strip()


def main() -> None:
    """Judges all commands."""
    checkout = sys.argv[1]
    os.chdir(checkout)
    sys.path.insert(0, checkout)
    replace_missing(REPLACED)
    commands = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        refusals = [refusal(command) for command in commands]
    json.dump({"version": f"torchtitan {version_of(checkout)}", "refusals": refusals}, sys.stdout)


if __name__ == "__main__":
    main()
