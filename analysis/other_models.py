"""Models of one name in two tables of results that are not the same model, and in what they differ."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from ultrabench.analysis.rows import Row
from ultrabench.model_shape import ModelShape
from ultrabench.sweep.running.other_shapes import differences

_USUAL = {field.name: None if field.default is MISSING else field.default for field in fields(ModelShape)}
"""Field of a shape -> its usual value; None for one that has none."""


def other_models(rows_of_a: Sequence[Row], rows_of_b: Sequence[Row]) -> Iterator[str]:
    """For each name by which A and B mean other models a text such as `model mine differs: rope_theta is 1 in A and 2 in B`.

    Rows without a model_id, as those of imported tables and of older versions, say nothing.
    """
    shapes_a, shapes_b = _shapes(rows_of_a), _shapes(rows_of_b)
    for name in sorted(shapes_a.keys() & shapes_b.keys()):
        of_a, of_b = shapes_a[name], shapes_b[name]
        only_a, only_b = (
            min(of_a.keys() - of_b.keys(), default=None),
            min(of_b.keys() - of_a.keys(), default=None),
        )
        if only_a and only_b:
            yield f"model {name} differs: {differences(of_a[only_a], of_b[only_b], '{} is {} in A and {} in B')}"


def _shapes(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """Name of a model -> model_id -> the fields of its shape, usual values where a row tells none."""
    by_name: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        of_name = by_name.setdefault(row["model"], {})
        if row["model_id"] is not None and row["model_id"] not in of_name:
            of_name[row["model_id"]] = _fields(row)
    return by_name


def _fields(row: Mapping[str, Any]) -> dict[str, Any]:
    settings = json.loads(row["model_settings"] or "{}")
    columns = {name: row[name] for name in _USUAL if row.get(name) is not None}
    return {**_USUAL, **columns, **settings}
