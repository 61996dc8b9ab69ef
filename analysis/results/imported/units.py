"""The units of a table: which ones a column of results may have, and those that headers and cells name."""

import re

from ultrabench import column
from ultrabench.analysis.results.columns import unit_of
from ultrabench.analysis.results.imported.scopes import SCOPE_TEXTS, SCOPED_COLUMNS, is_of_one_gpu
from ultrabench.errors import ConfigError
from ultrabench.time_labels import other_time_in

COUNT, TOKEN_RATE, FRACTION = column.NUMBER.symbol, column.TOKENS_PER_S.symbol, column.FRACTION.symbol
_COUNT_FACTORS = {
    "thousand": 1e3, "million": 1e6, "billion": 1e9, "trillion": 1e12, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30,
}  # fmt: skip
TOKENS = "tokens"
"""Unit of a global batch that is divided by seq_len."""
UNITS: dict[str, tuple[str, float]] = {
    "%": (FRACTION, 1e-2), FRACTION: (FRACTION, 1.0),
    "us": ("s", 1e-6), "ms": ("s", 1e-3), "s": ("s", 1.0), "min": ("s", 60.0), "h": ("s", 3600.0),
    "KB": ("B", 1e3), "MB": ("B", 1e6), "GB": ("B", 1e9), "TB": ("B", 1e12),
    "KiB": ("B", 2.0**10), "MiB": ("B", 2.0**20), "GiB": ("B", 2.0**30), "TiB": ("B", 2.0**40),
    "MB/s": ("B/s", 1e6), "GB/s": ("B/s", 1e9), "TB/s": ("B/s", 1e12), "GiB/s": ("B/s", 2.0**30),
    "Gbit/s": ("B/s", 1.25e8),
    "GFLOP/s": ("FLOP/s", 1e9), "TFLOP/s": ("FLOP/s", 1e12), "PFLOP/s": ("FLOP/s", 1e15),
    "MHz": ("Hz", 1e6), "GHz": ("Hz", 1e9), "kW": ("W", 1e3), TOKENS: (TOKENS, 1.0),
    **{unit: (COUNT, factor) for unit, factor in _COUNT_FACTORS.items()},
}  # fmt: skip
"""Unit of a table -> ultrabench's unit of the same quantity, and the factor to it."""

_ALIASES = {
    "s": {
        "s": "s", "sec": "s", "secs": "s", "second": "s", "seconds": "s", "s/step": "s", "s/it": "s", "s/iter": "s",
        "ms": "ms",
        "msec": "ms", "msecs": "ms", "millisecond": "ms", "milliseconds": "ms", "ms/step": "ms", "us": "us",
        "min": "min",
        "mins": "min", "minutes": "min", "h": "h", "hr": "h", "hrs": "h", "hours": "h",
    },
    "B": {
        "kb": "KB", "mb": "MB", "gb": "GB", "tb": "TB", "kib": "KiB", "mib": "MiB", "gib": "GiB", "tib": "TiB",
    },
    "B/s": {"mb/s": "MB/s", "gb/s": "GB/s", "tb/s": "TB/s", "gib/s": "GiB/s", "gbit/s": "Gbit/s"},
    "FLOP/s": {
        f"{prefix}{ending}": f"{prefix.upper()}FLOP/s"
        for prefix in "gtp"
        for ending in ("flops", "flop/s", "flops/s", "flop/s/gpu", "flops/s/gpu", "flops/gpu", "flop", "flop/s/device")
    },
    "Hz": {"mhz": "MHz", "ghz": "GHz"},
    "W": {"kw": "kW"},
    FRACTION: {"%": "%", "pct": "%", "percent": "%", "per cent": "%"},
    TOKEN_RATE: {"k": "thousand", "m": "million", "thousand": "thousand", "million": "million"},
    COUNT: {"b": "billion", "bn": "billion", "ki": "Ki", "mi": "Mi", **{unit: unit for unit in _COUNT_FACTORS}},
}  # fmt: skip
"""ultrabench's unit of a quantity -> lower-case text in headers and cells -> the unit that it means."""
_TOKEN_WORDS, _SECOND_WORDS = ("tok", "toks", "token", "tokens", "t"), ("s", "sec", "second", "seconds")
_LONG_TIME_WORDS = ("min", "minute", "h", "hr", "hour", "day")
_QUANTITY_BY_NAME = {
    **{
        alias: our_unit
        for our_unit, aliases in _ALIASES.items()
        for alias in aliases
        if our_unit not in (COUNT, TOKEN_RATE)
    },
    **{f"{tokens}/{time}": TOKEN_RATE for tokens in _TOKEN_WORDS for time in _SECOND_WORDS},
    **{f"{tokens}/{time}": "tokens in another time" for tokens in _TOKEN_WORDS for time in _LONG_TIME_WORDS},
    **{
        f"{thing}/{time}": "another rate"
        for thing in (
            "samples", "sample", "seqs", "seq", "sequences", "sequence", "steps", "step", "it", "its", "iter", "iters",
            "iterations", "iteration", "batches", "batch", "updates", "examples", "images", "epochs",
        )
        for time in (*_SECOND_WORDS, *_LONG_TIME_WORDS)
    },
    **{
        f"{time}/{part}": "time of a part of a step"
        for time in _ALIASES["s"]
        if "/" not in time
        for part in (
            "microbatch", "micro-batch", "micro batch", "mb", "layer", "token", "tok", "tokens", "sample", "samples",
            "seq",
            "sequence", "epoch",
        )
    },
    "tps": TOKEN_RATE, "tgs": TOKEN_RATE,
}  # fmt: skip
"""Lower-case text of a unit in a header -> ultrabench's unit of its quantity."""
_PREFIXED_TOKEN_RATE = re.compile(r"(thousand|million|[km]) ?(t.*)")
"""A number of tokens, and the token rate that it multiplies."""
_OF_WHAT = re.compile(r"/(?:gpu|device|gcd|rank|card|node|step|it|iter|iteration|batch)s?$")
"""What a unit in a header is of, beside its quantity."""
_OF_DEVICE = re.compile(r"/(?:gpu|device|gcd|card|accelerator|chip|rank|node)s?(?=/)")
"""The devices in a unit such as tokens/GPU/s."""
_PER_GPU = re.compile(r"(?:/|per)[ _-]?(?:gpu|device|gcd|card|accelerator|chip)(?![a-z])", re.IGNORECASE)
_OTHER_SCOPES = (
    r"node|host|server|machine|dp(?:[ _-]?(?:rank|group|replica))?|data[ _-]parallel[ _-](?:rank|group|replica)"
    r"|model[ _-]replica|replica|pipeline|worker|process|rank"
)
_PER_OTHER = re.compile(
    rf"(?:/|per)[ _-]?(?:{_OTHER_SCOPES})(?![a-z])|(?<![a-z])(?:{_OTHER_SCOPES})[ _-](?:tok|tps|throughput|t?flop)",
    re.IGNORECASE,
)
_OF_ALL = re.compile(r"(?<![a-z])(?:total|global|aggregate|overall|all gpus|cluster)(?![a-z])", re.IGNORECASE)
"""Words in a header that say of how many GPUs a rate is."""
_AMBIGUOUS_PREFIXES = {
    "k": ("1,000", "1,024", "thousand", "Ki"),
    "m": ("1,000,000", "1,048,576", "million", "Mi"),
}
_SAFE_LAST_WORDS = frozenset(
    {"%", "pct", "percent", *_ALIASES["B"], *_ALIASES["FLOP/s"], *_ALIASES["s"]}
    - {"tflop", "gflop", "pflop", "s", "h", "min", "second"}
)
"""Units that the last word of a header names, also without brackets; `min` may mean the minimum, `h` a hidden size."""


def require_unit_of(our_column: str, unit: str) -> None:
    """Raises ConfigError if a column of results holds another quantity than one with this unit."""
    units = units_of(our_column)
    if unit not in units:
        quantity = unit_of(our_column)
        quantity_text = {COUNT: "a number", TOKEN_RATE: TOKEN_RATE, FRACTION: "a fraction"}.get(
            quantity, f"in {quantity}"
        )
        choice = f"its units: {', '.join(units)}" if units else "it takes no unit"
        raise ConfigError(f"{our_column} with unit={unit!r}: {our_column} is {quantity_text}; {choice}")


def units_of(our_column: str) -> list[str]:
    """The units that the source of a column of results may have."""
    our_unit = unit_of(our_column)
    if our_column == "gbs":
        return [TOKENS, *_COUNT_FACTORS]
    if our_unit in (COUNT, TOKEN_RATE):
        return [*_COUNT_FACTORS]
    return [unit for unit, (base, _) in UNITS.items() if base == our_unit]


def header_unit(our_column: str, header: str, has_scope: bool) -> str | None:
    """The unit that the header of a column names, such as ms for `step (ms)`; None if it names none.

    Args:
        has_scope: whether the map says of how many GPUs the rate is, so that the header need not.

    Raises:
        ConfigError: what stands in its brackets is a unit of another quantity than that of the column of results.
    """
    our_unit = unit_of(our_column)
    if "reserved" in our_column and "alloc" in header.lower() and "reserv" not in header.lower():
        fact = f"the header {header!r} names allocated memory, which is less than {our_column}"
        raise ConfigError(f"{fact}; map it to peak_mem_allocated_bytes")
    if not has_scope:
        _require_same_scope(our_column, header)
    aliases = _ALIASES.get(our_unit, {})
    for bracket_text in re.findall(r"[(\[]([^)\]]*)[)\]]", header):
        text = _unit_text(bracket_text)
        if (
            our_unit == COUNT
            and "params" not in our_column
            and len(text) < 3
            and text not in ("%", "ms", "us", "ki", "mi")
        ):
            continue  # such as hidden (h), batch (b) or micro-batch (mb)
        if unit := _named_unit(our_column, header, bracket_text):
            return unit
    if our_unit != COUNT:
        for rate_text in _rate_texts(header):
            if unit := _named_unit(our_column, header, rate_text):
                return unit
    last_word = re.split(r"[\s_,.:()\[\]-]+", header.strip().lower().rstrip(")]"))[-1]
    return aliases.get(last_word) if last_word in _SAFE_LAST_WORDS else None


def _unit_text(text: str) -> str:
    """The unit that a text in a header names, in lower case, per step and of whatever number of GPUs."""
    text = text.strip().lower().removeprefix("in ").replace("\u00b5", "u")
    text = re.sub(r"[ _-]per[ _-]| ?/ ?", "/", text)
    return _OF_WHAT.sub("", _OF_DEVICE.sub("", text))


def _rate_texts(header: str) -> list[str]:
    """The words of a header that are quotients outside brackets, such as `it/s`,
    and names of token rates such as `tps`.
    """
    text = re.sub(r"[(\[][^)\]]*[)\]]", " ", header).strip().lower()
    text = re.sub(r"(?<![a-z])(thousand|million|[km])[ _-](?=t\w*(?:/| ?per))", r"\1", text)
    text = re.sub(r"[ _-]per[ _-]| ?/ ?", "/", text)
    header_parts = [part for part in re.split(r"[\s_,.:-]+", text) if part]
    quotients = [part for part in header_parts if "/" in part]
    names = [part for part in header_parts[-1:] if re.fullmatch(r"[km]?(?:tps|tgs)", part)]
    return [*quotients, *names]


def _named_unit(our_column: str, header: str, text: str) -> str | None:
    """The unit of a column of results that a text of its header names; None if it names none or ours.

    Raises:
        ConfigError: it is a unit of another quantity.
    """
    our_unit, unit_text = unit_of(our_column), _unit_text(text)
    aliases = _ALIASES.get(our_unit, {})
    unprefixed_text = unit_text
    match = _PREFIXED_TOKEN_RATE.fullmatch(unit_text)
    if match and _QUANTITY_BY_NAME.get(match[2]) == TOKEN_RATE:
        if our_unit == TOKEN_RATE:
            return aliases[match[1]]
        unprefixed_text = match[2]
    if unit_text in aliases:
        return aliases[unit_text]
    last_quotient = "/".join(unprefixed_text.split("/")[-2:])  # of such names as throughput/samples_per_s
    quantity = _QUANTITY_BY_NAME.get(unprefixed_text) or _QUANTITY_BY_NAME.get(last_quotient, our_unit)
    if quantity not in (our_unit, TOKENS):
        fact = f"the header {header!r} names {text}, which is no unit of {our_column}"
        raise ConfigError(f"{fact}; map the column that holds {our_column}")
    return None


def names_scope_of(our_column: str, header: str) -> bool:
    """Whether a header says that its rate is of as many GPUs as that of the column of results."""
    if our_column not in SCOPED_COLUMNS:
        return False
    return (_PER_GPU if is_of_one_gpu(our_column) else _OF_ALL).search(header) is not None


def require_whole_step(header: str) -> None:
    """Raises ConfigError if a header names a time that is not that of a whole step."""
    if label := other_time_in(header):
        fact = f"the header {header!r} names {label!r}, which is not the time of a whole step (step_time_s)"
        raise ConfigError(f"{fact}; map the column that holds it, or write certain: true if this column does")


def _require_same_scope(our_column: str, header: str) -> None:
    """Raises ConfigError if a header says that its rate is of another number of GPUs than that of the
    column of results.
    """
    if our_column not in SCOPED_COLUMNS:
        return
    is_per_gpu = is_of_one_gpu(our_column)
    if not is_per_gpu and _PER_GPU.search(header):
        todo = f"map it to {our_column}_per_gpu"
    elif is_per_gpu and _OF_ALL.search(header) and not _PER_GPU.search(header):
        todo = "map it to tokens_per_s" if "tokens" in our_column else "write per: all into the map"
    elif _PER_OTHER.search(header):
        todo = f"write what it is into the map: per: {' or per: '.join(SCOPE_TEXTS)}"
    else:
        return
    scope = "one GPU" if is_per_gpu else "all GPUs"
    raise ConfigError(
        f"the header {header!r} is of other GPUs than {our_column}, which is the rate of {scope}; {todo}"
    )


def cell_unit(our_column: str, text: str, expected_unit: str | None) -> str:
    """The unit that a cell names behind its number.

    Args:
        expected_unit: the unit of the whole column in its map or header.

    Raises:
        ConfigError: it is no unit of this column, is ambiguous, or contradicts the expected unit.
    """
    aliases, text_key = _ALIASES.get(unit_of(our_column), {}), text.lower().replace("\u00b5", "u")
    is_count = unit_of(our_column) in (COUNT, TOKEN_RATE)
    if is_count and text_key in _AMBIGUOUS_PREFIXES and text_key not in aliases:
        small, large, *prefix_units = _AMBIGUOUS_PREFIXES[text_key]
        if "params" in our_column:
            return prefix_units[0]
        if expected_unit in prefix_units:
            return str(expected_unit)
        raise ConfigError(
            f"is {small} or {large} times the number; write unit: {' or unit: '.join(prefix_units)}"
        )
    if text_key not in aliases:
        units = ", ".join(units_of(our_column))
        raise ConfigError(f"has the unit {text}; " + (f"known: {units}" if units else "it takes no unit"))
    unit = aliases[text_key]
    if expected_unit is not None and UNITS[unit][1] != UNITS[expected_unit][1]:
        raise ConfigError(f"is in {unit}, but its column in {expected_unit}; correct one of them")
    return unit
