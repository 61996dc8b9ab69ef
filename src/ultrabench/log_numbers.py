"""Numbers as programs write them into logs: with suffixes, units, and a comma or a point before the decimals."""

import math
import re
from typing import NamedTuple

FACTOR_BY_SUFFIX = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
"""Suffixes of numbers, such as 4.71K; nanotron writes B for 10^9, older versions of it G."""

_NUMBER = re.compile(
    r"(?P<sign>[-+]?)(?P<digits>\d[\d.,]*|\.\d+)(?P<exponent>[eE][-+]?\d+)?(?P<suffix> ?[kKMGBT](?![A-Za-z]))?\s*"
    r"(?P<unit>[A-Za-z\u00b5\u03bc%][A-Za-z\u00b5\u03bc%/]*)?"
)
"""A number with its suffix and its unit."""
_SPECIAL_NUMBER = re.compile(r"[-+]?(?:nan|inf(?:inity)?)", re.IGNORECASE)
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+")
_DECIMAL_POINT = re.compile(r"(?<![\w.,:])\d+\.\d+(?![\w]*[.,:]\d)")
"""A number with a decimal point that is no part of a version, an address or a time of day."""

_WORD_BY_SPELLING = {
    spelling: word
    for word, spellings in {
        "s": ("s", "sec", "secs", "second", "seconds"),
        "ms": ("ms", "msec", "msecs", "millis", "millisecond", "milliseconds"),
        "us": ("us", "\u00b5s", "\u03bcs", "usec", "usecs", "microsecond", "microseconds"),
        "ns": ("ns", "nanosecond", "nanoseconds"),
        "min": ("min", "mins", "minute", "minutes"),
        "h": ("hr", "hrs", "hour", "hours"),
        "step": ("it", "its", "iter", "iters", "iteration", "iterations", "step", "steps", "batch", "batches", "update",
            "updates"),
        "sample": ("sample", "samples", "seq", "seqs", "sequence", "sequences", "example", "examples", "sentence",
            "sentences"),
        "token": ("token", "tokens", "tok", "toks", "tks"),
        "gpu": ("gpu", "gpus", "device", "devices", "chip", "chips", "rank", "accelerator"),
        "node": ("node", "nodes", "host"), "replica": ("replica", "replicas"),
        "flop": tuple(f"{prefix}flop{end}" for prefix in ("", "g", "t", "p") for end in ("", "s")),
        "%": ("%", "percent", "pct"),
        "bytes": ("b", "bytes"),
        "kb": ("kb", "kib"), "mb": ("mb", "mib"), "gb": ("gb", "gib"), "tb": ("tb", "tib"),
    }.items()
    for spelling in spellings
}  # fmt: skip
"""Spelling of a part of a unit, in small letters -> the word for it. MB and MiB are one word:
many programs mix them."""
_RATE_SPELLINGS = {
    "tps": "token/s",
    "tgs": "token/s/gpu",
    "sps": "sample/s",
    "wps": "token/s",
    "tflops": "flop/s",
    "gflops": "flop/s",
}
_NO_UNIT_ALONE = frozenset({"step", "sample", "token", "gpu", "node", "replica", "bytes", "flop"})
"""Words that are a unit only together with another one; alone they are words of a sentence."""


class UnreadableError(ValueError):
    """A text of a log that is no number; the message says what it is."""


class LogNumber(NamedTuple):
    """A number that a program wrote."""

    value: float
    unit: str = ""
    """Its unit as `unit_words` writes it, such as step/s; empty where none stands behind it."""
    other_value: float | None = None
    """The value with the other reading of its comma or point, where both are possible."""


def read_number(text: str, decimal_mark: str | None = None) -> LogNumber:
    """The number that a program wrote, such as 5444.9, 7,282, 1,53, 4.71K or 0.41s/it.

    Args:
        decimal_mark: what stands before the decimals in this log, a comma or a point; None where it is not known. A
            comma before three digits then has two readings.

    Raises:
        UnreadableError: it is no number.
    """
    number_text = text.strip().rstrip(",;:|)]}'\"")
    if _SPECIAL_NUMBER.fullmatch(number_text):
        return LogNumber(float(number_text))
    match = _NUMBER.fullmatch(number_text)
    if match is None:
        raise UnreadableError(f"{text.strip()!r:.40} is not a number")
    digits, other_digits = _readings(match["digits"].rstrip(".,"), decimal_mark)
    factor = FACTOR_BY_SUFFIX.get((match["suffix"] or "").strip(), 1.0)

    def value_of(digits_text: str) -> float:
        return float(f"{match['sign']}{digits_text}{match['exponent'] or ''}") * factor

    try:
        return LogNumber(
            value_of(digits),
            unit_words(match["unit"] or ""),
            None if other_digits is None else value_of(other_digits),
        )
    except ValueError:
        raise UnreadableError(f"{text.strip()!r:.40} is not a number") from None


def _readings(digits: str, decimal_mark: str | None) -> tuple[str, str | None]:
    """The digits with a decimal point and without separators, and those of the other reading where there is one."""
    num_commas, num_points = digits.count(","), digits.count(".")
    if not num_commas and (num_points < 2 and decimal_mark != ","):
        return digits, None
    if num_commas and num_points:  # what stands last is before the decimals
        if digits.rfind(",") > digits.rfind("."):
            return digits.replace(".", "").replace(",", "."), None
        return digits.replace(",", ""), None
    if num_commas == 1 and is_decimal_comma(digits):
        return digits.replace(",", "."), None
    if num_commas > 1:
        return (digits.replace(",", ""), None) if _THOUSANDS.fullmatch(digits) else (digits, None)
    if num_points:
        is_group = re.fullmatch(r"[1-9]\d{0,2}(?:\.\d{3})+", digits) is not None
        if not is_group:
            return digits, None
        return (digits, digits.replace(".", "")) if num_points == 1 else (digits.replace(".", ""), None)
    as_thousands, as_decimal = digits.replace(",", ""), digits.replace(",", ".")
    if decimal_mark is None:
        return as_thousands, as_decimal
    return (as_decimal if decimal_mark == "," else as_thousands), None


def is_decimal_comma(digits: str) -> bool:
    """Whether the only comma of a number must stand before decimals, since three digits follow in a
    group of thousands.
    """
    integer_digits, _, decimals = digits.partition(",")
    return (
        "," in digits
        and ("," not in decimals)
        and (len(decimals) != 3 or len(integer_digits) > 3 or integer_digits[:1] in ("", "0"))
    )


def decimal_mark_in(texts: list[str], line: str) -> str | None:
    """What stands before the decimals in a line: a comma or a point; None where the line does not say it.

    Args:
        texts: what the groups of a pattern matched; only these are asked for commas, which also separate lists.
    """
    digit_texts = [
        match["digits"].rstrip(".,") for match in map(_NUMBER.match, map(str.strip, texts)) if match
    ]
    for digits in digit_texts:
        if "," in digits and ("." in digits or is_decimal_comma(digits)):
            return "," if digits.rfind(",") > digits.rfind(".") else "."
    return "." if _DECIMAL_POINT.search(line) else None


def unit_words(text: str) -> str:
    """A unit in one spelling, such as step/s for `its/sec`; empty where the text is no unit."""
    spelling = text.strip().lower()
    spelling = _RATE_SPELLINGS.get(spelling, spelling)
    words = [_WORD_BY_SPELLING.get(part) for part in spelling.split("/")]
    if words[0] is None and len(words) > 2:  # a path such as throughput/device/tokens/s
        path_words, words = words[:-2], words[-2:]
        words += ["gpu"] if "gpu" in path_words else []
    if None in words or (len(words) == 1 and words[0] in _NO_UNIT_ALONE):
        return ""
    return "/".join(word for word in words if word)


_PER = re.compile(r"\s+per\s+|_per_", re.IGNORECASE)
_HUMP = re.compile(r"(?<=[a-z])(?=[A-Z])")
"""Where a word begins in a name such as CurrSamplesPerSec."""
_UNIT_AFTER = re.compile(r"\s?(?:MODEL_)?([A-Za-z\u00b5\u03bc%]+(?:/[A-Za-z]+){0,2})(?![\w/]|\s*[:=])")
_UNIT_BEFORE = re.compile(
    r"(?:[\[(]\s*(?P<brackets>[A-Za-z\u00b5\u03bc%]+(?:/[A-Za-z]+){0,2})\s*[\])]\s*[:=|]?\s*"
    r"|(?<![A-Za-z])(?P<label>tflops|ms|msec|milliseconds|secs?|seconds)\s*[\"']?\s*[:=]\s*[\"']?"
    r"|(?<![A-Za-z/])(?P<rate>[A-Za-z]+(?:/[A-Za-z]+){1,4}|tgs)\s*[\"']?\s*[:=]?\s*[\"']?"
    r"|(?:_|\bin )(?P<ending>ms|us|ns|s|sec|secs|seconds)\s*[\"']?\s*[:=]\s*[\"']?)$",
    re.IGNORECASE,
)


def unit_beside(line: str, start: int, end: int) -> str:
    """The unit of the number at `start:end` of a line, as `unit_words` writes it; empty where none stands beside it."""
    text_after = _PER.sub("/", line[end : end + 40])
    if re.match(r"m(?![\w/])", text_after):  # minutes; behind a space it may be a label
        return "min"
    if (after := _UNIT_AFTER.match(text_after)) and (unit := unit_words(after[1])):
        # A smallest value may follow instead: 0.41 min 0.40 max 0.43.
        is_label = after[1] == "min" and re.match(r"\s+[\d.]", text_after[after.end() :])
        return "" if is_label else unit
    before = _UNIT_BEFORE.search(_PER.sub("/", _HUMP.sub(" ", line[max(0, start - 40) : start])))
    return unit_words(next(filter(None, before.groups()), "")) if before else ""


_MORE_AFTER = re.compile(r"[eE][-+]?\d|[.,_']?\d|:\d\d(?!\d)")
_MORE_BEFORE = re.compile(r"\d[.,_']?$|\d[eE][-+]?$|\d:$")
_DURATION = re.compile(r"\d+ ?[hm] ?\d[\d.]*(?: ?m ?\d[\d.]*)? ?s(?![A-Za-z])|\d+[hm]\d+(?![\w.])")
"""A duration of several parts, such as 1m02s, 1 m 2 s, 2m 5.3s or 1h02."""


def uncut_number_text(line: str, start: int, end: int) -> str | None:
    """The number of which the text at `start:end` of a line is only a part, such as 1,53 for 1;
    None if it is all of it.

    In a line without spaces, commas separate values.
    """
    if not any(map(str.isdigit, line[start:end])):
        return None
    for duration in _DURATION.finditer(line):
        if duration.start() <= start and end <= duration.end():
            return duration[0]
    text_before, text_after = line[:start], line[end:]
    is_list = " " not in line.strip()
    before, after = _MORE_BEFORE.search(text_before), _MORE_AFTER.match(text_after)
    number_text = line[start:end]
    is_group = (
        "." not in number_text or re.match(r"\d{3}\.", number_text) is not None
    )  # such as 234.5 of 1,234.5
    is_cut_before = before is not None and not (text_before.endswith(",") and (is_list or not is_group))
    if is_cut_before and text_before.endswith(":"):  # a time of day or a duration, not a label
        is_cut_before = re.match(r"\d\d(?!\d)", line[start:]) is not None
    is_separated = text_after.startswith(",") and (is_list or "." in number_text)
    is_cut_after = after is not None and not is_separated
    if not is_cut_before and not is_cut_after:
        return None
    head = re.search(r"[\d.,:_']*$", text_before) if is_cut_before else None
    tail = re.match(r"[\d.,:_'eE+-]*", text_after) if is_cut_after else None
    return f"{head[0] if head else ''}{line[start:end]}{tail[0] if tail else ''}"


def cut_suffix(line: str, end: int) -> str | None:
    """The suffix such as K that follows the number before position `end`; None if none does."""
    following = _SUFFIX_AFTER.match(line[end:])
    return following[0] if following else None


_SUFFIX_AFTER = re.compile(r"[kKMGBT](?![A-Za-z])|\s[kKMGBT](?=\s?(?:tok|samp|seq|FLOP|it/s|step)\w*)")
"""A suffix directly behind a number, or one before a unit, as in 72.1 k tok/s."""


def is_readable(value: float) -> bool:
    """Whether a number is finite and above 0, as a time or a rate must be."""
    return math.isfinite(value) and value > 0
