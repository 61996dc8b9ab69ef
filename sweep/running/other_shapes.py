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

MAX_NAMED = 3
"""Largest number of differences that a text names."""


def other_shapes(models: Iterable[ModelShape], state: SweepState) -> Iterator[str]:
    """A line for each model that was attempted in the sweep in another shape than it has now."""
    earlier_runs = _earlier_runs(state)
    for model in models:
        num_by_shape = Counter(
            {shape: n for shape, n in earlier_runs.items() if shape.name == model.name and shape != model}
        )
        if num_by_shape:
            shape = max(num_by_shape, key=lambda shape: (num_by_shape[shape], shape.model_id))
            changes = differences(values_of(shape), values_of(model), "{}: {} -> {}")
            fact = f"model {model.name} has a different shape than in {counted(num_by_shape.total(), 'run')} of earlier launches ({changes})"
            yield f"{fact}: those stay in the results as another model; for a separate sweep, add name=NAME"


class _Claim(msgspec.Struct):
    """What a claim says of the model of its run."""

    shape: dict[str, Any]


def _earlier_runs(state: SweepState) -> Counter[ModelShape]:
    """Shape -> number of the runs of a sweep that were claimed with it; runs that cannot be read are left out."""
    num_by_shape = Counter[ModelShape]()
    for attempts in state.by_run().values():
        shapes = (claim.shape for attempt in attempts if (claim := attempt.spec_as(_Claim)))
        if values := next(shapes, None):
            with contextlib.suppress(ConfigError):
                num_by_shape[from_dict(ModelShape, values, skip_unknown=True)] += 1
    return num_by_shape


def differences(old: Mapping[str, Any], new: Mapping[str, Any], template: str) -> str:
    """The settings of a model that differ, at most MAX_NAMED of them, such as `rope_theta: 10000 -> 500000`.

    Args:
        template: how a setting is written, with places for its name and its two values.
    """
    names = [name for name in old if name != "name" and old[name] != new[name]]
    texts = [template.format(name, _text(old[name]), _text(new[name])) for name in names[:MAX_NAMED]]
    return ", ".join(texts) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")


def _text(value: Any) -> str:
    """A value as a file has it, numbers without needless digits."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.15g}" if is_number else json.dumps(value, default=values_of).strip('"')
