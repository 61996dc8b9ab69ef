"""The commands `ultrabench sweep ...`, which plan, launch and manage a sweep."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ultrabench.allowed import Count, NonNegative, Positive, between
from ultrabench.cli.options import (
    RESULTS,
    AllSimilar,
    Force,
    Json,
    Overrides,
    RankBy,
    RankByAlias,
    ResultsDir,
    SelectedRows,
    WriteSweep,
    number_option,
    require_write,
    table_option,
)
from ultrabench.errors import ConfigError
from ultrabench.store.folder import find_sweep

sweep_app = typer.Typer(help="Plan, launch and manage sweeps.", no_args_is_help=True, rich_markup_mode=None)


Sweep = Annotated[
    str | None, typer.Argument(metavar="[SWEEP]", help="Name or folder; default: the newest sweep.")
]
OneSweep = Annotated[str, typer.Argument(metavar="SWEEP", help="Name or folder.")]
NewName = Annotated[str, typer.Argument(metavar="NEW", help="The new name.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
MaxGpuHours = Annotated[
    float | None, number_option("--max-gpu-hours", NonNegative, "Limit of the total GPU hours of the sweep.")
]
_BUDGET_HELP = "Propose the sweep that says most within so many GPU hours."
PlanMaxGpuHours = Annotated[float | None, number_option("--max-gpu-hours", Positive, _BUDGET_HELP)]
Top = Annotated[
    int | None, number_option("--top", Count, "Show the K groups of similar layouts to try first per cell.")
]
_ADVISE_HELP = "Largest P(OOM) of the layouts of --top; default: 0.1."
AdvisePOom = Annotated[
    float | None, number_option("--advise-p-oom", Annotated[float, between(0, 1)], _ADVISE_HELP)
]
Limit = Annotated[int | None, number_option("-n", Count, "Runs per cell; default: 10, with --json all.")]
Detach = Annotated[bool, typer.Option("--detach", help="Submit the jobs and exit at once.")]
ResultsOption = Annotated[
    Path | None, typer.Option("--results-dir", help="Folder of the sweeps, like results_dir=FOLDER.")
]
PlanFile = Annotated[Path | None, table_option("Write all candidates to a parquet file.")]
Run = Annotated[str, typer.Argument(help="Id of the run, first digits of the id, or rank in sweep top.")]
SweepArgument = Annotated[str | None, typer.Argument(metavar="[SWEEP]", help="Same as --sweep.")]
_AS_HELP = (
    "Print how another framework, such as megatron or deepspeed, "
    "trains this layout (see docs/start/your-program.md)."
)
SweepOption = Annotated[
    str | None, typer.Option("--sweep", help="Name or folder of the sweep; default: any sweep.")
]


def _say_at_once(message: str) -> None:
    """Prints a line before the slow imports, but only on a terminal: elsewhere an error is a single line."""
    if sys.stderr.isatty():
        typer.echo(message, err=True)


def _results_override(results_dir: Path | None) -> list[str]:
    """The override that chooses the folder of the results, if one is given."""
    return [] if results_dir is None else [f'results_dir="{results_dir}"']


@sweep_app.command()
def plan(
    overrides: Overrides,
    json_: Json = False,
    output: PlanFile = None,
    top: Top = None,
    all_: AllSimilar = False,
    advise_p_oom: AdvisePOom = None,
    max_gpu_hours: PlanMaxGpuHours = None,
    write: WriteSweep = None,
    force: Force = False,
    show_script: bool = typer.Option(False, "--show-script", help="Print only the script of the first job."),
    command: bool = typer.Option(
        False, "--command", help="Print only the command and the files of the first run of your program."
    ),
    results_dir: ResultsOption = None,
) -> None:
    """Show valid and rejected layouts and the predicted price.

    It submits nothing."""
    has_budget = max_gpu_hours is not None
    if show_script and (json_ or output or top or has_budget):
        others = "--json, -o, --top and --max-gpu-hours"
        raise ConfigError(f"--show-script prints a script and nothing else; leave out {others}")
    if command and (show_script or output or top or has_budget):
        others = "--show-script, -o, --top and --max-gpu-hours"
        raise ConfigError(f"--command prints one run and nothing else; leave out {others}")
    require_write(write, force=force)
    if write and not top and not has_budget:
        remedy = "add --top K, such as --top 3, or --max-gpu-hours H"
        raise ConfigError(
            f"--write {write} writes the layouts of --top, or the sweep of --max-gpu-hours", remedy
        )
    if write and top and has_budget:
        raise ConfigError(
            f"--write {write} with --top and --max-gpu-hours; it writes what one of them chooses: leave out one"
        )
    if all_ and not top:
        raise ConfigError("--all shows all layouts of the groups of --top", "add --top K, such as --top 3")
    _say_at_once("planning")
    overrides = [*overrides, *_results_override(results_dir)]
    from ultrabench.cli.sweep.plan import print_command, print_script, show_plan

    if show_script:
        print_script(overrides)
    elif command:
        print_command(overrides, json_)
    else:
        show_plan(
            overrides, json_, output, top, all_, advise_p_oom, write, force=force, max_gpu_hours=max_gpu_hours
        )


@sweep_app.command()
def launch(
    overrides: Overrides,
    detach: Detach = False,
    max_gpu_hours: MaxGpuHours = None,
    yes: bool = typer.Option(False, "--yes", help="Accept the predicted price, and ask nothing."),
    reuse: str | None = typer.Option(
        None, help="If the environment changed: same (measure again) or any (keep results)."
    ),
    results_dir: ResultsOption = None,
) -> int:
    """Run a sweep; the same command continues it after an interruption."""
    _say_at_once("reading the configuration and planning")
    from ultrabench.cli.sweep.launch import run_launch

    return run_launch([*overrides, *_results_override(results_dir)], detach, max_gpu_hours, yes, reuse)


@sweep_app.command()
def status(
    sweep: Sweep = None,
    watch: bool = typer.Option(False, "--watch", help="Update every second until the sweep ends."),
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Show the running and failed runs, and the best runs so far."""
    from ultrabench.cli.sweep.status import show_status

    show_status(find_sweep(sweep, results_dir), watch, json_)


@sweep_app.command()
def top(
    rows: SelectedRows = None,
    limit: Limit = None,
    by: RankBy = "tokens_per_s_per_gpu",
    rank_by: RankByAlias = None,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Rank the runs of each cell, in the same order as the heatmap.

    The best run comes first, then those statistically indistinguishable from it, the others, and suspects."""
    from ultrabench.cli.sweep.top import show_top

    show_top(rows, limit, rank_by or by, json_, results_dir)


@sweep_app.command()
def retry(
    sweep: Sweep = None,
    status_list: str | None = typer.Option(None, "--only", help="Statuses to retry, such as crash,timeout."),
    run_id_prefix: str | None = typer.Option(None, "--run", help="Retry only the run with this id."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would run, and run nothing."),
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> int:
    """Retry failed runs; all other results stay unchanged."""
    from ultrabench.cli.sweep.control import run_retry

    return run_retry(find_sweep(sweep, results_dir), status_list, run_id_prefix, dry_run, json_)


@sweep_app.command()
def pause(sweep: Sweep = None, results_dir: ResultsDir = RESULTS) -> None:
    """Finish the current runs, start no new ones and release the nodes."""
    from ultrabench.cli.sweep.control import run_pause

    run_pause(find_sweep(sweep, results_dir))


@sweep_app.command()
def resume(
    sweep: Sweep = None,
    detach: Detach = False,
    max_gpu_hours: MaxGpuHours = None,
    results_dir: ResultsDir = RESULTS,
) -> int:
    """Continue a sweep that is paused or has no launcher.

    It uses the latest configuration of the sweep."""
    from ultrabench.cli.sweep.control import run_resume

    return run_resume(find_sweep(sweep, results_dir), detach, max_gpu_hours)


@sweep_app.command()
def cancel(sweep: Sweep = None, results_dir: ResultsDir = RESULTS) -> None:
    """Cancel all pending and running jobs of a sweep; results are kept."""
    from ultrabench.cli.sweep.control import run_cancel

    run_cancel(find_sweep(sweep, results_dir))


@sweep_app.command("list")
def list_sweeps(json_: Json = False, results_dir: ResultsDir = RESULTS) -> None:
    """List all sweeps with their state, progress and best run."""
    from ultrabench.cli.sweep.sweeps import show_sweeps

    show_sweeps(results_dir, json_)


@sweep_app.command()
def rm(
    sweep: OneSweep,
    yes: Yes = False,
    cluster_gone: bool = typer.Option(
        False,
        "--cluster-gone",
        help="Do not ask the batch system for its jobs, since the cluster no longer exists.",
    ),
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Delete a sweep and its results, unless it has active jobs."""
    from ultrabench.cli.sweep.sweeps import run_rm

    run_rm(find_sweep(sweep, results_dir), yes, cluster_gone)


@sweep_app.command()
def rename(sweep: OneSweep, new: NewName, yes: Yes = False, results_dir: ResultsDir = RESULTS) -> None:
    """Rename a sweep, unless it has active jobs."""
    from ultrabench.cli.sweep.sweeps import run_rename

    run_rename(find_sweep(sweep, results_dir), new, yes)


@sweep_app.command()
def show(
    run_id: Run,
    in_sweep: SweepArgument = None,
    sweep: SweepOption = None,
    framework: str | None = typer.Option(None, "--as", metavar="FRAMEWORK", help=_AS_HELP),
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Show the results, plan, attempts and evidence of a run."""
    if framework is None:
        from ultrabench.cli.sweep.show import show_run

        show_run(run_id, in_sweep or sweep, json_, results_dir)
    else:
        from ultrabench.cli.sweep.show_as import show_as

        show_as(framework, run_id, in_sweep or sweep, json_, results_dir)


@sweep_app.command()
def logs(
    run_id: Run,
    in_sweep: SweepArgument = None,
    follow: bool = typer.Option(False, "-f", "--follow", help="Print new lines until the attempt ends."),
    sweep: SweepOption = None,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Print the log of the latest attempt of a run."""
    from ultrabench.cli.sweep.show import show_logs

    show_logs(run_id, follow, in_sweep or sweep, results_dir)
