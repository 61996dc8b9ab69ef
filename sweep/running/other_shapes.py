"""Runs of a sweep whose model had another shape than the model of the same name has now."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from ultrabench.errors import ConfigError, counted
from ultrabench.model_shape import ModelShape
from ultrabench.record import from_dict, values_of
from ultrabench.store.state import SweepState

MAX_DIFFERENCES = 3
"""Largest number of differences that a text names."""


def other_shapes(models: Iterable[ModelShape], state: SweepState) -> Iterator[str]:
    """A line for each model that was attempted in the sweep in another shape than it has now."""
    num_earlier_runs = _num_runs_by_shape(state)
    for model in models:
        model_shapes = [shape for shape in num_earlier_runs if shape.name == model.name and shape != model]
        num_by_shape = Counter({shape: num_earlier_runs[shape] for shape in model_shapes})
        if num_by_shape:
            shape = max(num_by_shape, key=lambda shape: (num_by_shape[shape], shape.model_id))
            changes_text = differences(values_of(shape), values_of(model), "{}: {} -> {}")
            problem_text = (
                f"model {model.name} has a different shape than in "
                f"{counted(num_by_shape.total(), 'run')} of earlier launches ({changes_text})"
            )
            yield f"{problem_text}: those stay in the results as another model; for a separate sweep, add name=NAME"


class _ClaimedModel(msgspec.Struct):
    """What a claim says of the model of its run."""

    shape: dict[str, Any]


def _num_runs_by_shape(state: SweepState) -> Counter[ModelShape]:
    """Shape -> number of the runs of a sweep that were claimed with it; runs that cannot be read are left out."""
    num_by_shape = Counter[ModelShape]()
    for attempts in state.by_run().values():
        claimed_shapes = (claim.shape for attempt in attempts if (claim := attempt.spec_as(_ClaimedModel)))
        if shape_values := next(claimed_shapes, None):
            with contextlib.suppress(ConfigError):
                num_by_shape[from_dict(ModelShape, shape_values, skip_unknown=True)] += 1
    return num_by_shape


def differences(old: Mapping[str, Any], new: Mapping[str, Any], template: str) -> str:
    """The settings of a model that differ, at most MAX_DIFFERENCES of them, such as `rope_theta: 10000 -> 500000`.

    Args:
        template: how a setting is written, with places for its name and its two values.
    """
    changed_settings = [key for key in old if key != "name" and old[key] != new[key]]
    listed_settings = changed_settings[:MAX_DIFFERENCES]
    texts = [template.format(key, _value_text(old[key]), _value_text(new[key])) for key in listed_settings]
    num_more = len(changed_settings) - MAX_DIFFERENCES
    return ", ".join(texts) + (f" and {num_more} more" if num_more > 0 else "")


def _value_text(value: Any) -> str:
    """A value as a file has it, numbers without needless digits."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.15g}" if is_number else json.dumps(value, default=values_of).strip('"')
