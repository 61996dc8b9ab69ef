"""Runs a command that dies with its agent: `python -P -m ultrabench.agent.bound PID COMMAND...`."""

import os
import sys

from ultrabench.processes import die_with_parent


def main() -> None:
    """Asks the kernel to be killed with process PID, then becomes the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    die_with_parent(parent)
    os.environ.pop("PYTHONSAFEPATH", None)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        sys.exit(127)


if __name__ == "__main__":
    main()
