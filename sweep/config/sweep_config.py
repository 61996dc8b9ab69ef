"""The configuration of a sweep, as frozen dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ultrabench.errors import ConfigError, unknown_name
from ultrabench.hardware import Hardware
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import PP_SCHEDULES, allowed_text, is_allowed
from ultrabench.measure import Measure
from ultrabench.model_shape import ModelShape
from ultrabench.run import Workload
from ultrabench.sweep.config.launcher_config import LauncherConfig
from ultrabench.sweep.config.retry_policy import RetryPolicy

SCHEDULES = ("auto", *PP_SCHEDULES[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values of the number of nodes and of each axis of a layout; candidates are their combinations."""

    nodes: tuple[int, ...]
    layout: Mapping[str, tuple[Any, ...]]
    """Axis -> its values, for every axis except dp, which follows from the others.

    gas is always gbs / (dp * mbs); when values of gas are given, layouts with another gas are left out.
    The pp_schedule auto means 1f1b, or afab where gas < pp. virtual_stages is used by interleaved only.
    """

    def __post_init__(self) -> None:
        schedules, stages = self.layout["pp_schedule"], self.layout["virtual_stages"]
        if not schedules or not stages or any(v < 2 for v in stages):
            raise ConfigError(
                f"sweep.pp_schedule={list(schedules)}, sweep.virtual_stages={list(stages)}; at least one schedule "
                "is needed, and virtual stages >= 2"
            )
        for name in schedules:
            if name not in SCHEDULES:
                raise ConfigError(unknown_name("schedule in sweep.pp_schedule", name, SCHEDULES))
        for name, values in (("nodes", self.nodes), *self.layout.items()):
            axis = "dp" if name == "nodes" else name
            if name != "pp_schedule" and not (values and all(is_allowed(axis, v) for v in values)):
                raise ConfigError(
                    f"sweep.{name}={list(values)}; each must be {allowed_text(axis)}, and at least one is needed"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """The complete configuration of one sweep."""

    name: str
    results_dir: str
    cluster: str
    hardware: Hardware
    kernel: KernelConfig
    launcher: LauncherConfig
    measure: Measure
    models: tuple[ModelShape, ...]
    workload: Workload
    axes: Axes
    retry: RetryPolicy
    repeats: int = 1
    profile: bool = False
    """Whether each run profiles some more steps after the measured ones."""
    resolved: dict[str, Any] = field(default_factory=dict)
    """The composed configuration as JSON values, kept for the record; secrets are redacted."""
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """The given secrets of kernel.env, which must be written only to the file for secrets."""
