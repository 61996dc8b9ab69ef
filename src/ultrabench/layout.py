"""A training layout: the degrees of parallelism and how the batch is cut."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, NamedTuple

from ultrabench.allowed import Allowed, Count, allowed_of, at_least, one_of, require_allowed
from ultrabench.errors import ConfigError

PP_SCHEDULES = ("none", "1f1b", "afab", "interleaved", "zbv")
"""The schedules of a pipeline. none means that there is no pipeline; the others order its micro-batches:

1f1b         one forward, one backward in turn (arXiv 2006.09503), one stage on each rank
afab         all forwards, then all backwards (arXiv 1811.06965), one stage on each rank
interleaved  1f1b with several stages on each rank, every pp-th (arXiv 2104.04473)
zbv          weight gradients fill the bubble; two stages on each rank, the first and the last on
             rank 0 (arXiv 2401.10241)
"""
RECOMPUTE = Allowed(
    "none, attention, selective, full, or every2, every3 and so on to every99",
    re.compile("none|attention|selective|full|every([2-9]|[1-9][0-9])").fullmatch,
)
"""What backward computes again; docs/kernel.md says what each word keeps. everyN is full for each N-th layer."""


class Coordinates(NamedTuple):
    """The index of a rank on each axis of the mesh."""

    pp: int
    dp: int
    cp: int
    tp: int


def axis(label: str, meaning: str, *, default: Any = MISSING, implied: tuple[int | str, ...] = ()) -> Any:
    """A field of `Layout` that describes one axis.

    Args:
        label: text before the value in short texts, such as mbs in `mbs4`.
        meaning: one sentence for the documentation of result columns.
        default: the neutral value; a field without one has to be given.
        implied: usual values, which short texts leave out.
    """
    return field(default=default, metadata={"label": label, "meaning": meaning, "implied": implied})


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to spread a global batch over dp*tp*pp*cp ranks.

    This is the only list of a layout's axes; grid, plan, result columns, rankings, figures and texts use it.
    """

    dp: Count = axis("dp", "Data-parallel degree.")
    tp: Count = axis("tp", "Tensor-parallel degree, with sequence parallelism.", default=1)
    pp: Count = axis("pp", "Pipeline-parallel degree.", default=1)
    cp: Count = axis("cp", "Context-parallel degree.", default=1, implied=(1,))
    zero_stage: Annotated[int, one_of(0, 1, 2, 3)] = axis(
        "z", "What dp*cp ranks shard: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.",
        default=0,
    )  # fmt: skip
    dp_shard: Annotated[int, at_least(0)] = axis(
        "shard", "Ranks among which a ZeRO stage shards, the others hold replicas; 0: all dp*cp ranks.",
        default=0, implied=(0,),
    )  # fmt: skip
    mbs: Count = axis("mbs", "Sequences of a micro-batch on one dp rank.", default=1)
    gas: Count = axis("gas", "Micro-batches of one optimizer step (gradient accumulation).", default=1)
    pp_schedule: Annotated[str, one_of(*PP_SCHEDULES)] = axis(
        "", "Order of micro-batches in the pipeline: none (pp=1), 1f1b, afab, interleaved or zbv.",
        default="none", implied=("none", "1f1b"),
    )  # fmt: skip
    virtual_stages: Count = axis("x", "Pipeline stages on each rank.", default=1, implied=(1,))
    recompute: Annotated[str, RECOMPUTE] = axis(
        "recompute-", "What backward computes again: none, attention, selective, full, or every2: each 2nd layer.",
        default="none", implied=("none",),
    )  # fmt: skip

    def __post_init__(self) -> None:
        require_allowed(self)
        if (self.pp_schedule == "none") != (self.pp == 1):
            raise ConfigError(f"pp_schedule={self.pp_schedule!r} with pp={self.pp}; none goes with pp=1 only")
        several = {"interleaved": self.virtual_stages > 1, "zbv": self.virtual_stages == 2}
        if not several.get(self.pp_schedule, self.virtual_stages == 1):
            given = f"virtual_stages={self.virtual_stages} with pp_schedule={self.pp_schedule}"
            raise ConfigError(f"{given}; must be 1, but for interleaved >= 2 and for zbv 2")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def zero_shards(self) -> int:
        """Number of ranks among which the ZeRO stage shards; 1 where it shards nothing."""
        return (self.dp_shard or self.dp * self.cp) if self.zero_stage else 1

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages of all ranks together."""
        return self.pp * self.virtual_stages

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Indices of the stages that a rank of the pp axis holds, in the order of the model."""
        if self.pp_schedule == "zbv":
            return pp_rank, self.num_stages - 1 - pp_rank
        return tuple(range(pp_rank, self.num_stages, self.pp))

    @property
    def full_every(self) -> int:
        """n if backward computes every n-th layer of the model again in full; 0 if it does so with none."""
        every = self.recompute.removeprefix("every")
        return 1 if every == "full" else int(every) if every.isdecimal() else 0

    @property
    def gbs(self) -> int:
        """Global batch size, in sequences."""
        return self.dp * self.mbs * self.gas

    def coordinates(self, rank: int) -> Coordinates:
        """The place of `rank` in the mesh (pp, dp, cp, tp); tp is innermost, so that it stays in a node.

        Raises:
            ConfigError: the rank is not in 0..world_size-1.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank={rank}; must be in 0..{self.world_size - 1}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(pp=pp, dp=dp, cp=cp, tp=tp)

    def first_rank(self, pp_rank: int) -> int:
        """The lowest of the ranks that hold the stages of `pp_rank`."""
        return self.rank(Coordinates(pp=pp_rank, dp=0, cp=0, tp=0))

    def rank(self, at: Coordinates) -> int:
        """The rank at the place `at`; the inverse of `coordinates`."""
        return ((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp

    def label(self) -> str:
        """A short text such as `dp4 tp1 pp2 z1 mbs2 gas4`; usual values of some axes are left out."""
        return " ".join(labels({name: getattr(self, name) for name in AXES}))


AXES = tuple(f.name for f in fields(Layout))
"""Names of the axes of a layout, in the order in which they are shown."""
ALLOWED = allowed_of(Layout)
"""Axis -> its allowed values."""
MEANINGS = {f.name: str(f.metadata["meaning"]) for f in fields(Layout)}
TEXT_AXES = frozenset(f.name for f in fields(Layout) if isinstance(f.default, str))
"""Axes whose values are words; the values of all other axes are whole numbers."""
_METADATA = {f.name: f.metadata for f in fields(Layout)}


def labels(values: Mapping[str, Any], names: Sequence[str] = AXES, always: Collection[str] = ()) -> list[str]:
    """The short texts of axes, such as `mbs4`; axes without a value or with a usual one are left out.

    Args:
        always: axes of which usual values are told, too, if they have an effect on the layout.
    """
    idle = {"pp_schedule", "virtual_stages"} if values.get("pp") == 1 else set[str]()
    idle |= {"dp_shard"} if values.get("zero_stage") == 0 else set()
    left_out = {n: (None, *(() if n in always and n not in idle else _METADATA[n]["implied"])) for n in names}
    told = {n: "-all" if n == "dp_shard" and values.get(n) == 0 else values.get(n) for n in names}
    return [f"{_METADATA[n]['label']}{told[n]}" for n in names if values.get(n) not in left_out[n]]


def default_schedule(pp: int, gas: int) -> str:
    """The schedule of a layout when none is given.

    1F1B needs at least pp micro-batches. With fewer, the pipeline runs all forwards and then all
    backwards (AFAB), which is then the same order of work.
    """
    if pp == 1:
        return "none"
    return "1f1b" if gas >= pp else "afab"


def default_virtual_stages(pp_schedule: str) -> int:
    """The number of stages on each rank when none is given."""
    return 2 if pp_schedule in ("interleaved", "zbv") else 1


MAY_DIFFER = ("mbs", "gas", "zero_stage", "pp_schedule", "recompute")
"""Axes in which two layouts may differ for `dominates`; it does not compare the memory of other axes."""


def dominates(oom: Layout, other: Layout) -> bool:
    """Whether `other` needs at least as much memory as `oom`, for the same model, nodes and global batch.

    This holds when all axes but those of MAY_DIFFER are equal, and `other` has no smaller micro-batch, no higher
    ZeRO stage, the same or less recomputation, and the same schedule or AFAB in place of 1F1B. Full
    recomputation needs least memory and none needs most, while that of the other words depends on the model.
    1F1B keeps min(gas, pp) micro-batches in flight and AFAB keeps gas; as mbs * gas is the same, neither
    mbs * min(gas, pp) nor mbs * gas gets smaller when mbs grows. Published measurements agree: of the 816 runs
    of the Ultra-Scale Playbook that ran out of memory, 547 are dominated by another one, and none of the 1,236
    pairs of layouts with the same degrees contradicts.
    """
    same = all(getattr(oom, name) == getattr(other, name) for name in AXES if name not in MAY_DIFFER)
    schedules = (oom.pp_schedule, other.pp_schedule)
    in_flight = schedules[0] == schedules[1] or schedules == ("1f1b", "afab")
    less = oom.recompute in (other.recompute, "full") or other.recompute == "none"
    no_less = other.mbs >= oom.mbs and other.zero_stage <= oom.zero_stage
    return same and in_flight and less and no_less and oom != other
