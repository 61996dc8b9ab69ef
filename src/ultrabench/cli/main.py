"""The `ultrabench` command. Each sub-command imports what it needs only when it runs."""

import contextlib
import gc
import io
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

import ultrabench
from ultrabench.cli.configs import configs
from ultrabench.cli.doctor import doctor
from ultrabench.cli.kernel.commands import kernel_app
from ultrabench.cli.predict.commands import predict_app
from ultrabench.cli.recommend import recommend
from ultrabench.cli.results import collect_sweeps, heatmap, plot, report
from ultrabench.cli.study_commands import add_study_commands, command_names
from ultrabench.cli.sweep.commands import sweep_app
from ultrabench.errors import ConfigError, DiskError, UltrabenchError, may_pass

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
GROUPS = {"sweep": sweep_app, "kernel": kernel_app, "predict": predict_app}
"""Name of each group of commands -> the group."""
app.command("collect")(collect_sweeps)
for command in (recommend, heatmap, plot, report, doctor, configs):
    app.command()(command)
add_study_commands(app)
for group_name, group_app in GROUPS.items():
    app.add_typer(group_app, name=group_name)
    add_study_commands(group_app, group_name)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True),
) -> None:
    """Find the fastest training layout for your nodes by measurement."""
    if version:
        typer.echo(ultrabench.__version__)
        raise typer.Exit


def main() -> None:
    """Runs the command line; a mistake of the user gives one line on stderr and exit code 2."""
    _guard_streams()
    _handle_ctrl_c()
    # A command makes few cycles; looking for them after each 700 objects would take a third of its time.
    gc.set_threshold(1_000_000)
    # Threads of numpy would wait in a loop for work that tables do not have.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        _require_working_folder()
        exit_code = app(standalone_mode=False)
        if _received_signals:  # Typer turns KeyboardInterrupt into an exit without a word
            exit_code = _print_failure("", 130)
        sys.stdout.flush()
    except UltrabenchError as error:
        exit_code = _print_failure(str(error), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        exit_code = _print_failure("" if _received_signals else "interrupted", 130)
    except OSError as error:
        unusable_path, remedy = error.filename or "standard output", "free or unlock it, or use another"
        if any(os.path.exists(parent / "sweep.json") for parent in Path(str(unusable_path)).parents):
            remedy = "free or unlock the folder of the sweep, or copy it and give --results-dir FOLDER"
        message = f"cannot use {unusable_path}: {error.strerror or error}; {remedy}"
        exit_code = _print_failure(message, DiskError.exit_code if may_pass(error) else 2)
    except Exception as error:
        # This is a wrong option. Typer has its own copy of Click, so its class cannot be named here.
        if not hasattr(error, "format_message"):
            if not _received_signals:
                raise
            sys.exit(_print_failure("", 2))
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(error.format_message(), err=True)
            sys.exit(2)
        message, hint = error.format_message(), ""
        commands_with_settings = {"plan", "launch", "doctor", "check", "dryrun"}
        unknown_option = getattr(error, "option_name", "") if type(error).__name__ == "NoSuchOption" else ""
        if unknown_option and commands_with_settings.intersection(sys.argv):
            hint = "; write settings without dashes: sweep.tp=[2], or tp=2 with kernel"
        for group_name, group_app in GROUPS.items():
            if "No such command" in message and sys.argv[1] in command_names(group_app):
                hint = f"; did you mean: ultrabench {group_name} {sys.argv[1]}?"
        exit_code = _print_failure(f"{message} (see --help{hint})", 2)
    try:
        sys.stdout.flush()
    except OSError:  # reported above; Python must not write the rest again when it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    gc.freeze()  # otherwise Python searches all objects for cycles before it exits
    sys.exit(exit_code if isinstance(exit_code, int) else 0)


_received_signals: list[int] = []
"""The SIGINTs that this process got; a library may turn their KeyboardInterrupt into any other exception."""


def _handle_ctrl_c() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt and records it, unless SIGINT is ignored as in the background."""

    def interrupt(signal_number: int, frame: FrameType | None) -> NoReturn:
        _received_signals.append(signal_number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        with contextlib.suppress(ValueError):  # only the main thread may set a handler
            signal.signal(signal.SIGINT, interrupt)


def _require_working_folder() -> None:
    """Raises ConfigError when the folder in which the command was started is gone."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"cannot use the working folder: {error.strerror}; change to another") from error


def _print_failure(message: str, exit_code: int) -> int:
    """Prints a message as one line on stderr; returns the exit code, which is 130 for all that follows Ctrl-C."""
    from ultrabench.cli.tables import say

    if _received_signals:
        message, exit_code = ": ".join(filter(None, ("interrupted", message))), 130
    say(f"ultrabench: {' '.join(message.split())}")
    return exit_code


class _ErrorIgnoringStream(io.FileIO):
    """A stream that ignores errors: if nobody reads it any more, its output is lost, but the work continues."""

    ignored_errors: type[OSError] = OSError
    """Errors that are ignored."""

    def write(self, data: Any) -> int:
        """Writes as much of `data` as it can, and returns the whole length."""
        with contextlib.suppress(self.ignored_errors):
            super().write(data)
        return len(data)


class _PipedStdout(_ErrorIgnoringStream):
    """A stdout that may be closed by its reader, as by `| head`; a full disk is still an error."""

    ignored_errors = BrokenPipeError


def _guard_streams() -> None:
    """Opens closed standard streams, and makes unprintable characters and a lost stderr raise no errors."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        while os.open(os.devnull, os.O_RDWR) < 2:  # otherwise the next file that is opened becomes stdout
            pass
    encoding = getattr(sys.__stderr__, "encoding", "utf-8")
    if sys.stderr is sys.__stderr__:
        buffered_stderr = io.BufferedWriter(_ErrorIgnoringStream(2, "w", closefd=False))
        sys.stderr = io.TextIOWrapper(buffered_stderr, encoding, "backslashreplace", line_buffering=True)
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        encoding = getattr(sys.__stdout__, "encoding", "utf-8")
        buffered_stdout = io.BufferedWriter(_PipedStdout(1, "w", closefd=False))
        sys.stdout = io.TextIOWrapper(buffered_stdout, encoding, line_buffering=os.isatty(1))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
