"""The predicted memory, step time and price of a run; docs/design/prediction.md derives the terms.

The prediction orders runs, leaves out those that are sure to run out of memory, sizes allocations and scales
deadlines.
"""

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ultrabench.column import BYTES, CHANCE, FRACTION, SECONDS, Better, Source, column, columns_of, fill_text
from ultrabench.device_rates import OPERATIONS, ProbeSettings, crossing_share, long_probe
from ultrabench.hardware import DEVICE_KINDS, Hardware, Peak
from ultrabench.layout import INDEPENDENT
from ultrabench.measure import Measure
from ultrabench.model_shape import ModelShape
from ultrabench.run import RunSpec
from ultrabench.sweep.predict.memory import (
    LargestStage,
    MemoryConstants,
    largest_stage,
    least_memory,
    p_oom_of,
    predict_memory,
)
from ultrabench.sweep.predict.network import Network
from ultrabench.sweep.predict.profile import (
    DividedRun,
    FittedAxes,
    Profile,
    Quantiles,
    axes_of,
    fitted_axes,
    steps_of_axes,
)
from ultrabench.sweep.predict.stage_memory import ENDS, LARGEST, StageMemory
from ultrabench.sweep.predict.step_time import (
    NEARLY_FULL,
    StepTime,
    StepTimes,
    communication_ratios,
    predict_step_time,
    step_times,
)
from ultrabench.variant import Value

LINK_EFFICIENCY = 0.7
"""Fraction of a link's bandwidth that the collectives of a probe reach."""
LIKELY_OOM = 0.5
"""P(OOM) above which a run is predicted not to fit into memory."""
ADVISED_P_OOM = 0.1
"""P(OOM) above which no layout is advised, unless --advise-p-oom gives another; max_p_oom says what is run."""
NOTABLE_SHARE = 0.1
"""Share of a step above which what is no computing is called the limit of a layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted memory and time of one run."""

    step_time_s: float = column(
        "Step time predicted before the run.",
        default=MISSING,
        unit=SECONDS,
        better=Better.LOWER,
        short="predicted",
    )
    step_time_low_s: float = column(
        "The step time is expected to be longer than this with a probability of 90 %.",
        default=MISSING,
        unit=SECONDS,
    )
    step_time_high_s: float = column(
        "The step time is expected to be shorter than this with a probability of 90 %.",
        default=MISSING,
        unit=SECONDS,
    )
    peak_mem_bytes: int = column(
        "Peak memory predicted before the run.",
        default=MISSING,
        unit=BYTES,
        better=Better.LOWER,
        short="peak",
    )
    """Memory of the rank that needs most, with what its allocator holds in reserve."""
    memory_share: float = column(
        "predicted_peak_mem_bytes divided by the memory that a rank has.", default=MISSING, unit=FRACTION
    )
    """On CPUs, a rank has what its process may hold."""
    p_oom: float = column(
        "Probability of running out of memory, predicted before the run.",
        default=MISSING,
        name="p_oom",
        unit=CHANCE,
        better=Better.LOWER,
        title="P(OOM)",
    )
    limited_by: str = column(
        "What costs the layout most: memory, launch, bubble, communication or compute.", default=MISSING
    )
    """Memory where it is unlikely to fit, or its allocator has to give its reserve back and wait; else launch,
    bubble or communication, if one of them takes a notable part of the step; else compute."""
    duration_s: float = column("Duration predicted for a whole run.", default=MISSING, unit=SECONDS)
    """A run that does not fit into memory has only the seconds of its start."""


PREDICTION_COLUMNS = columns_of(Prediction, source=Source.PREDICTION, prefix="predicted_")
"""Field of a prediction -> its column in plans and, for some of them, in results."""


def oom_text(p_oom: float) -> str:
    """A probability of running out of memory with its name, such as `P(OOM) 12 %`."""
    column = PREDICTION_COLUMNS["p_oom"]
    return f"{column.heading} {column.text(p_oom)}"


def too_large_text(prediction: Prediction, p_oom: float) -> str:
    """Why a layout is not run whose P(OOM) is `p_oom`, such as `predicted 668 GiB of 80, P(OOM) 100 %`."""
    limit_bytes = prediction.peak_mem_bytes / prediction.memory_share
    memory_text = fill_text(prediction.peak_mem_bytes, limit_bytes)
    return f"predicted {memory_text}, {oom_text(p_oom)}"


class Occupancy(NamedTuple):
    """How full the memory of a rank is."""

    peak_bytes: float
    """Its memory with what its allocator holds in reserve."""
    memory_share: float
    """peak_bytes divided by the memory that a rank has."""
    p_oom: float
    """Probability that it does not fit."""


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Predicts runs; it holds what the predictions of all runs on one number of nodes share."""

    hardware: Hardware
    peak: Peak
    measure: Measure
    """How runs are measured, which decides how long they are."""
    profile: Profile
    memory: MemoryConstants
    """The constants of the profile's memory."""
    links: Network

    def predict(self, spec: RunSpec) -> Prediction:
        """The prediction of a run."""
        if not spec.kernel.trains:
            return self._predict_probe(spec)
        divided = self.profile.as_divided(spec)
        largest = largest_stage(predict_memory(divided, self.memory, LARGEST))
        share = reserved_share(largest.peak_bytes, self.hardware)
        return self._prediction(spec, largest, share, self._step_time(divided, share))

    def predict_from(self, spec: RunSpec, stages: Sequence[StageMemory], step_time: StepTime) -> Prediction:
        """The prediction of a training run with this memory of its pipeline ranks and this step time."""
        largest = largest_stage(stages)
        share = reserved_share(largest.peak_bytes, self.hardware)
        return self._prediction(spec, largest, share, step_time)

    def _prediction(
        self, spec: RunSpec, largest: LargestStage, share: float, step_time: StepTime
    ) -> Prediction:
        """What `predict_from` returns; `share` is that of `reserved_share`."""
        scale = model_scale(spec)
        time_s = scale.flops * step_time.total
        peak_bytes, memory_share, oom_chance = self.occupancy(largest, scale.params)
        if not spec.kernel.is_predictable:  # nothing is left out for its memory
            oom_chance = 0.0
        log_low_ratio, log_high_ratio = self._interval_of(spec)
        work_s = self.measure.priced_s(time_s)
        if self.measure.checkpoint:
            work_s += self.measure.checkpoint_s(spec.shape.num_params, spec.nodes)
        return Prediction(
            step_time_s=time_s,
            step_time_low_s=time_s * math.exp(log_low_ratio),
            step_time_high_s=time_s * math.exp(log_high_ratio),
            peak_mem_bytes=round(peak_bytes),
            memory_share=memory_share,
            p_oom=oom_chance,
            limited_by="memory"
            if share > NEARLY_FULL or oom_chance > LIKELY_OOM
            else _limited_by(step_time, time_s),
            duration_s=self._start_s + (work_s if oom_chance <= LIKELY_OOM else 0.0),
        )

    @cached_property
    def _start_s(self) -> float:
        """Seconds from the start of a run to its first step."""
        return start_s(self.hardware, self.links.nodes)

    def occupancy(self, largest: LargestStage, scale: float = 1.0) -> Occupancy:
        """How full the rank is that needs most memory.

        Args:
            scale: how many times as much memory it needs as these stages.
        """
        gpu_bytes, peak = self.hardware.mem_bytes, scale * largest.peak_bytes
        return Occupancy(peak, peak / self._limit_bytes, p_oom_of(largest, gpu_bytes / scale, self.memory))

    @cached_property
    def _limit_bytes(self) -> float:
        """The memory that a rank has; the limit of a process counts from what it held before its tensors."""
        return self.hardware.mem_bytes + (self.memory.base_bytes if self.hardware.shares_host else 0.0)

    def smallest_occupancy(self, spec: RunSpec) -> Occupancy:
        """How full the first or the last rank of the pipeline is: no fuller than the rank that needs most."""
        return self.occupancy(largest_stage(predict_memory(self.profile.as_divided(spec), self.memory, ENDS)))

    def least_occupancy(self, shape: ModelShape, num_ranks: int) -> Occupancy | None:
        """How full the fullest rank is at least, whatever the layout; None where the form of memory does not say."""
        stage = least_memory(shape, num_ranks, self.memory)
        if stage is None:
            return None
        # A pipeline has another limit; whichever is more likely to fit counts.
        occupancies = (self.occupancy(largest_stage(stages)) for stages in ([stage], [stage, stage]))
        return min(occupancies, key=lambda occupancy: occupancy.p_oom)

    def stages(self, spec: RunSpec) -> tuple[StageMemory, ...]:
        """The memory of each rank of the pipeline axis."""
        return predict_memory(self.profile.as_divided(spec), self.memory)

    def step_time(self, spec: RunSpec, stages: Sequence[StageMemory]) -> StepTime:
        """The time of one step by part, of a run with this memory of its pipeline ranks; without any,
        no allocator waits.
        """
        peak_bytes = largest_stage(stages).peak_bytes if stages else 0.0
        return self._step_time(self.profile.as_divided(spec), reserved_share(peak_bytes, self.hardware))

    def _step_time(self, spec: DividedRun, memory_share: float) -> StepTime:
        """The time of one step by part, of a run whose allocator holds this share of a GPU's memory."""
        values: tuple[Value, ...] = ()
        if spec.variant or spec.kernel.knobs:
            values = tuple([spec.kernel.knob_value(knob, spec.variant) for knob in self.profile.flags])
        if (times := self._times_by_knobs.get(values)) is None:
            constants = self.profile.time_of(spec, self.hardware.gpu)
            times = step_times(self.hardware, self.peak, self.links, constants)
            self._times_by_knobs[values] = times
        return times.of(spec, memory_share)

    @cached_property
    def _times_by_knobs(self) -> dict[tuple[Value, ...], StepTimes]:
        """Values of the knobs that change constants -> what predicts the step times of runs with these values."""
        return {}

    def _interval_of(self, spec: RunSpec) -> Quantiles:
        """The interval of log(measured / predicted), which runs share that are equally far from those of the fit."""
        layout, kernel, gpu = spec.layout, spec.kernel, self._gpu_at_limit
        if spec.variant or kernel.knobs:
            return self.profile.interval_of(spec, gpu, self.links)
        key = (
            steps_of_axes(axes_of(layout), self._axes_of_fit),
            kernel.precision,
            spec.shape.num_experts > 0,
            spec.workload.seq_len,
            layout.pp > 1,
            layout.ep,
            spec.nodes,
        )
        if (quantiles := self._quantiles.get(key)) is None:
            quantiles = self._quantiles[key] = self.profile.interval_of(spec, gpu, self.links)
        return quantiles

    @cached_property
    def _gpu_at_limit(self) -> str:
        """The accelerator as profiles name it."""
        return self.hardware.gpu_at_limit

    @cached_property
    def _axes_of_fit(self) -> FittedAxes:
        """The values of axes in the runs of the fit."""
        return fitted_axes(tuple([self.profile.measured.get(axis, ()) for axis in INDEPENDENT]))

    @cached_property
    def _quantiles(self) -> dict[tuple[object, ...], Quantiles]:
        """Features of a run without knobs -> its interval."""
        return {}

    def communication_ratios(self, spec: RunSpec) -> dict[str, float]:
        """Axis -> seconds of its communication over seconds of the computing beside it, of axes that communicate."""
        divided = self.profile.as_divided(spec)
        ratios = communication_ratios(
            divided, self.hardware, self.peak, self.links, self.profile.time_of(spec, self.hardware.gpu)
        )
        return ratios.by_axis

    def _predict_probe(self, spec: RunSpec) -> Prediction:
        """The prediction of a run that measures devices and links."""
        hardware, settings = self.hardware, long_probe(self.hardware.device, 0, 1)
        peak_bytes, time_s = 3.0 * max(settings.sizes_bytes), probe_step_time_s(spec, hardware, settings)
        probe_memory_share = peak_bytes / hardware.mem_bytes
        start_time_s = start_s(hardware, spec.nodes) + 2 * settings.device_s
        return Prediction(
            step_time_s=time_s,
            step_time_low_s=time_s,
            step_time_high_s=time_s,
            peak_mem_bytes=round(peak_bytes),
            memory_share=probe_memory_share,
            p_oom=float(probe_memory_share > 1),
            limited_by="communication",
            duration_s=start_time_s + self.measure.priced_s(time_s) * (probe_memory_share <= 1),
        )


class ModelScale(NamedTuple):
    """How many times as large a program's model is as `model=` of its sweep."""

    flops: float
    """Ratio of the FLOPs of a token."""
    params: float
    """Ratio of the numbers of parameters."""


_SAME_SCALE = ModelScale(1.0, 1.0)


def model_scale(spec: RunSpec) -> ModelScale:
    """The size of a program's model by the numbers of kernel.params and kernel.flops_per_token;
    1 where they have none.
    """
    if spec.kernel.params is None and spec.kernel.flops_per_token is None:
        return _SAME_SCALE
    num_params, flops = spec.kernel.number("params"), spec.kernel.number("flops_per_token")
    params_ratio = num_params / spec.shape.num_params if num_params else 1.0
    flops_ratio = flops / spec.shape.flops_per_token(spec.workload.seq_len) if flops else params_ratio
    return ModelScale(flops_ratio, params_ratio)


def reserved_share(peak_bytes: float, hardware: Hardware) -> float:
    """The share of a GPU's memory that its allocator holds on the rank that needs most; 0 on CPUs, which have none."""
    return peak_bytes / hardware.mem_bytes if hardware.has_gpus else 0.0


def with_links(
    prediction: Prediction, spec: RunSpec, hardware: Hardware, peak: Peak, links: Network, profile: Profile
) -> Prediction:
    """The prediction of a training run with its step time on these links; its memory and its price stay."""
    divided = profile.as_divided(spec)
    step_time = predict_step_time(
        divided, hardware, peak, links, profile.time_of(spec, hardware.gpu), prediction.memory_share
    )
    log_low_ratio, log_high_ratio = profile.interval_of(spec, hardware.gpu_at_limit, links)
    time_s = model_scale(spec).flops * step_time.total
    return replace(
        prediction,
        step_time_s=time_s,
        step_time_low_s=time_s * math.exp(log_low_ratio),
        step_time_high_s=time_s * math.exp(log_high_ratio),
        limited_by="memory" if prediction.limited_by == "memory" else _limited_by(step_time, step_time.total),
    )


def _limited_by(step_time: StepTime, step_time_s: float) -> str:
    """What costs a layout that fits most."""
    lost_s, reason = max(
        (step_time.launch, "launch"),
        (step_time.bubble, "bubble"),
        (step_time.tp + step_time.cp + step_time.ep + step_time.dp + step_time.pp, "communication"),
    )
    return reason if lost_s > NOTABLE_SHARE * step_time_s else "compute"


_TRAINING_PARTS = ("gemm", "attention")
"""Parts of a step that train the model; a step loses time to the others."""


def largest_loss(step_time: StepTime) -> tuple[str, float]:
    """The part of a step to which it loses most time beside products and attention, and its share of the step."""
    lost_s = {part: seconds for part, seconds in step_time._asdict().items() if part not in _TRAINING_PARTS}
    largest = max(lost_s, key=lambda part: lost_s[part])
    return largest, lost_s[largest] / step_time.total


def start_s(hardware: Hardware, nodes: int) -> float:
    """Seconds from the start of a run to its first step; on CPUs they grow with the ranks of a host."""
    ranks_on_host = hardware.gpus_per_node * (nodes if hardware.simulated else 1)
    return DEVICE_KINDS[hardware.device].rank_start_s * (ranks_on_host if hardware.shares_host else 1)


def probe_step_time_s(spec: RunSpec, hardware: Hardware, settings: ProbeSettings) -> float:
    """Seconds of one step of a probe.

    A step runs every operation in every size, over all ranks and inside the nodes. It takes
    t = calls * sum(S * f) / link, with the shares f and the sizes S of `ultrabench.device_rates`.
    """
    gpus_per_node, link_bytes_per_s = hardware.gpus_per_node, hardware.link_bytes_per_s
    scopes = [(gpus_per_node, link_bytes_per_s)]
    if spec.nodes > 1:
        num_ranks = gpus_per_node * spec.nodes
        leaves_domain = num_ranks > hardware.nvlink_gpus
        far_bytes_per_s = hardware.node_link_bytes_per_s if leaves_domain else link_bytes_per_s
        scopes.append((num_ranks, min(link_bytes_per_s, far_bytes_per_s)))
    return sum(
        settings.calls * size_bytes * crossing_share(operation, num_ranks) / (bytes_per_s * LINK_EFFICIENCY)
        for num_ranks, bytes_per_s in scopes
        for operation in OPERATIONS
        for size_bytes in settings.sizes_bytes
    )
