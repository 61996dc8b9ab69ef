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
    asked: list[Any] = []

    def make(**given):
        assert given["group_desc"] == "mesh_cp"  # by which evidence of a hang calls the ring cp
        asked.append(given.get("split_ranks") or given["ranks"])

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
    assert asked == ([rings] if on_nccl else rings) * layout.world_size


def trainer_with(tp, tied):
    """As much of a trainer as the comparison looks at, with two copies along every axis of more than one rank."""
    sizes = {"tp": tp, "dp_replicate": 2, "pp": 1}
    groups = {axis: SimpleNamespace(axis=axis, size=lambda n=n: n) for axis, n in sizes.items()}
    return SimpleNamespace(
        params={name: torch.ones(64) for name in (NORM, MATRIX, HEAD)}, layout=Layout(dp=2, tp=tp), device="cpu",
        mesh=SimpleNamespace(get_group=groups.__getitem__), tied=tied, tied_peer=1 if tied else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tp", "name", "axis", "apart", "told"),
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
def test_copies_differ_by_rounding_only_where_they_may(monkeypatch, tp, name, axis, apart, told):
    """The copies of norms along tp, and of its groups; every other bit must be the same."""
    ours, theirs = (trainer_with(tp, tied=axis == "pp") for _ in range(2))
    theirs.params[name] = theirs.params[name] + apart
    sent = list[torch.Tensor]()
    monkeypatch.setattr(replicas, "swap", lambda *_: theirs.params[name].view(torch.int32).sum())
    monkeypatch.setattr(replicas.dist, "all_reduce", lambda tensor, *_: sent.append(tensor.clone()))
    replicas.require_equal_replicas(theirs)

    def all_reduce(tensor, op, group=None):
        other = sent.pop(0)
        if group is not None and group.axis == axis:
            tensor.copy_(torch.maximum(tensor, other))

    monkeypatch.setattr(replicas.dist, "all_reduce", all_reduce)
    if told:
        with pytest.raises(ReplicasDifferError, match=name):
            replicas.require_equal_replicas(ours)
    else:
        replicas.require_equal_replicas(ours)
