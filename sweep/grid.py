"""Enumerates the layouts of a sweep: all combinations of its axes that use all GPUs and the whole batch."""

from collections.abc import Iterator
from itertools import product
from math import prod

from ultrabench.errors import ConfigError
from ultrabench.layout import Layout, default_schedule, default_virtual_stages
from ultrabench.run import Workload
from ultrabench.sweep.config.sweep_config import Axes

MOST_COMBINATIONS = 1_000_000
"""Largest number of combinations of a sweep. With more, planning takes minutes and gigabytes."""


def require_countable(axes: Axes, models: int) -> None:
    """Raises when the axes have too many combinations; gas is not counted, as it follows from the others.

    Raises:
        ConfigError: the axes have more than MOST_COMBINATIONS combinations.
    """
    sizes = {name: len(set(values)) for name, values in axes.layout.items() if name != "gas"}
    sizes |= {"models": models, "nodes": len(set(axes.nodes))}
    number = prod(sizes.values())
    if number > MOST_COMBINATIONS:
        longest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        shown = ", ".join(f"sweep.{name} ({sizes[name]:,} values)" for name in longest)
        raise ConfigError(
            f"the axes have {number:,} combinations; a sweep may have {MOST_COMBINATIONS:,}: narrow {shown}"
        )


def layouts(axes: Axes, gpus: int, workload: Workload) -> Iterator[Layout]:
    """All different layouts with dp*tp*pp*cp = gpus and dp*mbs*gas = gbs.

    dp follows from the other degrees, and gas from gbs, dp and mbs. Structural rules are applied later.
    """
    free = [name for name in axes.layout if name not in ("gas", "pp_schedule", "virtual_stages")]
    for values in product(*(sorted(set(axes.layout[name])) for name in free)):
        at = dict(zip(free, values, strict=True))
        dp, ranks_left = divmod(gpus, at["tp"] * at["pp"] * at["cp"])
        gas, batch_left = divmod(workload.gbs, dp * at["mbs"]) if dp else (0, 1)
        if ranks_left or batch_left:
            continue
        for schedule, virtual_stages in dict.fromkeys(_schedules(axes, at["pp"], gas)):
            yield Layout(dp=dp, gas=gas, pp_schedule=schedule, virtual_stages=virtual_stages, **at)


def _schedules(axes: Axes, pp: int, gas: int) -> Iterator[tuple[str, int]]:
    """The pairs of schedule and virtual stages that the axes ask for."""
    for name in axes.layout["pp_schedule"] if pp > 1 else ("auto",):
        if name == "interleaved":
            yield from ((name, stages) for stages in axes.layout["virtual_stages"])
        else:
            schedule = default_schedule(pp, gas) if name == "auto" else name
            yield schedule, default_virtual_stages(schedule)


def not_listed(axes: Axes, layout: Layout) -> str | None:
    """The reason why sweep.gas leaves this layout out; None when it does not."""
    listed = axes.layout.get("gas", (layout.gas,))
    return None if layout.gas in listed else f"gas={layout.gas} is not in sweep.gas={list(listed)}"


def why_none(axes: Axes, gpus_per_node: int, workload: Workload) -> ConfigError:
    """The error for axes that give no candidate."""
    gpus, at = [n * gpus_per_node for n in axes.nodes], axes.layout
    products = sorted({a * b * c for a, b, c in product(at["tp"], at["pp"], at["cp"])})
    degrees = sorted({g // p for g in gpus for p in products if g % p == 0})
    if not degrees:
        return ConfigError(
            f"sweep.tp={list(at['tp'])}, sweep.pp={list(at['pp'])}, sweep.cp={list(at['cp'])}: no "
            f"tp*pp*cp divides {' or '.join(map(str, gpus))} GPUs; choose divisors"
        )
    return ConfigError(
        f"sweep.gbs={workload.gbs} is no dp*mbs*gas with dp in {degrees}, mbs in {list(at['mbs'])}; "
        "change sweep.gbs or sweep.mbs"
    )
