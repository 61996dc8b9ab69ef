"""A candidate of a plan: its layout, its predicted cost and whether it runs."""

from dataclasses import dataclass
from statistics import median

from ultrabench.layout import Layout
from ultrabench.model_shape import ModelShape
from ultrabench.result import RunResult
from ultrabench.run import RunSpec
from ultrabench.sweep.predict.predict import Prediction

CellKey = tuple[str, int]
"""Model name and number of nodes. Hardware and kernel are the same in the whole sweep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout of one model on one number of nodes, and whether it runs."""

    run_id: str
    spec: RunSpec
    rule: str | None = None
    """The first structural rule that rejects the layout, or `kernel` when the kernel refuses it."""
    reason: str | None = None
    prediction: Prediction
    peak_flops_per_s: float | None = None
    """Peak rate of one rank, which mfu is relative to; None where it is unknown."""

    @property
    def shape(self) -> ModelShape:
        """The shape of the model."""
        return self.spec.shape

    @property
    def layout(self) -> Layout:
        """The layout to be measured."""
        return self.spec.layout

    @property
    def nodes(self) -> int:
        """The number of nodes that the run uses."""
        return self.spec.nodes

    @property
    def cell(self) -> CellKey:
        """The cell that the candidate is ranked in."""
        return self.shape.name, self.nodes

    @property
    def valid(self) -> bool:
        """Whether no structural rule rejects the layout."""
        return self.rule in (None, "kernel")

    @property
    def runs(self) -> bool:
        """Whether the layout is valid and the kernel can train it."""
        return self.rule is None

    @property
    def fits(self) -> bool:
        """Whether the predicted memory is at most the memory of a rank."""
        return self.prediction.memory_share <= 1

    @property
    def gpu_hours(self) -> float:
        """Predicted GPU hours of one run."""
        return self.prediction.duration_s * self.layout.world_size / 3600

    def tokens_per_s_per_gpu(self, result: RunResult) -> float:
        """Tokens per second per GPU in an ok result."""
        return self.spec.tokens_per_step / median(result.step_times_s) / self.layout.world_size

    def mfu(self, tokens_per_s_per_gpu: float) -> float | None:
        """The mfu at this token rate, a fraction; None where the peak rate is unknown."""
        if self.peak_flops_per_s is None:
            return None
        flops_per_token = self.shape.flops_per_token(self.spec.workload.seq_len)
        return tokens_per_s_per_gpu * flops_per_token / self.peak_flops_per_s
