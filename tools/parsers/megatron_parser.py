"""Judges commands with Megatron-LM's own parser; runs in Megatron-LM's Python, and imports nothing of ultrabench.

Arguments: the checkout and the compute capability of the GPUs, such as 9.0. Reads a JSON list of commands on stdin,
each with `program`, `arguments`, `env` and `world_size`. Writes on stdout the version and, for each command, why it is
refused, or null. Calls that need a GPU or Transformer Engine get fixed answers.
"""

import argparse
import contextlib
import functools
import importlib
import io
import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TRANSFORMER_ENGINE = "2.13.0"
"""The version of Transformer Engine that Megatron-LM is told; it runs in NVIDIA's containers of August 2026."""


def stub_calls(capability: tuple[int, int]) -> None:
    """Answers what the parser asks of GPUs and of Transformer Engine, so that it runs without either."""
    import megatron.core.utils
    import megatron.training.arguments  # imports must see the machine as it is
    import torch
    from packaging.version import Version

    properties = SimpleNamespace(
        major=capability[0], minor=capability[1], multi_processor_count=132, name="GPU"
    )
    answers = {
        "get_device_capability": capability, "get_device_properties": properties, "current_device": 0,
        "get_device_name": "GPU", "is_available": True, "device_count": 8,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **options: answer)
    megatron.core.utils.get_te_version = lambda: Version(TRANSFORMER_ENGINE)
    # Kernels of Transformer Engine that are None where it is not installed.
    for module_name in ("megatron.core.extensions.transformer_engine", "megatron.core.transformer.moe.moe_utils",
                        "megatron.core.models.common.embeddings.rope_utils"):  # fmt: skip
        module = importlib.import_module(module_name)
        for name in vars(module).copy():
            if name.startswith("fused_") and getattr(module, name) is None:
                setattr(module, name, print)
    # All commands share one parser, whose options take a fifth of a second to list.
    arguments = megatron.training.arguments
    arguments.add_megatron_arguments = functools.cache(arguments.add_megatron_arguments)
    shared_parser = argparse.ArgumentParser(description="Megatron-LM", allow_abbrev=False)
    arguments.argparse = SimpleNamespace(
        **vars(argparse) | {"ArgumentParser": lambda **options: shared_parser}
    )


def first_line(text: str) -> str:
    """The first line of a message."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def refusal(command: dict[str, Any]) -> str | None:
    """Why Megatron-LM refuses a command; None if it accepts all words and their values."""
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    sys.argv = [command["program"], *command["arguments"]]
    os.environ.update(command["env"], RANK="1", WORLD_SIZE=str(command["world_size"]), LOCAL_RANK="1")
    error_text = io.StringIO()
    try:
        with contextlib.redirect_stderr(error_text), contextlib.redirect_stdout(io.StringIO()):
            args = parse_args()
            if not (Path.cwd() / command["program"]).is_file():
                return f"the checkout has no {command['program']}"
            validate_args(args, {"tokenizer_type": "GPT2BPETokenizer"})
            core_transformer_config_from_args(args)
    except SystemExit:
        lines = [line for line in error_text.getvalue().splitlines() if "error:" in line]
        return lines[-1].partition("error: ")[2] if lines else "it ended"
    except Exception as error:
        return f"{type(error).__name__}: {first_line(str(error)) or where(error)}"
    return None


def where(error: Exception) -> str:
    """The statement that failed without a message."""
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}: {frame.line}"


def main() -> None:
    """Judges all commands."""
    checkout, capability = sys.argv[1:]
    os.chdir(checkout)
    sys.path.insert(0, checkout)
    commands = json.load(sys.stdin)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        stub_calls(tuple(map(int, capability.split("."))))
        from megatron.core.package_info import __version__

        refusals = [refusal(command) for command in commands]
    json.dump({"version": f"megatron-core {__version__.partition('+')[0]}", "refusals": refusals}, sys.stdout)


if __name__ == "__main__":
    main()
