"""The configuration of a sweep, as frozen dataclasses."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Annotated, Any

from ultrabench.allowed import Allowed, Count, allowed_of, at_least, one_of, require_allowed
from ultrabench.errors import ConfigError
from ultrabench.hardware import Hardware
from ultrabench.kernel_config import KernelConfig
from ultrabench.layout import PP_SCHEDULES, Layout
from ultrabench.measure import Measure
from ultrabench.model_shape import ModelShape
from ultrabench.run import Workload
from ultrabench.sweep.config.launcher_config import LauncherConfig
from ultrabench.sweep.config.retry_policy import RetryPolicy

_ALLOWED = allowed_of(Layout) | {
    "nodes": at_least(1),
    "pp_schedule": one_of("auto", *PP_SCHEDULES[1:]),
    "virtual_stages": at_least(2),
}
"""Name -> values that a sweep may list; they differ from those of a layout in the last two."""


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
        for name, values in {"nodes": self.nodes, **self.layout}.items():
            allowed = _ALLOWED[name]
            if not values or not all(map(allowed.holds, values)):
                given = f"sweep.{name}={list(values)}"
                raise ConfigError(f"{given}; each must be {allowed.text}, and at least one is needed")


NAME = Allowed(
    "a text that begins with a letter, a digit or '_', goes on with these, spaces and any of .+=@,- and has at most "
    "100 characters",
    re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=@, -]{0,99}").fullmatch,
)
"""Names that a sweep may have. A name is also used for folders, Slurm jobs and commands that users copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """The complete configuration of one sweep."""

    name: Annotated[str, NAME]
    results_dir: Annotated[str, Allowed("a folder", bool)]
    cluster: str
    hardware: Hardware
    kernel: KernelConfig
    launcher: LauncherConfig
    measure: Measure
    models: tuple[ModelShape, ...]
    workload: Workload
    axes: Axes
    retry: RetryPolicy
    repeats: Count = 1
    profile: bool = False
    """Whether each run profiles some more steps after the measured ones."""
    resolved: dict[str, Any] = field(default_factory=dict)
    """The composed configuration as JSON values, kept for the record; secrets are redacted."""
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    """The given secrets of kernel.env, which must be written only to the file for secrets."""

    def __post_init__(self) -> None:
        require_allowed(self)
        if self.profile and self.kernel.kind != "embedded":
            advice = "only ultrabench's own kernel looks inside itself: use what the program has for that"
            raise ConfigError(f"profile=true with kernel={self.kernel.name}; {advice}")
        for one, other in combinations(self.models, 2):
            if replace(one, name=other.name) == other:
                both = f"{one.name} and {other.name}"
                raise ConfigError(f"sweep.models: {both} are the same model; name it once")
            if one.name == other.name:
                raise ConfigError(f"sweep.models: two models are called {one.name}; rename one of them")
