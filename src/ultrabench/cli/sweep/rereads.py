"""Connects the logs that agents have kept with the decision which results of a sweep are read again."""

from collections.abc import Set

import typer

from ultrabench.cli.tables import can_ask
from ultrabench.errors import ConfigError, counted
from ultrabench.kernel_config import LOG_OPTIONS
from ultrabench.launchers.allocation_ends import open_allocations
from ultrabench.result import RunResult
from ultrabench.run import Task
from ultrabench.store.folder import SweepFolder
from ultrabench.store.state import SweepState
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.running.attempts import attempts_to_reread, changed_patterns
from ultrabench.sweep.running.rereads import Rereads, rereads_of


def read_again(config: SweepConfig, folder: SweepFolder, state: SweepState, keep: bool) -> Rereads:
    """Reads the logs of all results by the patterns of `config` that were read by others.

    Args:
        keep: keep results whose logs are not whole as they are.

    Raises:
        ConfigError: jobs with the earlier patterns have not ended.
    """
    attempts = attempts_to_reread(state, config.kernel)
    if not attempts:
        return Rereads()
    # Most commands read no log again, and the patterns of all known failures take a tenth of their start.
    from ultrabench.agent.diagnose.reread import reread
    from ultrabench.agent.ranks.cleanup import whole_logs

    tasks = [key for allocation in open_allocations(state).values() for key in allocation.tasks]
    ended_keys = {key for key, attempt in state.attempts.items() if attempt.result}
    if open_keys := set(tasks) - ended_keys:
        changed_options = {name for attempt in attempts for name in changed_patterns(attempt, config.kernel)}
        first_option = next(option for option in LOG_OPTIONS if option in changed_options)
        fact = (
            f"kernel.{first_option} differs from that of {counted(len(open_keys), 'run')} submitted earlier"
        )
        remedy = f"wait until they have ended, or: ultrabench sweep cancel {folder.display_name}"
        raise ConfigError(fact, remedy)

    def read_logs(task: Task, reported: RunResult, changed_options: Set[str]) -> RunResult | None:
        return reread(task, reported, whole_logs(folder.log_folder(task.key)), changed_options)

    return rereads_of(state, config, read_logs, keep=keep)


def ask_to_measure_again(rereads: Rereads) -> None:
    """Asks on a terminal whether runs are measured again; raises typer.Abort if not."""
    if rereads.num_repeated and can_ask():
        typer.confirm(f"Measure {counted(rereads.num_repeated, 'run')} again?", abort=True, err=True)
