"""How far the predictions of a profile were from measured runs, by what these runs have in common."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Annotated

from ultrabench.allowed import one_of, require_allowed
from ultrabench.errors import ConfigError, require_known
from ultrabench.run import RunSpec
from ultrabench.variant import FLAGS

LONG_SEQ_LEN = 8192
"""Largest number of tokens in a sequence that does not count as long."""
SD_80 = 1.2816
"""Half the 80 % interval of a normal distribution, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutKind:
    """What runs have in common whose predictions are off alike; each field is a factor of the error."""

    gpu: str
    """The accelerator, with a lower power limit where it has one."""
    experts: Annotated[str, one_of("none", "some")]
    precision: str
    pp: Annotated[str, one_of("none", "some")]
    ep: Annotated[str, one_of("none", "inside", "across")]
    """Whether the experts are divided, and whether their ranks are inside one NVLink domain or in several."""
    seq_len: Annotated[str, one_of("usual", "long")]
    """`long` above LONG_SEQ_LEN tokens."""
    rows: int = field(default=0, compare=False)
    """Number of measured runs of this kind."""

    def __post_init__(self) -> None:
        require_allowed(self)


FACTORS_IN_WORDS = frozenset({"gpu", "experts", "precision"})
"""Factors whose values are words, between which there are no steps."""
FACTORS = tuple(f.name for f in fields(LayoutKind) if f.compare)
"""The fields of a LayoutKind by which predictions differ."""


def kind_of(spec: RunSpec, gpu: str, nvlink_gpus: int) -> LayoutKind:
    """The kind of a run.

    Args:
        gpu: the accelerator, with its power limit.
        nvlink_gpus: number of accelerators in an NVLink domain.
    """
    layout = spec.layout
    return _kind(
        gpu,
        "some" if spec.shape.num_experts else "none",
        spec.kernel.precision,
        "some" if layout.pp > 1 else "none",
        "none" if layout.ep == 1 else "inside" if layout.ep <= nvlink_gpus else "across",
        "usual" if spec.workload.seq_len <= LONG_SEQ_LEN else "long",
    )


@lru_cache(maxsize=1024)
def _kind(gpu: str, experts: str, precision: str, pp: str, ep: str, seq_len: str) -> LayoutKind:
    """A kind without a number of runs, which is checked once and not for each layout of a plan."""
    return LayoutKind(gpu=gpu, experts=experts, precision=precision, pp=pp, ep=ep, seq_len=seq_len)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileErrors:
    """The errors of a profile by factor, from `errors` of its file, which benchmarks/profile_errors.py writes."""

    program: str
    """The program as sentences name it, such as Megatron-LM."""
    date: str
    """When the runs were predicted, YYYY-MM-DD."""
    settings: int
    """Number of settings (model, GPU, number of GPUs) among the measured runs of this program."""
    kinds: tuple[LayoutKind, ...]
    """The kinds of the measured runs of this program."""
    knobs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Knob -> its values in these runs, whose effect is part of the errors."""
    spread: dict[str, dict[str, float]] = field(default_factory=dict)
    """Factor -> value -> standard deviation that the value adds, as root of the sum of squares."""
    over_programs: dict[str, float]
    """Factor -> the standard deviation that a value adds of which this program has no measurement: how much the
    values differ over all programs."""

    def __post_init__(self) -> None:
        require_known("factor of errors.spread", FACTORS, *self.spread)
        require_known("factor of errors.over_programs", FACTORS, *self.over_programs)
        if missing := [factor for factor in FACTORS if factor not in self.over_programs]:
            raise ConfigError(f"errors.over_programs lacks {', '.join(missing)}; give each factor a number")

    def has_feature(self, feature: str, value: object) -> bool:
        """Whether the errors contain what a value of a feature of a run changes, so that it is not extrapolated too."""
        group, _, knob = feature.partition(".")
        return feature in FACTORS_IN_WORDS or (group == FLAGS and value in self.knobs.get(knob, ()))

    @property
    def rows(self) -> int:
        """Number of measured runs."""
        return sum(kind.rows for kind in self.kinds)

    def spread_of(self, kind: LayoutKind) -> float:
        """The standard deviation of log(measured / predicted) that predictions of this kind have beside the interval of
        their profile: the variances of the values of its factors add up."""
        return math.hypot(
            *(
                self.spread.get(factor, {}).get(getattr(kind, factor), self.over_programs[factor])
                for factor in FACTORS
            )
        )

    def fitted_to(self, kinds: Iterable[LayoutKind]) -> "ProfileErrors":
        """The errors of constants that are fitted to runs of these kinds, whose values then add nothing to the interval
        of the fit."""
        new_kinds = [*kinds]
        rows = Counter({kind: kind.rows for kind in self.kinds}) + Counter(new_kinds)
        spread = {factor: dict(by_value) for factor, by_value in self.spread.items()}
        for factor in FACTORS:
            spread.setdefault(factor, {}).update({getattr(kind, factor): 0.0 for kind in new_kinds})
        all_kinds = tuple(replace(kind, rows=num) for kind, num in rows.items())
        return replace(self, kinds=all_kinds, spread=spread)

    def unproven(self, kind: LayoutKind) -> str | None:
        """What nobody measured of a kind, such as `no measurement of Megatron-LM with experts on H200`; None where
        all values of its factors were measured, and its GPU with such a model."""
        if not self.kinds:
            return f"no measurement of {self.program}"
        has_pair = any((k.gpu, k.experts) == (kind.gpu, kind.experts) for k in self.kinds)
        has_gpu = any(k.gpu == kind.gpu for k in self.kinds)
        texts = [*_unmeasured_texts(kind, self._measured_values())]
        if not has_pair:
            is_dense_alone = has_gpu and kind.experts == "none"
            model_text = "with a dense model" if is_dense_alone else _EXPERTS_TEXTS[kind.experts]
            texts = [*filter(None, [model_text]), *texts, f"on {kind.gpu}"]
        return f"no measurement of {' '.join((self.program, *texts))}" if texts else None

    def _measured_values(self) -> Mapping[str, set[str]]:
        """Factor -> its values in the measured runs."""
        return {factor: {getattr(kind, factor) for kind in self.kinds} for factor in FACTORS}


_EXPERTS_TEXTS = {"some": "with experts", "none": ""}
_TEXTS = {
    "pp": {"some": "with a pipeline", "none": "without a pipeline"},
    "ep": {
        "some": "",
        "none": "without ep",
        "inside": "with ep inside an NVLink domain",
        "across": "with ep over several NVLink domains",
    },
    "seq_len": {
        "long": f"with sequences of more than {LONG_SEQ_LEN:,} tokens",
        "usual": f"with sequences of up to {LONG_SEQ_LEN:,} tokens",
    },
}
"""Factor -> value -> how a sentence names it."""


def _unmeasured_texts(kind: LayoutKind, measured_values: Mapping[str, set[str]]) -> Iterator[str]:
    """How a sentence names the values of these factors that were not measured."""
    if kind.precision not in measured_values["precision"]:
        yield f"in {kind.precision}"
    for factor, text_by_value in _TEXTS.items():
        value = getattr(kind, factor)
        if value not in measured_values[factor]:
            yield text_by_value[value]
