"""The arguments and options that several commands share."""

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ultrabench.errors import ConfigError

RESULTS = Path("results")


def words(metavar: str, meaning: str) -> Any:
    """An argument that takes any number of words; `meaning` is its help."""
    return typer.Argument(metavar=metavar, default_factory=list, show_default=False, help=meaning)


def table_file(meaning: str) -> Any:
    """The option -o for a table to write as parquet; `meaning` is its help."""
    return typer.Option("-o", "--output", callback=require_parquet, help=meaning)


def require_parquet(path: Path | None) -> Path | None:
    """The name of a table to write; raises ConfigError when it does not end in .parquet."""
    if path is not None and path.suffix != ".parquet":
        raise ConfigError(f"{path}: a table is written as parquet; give a name that ends in .parquet")
    return path


def percent_option(name: str, meaning: str) -> Any:
    """An option for a percentage such as `5` or `0.5%`; a bare number below 1 is refused, because it may be a fraction."""

    def parse_percent(text: str | float) -> float:
        number, option = str(text).removesuffix("%").strip(), f"{name} {text}"
        try:
            percentage = float(number)
        except ValueError:
            percentage = math.nan
        if not 0 <= percentage < math.inf:
            raise ConfigError(f"{option} is not a percentage of 0 or more; write {name} 5 for 5 %")
        if 0 < percentage < 1 and number == str(text):
            forms = f"write {name} {100 * percentage:g} for {100 * percentage:g} %, or {name} {number}% for {number} %"
            raise ConfigError(f"{option} may be a fraction or a percentage; {forms}")
        return percentage

    return typer.Option(name, metavar="PERCENT", parser=parse_percent, help=meaning)


def parse_since(text: str) -> datetime:
    """The begin of a date in UTC; raises ConfigError when the text is not an ISO date."""
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError:
        raise ConfigError(f"--since {text} is not a date; write YYYY-MM-DD, such as 2026-11-12") from None


Overrides = Annotated[
    list[str], words("[OVERRIDES]...", "Hydra overrides, such as hardware=h100x8 cluster=mine.")
]
Source = Annotated[
    str | None, typer.Argument(metavar="[SWEEP or FILE.parquet]", help="Default: the newest sweep.")
]
RankBy = Annotated[str, typer.Option(metavar="COLUMN", help="Rank by this numeric column of the results.")]
AlsoRankBy = Annotated[str | None, typer.Option(hidden=True)]
"""The spelling of RankBy that another command has."""
Since = Annotated[
    datetime | None,
    typer.Option(
        metavar="DATE", parser=parse_since, help="Ignore days before this date, such as 2026-11-12."
    ),
]
"""The first day that is read; days begin at 0:00 UTC."""
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")]
ResultsDir = Annotated[Path, typer.Option(help="Folder of the sweeps.")]
