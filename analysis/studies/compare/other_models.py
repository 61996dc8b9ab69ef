"""Models of one name in two tables of results that are not the same model, and in what they differ."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from ultrabench.analysis.results.rows import Row
from ultrabench.model_shape import ModelShape
from ultrabench.sweep.running.other_shapes import differences

_DEFAULTS = {field.name: None if field.default is MISSING else field.default for field in fields(ModelShape)}
"""Field of a shape -> its usual value; None for one that has none."""


def other_models(rows_of_a: Sequence[Row], rows_of_b: Sequence[Row]) -> Iterator[str]:
    """For each name by which A and B mean other models a text such as
    `model mine differs: rope_theta is 1 in A and 2 in B`.

    Rows without a model_id, as those of imported tables and of older versions, say nothing.
    """
    models_a, models_b = _shapes_by_model(rows_of_a), _shapes_by_model(rows_of_b)
    for name in sorted(models_a.keys() & models_b.keys()):
        shapes_a, shapes_b = models_a[name], models_b[name]
        id_a, id_b = (
            min(shapes_a.keys() - shapes_b.keys(), default=None),
            min(shapes_b.keys() - shapes_a.keys(), default=None),
        )
        if id_a and id_b:
            yield f"model {name} differs: {differences(shapes_a[id_a], shapes_b[id_b], '{} is {} in A and {} in B')}"


def _shapes_by_model(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, Any]]]:
    """Name of a model -> model_id -> the fields of its shape, with usual values where a row has none."""
    shapes_by_name: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        shape_by_id = shapes_by_name.setdefault(row["model"], {})
        if row["model_id"] is not None and row["model_id"] not in shape_by_id:
            shape_by_id[row["model_id"]] = _shape_fields(row)
    return shapes_by_name


def _shape_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    settings = json.loads(row["model_settings"] or "{}")
    columns = {name: row[name] for name in _DEFAULTS if row.get(name) is not None}
    return {**_DEFAULTS, **columns, **settings}
