"""The command `ultrabench import`, which turns tables of other programs into result files."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from ultrabench.cli.options import Json, table_file
from ultrabench.cli.results import write_result
from ultrabench.errors import ConfigError, counted

Output = Annotated[Path | None, table_file("File to write; default: FILE.parquet in the current folder.")]


def import_table(
    arguments: list[str] = typer.Argument(
        metavar="[nanotron] FILE.csv",
        show_default=False,
        help="Format of the table, unless --map is given, and the file.",
    ),
    map_: Path | None = typer.Option(None, "--map", help="YAML file that maps the columns of another table."),
    output: Output = None,
    json_: Json = False,
) -> None:
    """Convert the result table of another program to a parquet file."""
    from ultrabench.analysis.collect import parquet
    from ultrabench.analysis.importing.import_table import import_csv
    from ultrabench.analysis.importing.table_map import built_in, read_map
    from ultrabench.cli.tables import print_json, say, show, table

    *formats, file = arguments
    if len(formats) + (map_ is not None) != 1:
        forms = "ultrabench import nanotron FILE.csv, or ultrabench import --map map.yaml FILE.csv"
        raise ConfigError(f"import {' '.join(arguments)} needs one format or one map: {forms}")
    imported = import_csv(Path(file), read_map(map_ or built_in(formats[0])))
    path = output or Path(Path(file).name).with_suffix(".parquet")
    write_result(path, parquet(imported.table))
    rows = imported.table.select(["status", "model", "suspect"]).to_pylist()
    by_status = Counter(str(row["status"]) for row in rows)
    by_model = Counter(str(row["model"]) for row in rows)
    num_suspects = sum(row["suspect"] is not None for row in rows)
    if json_:
        counts = {"rows": len(rows), "by_status": by_status, "by_model": by_model, "suspect": num_suspects}
        print_json({**counts, "doubts": imported.doubts, "unused_columns": imported.unused})
    else:
        doubt_rows = [(reason, ends.total(), ends["ok"]) for reason, ends in imported.doubts.items()]
        show(table("rows", "status", ">rows", rows=by_status.items()), "")
        show(table("models", "model", ">rows", rows=by_model.items()), "")
        show(table("suspect rows", "reason", ">rows", ">ok rows", rows=doubt_rows), "")
        show(f"unused columns: {', '.join(imported.unused) or 'none'}")
    rows_text = counted(len(rows), "row")
    say(f"read {rows_text} from {file}, wrote {rows_text} to {path}; {num_suspects:,} suspect")
