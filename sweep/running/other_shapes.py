"""Runs of a sweep whose model had another shape than the model of the same name has now."""

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ultrabench.errors import ConfigError, counted
from ultrabench.model_shape import ModelShape
from ultrabench.record import from_dict, values_of
from ultrabench.store.state import SweepState

MOST = 3
"""Largest number of differences that a text names."""


def other_shapes(models: Iterable[ModelShape], state: SweepState) -> Iterator[str]:
    """A line for each model that was attempted in the sweep in another shape than it has now."""
    earlier = _earlier_runs(state)
    for model in models:
        runs = Counter(
            {shape: n for shape, n in earlier.items() if shape.name == model.name and shape != model}
        )
        if runs:
            shape = max(runs, key=lambda shape: (runs[shape], shape.model_id))
            changed = differences(values_of(shape), values_of(model), "{}: {} -> {}")
            fact = f"model {model.name} has a different shape than in {counted(runs.total(), 'run')} of earlier launches ({changed})"
            yield f"{fact}: those stay in the results as another model; for a separate sweep, add name=NAME"


def _earlier_runs(state: SweepState) -> Counter[ModelShape]:
    """Shape -> number of the runs of a sweep that were claimed with it; runs that cannot be read are left out."""
    number = Counter[ModelShape]()
    for attempts in state.by_run().values():
        shapes = (a.spec["shape"] for a in attempts if a.spec and isinstance(a.spec.get("shape"), dict))
        if values := next(shapes, None):
            with contextlib.suppress(ConfigError):
                number[from_dict(ModelShape, values, skip_unknown=True)] += 1
    return number


def differences(was: Mapping[str, Any], now: Mapping[str, Any], form: str) -> str:
    """The settings of a model that differ, at most MOST of them, such as `rope_theta: 10000 -> 500000`.

    Args:
        form: how a setting is written, with places for its name and its two values.
    """
    names = [name for name in was if name != "name" and was[name] != now[name]]
    texts = [form.format(name, _text(was[name]), _text(now[name])) for name in names[:MOST]]
    return ", ".join(texts) + (f" and {len(names) - MOST} more" if len(names) > MOST else "")


def _text(value: Any) -> str:
    """A value as a file has it, numbers without needless digits."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.15g}" if is_number else json.dumps(value, default=values_of).strip('"')
