"""Makes every parity check fail if its ranks do not make the same groups in the same order, as NCCL needs."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh

from ultrabench.kernel.check import parity
from ultrabench.kernel.requests import CheckResult, CheckSpec

group_calls: list[str] = []
"""The calls of this process that make groups, with their arguments, in order."""
MAKERS = (
    (dist.distributed_c10d, "_new_group_with_tag"),  # which new_group calls, by whichever name torch has it
    (dist, "split_group"), (device_mesh, "split_group"),
)  # fmt: skip


def recorded(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that also adds its call to `group_calls`."""

    @wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        group_calls.append(repr((make.__name__, args, kwargs)))
        return make(*args, **kwargs)

    return call


def compare_groups() -> None:
    """Lets ranks of later checks record what groups they make, and their comparison compare them."""
    for owner, name in MAKERS:
        setattr(owner, name, recorded(getattr(owner, name)))
    train, compare = parity._train_rank, parity._compare

    def train_rank(spec: CheckSpec, rank: int, folder: Path) -> None:
        train(spec, rank, folder)
        (folder / f"groups{rank}").write_text("\n".join(group_calls))

    def compare_ranks(spec: CheckSpec, folder: Path) -> CheckResult:
        ranks = spec.layout.world_size
        sequences = {(folder / f"groups{rank}").read_text() for rank in range(ranks)}
        assert len(sequences) == 1, "ranks make different groups"
        calls = sequences.pop().splitlines()
        assert calls or ranks == 1, "the groups of a mesh are not seen"
        assert all("mesh_" in call for call in calls), f"torch makes groups by itself: {calls}"
        return compare(spec, folder)

    parity._train_rank, parity._compare = train_rank, compare_ranks
