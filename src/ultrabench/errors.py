"""The errors a user can meet, and the exit code each one has.

UltrabenchError        exit 2: the user's mistake; the message is the whole story, on one line
|-- ConfigError        a name, an override or a value that cannot be used
|   |-- LayoutError    a layout that a rule rejects or a kernel refuses
|   `-- ShapeError     sizes that do not make a model together
|-- SweepFolderError   a sweep folder that cannot be read, written or continued
|   `-- DiskError      exit 3: its disk is full, read-only or silent, which may pass
`-- ClusterError       exit 3: the cluster (or this machine) could not be used
"""

import difflib
import errno
import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from itertools import takewhile


class UltrabenchError(Exception):
    """A failure that is reported to the user in one line: what was given, the rule, and what to do.

    Args:
        fact: what was given, and the rule.
        remedy: what to do; it may also be a part of `fact`, where no caller shows it separately.
    """

    exit_code = 2

    def __init__(self, fact: object, remedy: str = "") -> None:
        super().__init__(f"{fact}; {remedy}" if remedy else str(fact))
        self.fact, self.remedy = str(fact), remedy


SETTING = "\x1f"
"""Stands for the name of the setting in a message; nobody types this character."""


class ConfigError(UltrabenchError):
    """A name, an override or a value that cannot be used.

    Args:
        fact: what was given, and the rule; SETTING in it stands for `setting`, as in `remedy`.
        setting: dotted name of the setting with that value, such as `sweep.tp`; None where the message names none.

    Attributes:
        template: the message with SETTING in it, from which the same error of a shorter name is made.
    """

    def __init__(self, fact: object, remedy: str = "", setting: str | None = None) -> None:
        self.template = f"{fact}; {remedy}" if remedy else str(fact)
        super().__init__(*(text.replace(SETTING, setting or "") for text in (str(fact), remedy)))
        self.setting = setting


class LayoutError(ConfigError):
    """A layout that a rule rejects or a kernel refuses."""

    def __init__(self, layout: str, reason: str, remedy: str = "") -> None:
        super().__init__(f"{layout} cannot run: {reason}", remedy)
        self.reason = reason


class ShapeError(ConfigError):
    """Sizes that do not make a model together.

    Args:
        where: how the message names the model, such as `model llama-1b`.
        rule: what is broken; a size that files may have under another name stands in braces, such as `{num_experts}=1`.
        name_by_size: each of these sizes -> its name in the message.
    """

    def __init__(self, where: str, rule: str, name_by_size: Mapping[str, str]) -> None:
        super().__init__(f"{where}: {rule.format_map(name_by_size)}")
        self.rule = rule


class SweepFolderError(UltrabenchError):
    """A sweep folder that cannot be read, written or continued."""


class DiskError(SweepFolderError):
    """A disk that is full, read-only or does not answer; this may pass."""

    exit_code = 3


class ClusterError(UltrabenchError):
    """The cluster, or this machine's processes, could not be used."""

    exit_code = 3


_TEMPORARY_ERRNOS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE, errno.EIO, errno.ETIMEDOUT,
)  # fmt: skip


def may_pass(error: BaseException) -> bool:
    """Whether this error of a disk may be temporary: it is full, read-only, stale or does not answer."""
    return isinstance(error, DiskError) or (isinstance(error, OSError) and error.errno in _TEMPORARY_ERRNOS)


def counted(count: int, noun: str) -> str:
    """The number with the noun in singular or plural, such as `1 run`, `2 runs`, `3 processes` or `4 batches`."""
    noun_ending = "" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}{noun_ending}"


def are(count: int) -> str:
    """The verb that follows a counted noun: `1 run is`, `2 runs are`."""
    return "is" if count == 1 else "are"


MIN_SIMILARITY = 0.7
"""Similarity of difflib from which a known name is probably meant: `oom` for `foo` has 0.67, `mfu` for `mfuu` 0.86."""
MAX_NAMES = 12
"""Largest number of known names that a message lists."""


def nearest_name(name: str, known_names: Iterable[str], min_similarity: float = MIN_SIMILARITY) -> str | None:
    """The one of `known_names` that is probably meant by `name`; None if none is similar enough.

    It may be in a group (words.etp for etp), or be the only one, not much longer, that begins so (zero_stage for zero).
    """
    known_names = [*known_names]
    names_in_groups = [known_name for known_name in known_names if known_name.rpartition(".")[2] == name]
    longer_names = [
        known_name
        for known_name in known_names
        if known_name.startswith(f"{name}_") and len(known_name) <= 3 * len(name)
    ]
    close_names = difflib.get_close_matches(name, known_names, n=1, cutoff=min_similarity)
    only_longer_name = longer_names if len(longer_names) == 1 else []
    return next(iter(names_in_groups or close_names or only_longer_name), None)


def misspelled_name(name: str, known_names: Iterable[str]) -> str | None:
    """The one of `known_names` from which `name` differs by one edit; None if there is none, or several.

    An edit adds, leaves out or replaces a character, or swaps two neighbours. It is none of a digit, since names that
    differ in a digit are those of different things, such as qwen2 and qwen3.
    """
    near_names = {near for near in names_one_edit_away(name, known_names) if not _differ_in_digit(name, near)}
    return near_names.pop() if len(near_names) == 1 else None


def names_one_edit_away(name: str, known_names: Iterable[str]) -> list[str]:
    """The `known_names` from which `name` differs by one edit: a character more, less or another, or two swapped."""
    return [known_name for known_name in known_names if _is_one_edit(name, known_name)]


def _common_length(name: str, other: str) -> int:
    """The number of characters with which both texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(name, other, strict=False)))


def _changed_parts(name: str, other: str) -> tuple[str, str]:
    """What is left of both texts without their common beginning and end."""
    start = _common_length(name, other)
    rest, other_rest = name[start:], other[start:]
    end = _common_length(rest[::-1], other_rest[::-1])
    return rest[: len(rest) - end], other_rest[: len(other_rest) - end]


def _differ_in_digit(name: str, other: str) -> bool:
    return any(map(str.isdigit, "".join(_changed_parts(name, other))))


def _is_one_edit(name: str, other: str) -> bool:
    changed, other_changed = _changed_parts(name, other)
    is_swap = len(changed) == 2 and changed == other_changed[::-1]
    return name != other and (is_swap or max(len(changed), len(other_changed)) == 1)


def most_similar(value: str, known_names: Iterable[str]) -> str | None:
    """The one of a few `known_names` that `value` is most similar to; None where it is far from all,
    or two are equally near. Names with other digits are those of different things, such as fp4 and fp64.
    """
    similar_names = [name for name in known_names if not _differ_in_digit(name, value)]
    scored_names = sorted(
        ((difflib.SequenceMatcher(None, name, value).ratio(), name) for name in similar_names), reverse=True
    )
    if not scored_names:
        return None
    (similarity, most_similar_name), runners_up = scored_names[0], scored_names[1:2]
    is_unique = not runners_up or runners_up[0][0] < similarity
    return most_similar_name if similarity >= MIN_SIMILARITY and is_unique else None


def unknown_name(kind: str, name: object, known_names: Iterable[str], first: Iterable[str] = ()) -> str:
    """One line which says that `name` is no known `kind`, with the most similar name and the known names nearest to it.

    Args:
        first: known names that are listed first, because most people want one of them.
    """
    known_names = sorted(known_names)
    similar_name = nearest_name(str(name).strip("{}"), known_names)
    hint_text = f"; did you mean {similar_name}?" if similar_name else ""
    return f"unknown {kind} {name!r}{hint_text} {known_text(name, known_names, first)}"


def known_text(name: object, known_names: Iterable[str], first: Iterable[str] = ()) -> str:
    """The names that may stand in the place of `name`, such as `(known: mfu, hfu and 9 more)`, the nearest ones first.

    Args:
        first: those that are listed before them.
    """
    known_names = sorted(known_names)
    listed_names = difflib.get_close_matches(str(name), known_names, n=MAX_NAMES, cutoff=0.0)
    listed_names = [*dict.fromkeys((*first, *listed_names))][:MAX_NAMES]
    more_text = f" and {len(known_names) - MAX_NAMES} more" if len(known_names) > MAX_NAMES else ""
    return f"(known: {', '.join(listed_names) or 'none'}{more_text})"


def require_known(
    kind: str,
    known_names: Collection[str],
    *requested: object,
    first: Iterable[str] = (),
    setting: str | None = None,
) -> None:
    """Raises for the first of the `requested` names that is not among `known_names`; those of `first` head the list.

    Raises:
        ConfigError: the message of `unknown_name`.
    """
    for name in requested:
        if name not in known_names:
            raise ConfigError(unknown_name(kind, name, known_names, first), setting=setting)


_CURLY_QUOTES = "\u2018\u2019\u201a\u201c\u201d\u201e\u00ab\u00bb"
"""The quotes of word processors and web pages, which mean nothing to a shell."""
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3001: ord(",")}
"""Code of each full-width form of an ASCII character, and of the ideographic comma -> code of that character."""
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2212"
"""The hyphens, dashes and minus signs that are not the one of a keyboard."""


def require_typed_characters(words: Iterable[str]) -> None:
    """Raises ConfigError for characters that word processors and input methods put in place of those of a command.

    These are a curly quote at either end of a word or beside a `=`, a comma or a bracket, a full-width comma, bracket
    or equals sign, and a dash in front of a word.
    """
    for word in words:
        if re.search(rf"(?:^|[=,\[{{:(])[{_CURLY_QUOTES}]|[{_CURLY_QUOTES}](?:$|[],}}:)])", word):
            plain_word = word.translate(dict.fromkeys(map(ord, _CURLY_QUOTES)))
            raise ConfigError(
                f"{word}: these quotes are curly; type straight ones: {shlex.quote(plain_word)}"
            )
        if full_width := re.search("[\uff0c\u3001\uff3b\uff3d\uff5b\uff5d\uff08\uff09\uff1d\uff0d]", word):
            plain_word = word.translate(_FULL_WIDTH)
            raise ConfigError(
                f"{word}: {full_width[0]} is a full-width character; write {shlex.quote(plain_word)}"
            )
        if re.match(f"[{_DASHES}]", word):
            option = f"--{word.lstrip(f'-{_DASHES}')}"
            raise ConfigError(
                f"{word}: {word[0]} is not the hyphen of an option; write {shlex.quote(option)}"
            )


def require_once(settings: Iterable[str]) -> None:
    """Raises ConfigError if two of the settings KEY=VALUE have the same key, or one has curly quotes or the like.

    Of two equal keys only the last one would count.
    """
    settings = [*settings]
    require_typed_characters(settings)
    setting_by_key: dict[str, str] = {}
    for setting in settings:
        key = setting.lstrip("+").partition("=")[0]
        if key in setting_by_key:
            raise ConfigError(f"{setting_by_key[key]} {setting}: {key} is given twice; leave one out")
        setting_by_key[key] = setting
