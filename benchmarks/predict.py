"""Measures how many layouts a core predicts in a second, and the CPU time of a plan in composes of Hydra."""

import gc
import time
from collections.abc import Callable
from functools import lru_cache
from os import cpu_count
from statistics import median

from timing import costs, ultrabench

from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan, predictor

PLAYBOOK = "sweep=playbook"
TIMES = 5
CACHED = type(lru_cache(cpu_count))


def forget() -> None:
    """Clears the caches of predictions, which a process that plans begins without."""
    for cached in gc.get_objects():
        if isinstance(cached, CACHED) and cached.__module__.startswith("ultrabench.s"):
            cached.cache_clear()


def cpu_s(work: Callable[[], object]) -> float:
    """Median CPU seconds of `work` in this process."""
    seconds = []
    for _ in range(TIMES):
        forget()
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return median(seconds)


def predict_all() -> None:
    """Predicts all valid layouts with new predictors, which know no run yet."""
    predictors = {nodes: predictor(config, nodes, peak) for nodes, peak in peaks.items()}
    for spec in valid:
        predictors[spec.nodes].predict(spec)


config = load_config([PLAYBOOK])
valid = [c.spec for c in make_plan(config).candidates if c.valid]
peaks = {n: config.hardware.peak(config.kernel.precision, n, None, 1) for n in config.axes.nodes}
predict_s = cpu_s(predict_all)
compose_s = cpu_s(lambda: load_config([PLAYBOOK]))
whole_s = median(costs(ultrabench("sweep", "plan", PLAYBOOK))[0] for _ in range(TIMES))
rate_text = (
    f"{len(valid) / predict_s:,.0f} layouts/s: memory, P(OOM) and step time of {len(valid):,} valid layouts"
)
print(
    f"{rate_text}\nsweep plan {PLAYBOOK}: {whole_s:.2f} s of CPU, {whole_s / compose_s:.1f} x one "
    f"compose ({compose_s:.3f} s)"
)
