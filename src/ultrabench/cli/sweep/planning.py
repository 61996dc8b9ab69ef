"""Makes a plan and shows how far it is."""

from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ultrabench.cli.tables import out
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import PARALLEL_FROM, Plan, make_plan
from ultrabench.sweep.remedy import require_runs


def plan_with_bar(config: SweepConfig, **rate: Any) -> Plan:
    """The plan of a sweep; on a terminal a large one shows a bar on stderr.

    Raises:
        ConfigError: no candidate can run.
    """
    console = out(stderr=True)
    columns = TextColumn("candidates"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", visible=False)

        def advance(done: int, of: int) -> None:
            bar.update(task, completed=done, total=of, visible=of >= PARALLEL_FROM)

        return require_runs(make_plan(config, advance=advance, **rate))
