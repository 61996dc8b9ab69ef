"""A training layout: the degrees of parallelism and how the batch is cut."""

from dataclasses import dataclass
from typing import NamedTuple

from ultrabench.errors import ConfigError

PP_SCHEDULES = ("none", "1f1b", "afab", "interleaved", "zbv")
"""none: no pipeline; the others order the micro-batches of one:

1f1b         one forward, one backward in turn (arXiv 2006.09503), one stage on each rank
afab         all forwards, then all backwards (arXiv 1811.06965), one stage on each rank
interleaved  1f1b with several stages on each rank, every pp-th (arXiv 2104.04473)
zbv          weight gradients fill the bubble; two stages on each rank, the first and the last on
             rank 0 (arXiv 2401.10241)
"""


class Coordinates(NamedTuple):
    """Where a rank stands on each axis of the mesh."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to spread one global batch over dp*tp*pp*cp ranks."""

    dp: int
    """Data-parallel degree."""
    tp: int = 1
    """Tensor-parallel degree (with sequence parallelism)."""
    pp: int = 1
    """Pipeline-parallel degree."""
    cp: int = 1
    """Context-parallel degree."""
    zero_stage: int = 0
    """What dp shards: 0 nothing, 1 optimizer state, 2 and gradients, 3 and parameters."""
    mbs: int = 1
    """Micro-batch size of one dp rank, in sequences."""
    gas: int = 1
    """Gradient accumulation steps: micro-batches of one optimizer step."""
    pp_schedule: str = "none"
    """Order of micro-batches in the pipeline: none (pp=1), 1f1b, afab, interleaved or zbv."""
    virtual_stages: int = 1
    """Pipeline stages on each rank."""

    def __post_init__(self) -> None:
        for field in ("dp", "tp", "pp", "cp", "mbs", "gas", "virtual_stages"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)}; must be >= 1")
        if self.zero_stage not in (0, 1, 2, 3):
            raise ConfigError(f"zero_stage={self.zero_stage}; must be 0, 1, 2 or 3")
        if self.pp_schedule not in PP_SCHEDULES:
            raise ConfigError(f"pp_schedule={self.pp_schedule!r}; must be one of {', '.join(PP_SCHEDULES)}")
        if (self.pp_schedule == "none") != (self.pp == 1):
            raise ConfigError(f"pp_schedule={self.pp_schedule!r} with pp={self.pp}; none goes with pp=1 only")
        several = {"interleaved": self.virtual_stages > 1, "zbv": self.virtual_stages == 2}
        if not several.get(self.pp_schedule, self.virtual_stages == 1):
            raise ConfigError(
                f"virtual_stages={self.virtual_stages} with pp_schedule={self.pp_schedule}; must be 1, "
                "but for interleaved >= 2 and for zbv 2"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def num_stages(self) -> int:
        """Pipeline stages of all ranks."""
        return self.pp * self.virtual_stages

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Indices of the stages that a rank of the pp axis holds, in their order."""
        if self.pp_schedule == "zbv":
            return pp_rank, self.num_stages - 1 - pp_rank
        return tuple(range(pp_rank, self.num_stages, self.pp))

    @property
    def gbs(self) -> int:
        """Global batch size, in sequences."""
        return self.dp * self.mbs * self.gas

    def coordinates(self, rank: int) -> Coordinates:
        """Place of `rank` in the mesh (pp, dp, cp, tp); tp is innermost, so it stays in a node.

        Raises:
            ConfigError: rank outside 0..world_size-1.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank={rank}; must be in 0..{self.world_size - 1}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(pp=pp, dp=dp, cp=cp, tp=tp)

    def first_rank(self, pp_rank: int) -> int:
        """The first of the ranks that hold the stages of `pp_rank`."""
        return self.rank(Coordinates(pp=pp_rank, dp=0, cp=0, tp=0))

    def rank(self, at: Coordinates) -> int:
        """The rank that stands at `at`; the inverse of `coordinates`."""
        return ((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp

    def label(self) -> str:
        """Short text such as `dp4 tp1 pp2 z1 mbs2 gas4`; the schedule only when it is another than 1f1b."""
        cp = f" cp{self.cp}" if self.cp > 1 else ""
        name = "" if self.pp_schedule in ("none", "1f1b") else f" {self.pp_schedule}"
        name += str(self.virtual_stages) if self.pp_schedule == "interleaved" else ""
        return f"dp{self.dp} tp{self.tp} pp{self.pp}{cp} z{self.zero_stage} mbs{self.mbs} gas{self.gas}{name}"


def default_schedule(pp: int, gas: int) -> str:
    """The schedule a layout gets when none is named.

    1F1B needs at least pp micro-batches; with fewer the pipeline runs all forwards, then all
    backwards (AFAB), which is the same order of work.
    """
    if pp == 1:
        return "none"
    return "1f1b" if gas >= pp else "afab"


def default_virtual_stages(pp_schedule: str) -> int:
    """Stages on each rank that a schedule gets when no number is named."""
    return 2 if pp_schedule in ("interleaved", "zbv") else 1
