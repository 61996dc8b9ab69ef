"""Measures how many layouts a core predicts in a second, and the CPU time of a plan in composes of Hydra."""

import gc
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from os import cpu_count
from statistics import median

from timing import costs, ultrabench

from ultrabench.run import RunSpec
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import make_plan, predictor, process_map

PLAYBOOK = "sweep=playbook"
THREE_TYPES = ("model=nemotron-3", "sweep.ep=[1,8]")
"""Overrides that put a model of three types of layers in place of the playbook's; our kernel does not train it, but its
predictions have the form of our kernel."""
TIMES = 9
CACHED = type(lru_cache(cpu_count))


def forget() -> None:
    """Clears the caches of predictions, which a process that plans begins without."""
    for cached in gc.get_objects():
        if isinstance(cached, CACHED) and cached.__module__.startswith("ultrabench.s"):
            cached.cache_clear()


def cpu_s(work: Callable[[], object]) -> list[float]:
    """CPU seconds of `work` in this process, the shortest first."""
    seconds = []
    for _ in range(TIMES):
        forget()
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return sorted(seconds)


def rate_text(config: SweepConfig, specs: Sequence[RunSpec], what: str) -> str:
    """How many of these runs one process predicts in a second, as a plan does with predictors that know no run yet."""
    peaks = {n: config.hardware.peak(config.kernel.precision, n, None, 1) for n in config.axes.nodes}

    def predict_all() -> None:
        predictors = {nodes: predictor(config, nodes, peak) for nodes, peak in peaks.items()}
        with process_map(1) as map_specs:
            for _ in map_specs(lambda spec: predictors[spec.nodes].predict(spec), specs):
                pass

    seconds = cpu_s(predict_all)
    # Other programs, and other VMs on the same core, only ever lengthen a pass.
    best_rate, median_rate = len(specs) / seconds[0], len(specs) / median(seconds)
    rates_text = (
        f"{best_rate:,.0f} layouts/s in the fastest of {TIMES} passes, {median_rate:,.0f} in the median one"
    )
    return f"{rates_text}: memory, P(OOM) and step time of {len(specs):,} {what}"


config = load_config([PLAYBOOK])
valid = [c.spec for c in make_plan(config).candidates if c.valid]
print(rate_text(config, valid, f"valid layouts of {PLAYBOOK}, models of one type of layer"))
typed_config = load_config([PLAYBOOK, *THREE_TYPES])
predicted = [c.spec for c in make_plan(typed_config).candidates if c.predicted]
num_types = len(predicted[0].shape.kinds)
print(rate_text(typed_config, predicted, f"layouts of {predicted[0].shape.name}, {num_types} types of layer"))
compose_s = median(cpu_s(lambda: load_config([PLAYBOOK])))
whole_s = median(costs(ultrabench("sweep", "plan", PLAYBOOK))[0] for _ in range(TIMES))
ratio_text = f"{whole_s / compose_s:.1f} x one compose ({compose_s:.3f} s)"
print(f"sweep plan {PLAYBOOK}: {whole_s:.2f} s of CPU, {ratio_text}")
