"""What the widest sweep of the package, sweep=recommend, searches and another sweep does not."""

from typing import Any

from ultrabench.layout import FOLLOWING
from ultrabench.sweep.config.files import files, read_yaml
from ultrabench.sweep.config.sweep_config import SweepConfig

WIDEST = "recommend"
"""The sweep with the most layouts."""


def unsearched_values(config: SweepConfig) -> dict[str, tuple[Any, ...]]:
    """Axis -> its values in the widest sweep that this one does not have; empty where they are no alternative.

    These values are those of training on GPUs with our own kernel, whose forms of parallelism they all are.
    """
    if not config.hardware.has_gpus or not config.kernel.trains_itself or config.axes.listed:
        return {}
    widest = read_yaml(files("sweep")[WIDEST])["sweep"]
    new_values = {
        axis: tuple(value for value in widest[axis] if value not in values)
        for axis, values in config.axes.layout.items()
        if isinstance(widest.get(axis), list) and axis not in FOLLOWING
    }
    del new_values["virtual_stages"]  # of interleaved alone
    return {axis: values for axis, values in new_values.items() if values}
