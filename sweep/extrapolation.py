"""How far predictions go beyond what was measured: features that no run of a fit had, kinds of layouts of which the
profile has no measurement, and rates that nobody published.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

from ultrabench.allowed import between, one_of, require_allowed
from ultrabench.attention_type import FLOPS_FORMULAS
from ultrabench.column import PEAK_FRACTION
from ultrabench.hardware import Hardware
from ultrabench.record import from_dict
from ultrabench.run import RunSpec
from ultrabench.sweep.config.files import files, read_yaml
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.predict.profile import Profile
from ultrabench.sweep.predict.profile_errors import kind_of


@dataclass(frozen=True, slots=True, kw_only=True)
class BestRate:
    """The best rate of training that is published of a GPU, from `best` of a file in configs/published/."""

    mfu: Annotated[float, between(0.0, 1.0)]
    flops_formula: Annotated[str, one_of(*FLOPS_FORMULAS)]
    """The formula that counts the FLOPs of a token, as in measure.flops_formula."""
    what: str
    """What was trained, and on how many GPUs."""
    source: str
    """The address of the publication."""

    def __post_init__(self) -> None:
        require_allowed(self, "best.")

    def below(self, mfu: float) -> bool:
        """Whether a predicted MFU is higher by more than rounding."""
        return round(mfu, 3) > self.mfu


def best_published(config: SweepConfig, precision: str) -> BestRate | None:
    """The best published rate of the GPU of a sweep in this precision; None where none is known.

    Raises:
        ConfigError: a value in the file is missing or cannot be used.
    """
    for path in files("published").values():
        file_content = read_yaml(path)
        best = file_content.get("best", {}).get(precision)
        if best and file_content.get("gpu") == config.hardware.gpu:
            return from_dict(BestRate, best, where=f"best of {path.name}")
    return None


def published_mfu(spec: RunSpec, step_time_s: float, peak_flops_per_s: float, best: BestRate | None) -> float:
    """The MFU of a step time, a fraction, counted with the formula of the best published rate."""
    flops = spec.shape.flops_per_token(spec.workload.seq_len, best.flops_formula if best else "megatron")
    return spec.tokens_per_step / step_time_s / spec.layout.world_size * flops / peak_flops_per_s


def against_published(config: SweepConfig, mfu: float, best: BestRate | None) -> str | None:
    """What to say of a predicted MFU beside the best published one; None where it is below.

    Args:
        mfu: what `published_mfu` returns.
    """
    gpu_and_precision = f"{config.hardware.gpu} in {config.kernel.precision}"
    if best is None:
        fact = f"no published rate for {gpu_and_precision} is known"
        return f"{fact}, so nothing confirms the predicted MFU"
    if not best.below(mfu):
        return None
    excess_text = PEAK_FRACTION.text(mfu / best.mfu - 1)
    comparison = f"predicted MFU is {excess_text} above the best published for {gpu_and_precision}"
    return f"{comparison}, with FLOPs counted alike: {best.what} ({best.source})"


def beyond_fit(specs: Iterable[RunSpec], profile: Profile, gpu: str) -> list[str]:
    """The features of these runs that the profile's constants are not for, such as `zero_stage=2, 3 (0 to 1)`.

    A link test has none, because it trains nothing.
    """
    values_by_feature = dict[tuple[str, str], set[int | str]]()
    for spec in (spec for spec in specs if spec.kernel.trains):
        for feature, (value, fitted_text) in profile.unmeasured(spec, gpu).items():
            values_by_feature.setdefault((feature, fitted_text), set()).add(value)
    return [
        f"{feature}={', '.join(map(str, sorted(values, key=lambda v: (str(type(v)), v))))} ({fitted_text})"
        for (feature, fitted_text), values in values_by_feature.items()
    ]


def unproven(specs: Iterable[RunSpec], profile: Profile, hardware: Hardware) -> list[str]:
    """What nobody measured of these runs, such as `no measurement of Megatron-LM with experts on H200`.

    A profile without errors says nothing, and a link test has no prediction to prove.
    """
    if profile.errors is None:
        return []
    gpu, nvlink_gpus = hardware.gpu_at_limit, hardware.nvlink_gpus
    kinds = dict.fromkeys(kind_of(spec, gpu, nvlink_gpus) for spec in specs if spec.kernel.trains)
    return [*dict.fromkeys(filter(None, map(profile.errors.unproven, kinds)))]
