"""Reads `sweep.layouts`, a list of single layouts in place of axes whose values are combined."""

from collections.abc import Mapping, Sequence
from typing import Any

from ultrabench.allowed import Count, Size
from ultrabench.errors import ConfigError, require_known
from ultrabench.layout import AXES, FOLLOWING, NEUTRAL, SWEEP_VALUES, TEXT_AXES, TYPES_IN_SWEEP, value_text
from ultrabench.record import value_from
from ultrabench.sweep.config.sweep_config import LAYOUTS_SETTING, LIST_LAYOUTS_REMEDY, ListedLayout

SETTING = LAYOUTS_SETTING
CELL_TYPES = {"model": str, "nodes": Count, "seq_len": Size, "gbs": Size, "precision": str}
"""Key of an entry that limits it to some cells of the sweep -> its type; the keys are those of a cell."""
EXAMPLE = "[{tp: 2, mbs: 1}, {tp: 4, pp: 2, mbs: 1}]"
_SINGLE_VALUES = {
    **{name: value for name, value in NEUTRAL.items() if name not in FOLLOWING},
    **{name: in_sweep.default for name, in_sweep in SWEEP_VALUES.items()},
    "ep": NEUTRAL["ep"],
}
"""Axis -> its value in an entry that does not name it."""


def read_layouts(entries: Any, other_axes: Sequence[str]) -> tuple[ListedLayout, ...]:
    """The entries of `sweep.layouts`.

    Args:
        entries: the value of the key.
        other_axes: axes of layouts that the sweep lists, too.

    Raises:
        ConfigError: the list is empty, stands beside `other_axes`, or an entry cannot be used or is there twice.
    """
    if other_axes:
        problem = f"{SETTING} beside {', '.join(f'sweep.{axis}' for axis in other_axes)}"
        rule = "a sweep either lists layouts or combines values of axes"
        remedy = f"leave one of them out; {LIST_LAYOUTS_REMEDY}"
        raise ConfigError(f"{problem}; {rule}", remedy, setting=SETTING)
    if not isinstance(entries, list | tuple) or not entries:
        raise ConfigError(f"{SETTING}={entries!r} lists no layouts", f"write {EXAMPLE}", setting=SETTING)
    layouts = tuple(_read_entry(index, entry) for index, entry in enumerate(entries))
    for index, layout in enumerate(layouts):
        for other in layouts[:index]:
            if (layout.layout, layout.cell) == (other.layout, other.cell):
                fact = f"{layout.name} is the same layout as {other.name}"
                raise ConfigError(fact, "leave one of them out", setting=SETTING)
    return layouts


def _read_entry(index: int, entry: Any) -> ListedLayout:
    if not isinstance(entry, dict):
        fact = f"{SETTING}[{index}]: {entry!r} is not a layout"
        raise ConfigError(fact, f"write {EXAMPLE}", setting=SETTING)
    name = f"{SETTING}[{index}] {{{', '.join(f'{key}: {value}' for key, value in entry.items())}}}"
    if FOLLOWING[0] in entry:
        rule = "dp follows from the GPUs, dp = GPUs/(tp*pp*cp)"
        raise ConfigError(f"{name}: {rule}", "leave it out, or change tp, pp or cp", setting=SETTING)
    require_known(f"key of {name}:", (*AXES[1:], *CELL_TYPES), *entry, setting=SETTING)
    values: dict[str, Any] = {}
    for key, value in entry.items():
        in_sweep = SWEEP_VALUES.get(key)
        is_several = in_sweep is not None and value is not None and value == in_sweep.several
        is_list = isinstance(value, list | tuple) and key != "pp_layout"
        if is_list or isinstance(value, dict) or value is None or is_several:
            fact = f"{name}: {key} has {'no value' if value is None else 'several values'}"
            raise ConfigError(fact, "an entry is one layout: give one value", setting=SETTING)
        if key in TEXT_AXES:
            value = value_text(key, value)
        values[key] = value_from({**TYPES_IN_SWEEP, **CELL_TYPES}[key], value, f"{name}: {key}")
    cell = {key: values.pop(key) for key in CELL_TYPES if key in values}
    layout = {axis: (value,) for axis, value in (_SINGLE_VALUES | values).items()}
    return ListedLayout(name=name, layout=layout, cell=cell)


def values_of_layouts(listed: Sequence[ListedLayout]) -> Mapping[str, tuple[Any, ...]]:
    """Axis -> its different values in the entries, in their order; gas, which an entry alone decides, is left out."""
    axes = [axis for axis in _SINGLE_VALUES if axis != FOLLOWING[1]]
    return {axis: tuple(dict.fromkeys(entry.layout[axis][0] for entry in listed)) for axis in axes}
