"""The beginning of the `ultrabench` command, so small that Ctrl-C can hardly arrive before its handler is set.

Until then Ctrl-C gives a traceback. So this module and `ultrabench/__init__.py` import only what Python has built in
(`signal` takes many times as long as `_signal`, since it makes enums),
and the handler is set when this one is imported.
"""

import _signal  # type: ignore[import-not-found]
import posix


def _exit_on_interrupt(signal_number: int, frame: object) -> None:
    """The handler of Ctrl-C while the command is still imported: ends the process with one line and code 130."""
    posix.write(2, b"ultrabench: interrupted\n")
    posix._exit(130)


if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:  # the background ignores it
    _signal.signal(_signal.SIGINT, _exit_on_interrupt)


def main() -> None:
    """Runs the command line; Ctrl-C ends it with code 130 and one line also while it is still imported."""
    from ultrabench.cli.main import main as run_cli

    run_cli()


if __name__ == "__main__":
    main()
