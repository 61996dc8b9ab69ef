"""A column of results: what its values mean, their unit, which of them are better, and where they come from.

A column is described once. Where a dataclass holds the value, such as `RunResult`, its field does it with `column`;
analysis/results/columns.py has the rows of all others. Schema, tables, figures, rankings, exports and the page use
these.
"""

import re
from dataclasses import field, fields
from enum import StrEnum
from typing import Any, Literal, NamedTuple, get_args


class ColumnType(StrEnum):
    """The type of the values of a column, as the documentation names it."""

    TEXT = "text"
    INT = "integer"
    FLOAT = "number"
    BOOL = "boolean"
    TEXTS = "list[text]"
    FLOATS = "list[number]"
    RECORDS = "list[record]"
    TIME = "time (UTC)"


NUMERIC_TYPES = (ColumnType.INT, ColumnType.FLOAT)
"""Types of columns by which runs may be ranked."""


class Better(StrEnum):
    """Which values of a column are better."""

    HIGHER = "higher"
    LOWER = "lower"
    NONE = "none"
    """Neither, such as for a degree of parallelism; runs cannot be ranked by such a column."""

    @property
    def note(self) -> str:
        """What figures write beside such a column where that is not the usual direction."""
        return "lower is better" if self is Better.LOWER else ""


class Source(StrEnum):
    """Where the value of a column comes from."""

    RUN = "run"
    """The plan and the configuration of the sweep: what was run."""
    RESULT = "result"
    """The field of RunResult with the name of the column."""
    PREDICTION = "prediction"
    """A prediction that was made before the run."""
    PREFLIGHT = "preflight"
    """The rates of devices and links that the allocation, or kernel=probe, measured."""
    COMPUTED = "computed"
    """Other columns, or the journal of the sweep."""


class Form(StrEnum):
    """How texts show the numbers of a unit."""

    PLAIN = "plain"
    """Four digits with the symbol of the unit."""
    GROUPED = "grouped"
    """A whole number with its digits in groups of three, without the unit."""
    PERCENT = "percent"
    """Three digits, or two of them below 1 %."""
    CHANCE = "chance"
    """Whole percents."""
    MEMORY = "memory"
    """MiB or GiB."""
    PREFIXED = "prefixed"
    """Three digits with a metric prefix and the symbol of the unit."""


class AxisUnit(NamedTuple):
    """The unit in which texts and figures show the numbers of a column."""

    symbol: str = ""
    factor: float = 1.0
    """What the numbers of results are multiplied with."""

    def bare_text(self, number: float, decimals: int = 2) -> str:
        """A number in this unit, without the symbol, for tables whose numbers have equally many decimals."""
        return f"{number * self.factor:,.{decimals}f}"

    def text(self, number: float, decimals: int = 2) -> str:
        """What `bare_text` returns, with the symbol of the unit, such as `24.50 GiB`."""
        return f"{self.bare_text(number, decimals)} {self.symbol}".rstrip()


class Unit(NamedTuple):
    """The unit of the numbers of a column."""

    symbol: str
    """The unit in which results hold the numbers; empty for plain numbers."""
    form: Form = Form.PLAIN
    axis: AxisUnit = AxisUnit()
    short: str = ""
    """A shorter symbol for places with little room, such as the cells of a heatmap."""

    def drawn(self, numbers: Any) -> Any:
        """A number of results, or many such as a pandas Series, in the unit `axis_symbol` of texts and figures."""
        return numbers if self.axis.factor == 1 else numbers * self.axis.factor

    @property
    def is_share(self) -> bool:
        """Whether its numbers are fractions, which texts and figures show in percent."""
        return self.form in (Form.PERCENT, Form.CHANCE)

    def text(self, number: float) -> str:
        """A number with the symbol of the unit, such as `24.5 GiB`, `0.1234 s` or `43.2 %`."""
        match self.form:
            case Form.PERCENT:
                return _percent(number)
            case Form.CHANCE:
                return "<1 %" if number < 0.01 else f"{100 * number:.0f} %"
            case Form.MEMORY:
                return _memory(number)
            case Form.GROUPED:
                return f"{self.drawn(number):,.0f}"
            case Form.PREFIXED:
                return _prefixed(number, self.symbol)
            case Form.PLAIN:
                shown = self.drawn(number)
                number_text = str(shown) if isinstance(shown, int) else f"{shown:.4g}"
                return f"{number_text} {self.axis_symbol}".rstrip()

    def bare_text(self, number: float) -> str:
        """A number without the symbol, for tables that name `axis_symbol` in the heading, such as `24.5` or `2.31`.

        It has three digits, or is a whole number from 100 on, never with an exponent; memory has one decimal.
        """
        shown = self.drawn(number)
        if self.form == Form.MEMORY:
            return f"{shown:,.1f}"
        return f"{shown:,.0f}" if shown >= 100 else f"{shown:.3g}"

    def brief_text(self, number: float) -> str:
        """What `bare_text` returns, with the symbol of the unit, such as `24.5 GiB` or `2.31 s`."""
        return f"{self.bare_text(number)} {self.axis_symbol}".rstrip()

    def exact_text(self, number: float) -> str:
        """A number with at most six digits and the symbol of figures, such as `24.5012 GiB` or `43.2105 %`."""
        return f"{self.drawn(number):.6g} {self.axis_symbol}".rstrip()

    @property
    def short_symbol(self) -> str:
        """The symbol where there is little room."""
        return self.short or self.symbol

    @property
    def axis_symbol(self) -> str:
        """The unit of what `drawn` returns; it stands in brackets behind the title of an axis."""
        return self.symbol if self.axis.factor == 1 else self.axis.symbol


def _percent(fraction: float) -> str:
    """A percentage such as `43.2 %`, with two significant digits below 1 %, or `< 0.01 %`."""
    value = 100 * fraction
    if 0 < value < 0.01:
        return "< 0.01 %"
    return f"{value:.1f} %" if value >= 1 else f"{value:.2g} %"


def _memory(num_bytes: float) -> str:
    """Memory in MiB or GiB, such as `512 MiB`, `9.54 GiB` or `24.5 GiB`."""
    gib = BYTES.drawn(num_bytes)
    if round(gib * 1024) < 1024:
        return f"{gib * 1024:.0f} MiB"
    return f"{gib:.1f} GiB" if round(gib, 2) >= 10 else f"{gib:.2f} GiB"


def _prefixed(number: float, symbol: str) -> str:
    """A number with three digits and a metric prefix, such as `1.34 G`; 999.9 M is 1 G, since digits are rounded."""
    for size, prefix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if float(f"{number:.3g}") >= size:
            return f"{number / size:.3g} {prefix}{symbol}"
    return f"{number:.3g} {symbol}".rstrip()


NUMBER = Unit("")
SECONDS = Unit("s", axis=AxisUnit("seconds"))
FRACTION = Unit("fraction", Form.PERCENT, AxisUnit("%", 100.0))
CHANCE = Unit("fraction", Form.CHANCE, AxisUnit("%", 100.0))
PEAK_FRACTION = Unit("fraction", Form.PERCENT, AxisUnit("% of peak", 100.0))
LOST_STEPS = Unit("", axis=AxisUnit("steps lost"))
BYTES = Unit("B", Form.MEMORY, AxisUnit("GiB", 2.0**-30))
KIBIBYTES = AxisUnit("KiB", 2.0**-10)
MEBIBYTES = AxisUnit("MiB", 2.0**-20)
MILLISECONDS = AxisUnit("ms", 1e3)
BYTES_PER_S = Unit("B/s", Form.PREFIXED, AxisUnit("GB/s", 1e-9))
BYTES_PER_S_PER_NODE = Unit("B/s", Form.PREFIXED, AxisUnit("GB/s per node", 1e-9))
FLOPS_PER_S = Unit("FLOP/s", Form.PREFIXED)
FLOPS = Unit("FLOP", Form.PREFIXED, AxisUnit("TFLOP", 1e-12))
HERTZ = Unit("Hz", Form.PREFIXED)
WATTS = Unit("W", Form.PREFIXED)
JOULES = Unit("J", Form.PREFIXED)
GPU_HOURS = Unit("GPU hours")
TOKENS_PER_S = Unit("tokens/s", Form.GROUPED, short="tok/s")


def capacity_text(num_bytes: float) -> str:
    """The memory that a device or a machine has, such as `79.11 GiB` or `12,288 GiB`."""
    gib = BYTES.drawn(num_bytes)
    return f"{gib:,.0f} {BYTES.axis.symbol}" if gib >= 1000 else f"{gib:.4g} {BYTES.axis.symbol}"


def memory_axis(max_bytes: float) -> AxisUnit:
    """The unit of a table or figure of memory whose largest number is `max_bytes`: GiB, or MiB below one GiB."""
    return BYTES.axis if BYTES.drawn(max_bytes) >= 1 else MEBIBYTES


def fill_text(num_bytes: float, limit_bytes: float) -> str:
    """Memory that is needed beside the memory that there is, such as `668 GiB of 80`."""
    needed, limit = map(BYTES.drawn, (num_bytes, limit_bytes))
    needed_text = f"{needed:,.0f}" if needed >= 10 else f"{needed:.2f}"
    return f"{needed_text} {BYTES.axis.symbol} of {limit:.4g}"


class Report(NamedTuple):
    """The place of a number in the reports of ranks; the largest number of all ranks counts."""

    event: Literal["memory", "done"]
    field: str
    """A name in FIELDS of rank_report.py."""


class Column(NamedTuple):
    """What everything that shows, ranks, exports or draws a column knows about it."""

    name: str
    type: ColumnType
    meaning: str
    """One or two sentences for the documentation."""
    unit: Unit = NUMBER
    better: Better = Better.NONE
    follows_step_time: bool = False
    """Whether it is proportional to the step time or its inverse, so that it has the same relative interval."""
    source: Source = Source.COMPUTED
    title: str = ""
    """Its name in tables and figures, where that is not the name of the column."""
    short: str = ""
    """Its name in tables with little room, where that is not `title`."""
    report: Report | None = None
    """Where ranks report it; None for a number that the agent finds in its own way."""
    text_by_value: dict[int, str] = {}  # noqa: RUF012 - no default is ever changed
    """Value -> its text, where that is not the number."""

    @property
    def heading(self) -> str:
        """Its name in tables and figures."""
        return self.title or self.name

    @property
    def short_heading(self) -> str:
        """Its name in tables with little room."""
        return self.short or self.heading

    @property
    def bare_heading(self) -> str:
        """Its name with the unit, in tables whose cells have `Unit.bare_text`, such as `peak GiB`.

        A name that has the unit already stays, such as `tokens/s/GPU`.
        """
        name, symbol = self.short_heading, self.unit.axis_symbol
        has_unit = re.search(rf"(?<!\w){re.escape(symbol)}(?!\w)", name)
        return name if has_unit else f"{name} {symbol}".rstrip()

    def text(self, value: float) -> str:
        """A number of the column with its unit, or the text that stands for it."""
        return self.text_by_value[int(value)] if value in self.text_by_value else self.unit.text(value)


_COLUMN_KEY = "column"
_TYPES: dict[Any, ColumnType] = {
    str: ColumnType.TEXT, int: ColumnType.INT, float: ColumnType.FLOAT, bool: ColumnType.BOOL,
    tuple[str, ...]: ColumnType.TEXTS, tuple[float, ...]: ColumnType.FLOATS,
}  # fmt: skip
"""Type of a field -> type of its column."""


def column(meaning: str, *, name: str = "", default: Any = None, **facts: Any) -> Any:
    """A field of a dataclass that describes the column which shows it.

    Args:
        name: name of the column; by default that of the field.
        default: the value of a field that is not given; MISSING for one that has to be given.
        facts: other fields of `Column`; `columns_of` adds the type and the source.
    """
    return field(default=default, metadata={_COLUMN_KEY: {"name": name, "meaning": meaning, **facts}})


def columns_of(record: Any, *, source: Source, prefix: str = "") -> dict[str, Column]:
    """Field of a dataclass -> the column that shows it, for each field that describes one.

    Args:
        source: where the values of these columns come from.
        prefix: begins the names of columns whose fields give no name.
    """
    described_fields = (f for f in fields(record) if _COLUMN_KEY in f.metadata)
    facts_by_field = {f.name: f.metadata[_COLUMN_KEY] | {"type": _type_of(f.type)} for f in described_fields}
    return {
        field_name: Column(**facts | {"name": facts["name"] or prefix + field_name, "source": source})
        for field_name, facts in facts_by_field.items()
    }


def _type_of(annotation: Any) -> ColumnType:
    """The type of the column of a field with this annotation, such as `float | None`."""
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return ColumnType.TEXT
    options = get_args(annotation) if type(None) in get_args(annotation) else (annotation,)
    return next(_TYPES[option] for option in options if option is not type(None))
