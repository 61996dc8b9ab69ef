"""The beginning of the `ultrabench` command, so small that Ctrl-C can hardly arrive before its handler is set."""

import os
import signal
from types import FrameType


def _exit_on_interrupt(signal_number: int, frame: FrameType | None) -> None:
    """The handler of Ctrl-C while the command is still imported: ends the process with one line and code 130."""
    os.write(2, b"ultrabench: interrupted\n")
    os._exit(130)


def main() -> None:
    """Runs the command line; Ctrl-C ends it with code 130 and one line also while it is still imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # the background ignores it
        signal.signal(signal.SIGINT, _exit_on_interrupt)
    from ultrabench.cli.main import main as run_cli

    run_cli()


if __name__ == "__main__":
    main()
