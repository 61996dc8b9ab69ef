"""What `ultrabench predict replay` prints and writes."""

from pathlib import Path

from ultrabench.analysis.predict.replay import STRATEGIES, cells_of, replay
from ultrabench.cli.predict.calibrate import open_cases
from ultrabench.cli.results import draw
from ultrabench.cli.tables import print_json, say, show, table
from ultrabench.errors import ConfigError, require_known
from ultrabench.sweep.config.load import load_config


def run_replay(
    source: str | None,
    strategy: str,
    batch: int,
    profile: str | None,
    output: Path | None,
    json_: bool,
    results_dir: Path,
) -> None:
    """Replays a finished sweep with a strategy, and prints its hours and regret by cell."""
    require_known("strategy", STRATEGIES, strategy)
    given, used = open_cases([source], profile, results_dir)
    cells = cells_of(given, used)
    if not cells:
        raise ConfigError(f"no layout of {source or 'the sweep'} worked; replay a finished sweep")
    found = replay(cells, strategy, batch, load_config().max_p_oom)
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
