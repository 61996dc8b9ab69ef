"""The command `ultrabench report`, which writes all results into one HTML page."""

import typer

from ultrabench.cli.options import RESULTS, Json, ResultsDir, Source
from ultrabench.cli.results import Output, write_result
from ultrabench.errors import ConfigError, counted


def report(
    source: Source = None,
    output: Output = None,
    public: bool = typer.Option(False, "--public", help="Leave out hosts, paths, users and all free texts."),
    json_: Json = False,
    results_dir: ResultsDir = RESULTS,
) -> None:
    """Write one page with all results, which opens without a network."""
    if output is not None and output.suffix not in (".html", ".htm"):
        raise ConfigError(f"-o {output}; the page is HTML: name a file that ends in .html")
    from ultrabench.analysis.collect import open_results
    from ultrabench.analysis.page.page import page
    from ultrabench.analysis.page.rows import document
    from ultrabench.cli.tables import print_json, say, warn

    name, default, table = open_results(source, results_dir, warn)
    path = output or default.with_name("report.html")
    held = document(table, public=public)
    made = page(held, title=name).encode()
    write_result(path, made)
    if json_:
        print_json({"path": str(path), "bytes": len(made), "rows": len(table), "cells": len(held["cells"])})
        return
    say(f"wrote {counted(len(table), 'row')} as a page of {len(made) / 1e6:.1f} MB to {path}")
