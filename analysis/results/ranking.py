"""Ranks the runs of each cell: finds the best run and those that are as good, or why there is none."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ultrabench.analysis.results.cells import Cell, model_marks, partial_gpus
from ultrabench.analysis.results.columns import EXPECTED_RATE, RATE, RESULT_TABLE, column_of, rankable
from ultrabench.analysis.results.environments import COLUMNS as ENVIRONMENT_COLUMNS
from ultrabench.analysis.results.environments import Environments
from ultrabench.analysis.results.options import COLUMNS as OPTION_COLUMNS
from ultrabench.analysis.results.options import in_rows, varied_options
from ultrabench.analysis.results.planned import PREDICTED, is_predicted
from ultrabench.analysis.results.rows import Row
from ultrabench.analysis.results.schema import MODEL
from ultrabench.column import Better
from ultrabench.errors import ConfigError, known_text, require_known
from ultrabench.layout import AXES
from ultrabench.partial_step import SCREENED_BY
from ultrabench.result import SIZE_DOUBT_CODES, SLOWER, Status, tier
from ultrabench.standing import Repeat, Standing, failed_in_full, standings
from ultrabench.sweep.candidate import expected_rate


def why_no_winner(rows: Sequence[Row]) -> tuple[str | None, str]:
    """Status and reason of a cell without a winner, from its final rows.

    The reason names first the runs that were tried (`12 oom; 3 crash: <reason>`), then those that wait
    (`4 pending`), then those that were skipped. Rejected layouts are named only when there is nothing
    else. The status is None while a run waits.
    """
    rows_by_status: dict[str | None, list[Row]] = defaultdict(list)
    for row in without_disproved(rows):
        rows_by_status[row["status"]].append(row)
    rejected_rows = rows_by_status.pop(Status.REJECTED, [])
    if not rows_by_status:
        return Status.REJECTED.value, _no_valid_layout_text(rejected_rows)
    statuses = sorted(rows_by_status, key=lambda s: (tier(s), -len(rows_by_status[s]), str(s)))
    texts = [_status_text(s, rows_by_status[s], is_only_status=len(statuses) == 1) for s in statuses]
    return (None if None in rows_by_status else statuses[0]), "; ".join(texts)


def without_disproved(rows: Sequence[Row]) -> list[Row]:
    """The final rows without those that screened a run whose start in full has failed: such a run stands as failed."""
    ends_by_run = defaultdict[tuple[str | None, str], list[tuple[str | None, bool]]](list)
    for row in rows:
        ends_by_run[row["sweep"], row["run_id"]].append((row["status"], bool(row["screened"])))
    failed_runs = {run for run, ends in ends_by_run.items() if failed_in_full(ends)}
    return [
        row for row in rows if row["status"] != Status.OK or (row["sweep"], row["run_id"]) not in failed_runs
    ]


def _status_text(status: str | None, rows: Sequence[Row], is_only_status: bool) -> str:
    """The text for one status, such as `all 12 oom`, `3 crash: <first reason>` or `2 ok but suspect: ...`."""
    num_runs = len({row["run_id"] for row in rows})
    if status is None:
        return f"{num_runs} pending"
    number_text = f"all {num_runs}" if is_only_status and num_runs > 1 else str(num_runs)
    if status == Status.OK:
        return f"{number_text} ok{_why_unranked(rows)}"
    reason = next((row["reason"] for row in rows if row["reason"]), None)
    if reason is None or status == Status.OOM:  # the name of the status says enough
        return f"{number_text} {status}"
    return f"{number_text} {status}: {reason}"


def _why_unranked(rows: Sequence[Row]) -> str:
    """The text that tells why none of the ok runs could win, such as ` but suspect: hot`, or a count of each reason."""
    reasons = (
        "without a value to rank by",
        "but stopped early as slower than the best",
        "but suspect",
        f"only screened, {SCREENED_BY}",
    )

    def code(row: Row) -> int:
        if row["stopped"] != SLOWER and row["screened"]:
            return 3
        return 2 if row["suspect"] else 1 if row["stopped"] == SLOWER else 0

    codes = {row["run_id"]: code(row) for row in rows}
    counts = sorted(Counter(codes.values()).items())
    texts = [f"{num_runs:,} {reasons[code].removeprefix('but ')}" for code, num_runs in counts]
    is_suspect_a_reason = 2 in codes.values()
    why_suspect = next((row["suspect"] for row in rows if row["suspect"]), None)
    why_suspect = why_suspect and (f": {why_suspect}" if is_suspect_a_reason else f"; suspect: {why_suspect}")
    fact = f" {reasons[counts[0][0]]}" if len(counts) == 1 else f": {', '.join(texts)}"
    return fact + (why_suspect or "")


def _no_valid_layout_text(rejected_rows: Sequence[Row]) -> str:
    """The text that names the rule that rejects most layouts, with an example of its reason."""
    rule, num_layouts = Counter(row["rule"] for row in rejected_rows).most_common(1)[0]
    example = next((row["reason"] for row in rejected_rows if row["rule"] == rule), None)
    return f"no valid layout: {example or rule} ({rule}, {num_layouts} of {len(rejected_rows)})"


DEFAULT_RANK_BY = RATE

_COMMON_COLUMNS = (
    DEFAULT_RANK_BY, "mfu", "source_mfu", "hfu", "tokens_per_s", "step_time_s", "peak_mem_reserved_bytes",
    "tokens_per_j", "cost_per_billion_tokens", "control_ratio",
)  # fmt: skip
"""Columns that people rank by, which a message names first."""

PANEL_COLUMNS = ("hardware", "kernel", "precision", "routing", "seq_len", "gbs")
"""Columns that are equal in all cells of a panel, unless gbs grows with the nodes."""
_CELL_KEY = [*dict.fromkeys((*PANEL_COLUMNS, "num_params", *MODEL, "nodes", "gpus"))]
"""Columns that are equal in all rows of a cell; models of one name but two shapes have different cells."""
_SOURCE_COLUMNS = ("source", "model", "hardware", "kernel", "precision", "seq_len")
"""Columns by which an imported row of suspect size is assigned to the cell of other rows of its source."""
_CELL_COLUMNS = (
    *PANEL_COLUMNS, "model", "model_id", "model_mark", "nodes", "gpus", "partial_gpus", "num_params",
    "num_active_params",
    "scaling",
)  # fmt: skip
"""Columns that a cell has from any of its rows."""
_SORT_COLUMNS = (
    "run_id", "repeat", "attempt", "sweep", "status", "tokens_per_s_per_gpu", "suspect", "rule", "reason", "source",
)  # fmt: skip
"""Columns that rows are sorted by first, so that their order in the files makes no difference."""
_WINNER_COLUMNS = (
    "mfu", "flops_formula", "source_mfu", "tokens_per_s_per_gpu", "peak_mem_reserved_bytes",
    "peak_mem_reserved_rank0_bytes", "peak_mem_allocated_bytes", "peak_source", "step_time_ci95_rel", "ci_reached",
    "env_id",
)  # fmt: skip
"""Columns that a cell has from its best run."""
_FURTHER_COLUMNS = (
    "run_id", "status", "rule", "reason", "suspect", "suspect_codes", "stopped", "sweep", "allocation",
    "control", "control_ratio", "control_ci95_rel", "repeat", "attempt", "source", "step_time_s",
    "predicted_step_time_s", "predicted_peak_mem_bytes", "p_oom", "measured_gas", "screened", "parts_step_time_s",
    "parts_ci95_rel",
)  # fmt: skip
"""Further columns that rankings need."""
_REPEAT_COLUMNS = (
    "run_id", "cell", "competes_in", "allocation_key", "control", "status", "stopped", "suspect", "rate",
    "control_ratio", "width",
    "ci_reached", "control_ci95_rel", "is_partial", "is_screened", "parts_ci95_rel", "parts_ratio",
)  # fmt: skip
"""Columns of a frame, in the order of the fields of Repeat."""


def require_rankable(table: pa.Table, name: str) -> None:
    """Raises ConfigError if runs cannot be ranked by the column: it holds no numbers,
    or neither higher nor lower is better.
    """
    choices = rankable(table.column_names)
    if name in table.column_names and name not in choices and _is_numeric(table.schema.field(name).type):
        fact = f"cannot rank by {name}: it is unknown whether higher or lower values are better"
        raise ConfigError(f"{fact}; choose another column {known_text(name, choices, _COMMON_COLUMNS)}")
    require_known("column to rank by", choices, name, first=_COMMON_COLUMNS)


def is_lower_better(name: str) -> bool:
    """Whether the best run is that with the smallest value of the column."""
    return column_of(name).better == Better.LOWER


def _is_numeric(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type))


class Ranking:
    """The final rows of runs that train a model, and the standings of these runs in their cells."""

    def __init__(
        self,
        table: pa.Table,
        *,
        rank_by: str = DEFAULT_RANK_BY,
        include_suspects: bool = False,
        more_columns: Sequence[str] = (),
    ) -> None:
        """Ranks the runs of a result table.

        Args:
            include_suspects: whether suspect rows compete with all others.
            more_columns: further columns of the frame.

        Raises:
            ConfigError: runs cannot be ranked by `rank_by`.
        """
        require_rankable(table, rank_by)
        self._rank_by = rank_by
        is_plan = rank_by == DEFAULT_RANK_BY and is_predicted(table)
        self._compared_column = EXPECTED_RATE.name if is_plan else rank_by
        needed_columns = (*_CELL_KEY, *_CELL_COLUMNS, *AXES, *OPTION_COLUMNS, *_WINNER_COLUMNS)
        kept_columns = dict.fromkeys((*needed_columns, *_FURTHER_COLUMNS, "is_final", rank_by, *more_columns))
        read_columns = {*kept_columns, *ENVIRONMENT_COLUMNS, *_SORT_COLUMNS} - {"model_mark", "partial_gpus"}
        is_final_run = pc.field("is_final") & pc.field("model").is_valid() & pc.field("nodes").is_valid()
        final_rows = table.select([*read_columns]).filter(is_final_run)
        final_rows = final_rows.sort_by([(name, "ascending") for name in _SORT_COLUMNS])
        self.environments = Environments(final_rows)
        mark_array = pa.array(model_marks(final_rows), pa.string())
        final_rows = final_rows.append_column("model_mark", mark_array)
        gpus_array = pa.array(partial_gpus(final_rows), pa.int64())
        self._table = final_rows.append_column("partial_gpus", gpus_array).select([*kept_columns])
        self.options = varied_options(self._table)
        """Option beside the layout that varies in the table -> its value in each row."""
        self.frame = self._ranking_frame()
        """The rows with the number of their cell and the columns of _REPEAT_COLUMNS."""
        unrejected_rows = self.frame[self.frame["status"] != Status.REJECTED]
        standings_by_cell = standings(
            map(Repeat, *(_values_or_none(unrejected_rows, name) for name in _REPEAT_COLUMNS)),
            indices=unrejected_rows.index.tolist(),
            include_suspects=include_suspects,
            by_control=rank_by == DEFAULT_RANK_BY,
        )
        self.standings = {n: standings_by_cell[n] for n in sorted(unrejected_rows["cell"].unique().tolist())}
        """Number of a cell -> standings of its runs, the best first; `repeat` and `competing` are row numbers."""

    def cells(self) -> list[Cell]:
        """What `rank` returns."""
        if self._rank_by != DEFAULT_RANK_BY:  # without speeds each cell says why it has no best run
            self._require_values()
        self._require_one_formula()
        frame = self.frame
        has_several_values = frame.loc[frame["status"] != Status.REJECTED, [*AXES]].nunique() > 1
        varied_axes = tuple(name for name in AXES if has_several_values[name])
        # The first row of each cell says what the cell is called; rows that are not suspect come first.
        trusted_first = frame.iloc[frame["suspect"].notna().argsort(kind="stable")]
        first_rows = trusted_first.drop_duplicates("cell").sort_values("cell")
        won_cells = [n for n, (first, *_) in self.standings.items() if first.best]
        winners = self.run_rows([first for first, *_ in self.standings.values() if first.best])
        winner_by_cell = dict(zip(won_cells, winners, strict=True))
        row_numbers_by_cell, cells = frame.groupby("cell").indices, []
        for first_row, cell_number in zip(self.rows_at(first_rows.index), first_rows["cell"], strict=True):
            cell_standings = self.standings.get(cell_number, [])
            cell_fields = {name: first_row[name] for name in _CELL_COLUMNS} | _run_counts(cell_standings)
            cell_fields |= {"predicted": first_row["source"] == PREDICTED}
            cell_fields |= {"shown_column": self._shown_column, "varied_axes": varied_axes}
            if winner := winner_by_cell.get(cell_number):
                cells.append(self._won_cell(cell_standings, winner, cell_fields))
            else:
                cell_status, reason = why_no_winner(self.rows_at(row_numbers_by_cell[cell_number]))
                cells.append(Cell(status=cell_status, reason=reason, **cell_fields))
        return cells

    def leaderboards(self, columns: Sequence[str] | None = None) -> list[list[Row]]:
        """What `leaderboard` returns, with these columns of the result table; None means all that were read."""
        self._require_values()
        self._require_one_formula()
        all_standings = [*chain.from_iterable(self.standings.values())]
        row_numbers = [standing.repeat for standing in all_standings]
        standing_rows = chain.from_iterable(map(self._standing_rows, self.standings.values()))
        options_of_rows = in_rows(self.options, row_numbers)
        parts_of_rows = zip(
            self.run_rows(all_standings, columns), standing_rows, options_of_rows, strict=True
        )
        ranked_rows = (
            {"rank": rank, **row, **standing_row, "options": options}
            for rank, (row, standing_row, options) in enumerate(parts_of_rows, 1)
        )
        return [[*islice(ranked_rows, len(cell_standings))] for cell_standings in self.standings.values()]

    @property
    def _shown_column(self) -> str:
        """The column that the heatmap shows: by default MFU, or the speed where rows have only that."""
        has_only_speed = self.frame["mfu"].isna().all() and self.frame[self._rank_by].notna().any()
        return "mfu" if self._rank_by == DEFAULT_RANK_BY and not has_only_speed else self._rank_by

    def _won_cell(self, cell_standings: Sequence[Standing], winner: Row, cell_fields: Row) -> Cell:
        """The cell of a winner; `cell_fields` are the fields that cells without a winner have, too."""
        (standing_row,) = self._standing_rows(cell_standings[:1])
        standing_row["as_good_as_best"] = tuple(s.run_id for s in cell_standings if s.as_good)
        return Cell(
            shown_value=winner[self._shown_column],
            layout={name: winner[name] for name in AXES},
            options=in_rows(self.options, [cell_standings[0].repeat])[0],
            **cell_fields,
            **{name: value for name, value in standing_row.items() if name != "best"},
            **{name: winner[name] for name in ("run_id", "status", "suspect", *_WINNER_COLUMNS)},
        )

    def _standing_rows(self, cell_standings: Sequence[Standing]) -> list[Row]:
        """The columns that the standing of each run of a cell gives, such as `best`, with the best run first."""
        labels = self.environments.labels(s.environment for s in self.standings[cell_standings[0].cell])
        return [
            {
                "ranked_by": "control_ratio" if standing.by_control else self._compared_column,
                "ranked_value": None if standing.value is None else abs(standing.value),
                "best": standing.best,
                "as_good_as_best": standing.as_good,
                "environment": labels.get(standing.environment or ""),
                "num_repeats": standing.num_repeats,
                "num_repeats_failed": standing.num_repeats_failed,
            }
            for standing in cell_standings
        ]

    def run_rows(self, standings: Sequence[Standing], columns: Sequence[str] | None = None) -> list[Row]:
        """The rows that stand for these runs; those of `run_numbers` replace the numbers of a single repeat."""
        rows = self.rows_at((standing.repeat for standing in standings), columns)
        for row, standing in zip(rows, standings, strict=True):
            row |= {name: value for name, value in self.run_numbers(standing).items() if name in row}
        return rows

    def run_numbers(self, standing: Standing) -> Row:
        """Column -> number of a run that its row does not have; empty for a run of a single start.

        Speeds, step times and the column to rank by are medians of the repeats that compete; the interval covers those
        of all, and of the starts that screened the run.
        """
        follows_step_time = column_of(self._rank_by).follows_step_time
        if standing.num_competing < 2:
            has_other_starts = standing.num_competing < standing.num_repeats - standing.num_repeats_failed
            is_known = has_other_starts and follows_step_time and standing.ci95_rel is not None
            return {"step_time_ci95_rel": standing.ci95_rel} if is_known else {}
        step_time_columns = [
            c.name for c in RESULT_TABLE.values() if c.follows_step_time and c.name in self.frame
        ]
        columns = [*dict.fromkeys((*step_time_columns, self._rank_by))]
        medians = self.frame.loc[[*standing.competing], columns].astype(float).median()
        width: Row = {"step_time_ci95_rel": standing.ci95_rel} if follows_step_time else {}
        numbers = {name: float(medians[name]) for name in columns if medians[name] == medians[name]}
        return numbers | width | {"ci_reached": standing.ci_reached}

    def rows_at(self, row_numbers: Iterable[int], columns: Sequence[str] | None = None) -> list[Row]:
        """The rows with these numbers, counted from 0 as in the frame; None means all columns that were read."""
        table = self._table if columns is None else self._table.select([*columns])
        rows: list[Row] = table.take(pa.array(row_numbers, pa.int64())).to_pylist()
        return rows

    def _require_values(self) -> None:
        """Raises ConfigError if no ok run has the number to rank by."""
        all_standings = chain.from_iterable(self.standings.values())
        ok_standings = [standing for standing in all_standings if standing.outcome == Status.OK]
        if ok_standings and all(standing.rate is None for standing in ok_standings):
            rule = "rank by another column of docs/reference/columns.md"
            raise ConfigError(f"no ok run has a value in {self._rank_by}; {rule}")

    def _require_one_formula(self) -> None:
        """Raises ConfigError if MFU follows from several formulas."""
        formulas = sorted({*self._table["flops_formula"].unique().to_pylist()} - {None})
        if len(formulas) > 1:
            fact = f"MFU of these results is not comparable: it uses the formulas {' and '.join(formulas)}"
            remedy = "launch the sweeps again with the same measure.flops_formula, or show each one alone"
            raise ConfigError(f"{fact}; {remedy}")

    def _ranking_frame(self) -> pd.DataFrame:
        """The frame of all rows with the further columns of _REPEAT_COLUMNS.

        A suspect imported row gets gbs and num_params of the cell to which `_cell_keys` assigns it.
        """
        frame = self._table.to_pandas()
        keys = _cell_keys(frame)
        sorted_keys = keys.sort_values(_CELL_KEY, na_position="first")
        follows_step_time = column_of(self._rank_by).follows_step_time
        rank_values = (-1 if is_lower_better(self._rank_by) else 1) * frame[self._rank_by]
        if self._compared_column == EXPECTED_RATE.name:
            rank_values = rank_values.combine(frame["p_oom"], expected_rate)
        ranking_frame: pd.DataFrame = frame.assign(
            **{name: keys[name].where(keys[name].notna(), frame[name]) for name in ("gbs", "num_params")},
            cell=sorted_keys.groupby(_CELL_KEY, dropna=False, sort=False).ngroup(),
            competes_in=self.environments.ids,
            allocation_key=[*zip(frame["sweep"], frame["allocation"], strict=True)],
            rate=rank_values,
            is_partial=frame["measured_gas"].notna(),
            is_screened=frame["screened"].eq(other=True),
            width=frame["step_time_ci95_rel"] if follows_step_time else None,
            parts_ratio=frame["parts_step_time_s"] / frame["step_time_s"] if follows_step_time else None,
        )
        return ranking_frame


def rank(table: pa.Table, *, rank_by: str = DEFAULT_RANK_BY, include_suspects: bool = False) -> list[Cell]:
    """The cells of a result table, sorted by hardware, kernel, workload, parameters, model and nodes.

    Only final ok rows compete, except runs that were stopped early as slower than the best. Suspect rows compete only
    if `include_suspects` is set or all rows of their cell are suspect. The default `rank_by` compares speeds relative
    to the control layout in cells where all runs have them, and expected speeds in the rows of a plan. A repeated run
    counts with the median of its repeats.

    Raises:
        ConfigError: runs cannot be ranked by `rank_by`, no ok run has a value in it although it is not the default,
            or MFU follows from several formulas.
    """
    return Ranking(table, rank_by=rank_by, include_suspects=include_suspects).cells()


def leaderboard(table: pa.Table, *, rank_by: str = DEFAULT_RANK_BY) -> list[list[Row]]:
    """The runs of each cell in order, each as one result row with its `rank` in the whole table.

    Each cell lists its runs in this order: the best run and those that are as good; the other ok runs by the number
    that is compared, also suspects and those that were stopped as slower; runs that failed or ran out of memory; runs
    that run or wait; skipped runs. A run with several repeats has one row, that of an ok repeat if there is one, else
    of one that ran out of memory, else of another one. `best` and `as_good_as_best` mark the winners. `num_repeats`
    is the number of repeats that have ended, and `num_repeats_failed` the number of these that were not ok.

    Raises:
        ConfigError: runs cannot be ranked by `rank_by`, no ok run has a value in it, or MFU follows from several
            formulas.
    """
    return Ranking(table, rank_by=rank_by).leaderboards()


def _cell_keys(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns of _CELL_KEY of each row, whose values name its cell.

    An imported row that is suspect for its model sizes or batch gets those of the first row of its source and model
    that is not suspect, so it belongs to that cell: its publisher ranked it there.
    """
    workload = frame[[name for name in _CELL_KEY if name not in (*_SOURCE_COLUMNS, "nodes", "gpus")]]
    source_keys = [frame[name] for name in _SOURCE_COLUMNS]
    is_suspect_import = frame["source"].notna() & frame["suspect"].notna()
    has_other_size = frame["suspect_codes"].map(
        lambda codes: codes is None or not SIZE_DOUBT_CODES.isdisjoint(codes)
    )
    trusted_by_source = workload.mask(is_suspect_import).groupby(source_keys, dropna=False)
    moves = is_suspect_import & has_other_size.astype(bool)
    return frame[_CELL_KEY].assign(**workload.where(~moves, trusted_by_source.transform("first")))


def _values_or_none(frame: pd.DataFrame, column: str) -> list[Any]:
    """The values of a column, None where one is missing."""
    return [None if value is None or value != value else value for value in frame[column].tolist()]


def _run_counts(cell_standings: Sequence[Standing]) -> Row:
    """The fields of a Cell with its numbers of ended runs, by how they ended."""
    ended_runs = [standing for standing in cell_standings if standing.num_repeats]
    num_by_outcome = Counter(standing.outcome for standing in ended_runs)
    num_failed = len(ended_runs) - num_by_outcome[Status.OK] - num_by_outcome[Status.OOM]
    num_in_doubt = sum(run.outcome == Status.OK and run.suspect is not None for run in ended_runs)
    num_screened = sum(run.outcome == Status.OK and run.screened for run in ended_runs)
    counts = {"num_runs": len(ended_runs), "num_oom": num_by_outcome[Status.OOM], "num_failed": num_failed}
    return counts | {"num_in_doubt": num_in_doubt, "num_screened": num_screened}
