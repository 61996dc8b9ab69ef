"""The command `ultrabench import`, which turns tables of other programs into result files."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from ultrabench.cli.options import Json, table_option
from ultrabench.cli.output import write_result
from ultrabench.errors import ConfigError, counted
from ultrabench.result import PENDING, Status

Output = Annotated[Path | None, table_option("File to write; default: FILE.parquet in the current folder.")]


def import_table(
    arguments: list[str] = typer.Argument(
        metavar="[nanotron] FILE",
        show_default=False,
        help="Format of the table, unless --map is given, and the file: CSV, Markdown, JSON or JSON lines.",
    ),
    map_: Path | None = typer.Option(None, "--map", help="YAML file that maps the columns of another table."),
    output: Output = None,
    json_: Json = False,
) -> None:
    """Converts a table, and prints how its rows and columns were understood."""
    from ultrabench.analysis.results.cases import unusable_lines
    from ultrabench.analysis.results.cells import left_out
    from ultrabench.analysis.results.collect import parquet
    from ultrabench.analysis.results.imported.table_map import built_in, read_map
    from ultrabench.analysis.studies.import_tables.import_table import import_table as import_file
    from ultrabench.cli.tables import print_json, say, show, table

    *format_names, source_path = arguments
    if len(format_names) + (map_ is not None) != 1:
        usage = "ultrabench import nanotron FILE.csv, or ultrabench import --map map.yaml FILE.csv"
        raise ConfigError(f"import {' '.join(arguments)} needs one format or one map: {usage}")
    conversion = import_file(Path(source_path), read_map(map_ or built_in(format_names[0])))
    output_path = output or Path(Path(source_path).name).with_suffix(".parquet")
    write_result(output_path, parquet(conversion.table))
    rows = conversion.table.select(["status", "model", "suspect"]).to_pylist()
    num_by_status = Counter(row["status"] or PENDING for row in rows)
    num_by_model = Counter(str(row["model"]) for row in rows)
    num_suspects = sum(row["suspect"] is not None for row in rows)
    notes = [*conversion.notes, *left_out(conversion.table)]
    unusable = unusable_lines(conversion.table)
    if json_:
        counts = {"rows": len(rows), "by_status": num_by_status, "by_model": num_by_model}
        counts |= {"suspect": num_suspects, "doubts": conversion.doubt_counts}
        counts |= {"doubt_examples": conversion.doubt_examples}
        counts |= {"unused_columns": conversion.unused_columns, "notes": notes, "unusable": unusable}
        print_json(counts)
    else:
        doubt_rows = [
            (reason, num.total(), num[Status.OK]) for reason, num in conversion.doubt_counts.items()
        ]
        show(table("rows", "status", ">rows", rows=num_by_status.items()), "")
        show(table("models", "model", ">rows", rows=num_by_model.items()), "")
        show(table("suspect rows", "reason", ">rows", ">ok rows", rows=doubt_rows), "")
        examples = [f"{code}, such as {text}" for code, text in conversion.doubt_examples.items()]
        show(*examples, *[""] * bool(examples))
        show(f"unused columns: {', '.join(conversion.unused_columns) or 'none'}", *notes, *unusable)
    rows_text = counted(len(rows), "row")
    say(f"read {rows_text} from {source_path}, wrote {rows_text} to {output_path}; {num_suspects:,} suspect")
