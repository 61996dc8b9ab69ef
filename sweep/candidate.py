"""A candidate of a plan, and the cell in which it is ranked."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from ultrabench.column import SECONDS
from ultrabench.errors import counted
from ultrabench.layout import Layout
from ultrabench.measure import Measure
from ultrabench.model_flops import ModelFlops, model_flops
from ultrabench.model_shape import ModelShape
from ultrabench.partial_step import Slice, only_screens, screening_text
from ultrabench.result import RunResult
from ultrabench.run import RunSpec
from ultrabench.sweep.partial_steps import WholeSteps
from ultrabench.sweep.predict.predict import ADVISED_P_OOM, LIKELY_OOM, Prediction
from ultrabench.variant import CELL_OPTIONS, Runtime, runtime_of


class CellKey(NamedTuple):
    """What the runs of a sweep have in common that are ranked together; hardware and kernel are the same in all."""

    model: str
    nodes: int
    seq_len: int
    gbs: int
    precision: str


def options_of(spec: RunSpec) -> dict[str, str]:
    """What the step time of a run depends on beside the numbers and words of its layout."""
    is_over_nodes = spec.layout.ep > spec.gpus_per_node
    options = {name: str(value) for name, value in spec.variant.items()}
    return options | {"precision": spec.kernel.precision, "ep": "over nodes" if is_over_nodes else ""}


PRUNED = "memory"
"""The rule of valid layouts that are not run, because they are predicted to run out of memory."""
UNSELECTED = "max_runs"
"""The rule of layouts that are not run, because others were selected; they may fit."""
PARTS_COST = 0.06
"""What a measurement by parts of steps costs beside one by whole steps, as the search weighs it. Turns take 5 to 25 %
of a whole step; with this value the search ends within 2 % in 95 % of simulated cells even if parts are as rough as on
busy cores (benchmarks/measured.md)."""

FEW_STEPS_COST = 0.24
"""What a measurement by few whole steps costs beside one by all: 8 of the 33 steps of `measure=default`."""


class TwoStartsPrice(NamedTuple):
    """What a run is predicted to take by parts of steps in two starts, and by all whole steps in one."""

    two_starts_s: float
    whole_s: float

    @property
    def text(self) -> str:
        """Both in words."""
        return f"{SECONDS.text(self.two_starts_s)} in two starts, {SECONDS.text(self.whole_s)} by whole steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout of one model on one number of nodes, and whether it runs."""

    run_id: str
    spec: RunSpec
    rule: str | None = None
    """The first structural rule that rejects the layout, `kernel` when the kernel refuses it, PRUNED or UNSELECTED."""
    reason: str | None = None
    predicted: Prediction | None
    """The prediction; None where a structural rule rejects the layout."""
    peak_flops_per_s: float | None = None
    """Peak rate of one rank, which mfu is relative to; None where it is unknown."""
    mfu_problem: str | None = None
    """Why no MFU relative to this peak is given; None where the peak can be trusted."""
    flops_formula: str
    """The formula that counts the FLOPs of a token."""
    start_excess_s: float = 0.0
    """Seconds by which measured starts of its program are longer than the start of the prediction."""
    step_factor: float = 1.0
    """How many times as long as predicted the measured steps of its cell have taken."""
    steps_excess_s: float = 0.0
    """Seconds by which all its steps together are therefore expected to be longer than predicted."""

    slice: Slice | None = None
    """The parts of a step by which the run is measured; None: whole steps are measured."""
    few_steps: bool = False
    """Whether few whole steps are measured: alone where no part stands for the run, before parts to confirm them."""
    whole_steps: WholeSteps | None = None
    """Why whole steps are measured although measure.partial_steps asks for parts; None where it does not, and where
    parts are measured."""
    turn_share: float = 1.0
    """Predicted seconds of a step of each size of `slice`, relative to those of a whole step; 1 for whole steps."""
    has_third: bool = True
    """Whether its price counts the third size of its slice, which only the first runs of a kind measure."""
    p_wider: float = 0.0
    """How likely its slice becomes wider, for the price."""
    second_start_s: float = 0.0
    """Predicted seconds of the second start of its program, where its slice needs two."""
    dear_two_starts: TwoStartsPrice | None = None
    """The price of two starts, if they would take no less than all whole steps, which are measured for that reason."""

    @property
    def shape(self) -> ModelShape:
        """The shape of the model."""
        return self.spec.shape

    @property
    def layout(self) -> Layout:
        """The layout to be measured."""
        return self.spec.layout

    @property
    def options(self) -> dict[str, str]:
        """What its step time depends on beside its layout, for the search."""
        return options_of(self.spec)

    @property
    def nodes(self) -> int:
        """The number of nodes that the run uses."""
        return self.spec.nodes

    @property
    def cell(self) -> CellKey:
        """The cell that the candidate is ranked in."""
        workload = self.spec.workload
        return CellKey(
            self.shape.name, self.nodes, workload.seq_len, workload.gbs, self.spec.kernel.precision
        )

    @property
    def runtime(self) -> Runtime:
        """The container and the interpreter of the allocations in which it runs."""
        return runtime_of(self.spec.variant)

    @property
    def valid(self) -> bool:
        """Whether no structural rule rejects the layout."""
        return self.trainable or self.rule == "kernel"

    @property
    def trainable(self) -> bool:
        """Whether the layout is valid and the kernel can train it, if it fits into memory."""
        return self.rule in (None, PRUNED, UNSELECTED)

    @property
    def runs(self) -> bool:
        """Whether the layout is valid, the kernel can train it, and it has a chance to fit into memory."""
        return self.rule is None

    @property
    def prediction(self) -> Prediction:
        """The prediction of a valid layout."""
        assert self.predicted is not None
        return self.predicted

    @property
    def fits(self) -> bool:
        """Whether the run is more likely to fit into memory than not."""
        return self.prediction.p_oom <= LIKELY_OOM

    @property
    def search_cost(self) -> float:
        """What a measurement costs beside one of whole steps, for the search."""
        if self.has_two_starts and self.fits:
            start_s, duration_s = self.second_start_s, self.prediction.duration_s
            return duration_s / (start_s + (duration_s - 2 * start_s) / self.turn_share)
        return PARTS_COST if self.slice else FEW_STEPS_COST if self.few_steps else 1.0

    @property
    def has_two_starts(self) -> bool:
        """Whether the program starts twice to measure the run, once for each number of micro-batches."""
        return self.slice is not None and self.slice.two_starts

    @property
    def is_screened(self) -> bool:
        """Whether what is measured only chooses whether the run is measured again."""
        return only_screens(self.slice, self.few_steps)

    @property
    def screening_text(self) -> str | None:
        """What is measured first to screen the run, such as `parts of 4,8 micro-batches, in two starts`; None where the
        run is measured in full at once."""
        if not self.is_screened:
            return None
        starts_text = ", in two starts" if self.has_two_starts else ""
        return screening_text(self.slice.text if self.slice else None) + starts_text

    @property
    def has_whole_steps(self) -> bool:
        """Whether whole steps are measured, alone or before parts."""
        return self.slice is None or self.few_steps

    @property
    def duration_s(self) -> float:
        """Predicted seconds of one run, with the start and the step times that runs before it have measured."""
        start_excess_s = (1 + self.has_two_starts) * self.start_excess_s
        return self.prediction.duration_s + start_excess_s + self.steps_excess_s

    @property
    def gpu_hours(self) -> float:
        """Predicted GPU hours of one run."""
        return self.duration_s * self.layout.world_size / 3600

    def priced_s(self, measure: Measure, step_time_s: float) -> float:
        """Seconds of all steps of a run for its price, and of its second start, if a whole step takes `step_time_s`."""
        if self.slice is None:
            return (measure.few_steps if self.few_steps else measure).priced_s(step_time_s)
        turn_s = self._turn_s(self.slice.sizes if self.has_third else self.slice.pair, step_time_s)
        wider, p_wider = self.slice.wider, self.p_wider if self.slice.wider else 0.0
        wider_s = self._turn_s((self.slice.g1, wider), step_time_s) if wider else 0.0
        if self.few_steps:
            return measure.priced_beside_parts_s(step_time_s, turn_s, wider_s, p_wider)
        second_start_s = self.second_start_s if self.has_two_starts else 0.0
        return second_start_s + measure.priced_s(turn_s, wider_s, p_wider)

    def _turn_s(self, sizes: Collection[int], step_time_s: float) -> float:
        """Predicted seconds of a step of each of these sizes, by the straight line that the prediction is."""
        assert self.slice
        gas, num_sizes = self.layout.gas, len(self.slice.sizes)
        microbatch_share = (num_sizes - self.turn_share) / (num_sizes * gas - sum(self.slice.sizes))
        return step_time_s * sum(1 - (gas - size) * microbatch_share for size in sizes)

    def by_slice(self, slice_: Slice, measure: Measure) -> "Candidate":
        """The run measured by other parts, with its price."""
        return self.measured_by(measure, slice=slice_, turn_share=self._turn_s(slice_.sizes, 1.0))

    def at_longest(self, measure: Measure) -> "Candidate":
        """The run with the price that it has if its slice becomes wider and it measures a third size."""
        return self.measured_by(measure, has_third=True, p_wider=1.0) if self.slice else self

    def by_few_steps(self, measure: Measure) -> "Candidate":
        """The run screened by few whole steps, with its price; itself if no parts were to be measured.

        Only our own kernel measures few steps, so that a program that starts twice measures all.
        """
        if self.slice is None:
            return self
        if self.has_two_starts:
            return self.in_full(measure)
        return self.measured_by(measure, slice=None, turn_share=1.0, few_steps=True)

    def in_full(self, measure: Measure | None) -> "Candidate":
        """The run measured in a way that confirms it, with its price: by few whole steps and then by its parts in one
        start, or by all whole steps where it has no parts, or would need two starts for them.

        Args:
            measure: how the sweep measures; None: the price does not matter and stays as it is.
        """
        if not self.is_screened:
            return self
        changes: dict[str, Any] = {"few_steps": self.slice is not None}
        if self.has_two_starts:
            changes = {"slice": None, "turn_share": 1.0}
        return replace(self, **changes) if measure is None else self.measured_by(measure, **changes)

    def unless_dearer(self, measure: Measure) -> "Candidate":
        """The run measured in full, with the reason, if two starts are expected to take no less than whole steps.

        Two numbers of micro-batches that the user gives hold in any case.
        """
        if not self.has_two_starts or isinstance(measure.partial_steps, tuple):
            return self
        whole, step_time_s = self.in_full(measure), self.step_factor * self.prediction.step_time_s
        start_s = self.second_start_s + self.start_excess_s
        price = TwoStartsPrice(
            start_s + self.start_excess_s + self.priced_s(measure, step_time_s),
            start_s + whole.priced_s(measure, step_time_s),
        )
        if price.two_starts_s < price.whole_s:
            return self
        return replace(whole, dear_two_starts=price, whole_steps=WholeSteps("two_starts", price.text))

    def after_full(self, measure: Measure) -> "Candidate":
        """The run as its other starts measure it, beside one in full: screened as before, since the start in full has
        both whole steps and parts; in full where no start has both.
        """
        return self.in_full(measure) if self.has_two_starts else self

    def measured_by(self, measure: Measure, **changes: Any) -> "Candidate":
        """The run with `changes` in what is measured, such as `slice`, and with its price."""
        run, prediction = replace(self, **changes), self.prediction
        step_time_s = prediction.step_time_s
        saved_s = self.priced_s(measure, step_time_s) - run.priced_s(measure, step_time_s)
        duration_s = prediction.duration_s - saved_s * self.fits
        return replace(
            run,
            predicted=replace(prediction, duration_s=duration_s),
            steps_excess_s=run.priced_s(measure, self.step_factor * step_time_s)
            - run.priced_s(measure, step_time_s),
        )

    def tokens_per_s_per_gpu(self, result: RunResult) -> float:
        """Tokens per second per GPU in an ok result."""
        return self.spec.tokens_per_step / median(result.step_times_s) / self.layout.world_size

    def flops(self, result: RunResult | None = None) -> ModelFlops:
        """The FLOPs of a token, also by what the log of a run of its program says."""
        spec = self.spec
        seq_len, num_ranks = spec.workload.seq_len, spec.layout.world_size
        return model_flops(spec.kernel, spec.shape, seq_len, self.flops_formula, result, num_ranks)

    def mfu(self, tokens_per_s_per_gpu: float, result: RunResult | None = None) -> float | None:
        """The mfu at this token rate, a fraction; None where the peak rate is unknown or in doubt,
        or the FLOPs unknown.

        Args:
            result: the run that was measured; None for a predicted rate.
        """
        flops_per_token = self.flops(result).per_token
        if self.peak_flops_per_s is None or self.mfu_problem or flops_per_token is None:
            return None
        return tokens_per_s_per_gpu * flops_per_token / self.peak_flops_per_s


def expected_rate(rate: float, p_oom: float) -> float:
    """What predicted runs are ranked by: the predicted rate times the probability that the run fits into memory."""
    return rate * (1 - p_oom)


def cell_columns(cells: Iterable[CellKey]) -> list[str]:
    """The names that tell cells apart in a table: model, nodes, and the others that have several values."""
    values_by_column = zip(CellKey._fields, zip(*cells, strict=True), strict=False)
    return [name for name, values in values_by_column if name in ("model", "nodes") or len({*values}) > 1]


def cell_label(cell: CellKey, columns: Sequence[str] = ()) -> str:
    """A cell in words, such as `llama3-8b on 2 nodes, seq_len=4096`.

    Args:
        columns: what `cell_columns` returns for the cells that are named together.
    """
    option_texts = [f"{column}={getattr(cell, column)}" for column in CELL_OPTIONS if column in columns]
    return ", ".join((f"{cell.model} on {counted(cell.nodes, 'node')}", *option_texts))


def by_cell(candidates: Iterable[Candidate]) -> dict[CellKey, list[Candidate]]:
    """CellKey -> its candidates among these, in their order."""
    candidates_by_cell: dict[CellKey, list[Candidate]] = {}
    for candidate in candidates:
        candidates_by_cell.setdefault(candidate.cell, []).append(candidate)
    return candidates_by_cell


NO_ROOM = "no room for the allocator's reserve"
"""What to say of a run that is likely to fit, but is advised only where no run of its cell has that room."""


def advised(runs: Iterable[Candidate], max_p_oom: float = ADVISED_P_OOM) -> list[Candidate]:
    """The runs that are likely enough to fit; those with room for the reserve of their allocator if there are any."""
    likely_to_fit = [run for run in runs if run.prediction.p_oom <= max_p_oom]
    return [run for run in likely_to_fit if run.prediction.memory_share <= 1] or likely_to_fit
