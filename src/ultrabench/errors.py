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
from collections.abc import Collection, Iterable, Mapping
from itertools import chain


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


class ConfigError(UltrabenchError):
    """A name, an override or a value that cannot be used.

    Args:
        setting: dotted name of the setting with that value, such as `sweep.tp`; None where the message names none.
    """

    def __init__(self, fact: object, remedy: str = "", setting: str | None = None) -> None:
        super().__init__(fact, remedy)
        self.setting = setting


class LayoutError(ConfigError):
    """A layout that a rule rejects or a kernel refuses."""

    def __init__(self, layout: str, reason: str, remedy: str = "") -> None:
        super().__init__(f"{layout} cannot run: {reason}", remedy)
        self.reason = reason


class ShapeError(ConfigError):
    """Sizes that do not make a model together.

    Args:
        where: what the message calls the model.
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


def counted(number: int, noun: str) -> str:
    """The number with the noun in singular or plural, such as `1 run`, `2 runs`, `3 processes` or `4 batches`."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


MIN_SIMILARITY = 0.7
"""Similarity of difflib from which a known name is probably meant: `oom` for `foo` has 0.67, `mfu` for `mfuu` 0.86."""
MAX_NAMES = 12
"""Largest number of known names that a message lists."""


def nearest_name(name: str, names: Iterable[str], similarity: float = MIN_SIMILARITY) -> str | None:
    """The one of `names` that is probably meant by `name`, such as words.etp by etp; None if none is as similar."""
    names = [*names]
    names_in_groups = (candidate for candidate in names if candidate.rpartition(".")[2] == name)
    return next(chain(names_in_groups, difflib.get_close_matches(name, names, n=1, cutoff=similarity)), None)


def most_similar(value: str, names: Iterable[str]) -> str | None:
    """The one of a few `names` that `value` is most similar to; None where it is far from all, or two are equally near."""
    similarities = sorted(
        ((difflib.SequenceMatcher(None, name, value).ratio(), name) for name in names), reverse=True
    )
    (similarity, nearest), runner_up = similarities[0], similarities[1:2]
    is_unique = not runner_up or runner_up[0][0] < similarity
    return nearest if similarity >= MIN_SIMILARITY and is_unique else None


def unknown_name(kind: str, name: object, names: Iterable[str], first: Iterable[str] = ()) -> str:
    """One line which says that `name` is no known `kind`, with the most similar name and the known names nearest to it.

    Args:
        first: known names that are listed first, because most people want one of them.
    """
    names = sorted(names)
    similar_name = nearest_name(str(name).strip("{}"), names)
    hint = f"; did you mean {similar_name}?" if similar_name else ""
    nearest = difflib.get_close_matches(str(name), names, n=MAX_NAMES, cutoff=0.0)
    nearest = [*dict.fromkeys((*first, *nearest))][:MAX_NAMES]
    more_text = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return f"unknown {kind} {name!r}{hint} (known: {', '.join(nearest) or 'none'}{more_text})"


def require_known(
    kind: str,
    names: Collection[str],
    *requested: object,
    first: Iterable[str] = (),
    setting: str | None = None,
) -> None:
    """Raises for the first of the `requested` names that is not among `names`; those of `first` head the list.

    Raises:
        ConfigError: the message of `unknown_name`.
    """
    for name in requested:
        if name not in names:
            raise ConfigError(unknown_name(kind, name, names, first), setting=setting)


def require_once(settings: Iterable[str]) -> None:
    """Raises ConfigError if two of the settings KEY=VALUE have the same key, since only the last one would count."""
    setting_by_key: dict[str, str] = {}
    for setting in settings:
        key = setting.lstrip("+").partition("=")[0]
        if key in setting_by_key:
            raise ConfigError(f"{setting_by_key[key]} {setting}: {key} is given twice; leave one out")
        setting_by_key[key] = setting
