"""Every candidate of a sweep: the product of its axes that fills the GPUs and the batch."""

from collections.abc import Iterator
from itertools import product
from math import prod

from ultrabench.errors import ConfigError
from ultrabench.layout import Layout, default_schedule, default_virtual_stages
from ultrabench.run import Workload
from ultrabench.sweep.config import Axes

MOST_COMBINATIONS = 1_000_000
"""Beyond it a plan takes minutes and gigabytes, and nobody runs so many."""


def require_countable(axes: Axes, models: int) -> None:
    """Returns when the product of the axes can be enumerated; gas follows from the others.

    Raises:
        ConfigError: it has more than MOST_COMBINATIONS combinations.
    """
    sizes = {name: len(set(getattr(axes, name))) for name in ("nodes", "tp", "pp", "cp", "zero_stage", "mbs")}
    sizes |= {"models": models, "pp_schedule": len(axes.pp_schedule) * len(axes.virtual_stages)}
    number = prod(sizes.values())
    if number > MOST_COMBINATIONS:
        longest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        shown = ", ".join(f"sweep.{name} ({sizes[name]:,} values)" for name in longest)
        raise ConfigError(
            f"the axes have {number:,} combinations; a sweep may have {MOST_COMBINATIONS:,}: narrow {shown}"
        )


def layouts(axes: Axes, gpus: int, workload: Workload) -> Iterator[Layout]:
    """The layouts of `gpus` ranks with dp*tp*pp*cp = gpus and dp*mbs*gas = gbs, each once.

    dp follows from the other degrees, gas from gbs, dp and mbs. Nothing else is asked here; rules come after.
    """
    for tp, pp, cp in product(sorted(set(axes.tp)), sorted(set(axes.pp)), sorted(set(axes.cp))):
        if gpus % (tp * pp * cp):
            continue
        dp = gpus // (tp * pp * cp)
        for mbs in sorted(set(axes.mbs)):
            gas, rest = divmod(workload.gbs, dp * mbs)
            if rest:
                continue
            schedules = dict.fromkeys(_schedules(axes, pp, gas))
            for zero_stage, (schedule, virtual) in product(sorted(set(axes.zero_stage)), schedules):
                yield Layout(
                    dp=dp,
                    tp=tp,
                    pp=pp,
                    cp=cp,
                    zero_stage=zero_stage,
                    mbs=mbs,
                    gas=gas,
                    pp_schedule=schedule,
                    virtual_stages=virtual,
                )


def _schedules(axes: Axes, pp: int, gas: int) -> Iterator[tuple[str, int]]:
    """Schedule and virtual stages of each order of micro-batches that is wanted."""
    for name in axes.pp_schedule if pp > 1 else ("auto",):
        if name == "interleaved":
            yield from ((name, stages) for stages in axes.virtual_stages)
        else:
            schedule = default_schedule(pp, gas) if name == "auto" else name
            yield schedule, default_virtual_stages(schedule)


def not_listed(axes: Axes, layout: Layout) -> str | None:
    """The reason why a layout that fills GPUs and batch is left out by sweep.gas; None when it is not."""
    if axes.gas is None or layout.gas in axes.gas:
        return None
    return f"gas={layout.gas} is not in sweep.gas={list(axes.gas)}"


def why_none(axes: Axes, gpus_per_node: int, workload: Workload) -> ConfigError:
    """The error for axes that give no candidate at all."""
    gpus = [n * gpus_per_node for n in axes.nodes]
    products = sorted({a * b * c for a, b, c in product(axes.tp, axes.pp, axes.cp)})
    degrees = sorted({g // p for g in gpus for p in products if g % p == 0})
    if not degrees:
        return ConfigError(
            f"sweep.tp={list(axes.tp)}, sweep.pp={list(axes.pp)}, sweep.cp={list(axes.cp)}: no "
            f"tp*pp*cp divides {' or '.join(map(str, gpus))} GPUs; choose divisors"
        )
    return ConfigError(
        f"sweep.gbs={workload.gbs} is no dp*mbs*gas with dp in {degrees}, mbs in {list(axes.mbs)}; "
        "change sweep.gbs or sweep.mbs"
    )
