"""Judges configuration files with nanotron's own classes; runs in nanotron's Python, and imports nothing of ultrabench.

Arguments: the checkout and the compute capability of the GPUs, which it does not ask for. Reads a JSON list of
commands on stdin, each with `arguments`, among them the path of a file, and writes on stdout the version and why each is refused,
or null.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

from replaced_modules import replace_missing

REPLACED = ("flash_attn", "grouped_gemm", "datasets", "transformers", "functorch", "datatrove")
"""Kernels and packages of data, which are replaced where they are not installed, since no setting needs them."""


def refusal(command: dict) -> str | None:
    """Why nanotron refuses a command; None if it accepts all settings and their values."""
    from nanotron.config import get_config_from_file

    try:
        path = command["arguments"][command["arguments"].index("--config-file") + 1]
        get_config_from_file(path)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def version_of(checkout: Path) -> str:
    """The version in pyproject.toml."""
    import tomllib

    return tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["version"]


def main() -> None:
    """Judges all commands."""
    checkout = Path(sys.argv[1])
    os.chdir(checkout)
    sys.path.insert(0, str(checkout / "src"))
    replace_missing(REPLACED)
    commands = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        refusals = [refusal(command) for command in commands]
    json.dump({"version": f"nanotron {version_of(checkout)}", "refusals": refusals}, sys.stdout)


if __name__ == "__main__":
    main()
