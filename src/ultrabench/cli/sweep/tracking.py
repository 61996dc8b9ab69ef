"""Starts and ends the process that logs the runs of a launch into a tracker (`launcher.track`).

A study does the logging. Its module `live_tracking.py` has `require_library(kind)`, which raises ConfigError if the
library of a tracker is not installed, and PROGRAM, the module that logs.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

from ultrabench.analysis.study import modules
from ultrabench.cli.tables import say
from ultrabench.errors import ConfigError
from ultrabench.store.folder import SweepFolder
from ultrabench.sweep.config.sweep_config import SweepConfig

USUAL_EXIT_S, EXIT_TIMEOUT_S = 2.0, 20.0
"""Seconds in which the last runs are usually tracked, and after which the launch leaves them to `ultrabench export`."""


def _live_tracking() -> ModuleType:
    """The module `live_tracking` of the study that logs runs.

    Raises:
        ConfigError: there is no such study.
    """
    for module in modules("live_tracking"):
        return module
    raise ConfigError(
        "launcher.track: this ultrabench has no study that logs runs", "leave out launcher.track"
    )


def require_tracker(config: SweepConfig) -> None:
    """Raises ConfigError if the runs of a launch cannot be logged into the tracker that it names."""
    if config.launcher.track:
        _live_tracking().require_library(config.launcher.track)


@contextlib.contextmanager
def tracked(tracker_kind: str | None, folder: SweepFolder) -> Iterator[None]:
    """Logs the runs of a sweep into a tracker while the body runs, which never waits for the tracker.

    Afterwards the process has EXIT_TIMEOUT_S to log the last runs; a body that is interrupted ends it at once.

    Args:
        tracker_kind: the tracker; None for none.
    """
    if tracker_kind is None:
        yield
        return
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", _live_tracking().PROGRAM, tracker_kind, str(folder.path)],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    num_earlier_failures, is_complete = len(_failure_lines(folder)), False
    try:
        yield
        is_complete = True
    finally:
        is_complete = is_complete and _finish_tracking(process)
        if process.stdin:
            process.stdin.close()
        process.kill()
        process.wait()
        if not is_complete:
            new_failures = _failure_lines(folder)[num_earlier_failures:]
            failure_text = f" ({new_failures[-1]})" if new_failures else ""
            command = f"ultrabench export {tracker_kind} {folder.display_name}"
            say(f"{tracker_kind} may miss some runs{failure_text}; to add them: {command}")


def _finish_tracking(process: "subprocess.Popen[bytes]") -> bool:
    """Asks the process to log what is left; returns whether it has done so in time."""
    assert process.stdin
    process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(USUAL_EXIT_S) == 0
    say(f"waiting up to {EXIT_TIMEOUT_S:.0f} s for the tracker")
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(EXIT_TIMEOUT_S - USUAL_EXIT_S) == 0
    return False


def _failure_lines(folder: SweepFolder) -> list[str]:
    """The lines of tracking.log."""
    log_path = folder.path / "tracking.log"
    return log_path.read_text(encoding="utf-8", errors="replace").splitlines() if log_path.exists() else []
