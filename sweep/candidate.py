"""One layout of a plan: its run, its prediction and what is decided about it."""

from dataclasses import dataclass
from statistics import median

from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.result import RunResult
from ultrabench.run import RunSpec
from ultrabench.sweep.predict.predict import Prediction

CellKey = tuple[str, int]
"""Model and nodes; hardware and kernel are the same in a whole sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout of one model on one number of nodes, and what is decided about it."""

    run_id: str
    spec: RunSpec
    rule: str | None = None
    """The first structural rule that rejects it, or `kernel` when the kernel refuses it."""
    reason: str | None = None
    prediction: Prediction
    peak_flops_per_s: float | None = None
    """Peak rate of one rank, of which mfu is a fraction; None where it is unknown."""

    @property
    def shape(self) -> ModelShape:
        """The model."""
        return self.spec.shape

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.spec.layout

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.spec.nodes

    @property
    def cell(self) -> CellKey:
        """The cell that the candidate is ranked in."""
        return self.shape.name, self.nodes

    @property
    def valid(self) -> bool:
        """Whether no structural rule rejects it."""
        return self.rule in (None, "kernel")

    @property
    def runs(self) -> bool:
        """Whether the layout can exist and the kernel can train it."""
        return self.rule is None

    @property
    def fits(self) -> bool:
        """Whether its predicted memory is within that of a rank."""
        return self.prediction.memory_share <= 1

    @property
    def gpu_hours(self) -> float:
        """Predicted price of one run."""
        return self.prediction.duration_s * self.layout.world_size / 3600

    def tokens_per_s_per_gpu(self, result: RunResult) -> float:
        """The token rate of each GPU in an ok result."""
        return self.spec.tokens_per_step / median(result.step_times_s) / self.layout.world_size

    def mfu(self, tokens_per_s_per_gpu: float) -> float | None:
        """The mfu at this token rate, as a fraction; None where the peak rate is unknown."""
        if self.peak_flops_per_s is None:
            return None
        flops_per_token = self.shape.flops_per_token(self.spec.workload.seq_len)
        return tokens_per_s_per_gpu * flops_per_token / self.peak_flops_per_s
