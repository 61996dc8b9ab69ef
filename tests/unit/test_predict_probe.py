import pytest

from ultrabench.errors import ConfigError
from ultrabench.kernel_config import KernelConfig
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.plan import make_plan


def test_a_run_for_every_node_count_whatever_it_divides():
    """One sequence a rank, so that no batch decides which node counts are measured."""
    plan = make_plan(load_config(["sweep=comm", "hardware=h100x8", "sweep.nodes=[1,3,64]"]))
    assert [(c.nodes, c.layout.dp, c.spec.workload.gbs) for c in plan.runs] == [
        (1, 8, 8),
        (3, 24, 24),
        (64, 512, 512),
    ]
    assert len(plan.candidates) == 3
    assert {c.spec.kernel.kind for c in plan.runs} == {"probe"}
    assert not plan.config.launcher.preflight


def test_the_price_is_what_crosses_the_links():
    """8 ranks at 70 % of 450 GB/s, 5 calls of each size: (2 + 1 + 1 + 1) * 7/8 + 1 = 5.375 times its bytes."""
    alone, pair = make_plan(load_config(["sweep=comm", "hardware=h100x8", "sweep.nodes=[1,2]"])).runs
    sizes = 2**16 + 2**20 + 2**23 + 2**26 + 2**28 + 2**30
    inside = 5 * 5.375 * sizes / (0.7 * 450e9)
    assert alone.prediction.step_time_s == pytest.approx(inside)
    across = 5 * (5 * 15 / 16 + 1) * sizes / (0.7 * 50e9)
    assert pair.prediction.step_time_s == pytest.approx(inside + across)
    assert pair.prediction.duration_s < 90


def test_a_kernel_of_no_kind_is_refused():
    with pytest.raises(ConfigError, match="must be embedded, command or probe"):
        KernelConfig(name="x", kind="prob")
