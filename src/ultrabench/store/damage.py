"""Reads sweeps of which some may be damaged, foreign or unreadable: each of these is one line,
and the others are read.
"""

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from ultrabench.errors import SweepFolderError, UltrabenchError

Source = TypeVar("Source", bound=Hashable)
Content = TypeVar("Content")


@contextlib.contextmanager
def one_line_if_damaged(path: Path) -> Iterator[None]:
    """Raises SweepFolderError, which names the sweep or file at `path`, for whatever its content makes readers raise.

    Others may write anything into a folder, so that no list of exceptions is complete.

    Raises:
        SweepFolderError: the content cannot be read.
    """
    try:
        yield
    except UltrabenchError:
        raise
    except OSError as error:
        unreadable_path = error.filename or path
        remedy = "make it readable, or move it out of the results folder"
        raise SweepFolderError(
            f"cannot read {unreadable_path}: {error.strerror or error}; {remedy}"
        ) from error
    except Exception as error:
        fact = f"{path} is damaged ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        raise SweepFolderError(f"{fact}; restore it, or move it out of the results folder") from error


def read_each(
    sources: Iterable[Source],
    read: Callable[[Source], Content],
    warn: Callable[[str], None],
    *,
    path_of: Callable[[Source], Path],
    may_be_empty: bool = False,
) -> dict[Source, Content]:
    """Source -> what `read` returns for it, without the sources that cannot be read, which give a warning each.

    Args:
        path_of: the path of a source, whose last part begins its warning.
        may_be_empty: return no content, instead of an error, if no source can be read.

    Raises:
        SweepFolderError: no source can be read; it is the error of the last one.
    """
    content_by_source, failures = dict[Source, Content](), list[tuple[Path, UltrabenchError]]()
    for source in sources:
        path = path_of(source)
        try:
            with one_line_if_damaged(path):
                content_by_source[source] = read(source)
        except UltrabenchError as error:
            failures.append((path, error))
    last_failure = None if content_by_source or may_be_empty or not failures else failures.pop()[1]
    for path, failure in failures:
        warn(f"{path.name}: {failure}")
    if last_failure:
        raise last_failure
    return content_by_source
