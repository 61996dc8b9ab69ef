"""Makes one table of results from the journals of sweeps, and writes and reads it as parquet."""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ultrabench.analysis.results.planned import PREDICTED, is_predicted, predicted_results
from ultrabench.analysis.results.rows import Warn, sweep_table, without_doubtful_mfu
from ultrabench.analysis.results.schema import RESULTS_SCHEMA_VERSION, SCHEMA, VERSION_KEY
from ultrabench.errors import ConfigError, SweepFolderError
from ultrabench.store.damage import read_each
from ultrabench.store.folder import SweepFolder, find_sweep, newest_first, sweep_dirs
from ultrabench.sweep.plan_table import read_failure

_TABLE_SUFFIXES = (".csv", ".tsv", ".md", ".json", ".jsonl")
"""Suffixes of files that `ultrabench import` may read."""
_OTHER_SUFFIXES = (*_TABLE_SUFFIXES, ".yaml", ".yml")
"""A source with one of these suffixes is refused as a file that is no result table, even if it does not exist."""


def collect(folders: Sequence[SweepFolder], warn: Warn) -> pa.Table:
    """The result rows of all sweeps in the order given; the sweeps may still be running.

    Args:
        warn: called with one line for each thing that cannot be read; everything else is still collected.

    Raises:
        SweepFolderError: none of the folders can be read.
    """
    return merged(readable_tables(folders, warn).values())


def merged(tables: Iterable[pa.Table]) -> pa.Table:
    """The rows of all these result tables, one after another."""
    return pa.concat_tables(tables).combine_chunks()


def readable_tables(
    folders: Iterable[SweepFolder], warn: Warn, *, may_be_empty: bool = False
) -> dict[SweepFolder, pa.Table]:
    """Folder -> the result rows of its sweep; each sweep that cannot be read gives a warning.

    Raises:
        SweepFolderError: no sweep can be read, unless `may_be_empty`.
    """
    read = partial(sweep_table, warn=warn)
    return read_each(folders, read, warn, path_of=lambda folder: folder.path, may_be_empty=may_be_empty)


def newest_table(results_dir: Path, warn: Warn) -> dict[SweepFolder, pa.Table]:
    """The newest sweep that can be read -> its result rows; each newer one gives a warning.

    Raises:
        SweepFolderError: there is no sweep, or none can be read.
    """
    find_sweep(None, results_dir)  # raises where there is none
    folders = [SweepFolder(path.absolute()) for path in newest_first(sweep_dirs(results_dir))]
    for folder in folders[:-1]:
        if table_by_folder := readable_tables([folder], warn, may_be_empty=True):
            return table_by_folder
    return readable_tables(folders[-1:], warn)


def open_results(source: str | None, results_dir: Path, warn: Warn) -> tuple[str, str, pa.Table]:
    """The name of a sweep or a parquet file, how the default paths of its figures begin, and its result table.

    `runs.parquet` in the folder of a sweep is named as the sweep; figures of other files begin with the file's name.

    Args:
        source: name or folder of a sweep, or path of a parquet file; None means the newest in `results_dir`.

    Raises:
        ConfigError: `source` is a file, or is named like one, that is no parquet file.
        SweepFolderError: there is no such sweep, or it cannot be read.
    """
    if source is not None and source.endswith(".parquet"):
        path = Path(source)
        if path.name == "runs.parquet" and SweepFolder(path.parent).sweep_json.exists():
            return _printable(path.resolve().parent.name), f"{path.parent}/", read_parquet(path)
        table, path_prefix = read_parquet(path), f"{path.with_suffix('')}-"
        if is_predicted(table):
            return f"{_printable(path.stem)}, {PREDICTED}", f"{path_prefix}{PREDICTED}-", table
        return _printable(path.stem), path_prefix, table
    if source is not None and (Path(source).is_file() or source.endswith(_OTHER_SUFFIXES)):
        remedy = "give a sweep or a .parquet file of ultrabench collect or import"
        if source.endswith(_TABLE_SUFFIXES):
            remedy = f"convert it first: ultrabench import {source} --map MAP.yaml"
        raise ConfigError(f"{source} is not a parquet file", remedy)
    if source is None:
        table_by_folder = newest_table(results_dir, warn)
    else:
        table_by_folder = readable_tables([find_sweep(source, results_dir)], warn)
    ((folder, table),) = table_by_folder.items()
    return _printable(folder.name), f"{folder.path}/", table


def _printable(name: str) -> str:
    """A file name as text that titles can show; bytes that are not UTF-8 become question marks."""
    return name.encode(errors="replace").decode()


def distinct_names(*names_and_prefixes: Sequence[str]) -> tuple[str, str]:
    """The names of two results; those that are equal are replaced by the last parts of their paths that differ.

    Args:
        names_and_prefixes: for each result its name and how the paths of its figures begin, from `open_results`.
    """
    (name_a, name_b), path_prefixes = zip(*names_and_prefixes, strict=True)
    part_pairs = zip(*(reversed(Path(prefix).resolve().parts) for prefix in path_prefixes), strict=False)
    return next((pair for pair in part_pairs if name_a == name_b and pair[0] != pair[1]), (name_a, name_b))


def parquet(table: pa.Table) -> bytes:
    """The bytes of a parquet file with this result table; equal tables give equal bytes."""
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd")
    return bytes(buffer.getvalue())


_ESSENTIAL_COLUMNS = ("model", "nodes", "status", "tokens_per_s_per_gpu")
"""Columns by which runs are grouped, counted and ranked."""


def read_parquet(path: Path) -> pa.Table:
    """The result table of a parquet file: first all columns of the schema, then other columns of the file.

    A column that the file lacks is null, but for the essential ones, without which the file is refused. If another
    program has removed the metadata of the file, the schema version is taken from the column schema_version.

    Raises:
        SweepFolderError: the file cannot be read, has no version or run_id of results, lacks an essential column,
            or has a newer schema.
    """
    try:
        with path.open("rb") as file:  # pyarrow takes no name with bytes that are not UTF-8
            # A thread of pyarrow that lets go of the file while Python exits ends the process with SIGABRT.
            table = pq.read_table(file, use_threads=False, pre_buffer=False)
    except (OSError, pa.ArrowException) as error:
        reason = getattr(error, "strerror", None) or read_failure(error)
        reason = "no such file" if isinstance(error, FileNotFoundError) else reason
        remedy = (
            "is the path right?"
            if isinstance(error, FileNotFoundError)
            else "copy or make it again: ultrabench collect"
        )
        raise SweepFolderError(f"cannot read {path}: {reason.rstrip('.')}", remedy) from error
    if "decision" in table.column_names:
        table = predicted_results(table, path.stem)
    version = _schema_version(table)
    if version is None or "run_id" not in table.column_names:
        remedy = "to make one: ultrabench collect -o FILE.parquet"
        raise SweepFolderError(f"{path} is not a result table", remedy)
    if version > RESULTS_SCHEMA_VERSION:
        remedy = f"this ultrabench reads versions up to {RESULTS_SCHEMA_VERSION}: upgrade ultrabench"
        raise SweepFolderError(f"{path} has schema version {version}; {remedy}")
    if missing_columns := [name for name in _ESSENTIAL_COLUMNS if name not in table.column_names]:
        remedy = f"ranking needs {', '.join(_ESSENTIAL_COLUMNS)}: give a table that has them"
        raise SweepFolderError(f"{path} lacks the column {missing_columns[0]}; {remedy}")
    return without_doubtful_mfu(conform_to_schema(table, path))


def _schema_version(table: pa.Table) -> int | None:
    """The newest schema version in the metadata or rows of the table; None when there is none."""
    raw_values: list[object] = [(table.schema.metadata or {}).get(VERSION_KEY)]
    if "schema_version" in table.column_names:
        raw_values += table["schema_version"].unique().to_pylist()
    versions = [raw.decode() if isinstance(raw, bytes) else str(raw) for raw in raw_values if raw is not None]
    try:
        return max((int(version.removesuffix(".0")) for version in versions), default=None)
    except ValueError:
        return None


def conform_to_schema(table: pa.Table, table_label: object) -> pa.Table:
    """The table with every column of the schema, each cast to the type of the schema, then its other columns.

    Raises:
        SweepFolderError: a column has another type; the message calls the table `table_label`.
    """
    arrays = []
    for field in SCHEMA:
        values = table[field.name] if field.name in table.column_names else pa.nulls(len(table))
        try:
            arrays.append(values.cast(field.type))
        except pa.ArrowException as error:
            failure = f"{table_label}: column {field.name} has type {values.type} instead of {field.type}"
            raise SweepFolderError(failure, "run ultrabench collect again") from error
    other_names = [name for name in table.column_names if name not in SCHEMA.names]
    schema = pa.schema([*SCHEMA, *map(table.schema.field, other_names)], metadata=SCHEMA.metadata)
    return pa.table([*arrays, *map(table.column, other_names)], schema=schema)
