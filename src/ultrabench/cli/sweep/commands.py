"""The commands `ultrabench sweep ...`, which plan, launch and look after a sweep."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ultrabench.errors import ConfigError

sweep_app = typer.Typer(
    help="Plan, launch and look after a sweep.", no_args_is_help=True, rich_markup_mode=None
)

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[OVERRIDES]...", help="Hydra overrides, such as sweep=playbook."),
]
Sweep = Annotated[
    str | None, typer.Argument(metavar="[SWEEP]", help="Name or folder of a sweep; by default the newest.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
ResultsDir = Annotated[Path, typer.Option("--results-dir", help="The folder that holds the sweeps.")]
InSweep = Annotated[
    str | None, typer.Option("--sweep", help="Name or folder of the sweep; by default all are searched.")
]
MaxGpuHours = Annotated[
    float | None, typer.Option("--max-gpu-hours", min=0.0, help="The most that the sweep may use in all.")
]
Run = Annotated[str, typer.Argument(help="The id of a run, its first digits, or its rank in sweep top.")]
InThis = Annotated[str | None, typer.Argument(metavar="[SWEEP]", help="The same as --sweep.")]
RESULTS = Path("results")


def _say_at_once(message: str) -> None:
    """Prints a line before the slow imports, but only on a terminal: elsewhere an error is a single line."""
    if sys.stderr.isatty():
        typer.echo(message, err=True)


@sweep_app.command("plan")
def plan(
    overrides: Overrides = None,
    json_: Json = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write every candidate to a parquet file.")
    ] = None,
    top: Annotated[
        int | None, typer.Option("--top", min=1, help="Name the K layouts to try first per cell.")
    ] = None,
    show_script: Annotated[
        bool, typer.Option("--show-script", help="Print only the script of the first Slurm job.")
    ] = False,
) -> None:
    """Enumerate all layouts, reject some with reasons, and predict the price; nothing is submitted."""
    if show_script and (json_ or output or top):
        raise ConfigError("--show-script prints a script and nothing else; leave out --json, -o and --top")
    _say_at_once("planning")
    from ultrabench.cli.sweep.plan import print_script, show_plan

    if show_script:
        print_script(overrides or [])
    else:
        show_plan(overrides or [], json_, output, top)


@sweep_app.command("launch")
def launch(
    overrides: Overrides = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit the jobs and return at once.")] = False,
    max_gpu_hours: MaxGpuHours = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Ask nothing on a terminal: no price, no jobs of others.")
    ] = False,
    reuse: Annotated[
        str | None,
        typer.Option("--reuse", help="Results of another environment: same (measure again) or any (keep)."),
    ] = None,
) -> None:
    """Run a sweep until it is done; the same command continues it later."""
    _say_at_once("reading the configuration and planning")
    from ultrabench.cli.sweep.launch import run_launch

    raise typer.Exit(run_launch(overrides or [], detach, max_gpu_hours, yes, reuse))


@sweep_app.command("status")
def status(
    sweep: Sweep = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it anew every second until it is over.")
    ] = False,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Show the progress of a sweep, what runs, what failed and the best runs so far; writes nothing."""
    from ultrabench.cli.sweep.status import show_status

    raise typer.Exit(show_status(sweep, watch, json_, results_dir))


@sweep_app.command("top")
def top(
    source: Annotated[
        str | None, typer.Argument(metavar="[SWEEP or FILE.parquet]", help="The newest sweep.")
    ] = None,
    first: Annotated[
        int | None,
        typer.Option("-n", min=1, help="Runs to show of each cell; by default 10, and all with --json."),
    ] = None,
    by: Annotated[
        str, typer.Option("--by", metavar="COLUMN", help="A numeric column of the result table.")
    ] = "tokens_per_s_per_gpu",
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Rank all runs of each cell as the heatmap does; doubtful numbers come after those that may win."""
    from ultrabench.cli.sweep.top import show_top

    show_top(source, first, by, json_, results_dir)


@sweep_app.command("retry")
def retry(
    sweep: Sweep = None,
    only: Annotated[
        str | None, typer.Option("--only", help="Statuses to retry, such as crash,timeout.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="One run, by its id.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would run.")] = False,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Try failed runs again as new attempts; finished runs are never changed."""
    from ultrabench.cli.sweep.retry import run_retry

    raise typer.Exit(run_retry(sweep, only, run, dry_run, json_, results_dir))


@sweep_app.command("pause")
def pause(sweep: Sweep = None, results_dir: ResultsDir = RESULTS) -> None:
    """Start no new runs; running ones are finished, and then the nodes are given back."""
    from ultrabench.cli.sweep.pause_cancel import run_pause

    run_pause(sweep, results_dir)


@sweep_app.command("resume")
def resume(
    sweep: Sweep = None,
    detach: Annotated[bool, typer.Option("--detach", help="Submit the jobs and return at once.")] = False,
    max_gpu_hours: MaxGpuHours = None,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Continue a paused sweep, or one that no launcher follows, with its latest configuration."""
    from ultrabench.cli.sweep.pause_cancel import run_resume

    raise typer.Exit(run_resume(sweep, results_dir, detach, max_gpu_hours))


@sweep_app.command("cancel")
def cancel(sweep: Sweep = None, results_dir: ResultsDir = RESULTS) -> None:
    """Cancel all queued and running jobs of a sweep; results stay."""
    from ultrabench.cli.sweep.pause_cancel import run_cancel

    run_cancel(sweep, results_dir)


@sweep_app.command("show")
def show(
    run_id: Run,
    in_sweep: InThis = None,
    sweep: InSweep = None,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Show everything about one run: its numbers, spec, prediction, attempts and evidence."""
    from ultrabench.cli.sweep.show import show_run

    show_run(run_id, in_sweep or sweep, json_, results_dir)


@sweep_app.command("logs")
def logs(
    run_id: Run,
    in_sweep: InThis = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Print what is added until the attempt ends.")
    ] = False,
    sweep: InSweep = None,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Print the log of a run's latest attempt."""
    from ultrabench.cli.sweep.show import show_logs

    show_logs(run_id, follow, in_sweep or sweep, results_dir)
