"""Groups of ranks and the copies that they hold, without any other rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ultrabench.kernel import replicas
from ultrabench.kernel.mesh import cp_group
from ultrabench.kernel.rank.failure import ReplicasDifferError
from ultrabench.layout import Layout

ONE_ULP = torch.finfo(torch.float32).eps
NORM, MATRIX, HEAD = "layers.0.attention_norm.weight", "layers.0.ffn.up.weight", "head.weight"


@pytest.mark.parametrize("on_nccl", [True, False])
def test_every_rank_asks_for_all_rings(monkeypatch, on_nccl):
    """With NCCL in one call, which splits the communicator of all ranks; with gloo in one for each ring."""
    requests: list[Any] = []

    def make(**options):
        assert options["group_desc"] == "mesh_cp"  # by which evidence of a hang calls the ring cp
        requests.append(options.get("split_ranks") or options["ranks"])

    monkeypatch.setattr(dist, "split_group", make)
    monkeypatch.setattr(dist.distributed_c10d, "new_group", make)
    layout = Layout(dp=2, cp=2, tp=2)
    for rank in range(layout.world_size):
        dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
        if on_nccl:
            dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        cp_group(layout)
        dist.destroy_process_group()
    rings = [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert requests == ([rings] if on_nccl else rings) * layout.world_size


@pytest.mark.parametrize(
    ("tp", "name", "axis", "apart", "differs"),
    [
        (2, NORM, "tp", ONE_ULP, False),
        (2, NORM, "dp_replicate", -ONE_ULP, False),
        (2, NORM, "tp", 1e-5, True),
        (2, NORM, "dp_replicate", -1e-5, True),
        (1, NORM, "dp_replicate", ONE_ULP, True),
        (2, MATRIX, "dp_replicate", ONE_ULP, True),
        (2, HEAD, "pp", ONE_ULP, True),
        (2, HEAD, "pp", 0.0, False),
    ],
)
def test_copies_differ_by_rounding_only_where_they_may(monkeypatch, tp, name, axis, apart, differs):
    """The copies of norms along tp, and of its groups; every other bit must be the same.

    The other copy of `name` along `axis` is larger by `apart`.
    """
    params = {name: torch.ones(64) for name in (NORM, MATRIX, HEAD)}
    theirs = params[name] + apart

    def spread(trainer, values, along):
        other = theirs if name in values and values[name].dim() else theirs.view(torch.int32).sum()
        return {n: abs(other - value) * (n == name and along == axis) for n, value in values.items()}

    monkeypatch.setattr(replicas, "_spread_along", spread)
    monkeypatch.setattr(replicas, "swap", lambda *_: theirs.view(torch.int32).sum())
    monkeypatch.setattr(replicas.dist, "all_reduce", lambda *_: None)
    trainer: Any = SimpleNamespace(
        params=params, layout=Layout(dp=2, tp=tp), device="cpu", mesh=SimpleNamespace(get_group=str),
        ties_across_stages=axis == "pp", tied_peer=1, models=[], expert_mesh=None,
    )  # fmt: skip
    if differs:
        with pytest.raises(ReplicasDifferError, match=name):
            replicas.require_equal_replicas(trainer)
    else:
        replicas.require_equal_replicas(trainer)
