"""A training layout: the degrees of parallelism and how the batch is cut."""

import functools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from ultrabench.allowed import Count, at_least, between, matching, one_of, require_allowed
from ultrabench.errors import ConfigError
from ultrabench.record import CHOICES_KEY, field_types

PP_SCHEDULES = ("none", "1f1b", "afab", "interleaved", "zbv")
"""The schedules of a pipeline. none means that there is no pipeline; the others order its micro-batches:

1f1b         one forward, one backward in turn (arXiv 2006.09503), one stage on each rank
afab         all forwards, then all backwards (arXiv 1811.06965), one stage on each rank
interleaved  1f1b with several stages on each rank, every pp-th (arXiv 2104.04473)
zbv          weight gradients fill the bubble; two stages on each rank, the first and the last on
             rank 0 (arXiv 2401.10241)
"""
RECOMPUTE = matching(
    "none|attention|selective|full|every([2-9]|[1-9][0-9])",
    "none, attention, selective, full or every2 to every99",
    {CHOICES_KEY: ("none", "attention", "selective", "full")},
)
"""What backward computes again; docs/reference/kernel.md says what each word keeps.
everyN is full for each N-th layer."""

PP_LAYOUT = matching(
    r"auto|cost|even|[0-9]+(-[0-9]+)+",
    "auto, cost, even or the layers of each stage, such as 8-9-9-6",
    {CHOICES_KEY: ("auto", "cost", "even")},
)
"""How the layers of a model are divided among the stages of a pipeline."""

DpShardInSweep = Annotated[
    Annotated[int, at_least(2)] | Annotated[str, one_of("all", "node")],
    Meta(description="all, node or a number >= 2"),
]
"""Type of a value of dp_shard in a sweep: all dp*cp ranks, those of them on one node, or a number of ranks."""
AUTO = "auto"
"""Word in place of a value that ultrabench chooses: by the model and other axes, or by the device."""
DivisorsInSweep = Annotated[
    Annotated[int, at_least(1)] | Annotated[str, one_of(AUTO)], Meta(description="auto or a number >= 1")
]
"""Type of a value of pp, mbs or ep in a sweep: a number, or auto, which is all usual numbers that divide
what the axis cuts."""
VirtualStagesInSweep = Annotated[
    Annotated[int, at_least(2)] | Annotated[str, one_of(AUTO)], Meta(description="auto or a number >= 2")
]
"""Type of a value of virtual_stages in a sweep: a number, or auto, which is all numbers with which the stages
divide the layers."""


class SweepValues(NamedTuple):
    """What a sweep may list for an axis, where that differs from the values that the axis has in a layout.

    Only grid.py turns words such as auto into values of layouts.
    """

    type: Any
    """The type of one value, with its rule."""
    default: int | str
    """The value that a sweep lists when it does not name the axis."""
    first: int | str
    """The value that `default` is in most layouts, or the first of several."""
    several: str | None = None
    """The word that may be several values, each in a layout of its own."""


DEGREE, BATCH_CUT, CHOICE = "degree", "batch", "choice"
"""Kinds of an axis: the degrees multiply to the number of ranks, two axes cut the batch, the others are choices."""
POWERS_OF_TWO = tuple(2**n for n in range(8))
"""1 to 128, the usual values of a number."""


def axis(
    label: str, meaning: str, *, kind: str, title: str = "", default: Any = MISSING,
    implied: tuple[int | str, ...] = (),
    usual: tuple[int | str, ...] = (), divides: tuple[str, ...] = (), detail_of: str = "",
    sweep_values: SweepValues | None = None, added_later: bool = False, text_by_value: Mapping[int, str] | None = None,
) -> Any:  # fmt: skip
    """A field of `Layout` that describes one axis.

    Args:
        label: text before the value in short texts, such as mbs in `mbs4`.
        meaning: one sentence for the documentation of result columns.
        kind: DEGREE, BATCH_CUT or CHOICE.
        title: its name in figures, such as `tensor-parallel degree`; by default its meaning.
        default: the neutral value; a field without one has to be given.
        implied: usual values, which short texts leave out.
        usual: values that a figure over this axis draws; those of degrees follow from the number of GPUs.
        divides: degrees whose product the value has to divide, because it regroups their ranks.
        detail_of: another axis, at whose neutral value this one has no effect.
        sweep_values: what a sweep lists, where that differs from the values in a layout.
        added_later: whether the axis came after the first run ids, which do not contain it.
        text_by_value: value -> its text in tables, where that is not the number.
    """
    title = title or meaning.rstrip(".").lower()
    return field(default=default, metadata={
        "label": label, "meaning": meaning, "kind": kind, "title": title, "implied": implied, "usual": usual,
        "divides": divides, "detail_of": detail_of, "sweep_values": sweep_values, "added_later": added_later,
        "text_by_value": text_by_value or {},
    })  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to spread a global batch over the ranks, whose number is the product of the degrees.

    This is the only list of a layout's axes; grid, plan, result columns, rankings, figures and texts use it.
    """

    dp: Count = axis("dp", "Data-parallel degree.", kind=DEGREE)
    tp: Count = axis("tp", "Tensor-parallel degree.", kind=DEGREE, default=1)
    pp: Count = axis(
        "pp", "Pipeline-parallel degree.", kind=DEGREE, default=1,
        sweep_values=SweepValues(DivisorsInSweep, 1, first=1, several=AUTO),
    )  # fmt: skip
    cp: Count = axis("cp", "Context-parallel degree.", kind=DEGREE, default=1, implied=(1,))
    zero_stage: Annotated[int, between(0, 3)] = axis(
        "z", "What dp*cp ranks shard: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters.",
        kind=CHOICE, title="ZeRO stage", default=0, usual=(0, 1, 2, 3),
    )  # fmt: skip
    dp_shard: Annotated[int, at_least(0)] = axis(
        "shard", "Number of ranks among which ZeRO shards; other ranks hold replicas. 0: all dp*cp ranks.",
        kind=CHOICE, title="ranks of a shard group", default=0, implied=(0,), detail_of="zero_stage",
        sweep_values=SweepValues(DpShardInSweep, "all", first=0), added_later=True, text_by_value={0: "all ranks"},
    )  # fmt: skip
    mbs: Count = axis(
        "mbs", "Sequences of a micro-batch on one dp rank.", kind=BATCH_CUT, title="sequences of a micro-batch",
        default=1, usual=POWERS_OF_TWO[:6], sweep_values=SweepValues(DivisorsInSweep, 1, first=1, several=AUTO),
    )  # fmt: skip
    gas: Count = axis(
        "gas", "Micro-batches of one optimizer step (gradient accumulation).", kind=BATCH_CUT,
        title="micro-batches of a step", default=1, usual=POWERS_OF_TWO,
    )  # fmt: skip
    pp_schedule: Annotated[str, one_of(*PP_SCHEDULES)] = axis(
        "", "Order of micro-batches in the pipeline: none (pp=1), 1f1b, afab, interleaved or zbv.",
        kind=CHOICE, title="pipeline schedule", default="none", implied=("none", "1f1b"), detail_of="pp",
        sweep_values=SweepValues(Annotated[str, one_of(AUTO, *PP_SCHEDULES[1:])], AUTO, first="1f1b"),
    )  # fmt: skip
    virtual_stages: Count = axis(
        "x", "Pipeline stages on each rank.", kind=CHOICE, title="stages of a rank", default=1, implied=(1,),
        detail_of="pp_schedule", sweep_values=SweepValues(VirtualStagesInSweep, 2, first=2, several=AUTO),
    )  # fmt: skip
    recompute: Annotated[str, RECOMPUTE] = axis(
        "recompute-", "What backward recomputes: none, attention, selective, full or everyN (every N-th "
        "layer in full).",
        kind=CHOICE, title="recomputation", default="none", implied=("none",),
        usual=("none", "attention", "selective", "every2", "full"),
    )  # fmt: skip
    sequence_parallel: Annotated[str, one_of("on", "off")] = axis(
        "sp-", "Between blocks, tp ranks split the tokens (on) or each rank holds all of them (off).", kind=CHOICE,
        title="sequence parallelism", default="on", implied=("on",), usual=("on", "off"), detail_of="tp",
        added_later=True,
    )  # fmt: skip
    cp_exchange: Annotated[str, one_of("ring", "allgather")] = axis(
        "cp-", "How cp ranks exchange keys and values: ring (during attention) or allgather (before it).",
        kind=CHOICE, title="exchange of keys and values", default="ring", implied=("ring",),
        usual=("ring", "allgather"),
        detail_of="cp", added_later=True,
    )  # fmt: skip
    ep: Count = axis(
        "ep", "Expert-parallel degree: this many consecutive ranks of a stage share the experts of a layer.",
        kind=CHOICE,
        title="expert-parallel degree", default=1, implied=(1,), usual=POWERS_OF_TWO, divides=("dp", "cp", "tp"),
        sweep_values=SweepValues(DivisorsInSweep, AUTO, first=1, several=AUTO), added_later=True,
    )  # fmt: skip
    dp_overlap: Annotated[str, one_of("on", "off")] = axis(
        "overlap-", "Whether gradients are reduced during backward (on) or after it (off).", kind=CHOICE,
        title="reduction of gradients during backward", default="on", implied=("on",), usual=("on", "off"),
        added_later=True,
    )  # fmt: skip
    pp_layout: Annotated[str, PP_LAYOUT] = axis(
        "stages-", "Layers of pipeline stages: auto (as the program divides them), cost, even, or those of each, "
        "such as 8-9-9-6.",
        kind=CHOICE, title="layers of pipeline stages", default="auto", implied=("auto",),
        usual=("auto", "cost", "even"),
        detail_of="pp", added_later=True,
    )  # fmt: skip

    def __post_init__(self) -> None:
        require_allowed(self)
        if (self.pp_schedule == "none") != (self.pp == 1):
            raise ConfigError(
                f"pp_schedule={self.pp_schedule!r} with pp={self.pp}; pp=1 needs pp_schedule=none, "
                "pp > 1 another schedule"
            )
        stages_fit_by_schedule = {"interleaved": self.virtual_stages > 1, "zbv": self.virtual_stages == 2}
        if not stages_fit_by_schedule.get(self.pp_schedule, self.virtual_stages == 1):
            stages_text = f"virtual_stages={self.virtual_stages} with pp_schedule={self.pp_schedule}"
            raise ConfigError(f"{stages_text}; must be 1 (interleaved: >= 2, zbv: 2)")

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(degrees_of(self))

    @property
    def zero_shards(self) -> int:
        """Number of ranks among which the ZeRO stage shards; 1 where it shards nothing."""
        return (self.dp_shard or self.dp * self.cp) if self.zero_stage else 1

    @property
    def dp_shard_size(self) -> int:
        """Number of dp ranks in a shard group, which also has the ranks of cp; all where dp_shard is 0."""
        return max(1, self.dp_shard // self.cp) if self.dp_shard else self.dp

    @property
    def expert_shards(self) -> int:
        """Number of ranks among which the ZeRO stage shards the same experts.

        They are those of a shard group and their ranks of tp that hold them; 1 where it shards nothing.
        """
        return max(1, self.zero_shards * self.tp // self.ep) if self.zero_stage else 1

    @property
    def expert_copies(self) -> int:
        """Number of groups of ranks that hold the same experts."""
        return self.dp * self.cp * self.tp // (self.ep * self.expert_shards)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages of all ranks together."""
        return self.pp * self.virtual_stages

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """The layers of each stage as pp_layout lists them; empty if it lists none."""
        return tuple(map(int, self.pp_layout.split("-"))) if self.pp_layout[0].isdecimal() else ()

    @property
    def num_stages_text(self) -> str:
        """This number as messages give it: `pp=4` or `pp*virtual_stages=8`."""
        return f"{'pp*virtual_stages' if self.virtual_stages > 1 else 'pp'}={self.num_stages}"

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Indices of the stages that a rank of the pp axis holds, in the order of the model."""
        if self.pp_schedule == "zbv":
            return pp_rank, self.num_stages - 1 - pp_rank
        return tuple(range(pp_rank, self.num_stages, self.pp))

    @property
    def full_every(self) -> int:
        """n if backward computes every n-th layer of the model again in full; 0 if it does so with none."""
        interval_text = self.recompute.removeprefix("every")
        return 1 if interval_text == "full" else int(interval_text) if interval_text.isdecimal() else 0

    @property
    def gbs(self) -> int:
        """Global batch size, in sequences."""
        return self.dp * self.mbs * self.gas

    def stride(self, degree: str, rank_order: Sequence[str] | None = None) -> int:
        """How far apart the numbers of neighbours in a group of this degree are.

        Args:
            rank_order: the degrees, first the one in which neighbouring ranks differ; None for RANK_ORDER.
        """
        order = rank_order or RANK_ORDER
        return math.prod(getattr(self, faster) for faster in order[: order.index(degree)])

    def group_axes(self, *degrees: str, rank_order: Sequence[str] | None = None) -> "GroupAxes":
        """The axes of a group of ranks that differ in these degrees only, such as dp and cp.

        Args:
            rank_order: as for `stride`.
        """
        return _group_axes(degrees_of(self), degrees, tuple(rank_order or RANK_ORDER))

    def coordinates(self, rank: int, rank_order: Sequence[str] | None = None) -> "Coordinates":
        """The place of `rank` in the mesh (pp, dp, cp, tp); tp is innermost, so that it stays in a node.

        Args:
            rank_order: as for `stride`.

        Raises:
            ConfigError: the rank is not in 0..world_size-1.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank={rank}; must be in 0..{self.world_size - 1}")
        index_by_degree = {}
        for degree in rank_order or RANK_ORDER:
            rank, index_by_degree[degree] = divmod(rank, getattr(self, degree))
        return Coordinates(**index_by_degree)

    def first_rank(self, pp_rank: int) -> int:
        """The lowest of the ranks that hold the stages of `pp_rank`."""
        return pp_rank * (self.world_size // self.pp)

    def label(self) -> str:
        """A short text such as `dp4 tp1 pp2 z1 mbs2 gas4`; usual values of some axes are left out."""
        return " ".join(labels({name: getattr(self, name) for name in AXES}))


GroupAxes = tuple[tuple[int, int], ...]
"""The axes along which the ranks of a group lie, the innermost first: their number,
and how far apart neighbours are."""


@functools.lru_cache(maxsize=4096)  # a prediction asks for five groups, whose degrees many layouts share
def _group_axes(
    sizes: tuple[int, ...], group_degrees: tuple[str, ...], rank_order: tuple[str, ...]
) -> GroupAxes:
    """The axes of a group of ranks that differ in `group_degrees` only.

    Args:
        sizes: the degrees in the order of DEGREES.
    """
    size_by_degree, stride, group_axes = dict(zip(DEGREES, sizes, strict=True)), 1, list[tuple[int, int]]()
    for degree in rank_order:
        size = size_by_degree[degree]
        if degree in group_degrees and group_axes and math.prod(group_axes[-1]) == stride:
            group_axes[-1] = (group_axes[-1][0] * size, group_axes[-1][1])
        elif degree in group_degrees:
            group_axes.append((size, stride))
        stride *= size
    return tuple(group_axes)


@functools.lru_cache(maxsize=4096)
def ranks_in_node(group_axes: GroupAxes, gpus_per_node: int) -> int:
    """How many ranks of a group are on one node."""
    return math.prod(min(size, max(1, gpus_per_node // stride)) for size, stride in group_axes)


@functools.lru_cache(maxsize=4096)
def crosses_nodes(group_axes: GroupAxes, gpus_per_node: int) -> bool:
    """Whether the ranks of a group are on several nodes."""
    return ranks_in_node(group_axes, gpus_per_node) < math.prod(size for size, _ in group_axes)


class Coordinates(NamedTuple):
    """The index of a rank on each axis of the mesh, the outermost first."""

    pp: int
    dp: int
    cp: int
    tp: int


RANK_ORDER = tuple(reversed(Coordinates._fields))
"""The degrees in the order in which ranks are numbered, unless a program has its own: first the one in which neighbours
differ."""
AXES = tuple(f.name for f in fields(Layout))
"""Names of the axes of a layout, in the order in which they are shown."""
MEANINGS = {f.name: str(f.metadata["meaning"]) for f in fields(Layout)}
"""Axis -> one sentence about it for the documentation of result columns."""
TEXT_AXES = frozenset(f.name for f in fields(Layout) if isinstance(f.default, str))
"""Axes whose values are words; the values of all other axes are whole numbers."""
_TRAITS = {f.name: f.metadata for f in fields(Layout)}
"""Axis -> the arguments of `axis` that describe it."""
_DETAIL_OF = {name: str(metadata["detail_of"]) for name, metadata in _TRAITS.items()}
"""Axis -> another axis, at whose neutral value it has no effect; empty where there is none."""
DEGREES = tuple(name for name in AXES if _TRAITS[name]["kind"] == DEGREE)
"""The degrees of parallelism, whose product is the number of ranks; dp comes first."""
assert {*DEGREES} == {*Coordinates._fields}, "each degree is an axis of the mesh"
BATCH = tuple(name for name in AXES if _TRAITS[name]["kind"] == BATCH_CUT)
"""The axes that cut the batch of a dp rank: mbs and gas."""
FOLLOWING = (DEGREES[0], BATCH[-1])
"""dp and gas, which follow from the number of GPUs, the batch and the other axes."""
INDEPENDENT = tuple(n for n in AXES if n not in FOLLOWING and _DETAIL_OF[n] in ("", *DEGREES))
"""The axes without those that follow from others and the details of a choice."""
NEUTRAL = {f.name: f.default for f in fields(Layout) if f.default is not MISSING}
"""Axis -> its neutral value."""
TITLES = {name: str(metadata["title"]) for name, metadata in _TRAITS.items()}
"""Axis -> its name in figures, such as `tensor-parallel degree`."""
TEXT_BY_VALUE: dict[str, dict[int, str]] = {
    name: metadata["text_by_value"] for name, metadata in _TRAITS.items()
}
"""Axis -> value -> its text in tables, where that is not the number."""
USUAL = {name: metadata["usual"] for name, metadata in _TRAITS.items() if metadata["usual"]}
"""Axis -> values that a figure over it draws."""
DIVIDES: dict[str, tuple[str, ...]] = {name: m["divides"] for name, m in _TRAITS.items() if m["divides"]}
"""Axis -> the degrees whose product its value has to divide."""
SWEEP_VALUES: dict[str, SweepValues] = {n: m["sweep_values"] for n, m in _TRAITS.items() if m["sweep_values"]}
"""Axis -> what a sweep lists, where that differs from the values in a layout."""
ADDED_LATER = tuple(name for name in AXES if _TRAITS[name]["added_later"])
"""The axes that are left out of a run id at their neutral value."""
TYPES_IN_SWEEP = field_types(Layout) | {name: swept.type for name, swept in SWEEP_VALUES.items()}
"""Axis -> the type of a value that a sweep lists, with its rule."""
OTHER_DEGREES = "*".join(DEGREES[1:])
"""The degrees other than dp as a text: `tp*pp*cp`."""


degrees_of = operator.attrgetter(*DEGREES)
"""Gives the degrees of a layout as a tuple, in the order of DEGREES."""


def model_parallel_degree(values: Mapping[str, Any]) -> int:
    """The product of the degrees other than dp among the values of axes; a degree without a value is 1."""
    return math.prod(values.get(name, 1) for name in DEGREES[1:])


@functools.cache  # checking the rules of a layout asks for each axis
def details_of(name: str) -> tuple[str, ...]:
    """The axes that have no effect at the neutral value of another one,
    such as pp_schedule and virtual_stages of pp.
    """
    direct_details = tuple(detail for detail in AXES if _DETAIL_OF[detail] == name)
    return (*direct_details, *(further for detail in direct_details for further in details_of(detail)))


def labels(values: Mapping[str, Any], axes: Sequence[str] = AXES, always: Collection[str] = ()) -> list[str]:
    """The short texts of axes, such as `mbs4`; axes without a value or with a usual one are left out.

    Args:
        always: axes whose usual values are shown, too, if they have an effect on the layout.
    """
    neutral_axes = (name for name in AXES if values.get(name) == NEUTRAL.get(name))
    idle_axes = {detail for name in neutral_axes for detail in details_of(name)}
    texts = []
    for name in axes:
        value, traits = values.get(name), _TRAITS[name]
        is_shown = value not in traits["implied"] or (name in always and name not in idle_axes)
        if value is not None and is_shown:
            shown_value = "-all" if name == "dp_shard" and value == 0 else value
            texts.append(f"{traits['label']}{shown_value}")
    return texts


def axis_texts(name: str, values: Sequence[Any]) -> list[str]:
    """The values of an axis of words as texts; the layers of each stage may be a list, which is one value."""
    if name == "pp_layout" and values and all(type(value) is int for value in values):
        values = [values]
    return [value_text(name, value) for value in values]


def value_text(name: str, value: Any) -> str:
    """One value of an axis of words as a text."""
    if name == "pp_layout":
        numbers = value if isinstance(value, list | tuple) else str(value).strip("[]").split(",")
        return "-".join(str(number).strip() for number in numbers)
    return choice_text(value) if NEUTRAL[name] == "on" else str(value)


def choice_text(value: Any) -> str:
    """The value of an axis as a text; YAML reads the words on and off as true and false."""
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


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


COMPARABLE_AXES = ("mbs", "gas", "zero_stage", "pp_schedule", "recompute")
"""Axes in which two layouts may differ if `dominates` is to compare them;
it knows how each of these axes changes memory.

This list is written by hand, because an axis whose effect on memory nobody has looked at must not be in it."""
family = operator.attrgetter(*(name for name in AXES if name not in COMPARABLE_AXES))
"""Gives the values of the other axes, which two layouts must have in common so that `dominates` can
compare their memory."""


def dominates(oom: Layout, other: Layout) -> bool:
    """Whether `other` needs at least as much memory as `oom`, for the same model, nodes and global batch.

    This holds when both are of one `family`, and `other` has the same or less recomputation, no higher ZeRO stage,
    the same schedule or AFAB in place of 1F1B, and the same or a larger micro-batch. Full recomputation needs least
    memory and none needs most, while that of the other words depends on the model. 1F1B keeps min(gas,
    pp) micro-batches in flight and AFAB keeps gas; as mbs * gas is the same, neither mbs * min(gas,
    pp) nor mbs * gas gets smaller when mbs grows. But a single micro-batch needs no sums of gradients,
    so it may need less. Other schedules keep other numbers in flight, so only equal micro-batches are compared.
    Where gradients are reduced after backward, ZeRO may need more memory, so neither its stages nor micro-batches are
    compared. Published measurements agree: of the 824 runs of the Ultra-Scale Playbook that ran out of memory,
    467 are dominated by another one, and none of the 944 pairs contradicts.
    """
    schedules = (oom.pp_schedule, other.pp_schedule)
    schedule_ok = schedules[0] == schedules[1] or schedules == ("1f1b", "afab")
    recompute_ok = oom.recompute in (other.recompute, "full") or other.recompute == "none"
    batch_ok = other.mbs == oom.mbs or (
        other.mbs > oom.mbs and other.gas > 1 and oom.pp_schedule in ("none", "1f1b")
    )
    sizes_ok = batch_ok and other.zero_stage <= oom.zero_stage
    overlap_ok = oom.dp_overlap == "on" or (oom.mbs, oom.zero_stage) == (other.mbs, other.zero_stage)
    is_larger = schedule_ok and recompute_ok and sizes_ok and overlap_ok
    return family(oom) == family(other) and is_larger and oom != other
