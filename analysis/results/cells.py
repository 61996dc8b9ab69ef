"""The cells of a ranking (model, nodes, hardware, kernel, precision and batch) and the sentences about them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, product
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import ultrabench
from ultrabench.analysis.results.environments import Environments
from ultrabench.analysis.results.numbers import count, formula_text
from ultrabench.analysis.results.planned import NOTE, is_predicted
from ultrabench.errors import ConfigError, counted
from ultrabench.kernel_config import kind_by_name
from ultrabench.layout import AXES, labels
from ultrabench.result import PENDING, Status, outcome_order, tier
from ultrabench.routing import routing_text
from ultrabench.standing import failed_in_full
from ultrabench.sweep.config.files import files
from ultrabench.sweep.config.load import load_hardware
from ultrabench.sweep.config.sweep_config import WEAK
from ultrabench.sweep.running.outliers import foreign_load_line
from ultrabench.variant import option_texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The best run of a cell, or the reason why there is none; the fields are those of `heatmap --json`."""

    model: str
    model_id: str | None = None
    """Hash of the shape of the model without its name; None where it is unknown."""
    model_mark: str | None = None
    """First digits of model_id where the table has another model of this name; else None."""
    nodes: int
    gpus: int | None = None
    """Number of ranks; None where it is unknown."""
    partial_gpus: int | None = None
    """The number of ranks where they fill no whole number of nodes; else None."""
    run_id: str | None = None
    status: str | None
    """ok when a run won the cell, else the most common status; None while runs are pending."""
    reason: str | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Axis -> value of the best run; empty where there is no best run."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Option beside the layout that varies in the table -> value of the best run, None where it is unset."""
    env_id: str | None = None
    """Hash of the environment of the best run."""
    environment: str | None = None
    """What sets this environment apart from the others of the cell, such as `ALGO=Ring`; None if there is one."""
    suspect: str | None = None
    """Why the number of the best run is suspect; None if it is not. A suspect is the best only of suspects."""
    mfu: float | None = None
    """MFU of the best run, a fraction."""
    flops_formula: str | None = None
    """The formula by which MFU counts the FLOPs of a token."""
    source_mfu: float | None = None
    """MFU of a published measurement as its publisher computed it, a fraction."""
    tokens_per_s_per_gpu: float | None = None
    peak_mem_reserved_bytes: int | None = None
    """Peak of reserved memory, the largest of all ranks."""
    peak_mem_reserved_rank0_bytes: int | None = None
    """Peak of reserved memory of rank 0 alone, as other benchmarks publish it."""
    peak_mem_allocated_bytes: int | None = None
    """Peak of allocated memory, the largest of all ranks."""
    num_runs: int
    """Number of runs of the cell that have ended."""
    num_oom: int = 0
    """Number of runs of the cell that ran out of memory and were ok in no repeat."""
    num_failed: int = 0
    """Number of runs of the cell that ended in another way, neither ok nor out of memory, in all their repeats."""
    num_in_doubt: int = 0
    """Number of runs of the cell that were ok, but suspect in each ok repeat."""
    num_screened: int = 0
    """Number of runs of the cell that were ok, but only screened."""
    num_repeats: int = 0
    """Number of repeats of the best run that have ended."""
    num_repeats_failed: int = 0
    """Number of repeats of the best run that were not ok."""
    as_good_as_best: tuple[str, ...] = ()
    """run_ids of the other runs whose 95 % intervals overlap with that of the best run."""
    ranked_by: str | None = None
    """The column that was compared: control_ratio where the cell has one control, else the one asked for."""
    ranked_value: float | None = None
    """The value that was compared: the median of the best run's repeats in that column."""
    shown_column: str = "mfu"
    """The column that the heatmap shows: MFU, or the one that was asked for."""
    shown_value: float | None = None
    """The value of the best run in that column."""
    hardware: str | None
    kernel: str | None
    precision: str | None
    routing: str | None = None
    """How tokens choose their experts, where this is known."""
    seq_len: int | None
    gbs: int | None
    scaling: str | None = None
    num_params: int | None
    num_active_params: int | None = None
    """Parameters used for one token; fewer than num_params in a model with experts."""
    peak_source: str | None = None
    step_time_ci95_rel: float | None = None
    """Half the 95 % interval of the best run's median step time, relative to it."""
    ci_reached: bool | None = None
    """Whether this interval met the target of the measurement."""
    predicted: bool = False
    """Whether a plan predicts its numbers, so that nothing was measured."""
    varied_axes: tuple[str, ...] = ()
    """Axes with several values in the table; a figure names their values also where these are the usual ones."""
    compare_ratio: float | None = None
    """tokens_per_s_per_gpu of the best run, divided by that of the same cell in another table."""
    compare_layout: Mapping[str, Any] | None = None
    """Layout of the best run of the same cell in another table, where it is another layout."""
    compare_differing: Mapping[str, str | None] = field(default_factory=dict)
    """One of MAY_DIFFER -> its value in the other cell, where it is another one."""

    @property
    def title(self) -> str:
        """What the model is called in this table, such as `mine (3f2a)` where it has another one called mine."""
        return model_text(self.model, self.model_mark)

    @property
    def has_experts(self) -> bool:
        """Whether a token uses only some of the parameters; False where this is unknown."""
        return self.num_active_params not in (None, self.num_params)

    @property
    def panel(self) -> tuple[object, ...]:
        """What all cells of one panel of a figure share."""
        batch = None if self.gbs is None else batch_text(self.gbs, self.nodes, self.scaling)
        return self.hardware, self.kernel, self.precision, self.routing, self.seq_len, batch

    def to_json(self) -> dict[str, Any]:
        """The cell as one flat JSON object, which includes the axes of its layout."""
        values = asdict(self)
        layout = values.pop("layout")
        return values | {name: layout.get(name) for name in AXES}


def formula_of_cells(cells: Iterable[Cell]) -> str | None:
    """The sentence about the formulas by which the cells have their MFU; None if they have none."""
    cells_with_mfu = [cell for cell in cells if cell.shown_column == "mfu" and cell.mfu]
    formulas = {cell.flops_formula for cell in cells_with_mfu if cell.flops_formula}
    return formula_text(formulas, any(cell.has_experts for cell in cells_with_mfu)) if formulas else None


def model_marks(table: pa.Table) -> list[str | None]:
    """For each row the first digits of its model_id that set it apart from other models of its name.

    None where the table has one model of this name, or the shape of the row's model is unknown.
    """
    model_names, row_model_ids = table["model"].to_pylist(), table["model_id"].to_pylist()
    ids_by_name: dict[str, set[str]] = defaultdict(set)
    for name, model_id in dict.fromkeys(zip(model_names, row_model_ids, strict=True)):
        if model_id is not None:
            ids_by_name[name].add(model_id)
    num_digits = {name: _num_digits(ids) for name, ids in ids_by_name.items() if len(ids) > 1}
    return [
        model_id[: num_digits[name]] if model_id is not None and name in num_digits else None
        for name, model_id in zip(model_names, row_model_ids, strict=True)
    ]


def partial_gpus(table: pa.Table) -> list[int | None]:
    """For each row its number of GPUs where they fill no whole number of nodes, else None.

    A node has as many GPUs as the file of the hardware says, or at least as many as a row of it uses per node.
    """
    columns = [table[name].to_pylist() for name in ("hardware", "nodes", "gpus")]
    gpus_of_node: dict[str | None, float] = {}
    for hardware, nodes, gpus in zip(*columns, strict=True):
        if hardware not in gpus_of_node:
            has_file = hardware in files("hardware")
            gpus_of_node[hardware] = load_hardware(hardware).gpus_per_node if has_file else 0
        if nodes and gpus:
            gpus_of_node[hardware] = max(gpus_of_node[hardware], gpus / nodes)
    return [
        gpus if gpus and nodes and gpus < nodes * gpus_of_node[hardware] else None
        for hardware, nodes, gpus in zip(*columns, strict=True)
    ]


def nodes_text(nodes: int, partial_gpus: int | None) -> str:
    """A text such as `2 nodes`, or `1 node (4 GPUs)` where the GPUs fill no whole number of nodes."""
    return counted(nodes, "node") + (f" ({counted(partial_gpus, 'GPU')})" if partial_gpus else "")


def left_out(table: pa.Table) -> list[str]:
    """A line that counts the rows which no ranking has, since they name no model or no number of nodes."""
    rows = table.select(["kernel", "model", "nodes"]).to_pylist()
    training_rows = [row for row in rows if kind_by_name(row["kernel"]).trains]
    num_without_model = sum(row["model"] is None for row in training_rows)
    num_without_nodes = sum(row["model"] is not None and row["nodes"] is None for row in training_rows)
    counts = ((num_without_model, "without a model"), (num_without_nodes, "without a number of nodes"))
    texts = [f"{number:,} {reason}" for number, reason in counts if number]
    if not texts:
        return []
    todo = "give model, and nodes or gpus and gpus_per_node"
    return [f"left out of rankings: {', '.join(texts)} (of {counted(len(rows), 'row')}); {todo}"]


def _num_digits(model_ids: Collection[str]) -> int:
    """The least number of first digits, 4 or more, in which these ids differ."""
    return next(n for n in range(4, 17) if len({model_id[:n] for model_id in model_ids}) == len(model_ids))


def model_text(model: str, mark: str | None) -> str:
    """The name of a model with its mark, if it has one."""
    return f"{model} ({mark})" if mark else model


SETTINGS: dict[str, Callable[[Any], str]] = {
    "hardware": str,
    "kernel": "kernel {}".format,
    "precision": str,
    "routing": routing_text,
    "seq_len": "seq_len {:,.0f}".format,
    "gbs": "gbs {:,.0f}".format,
    "batch": str,
    "num_params": lambda value: count(value, "params"),
}
"""Setting of a cell -> the text of its value. `batch` is what `batch_text` returns, for all numbers of nodes."""


def set_apart(cells: Sequence[Mapping[str, Any]], setting_names: Iterable[str]) -> list[list[str]]:
    """For each cell the texts of those settings that others of these cells of the same model have otherwise.

    Args:
        cells: settings of cells, with their `model`.
        setting_names: those of SETTINGS that count.
    """
    values_by_setting = defaultdict[tuple[Any, str], set[Any]](set)
    for cell, name in product(cells, setting_names := [*setting_names]):
        values_by_setting[cell["model"], name].add(cell[name])
    return [
        [
            f"unknown {name}" if cell[name] is None else SETTINGS[name](cell[name])
            for name in setting_names
            if len(values_by_setting[cell["model"], name]) > 1
        ]
        for cell in cells
    ]


def batch_text(gbs: float, nodes: int, scaling: str | None) -> str:
    """What all runs of one panel share of their batches: `gbs 256`, or with weak scaling the part of each node."""
    return f"gbs {gbs / nodes:,.6g} per node" if scaling == WEAK else f"gbs {gbs:,.0f}"


MAY_DIFFER = ("hardware", "kernel", "precision")
"""Columns in which the best of two cells are compared although they differ; the figure says so."""


def compared_with(cells: list[Cell], other_cells: list[Cell]) -> list[Cell]:
    """`cells` with the `compare_` fields of the cell of the same model, nodes and batch in `other_cells`.

    A cell of the same hardware and kernel is preferred; else the fastest of the other cells is used.
    """
    measured_cells = [other for other in other_cells if other.tokens_per_s_per_gpu]
    measured_cells.sort(key=lambda other: other.tokens_per_s_per_gpu or 0.0)
    cells_by_workload = defaultdict[tuple[object, ...], list[Cell]](list)
    for other in measured_cells:
        cells_by_workload[_workload(other)].append(other)
    compared_cells = []
    for cell in cells:
        model_cells = [other for other in cells_by_workload[_workload(cell)] if _same_model(cell, other)]
        equal_cells = [other for other in model_cells if _settings(other) == _settings(cell)]
        nearest = next(reversed(equal_cells or model_cells), None)
        speed, other_speed = cell.tokens_per_s_per_gpu, nearest and nearest.tokens_per_s_per_gpu
        ratio = speed / other_speed if speed and other_speed else None
        other_layout = nearest.layout if nearest and _layouts_differ(cell.layout, nearest.layout) else None
        value_pairs = {name: (getattr(nearest, name), getattr(cell, name)) for name in MAY_DIFFER if nearest}
        other_values = {name: old for name, (old, new) in value_pairs.items() if old != new}
        fields: dict[str, Any] = {"compare_layout": other_layout, "compare_differing": other_values}
        compared_cells.append(replace(cell, compare_ratio=ratio, **fields))
    return compared_cells


def require_comparable(cells: Sequence[Cell], other_cells: Sequence[Cell]) -> None:
    """Raises ConfigError unless one of the cells of A that `compared_with` returned has a ratio to a cell of B."""
    if any(cell.compare_ratio for cell in cells):
        return
    sides = [[cell for cell in side if cell.tokens_per_s_per_gpu] for side in (cells, other_cells)]
    names = ("model", "nodes", "routing", "seq_len", "gbs")
    values_by_column = {name: [{str(getattr(c, name)) for c in side} for side in sides] for name in names}
    fact = f"no cell has a speed in both A ({counted(len(sides[0]), 'cell')} with a speed) and B ({len(sides[1]):,})"
    raise ConfigError(fact + without_common_value(values_by_column))


def without_common_value(values_by_column: Mapping[str, Sequence[Collection[str]]]) -> str:
    """The end of a refusal: `; gbs is 32 in A and 64 in B` for the first three columns without a common
    value, and what to do.

    Args:
        values_by_column: for each column its values in A and in B.
    """
    sorted_values = {name: [*map(sorted, sides)] for name, sides in values_by_column.items()}
    texts = [
        f"; {name} is {' / '.join(values_a[:3])} in A and {' / '.join(values_b[:3])} in B"
        for name, (values_a, values_b) in sorted_values.items()
        if values_a and values_b and not {*values_a} & {*values_b}
    ]
    return f"{''.join(texts[:3])}: compare tables with the same models and batch"


def _layouts_differ(layout: Mapping[str, Any], other_layout: Mapping[str, Any]) -> bool:
    """Whether two layouts differ in an axis that both know, or only one of them is there."""
    value_pairs = [(layout.get(name), other_layout.get(name)) for name in AXES]
    return bool(layout) != bool(other_layout) or any(a != b for a, b in value_pairs if None not in (a, b))


def _settings(cell: Cell) -> tuple[object, ...]:
    """The values of MAY_DIFFER of a cell."""
    return tuple(getattr(cell, name) for name in MAY_DIFFER)


def _same_model(cell: Cell, other: Cell) -> bool:
    """Whether the shapes of the models of two cells are equal, as far as both are known."""
    return None in (cell.model_id, other.model_id) or cell.model_id == other.model_id


def _workload(cell: Cell) -> tuple[object, ...]:
    """The model, nodes, routing and batch of a cell, which must be equal in two cells that are compared."""
    return (
        cell.num_params or cell.model, cell.nodes, cell.partial_gpus, cell.routing, cell.seq_len, cell.gbs,
    )  # fmt: skip


def layout_words(row: Mapping[str, Any], shown_axes: Collection[str] = ()) -> tuple[str, str]:
    """The layout of a result row as two texts: the degrees and ZeRO, and everything from mbs on.

    The second one has the batch, the schedule, recomputation and the `options` of the row, if it has any.

    Args:
        shown_axes: axes that are named also where they have their usual value.
    """
    batch_start = AXES.index("mbs")
    batch_words = (*labels(row, AXES[batch_start:], shown_axes), *option_texts(row.get("options") or {}))
    return " ".join(labels(row, AXES[:batch_start], shown_axes)), " ".join(batch_words)


def repeats_failed(num_repeats: int, num_failed: int) -> str | None:
    """A text such as `1 of 2 repeats failed`; None when none has."""
    return f"{num_failed} of {counted(num_repeats, 'repeat')} failed" if num_failed else None


OUTCOMES = {False: ("tried", Status.OOM.value), True: ("planned", "predicted out of memory")}
"""Whether a plan predicts the runs of a cell -> what texts call all of them, and those without enough memory."""


def tried(cell: Cell) -> list[str]:
    """How many repeats of the best run failed, and what became of all runs of the cell, as short texts."""
    num_as_good, (tried_text, oom_text) = len(cell.as_good_as_best), OUTCOMES[cell.predicted]
    counts = (
        (cell.num_runs, tried_text), (num_as_good, "as good"), (cell.num_oom, oom_text), (cell.num_failed, "failed"),
        (cell.num_in_doubt, "suspect"), (cell.num_screened, "screened"),
    )  # fmt: skip
    failed_repeats = repeats_failed(cell.num_repeats, cell.num_repeats_failed)
    count_texts = (failed_repeats, *(f"{num_runs:,} {outcome}" for num_runs, outcome in counts if num_runs))
    return [text for text in count_texts if text]


def caveats(table: pa.Table) -> list[str]:
    """Lines about suspect rows, invalid rows, each with an example, rows without MFU, load of other programs,
    and drivers that differ.
    """
    rows = table.select(["run_id", "status", "reason", "suspect"]).to_pylist()
    suspects = [(row["run_id"], row["suspect"]) for row in rows if row["suspect"]]
    invalids = [(row["run_id"], row["reason"]) for row in rows if row["status"] == Status.INVALID]
    examples_by_text = ((suspects, "suspect (wins only a cell without other results)"), (invalids, "invalid"))
    example_lines = [
        f"{len(examples):,} of {counted(len(rows), 'row')} {description}, such as {examples[0][0]}: {examples[0][1]}"
        for examples, description in examples_by_text
        if examples
    ]
    other_lines = (screened_rows(table), left_out(table), mfu_problems(table), foreign_load(table))
    return [*example_lines, *chain(*other_lines), *Environments(table).notes]


def screened_rows(table: pa.Table) -> list[str]:
    """A line that counts the ok rows that only screened their runs."""
    screened = table.filter(pc.and_(pc.equal(table["status"], Status.OK), pc.is_valid(table["screened"])))
    num_screened, num_partial = len(screened), len(screened) - screened["measured_gas"].null_count
    if not num_screened:
        return []
    counts = (num_partial, "by parts of steps"), (num_screened - num_partial, "by few whole steps")
    how_text = ", ".join(f"{count:,} {how}" for count, how in counts if count)
    fact = f"{num_screened:,} of {counted(len(table), 'row')} screened ({how_text})"
    return [f"{fact}; only runs measured in full can be the best, and heatmaps show only their numbers"]


def foreign_load(table: pa.Table) -> list[str]:
    """What `foreign_load_line` says about the rows that are not suspect."""
    rows = table.select(["foreign_load", "suspect"]).to_pylist()
    line = foreign_load_line(row["foreign_load"] for row in rows if row["suspect"] is None)
    return [line] if line else []


def mfu_problems(table: pa.Table) -> list[str]:
    """A line for each reason why rows have no MFU."""
    num_by_problem = Counter(problem for problem in table["mfu_problem"].to_pylist() if problem)
    return [f"no MFU in {counted(num, 'row')}: {problem}" for problem, num in sorted(num_by_problem.items())][
        :3
    ]


def notes(table: pa.Table, include_suspects: bool = False) -> str:
    """The note under a figure: numbers of runs by how they ended in their cells, suspect rows, and versions.

    Args:
        include_suspects: whether suspect rows could win.
    """
    rows = table.select(["run_id", "repeat", "status", "is_final", "suspect", "screened"]).to_pylist()
    ends_by_run = defaultdict(list)
    for row in rows:
        if row["is_final"]:
            ends_by_run[row["run_id"]].append((row["repeat"] or 0, row["status"], bool(row["screened"])))
    num_by_status = Counter(map(_outcome, ends_by_run.values()))
    statuses = sorted(num_by_status, key=lambda status: (tier(status), -num_by_status[status], status))
    layouts_text = ", ".join(f"{num_by_status[status]:,} {status}" for status in statuses) or "no runs"
    if is_plan := is_predicted(table):
        runs_text, oom_text = OUTCOMES[is_plan]
        layouts_text = f"{num_by_status.total():,} {runs_text}, {num_by_status[Status.OOM]:,} {oom_text}"
    if num_suspect := sum(row["suspect"] is not None for row in rows):
        wins_text = "may win any cell" if include_suspects else "win only cells without other results"
        layouts_text += f". Suspect ({wins_text}): {num_suspect:,} of {counted(len(rows), 'row')}"
    return NOTE * is_plan + ". ".join(
        text[:1].upper() + text[1:]
        for text in (
            f"Layouts: {layouts_text}",
            *screened_rows(table),
            *left_out(table),
            *mfu_problems(table),
            *foreign_load(table),
            *Environments(table).notes,
            made_with(table),
        )
    )


def _outcome(ends: Sequence[tuple[int, str | None, bool]]) -> str:
    """The status of a run as `standings` has it, or pending.

    Args:
        ends: repeat, status, and whether it only screened the run, of each final row of the run.
    """
    has_failed = failed_in_full([(status, is_screened) for _, status, is_screened in ends])
    statuses = [(repeat, status) for repeat, status, _ in ends if not (has_failed and status == Status.OK)]
    _, _, text = max((outcome_order(status), repeat, status or PENDING) for repeat, status in statuses)
    return text


def made_with(table: pa.Table) -> str:
    """One sentence with the versions of the software that made the runs of a figure."""
    version_texts = [f"ultrabench {ultrabench.__version__}"]
    for column, label in (("torch_version", "torch"), ("nccl_version", "NCCL"), ("kernel_digest", "kernel")):
        values = sorted(str(value) for value in table[column].unique().to_pylist() if value is not None)
        if values:
            version_texts.append(f"{label} {' / '.join(values[:3])}{' / ...' if len(values) > 3 else ''}")
    return f"Made with {', '.join(version_texts)}."
