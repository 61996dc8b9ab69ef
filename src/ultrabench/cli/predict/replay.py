"""The command `ultrabench predict replay`, which measures what a strategy of search costs and misses."""

import typer

from ultrabench.cli.options import RESULTS, Json, ProfileName, ResultsDir, Source
from ultrabench.cli.results import Output, draw
from ultrabench.errors import ConfigError, require_known


def replay(
    source: Source = None,
    strategy: str = typer.Option(
        "adaptive", metavar="NAME", help="adaptive, exhaustive, random or predicted."
    ),
    batch: int = typer.Option(1, min=1, help="Runs that are made at the same time."),
    profile: ProfileName = None,
    output: Output = None,
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Replay a finished sweep as if live.

    It tells GPU hours and regret of a strategy, drawn with -o FILE.png."""
    from ultrabench.analysis.predict.replay import STRATEGIES, cells_of
    from ultrabench.analysis.predict.replay import replay as replayed
    from ultrabench.cli.predict.cases import open_cases
    from ultrabench.cli.tables import print_json, say, show, table
    from ultrabench.sweep.config.load import load_config

    require_known("strategy", STRATEGIES, strategy)
    given, used = open_cases([source], profile, results_dir)
    cells = cells_of(given, used)
    if not cells:
        raise ConfigError(f"no layout of {source or 'the sweep'} worked; replay a finished sweep")
    found = replayed(cells, strategy, batch, load_config().max_p_oom)
    if output is not None:
        from ultrabench.analysis.figures.replayed import figure

        draw(output, lambda: figure(found, str(source or "sweep")))
    if json_:
        print_json(found)
        return
    rows = [
        (c["model"], c["nodes"], c["layouts"], c["runs"], f"{c['gpu_hours_share']:.1%}",
         "none found" if c["regret"] is None else f"{c['regret']:.1%}")
        for c in found["cells"]
    ]  # fmt: skip
    title = f"strategy {strategy}, batch {batch}, profile {used.name}"
    show(table(title, "model", ">nodes", ">layouts", ">runs", ">GPU hours", ">regret", rows=rows), "")
    near = sum(c["regret"] is not None and c["regret"] <= 0.02 for c in found["cells"])
    say(
        f"{found['runs']:,} runs, {found['gpu_hours_share']:.1%} of the GPU hours of all layouts; "
        f"within 2 % of the best in {near} of {len(rows)} cells"
    )
