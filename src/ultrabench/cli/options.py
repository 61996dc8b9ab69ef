"""The arguments and options that several commands share."""

import contextlib
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ultrabench.errors import ConfigError
from ultrabench.record import value_from

RESULTS = Path("results")
"""Folder of the sweeps without --results-dir."""


def words_argument(metavar: str, help_text: str) -> Any:
    """An argument that takes any number of words; `help_text` is its help."""
    return typer.Argument(metavar=metavar, default_factory=list, show_default=False, help=help_text)


def table_option(help_text: str) -> Any:
    """The option -o for a table to write as parquet; `help_text` is its help."""
    return typer.Option("-o", "--output", callback=require_parquet, help=help_text)


def require_parquet(path: Path | None) -> Path | None:
    """Returns the path of a table to write unchanged; raises ConfigError when it does not end in .parquet."""
    if path is not None and path.suffix != ".parquet":
        raise ConfigError(f"{path}: a table is written as parquet; give a name that ends in .parquet")
    return path


def percent_option(option_name: str, help_text: str) -> Any:
    """An option for a percentage such as `5` or `0.5%`; a bare number below 1 is refused,
    because it may be a fraction.
    """

    def parse_percent(text: str | float) -> float:
        number_text, input_text = str(text).removesuffix("%").strip(), f"{option_name} {text}"
        try:
            percentage = float(number_text)
        except ValueError:
            percentage = math.nan
        if not 0 <= percentage < math.inf:
            raise ConfigError(f"{input_text} is not a percentage of 0 or more; write {option_name} 5 for 5 %")
        if 0 < percentage < 1 and number_text == str(text):
            remedy = (
                f"write {option_name} {100 * percentage:g} for {100 * percentage:g} %, "
                f"or {option_name} {number_text}% for {number_text} %"
            )
            raise ConfigError(f"{input_text} may be a fraction or a percentage; {remedy}")
        return percentage

    return typer.Option(option_name, metavar="PERCENT", parser=parse_percent, help=help_text)


def number_option(option_name: str, number_type: Any, help_text: str) -> Any:
    """An option for a number of a type with limits, such as Count; others are refused as in a configuration."""

    def parse_number(text: str | float) -> Any:
        number: str | float = text
        with contextlib.suppress(ValueError):
            number = float(text)
        return value_from(number_type, number, option_name)

    return typer.Option(option_name, metavar="NUMBER", parser=parse_number, help=help_text)


def parse_since(text: str) -> datetime:
    """The start of a day in UTC; raises ConfigError when the text is not an ISO date."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise ConfigError(f"--since {text} is not a date; write YYYY-MM-DD, such as 2026-11-12") from None


Overrides = Annotated[
    list[str], words_argument("[OVERRIDES]...", "Hydra overrides, such as hardware=h100x8 cluster=mine.")
]
SweepOrFile = Annotated[
    str | None, typer.Argument(metavar="[SWEEP or FILE.parquet]", help="Default: the newest sweep.")
]
SelectedRows = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SWEEP or FILE.parquet] [COLUMN=VALUE]...",
        help="Default: all rows of the newest sweep. COLUMN=VALUE keeps matching rows, such as nodes=4.",
    ),
]
RankBy = Annotated[
    str,
    typer.Option(
        metavar="COLUMN",
        help="Rank by this column of the results, one whose higher or lower values are better.",
    ),
]
RankByAlias = Annotated[str | None, typer.Option(hidden=True)]
"""RankBy under the name that it has in another command: --by in `heatmap`, --rank-by in `sweep top`."""
Since = Annotated[
    datetime | None,
    typer.Option(
        metavar="DATE", parser=parse_since, help="Ignore days before this date, such as 2026-11-12."
    ),
]
"""The first day that is read; days begin at 0:00 UTC."""
WriteSweep = Annotated[
    str | None,
    typer.Option("--write", metavar="NAME", help="Write the layouts as ./ultrabench/sweep/NAME.yaml."),
]
AllSimilar = Annotated[
    bool, typer.Option("--all", help="Show all layouts of the groups of --top, not only the best of each.")
]
Force = Annotated[bool, typer.Option("--force", help="Let --write replace a file.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")]
ResultsDir = Annotated[Path, typer.Option(help="Folder of the sweeps.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", help="File to write.")]


def require_write(write: str | None, *, force: bool) -> None:
    """Raises ConfigError for --force without --write, whose file it replaces."""
    if force and write is None:
        raise ConfigError("--force replaces the file of --write", "add --write NAME, or leave out --force")
