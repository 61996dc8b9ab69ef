"""Judges commands with torchtitan's own configuration; runs in torchtitan's Python, and imports nothing of ultrabench.

Arguments: the checkout and the compute capability of the GPUs, which it does not ask for. Reads a JSON list of commands
on stdin, each with `arguments` and `env`, and writes on stdout the version and why each is refused, or null.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import sys
import types

REPLACED = (
    "grain",
    "datasets",
    "tokenizers",
    "torchao",
    "wandb",
    "safetensors",
    "huggingface_hub",
    "PIL",
    "tensorboard",
)
"""Packages of data and metrics, which are replaced where they are not installed, since no option needs them."""


class ReplacedModule(types.ModuleType):
    """A module that has any class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})


class Replacements(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module of REPLACED packages that nothing else finds."""

    def find_spec(
        self, name: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A replaced module."""
        if name.partition(".")[0] in REPLACED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """A module of any class."""
        return ReplacedModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """It has no code."""


def refusal(command: dict) -> str | None:
    """Why torchtitan refuses a command; None if it accepts all words and their values."""
    from torchtitan.config import ConfigManager

    error_text = io.StringIO()
    sys.path[:0] = filter(None, command["env"].get("PYTHONPATH", "").split(":"))
    try:
        with contextlib.redirect_stderr(error_text), contextlib.redirect_stdout(error_text):
            ConfigManager().parse_args(command["arguments"])
    except SystemExit:
        lines = [line.strip(" |│") for line in error_text.getvalue().splitlines()]
        return " ".join(line for line in lines if line and line[0] not in "╭╰─")[:300]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def main() -> None:
    """Judges all commands."""
    checkout = sys.argv[1]
    os.chdir(checkout)
    sys.path.insert(0, checkout)
    sys.meta_path.append(Replacements())
    refusals = [refusal(command) for command in json.load(sys.stdin)]
    json.dump({"version": "torchtitan", "refusals": refusals}, sys.stdout)


if __name__ == "__main__":
    main()
