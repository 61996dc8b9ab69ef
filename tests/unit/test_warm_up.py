"""When the warm-up of a run ends."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.configs import measure
from ultrabench.kernel.worker import MOST_COMPILING_STEPS, Timing


class Compiling(Timing):
    """Steps that take no time and compile a graph each, until `last`."""

    def __init__(self, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
        task: Any = SimpleNamespace(measure=measure(warmup_steps=2), device="cpu")
        trainer: Any = SimpleNamespace(device=torch.device("cpu"), compiler=SimpleNamespace(graphs=0))
        report: Any = None
        super().__init__(task, trainer, report)
        self.last = last
        monkeypatch.setattr(self, "_any_rank", bool)
        monkeypatch.setattr(self, "_of_rank_0", float)

    def step(self) -> None:
        """One more step."""
        self.done_steps += 1
        self.compiled = self.done_steps <= self.last
        self.trainer.compiler.graphs += self.compiled  # type: ignore[misc]


@pytest.mark.parametrize(("last", "steps"), [(0, 2), (1, 2), (2, 3), (5, 6)])
def test_the_warm_up_goes_on_while_graphs_are_compiled(
    monkeypatch: pytest.MonkeyPatch, last: int, steps: int
) -> None:
    """So that no measured step compiles."""
    timing = Compiling(last, monkeypatch)
    timing._warm_up()
    assert timing.done_steps == steps


def test_compilation_without_an_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a measurement."""
    with pytest.raises(
        RuntimeError, match=r"step 12 still compiled layers, 12 graphs in all; take kernel.compile"
    ):
        Compiling(2 + MOST_COMPILING_STEPS, monkeypatch)._warm_up()
