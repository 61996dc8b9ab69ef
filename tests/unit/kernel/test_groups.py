"""Groups of ranks and the copies that they hold, without any other rank."""

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ultrabench.kernel import replicas
from ultrabench.kernel.compat import GROUP_TIMEOUT, use_one_gloo_worker
from ultrabench.kernel.cut import COLUMNS, OF_TOKENS, VOCABULARY
from ultrabench.kernel.mesh import cp_group, kv_group
from ultrabench.kernel.rank.failure import ReplicasDifferError
from ultrabench.kernel.requests import TINY
from ultrabench.layout import Layout

ONE_ULP = torch.finfo(torch.float32).eps
NORM, MATRIX, HEAD = "layers.0.attention_norm.weight", "layers.0.ffn.up.weight", "head.weight"
KEYS = "layers.0.attention.k.weight"
CUTS = {
    NORM: OF_TOKENS,
    MATRIX: COLUMNS,
    HEAD: VOCABULARY,
    KEYS: COLUMNS._replace(num_heads=TINY.num_key_value_heads),
}


@pytest.mark.parametrize("on_nccl", [True, False])
def test_every_rank_asks_for_all_groups(monkeypatch, on_nccl):
    """With NCCL in one call, which splits the communicator of all ranks; with gloo in one for each group.

    Evidence of a hang calls the groups of cp and of copies of key/value heads by the ends of their names.
    """
    requests: list[Any] = []

    def make(**options):
        requests.append((options["group_desc"], options.get("split_ranks") or options["ranks"]))

    monkeypatch.setattr(dist, "split_group", make)
    monkeypatch.setattr(dist.distributed_c10d, "new_group", make)
    ring_layout, copies_layout = Layout(dp=2, cp=2, tp=2), Layout(dp=2, tp=4)
    for rank in range(8):
        dist.init_process_group("fake", rank=rank, world_size=8, store=FakeStore())
        if on_nccl:
            dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        cp_group(ring_layout)
        kv_group(copies_layout, 2, dist.group.WORLD)
        assert kv_group(copies_layout, 1, dist.group.WORLD) is None
        assert (
            kv_group(copies_layout, 4, dist.group.WORLD) is dist.group.WORLD
        )  # which stands for the ranks of tp
        dist.destroy_process_group()
    rings, pairs = [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]
    calls = [("mesh_cp", rings), ("mesh_kv", pairs)]
    if not on_nccl:
        calls = [(name, ranks) for name, groups in calls for ranks in groups]
    assert requests == calls * 8


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
        (4, KEYS, "kv", ONE_ULP, False),
        (4, KEYS, "kv", 1e-5, True),
        (4, KEYS, "dp_replicate", ONE_ULP, False),
        (2, KEYS, "dp_replicate", ONE_ULP, True),  # each rank of tp has a head of its own
    ],
)
def test_copies_differ_by_rounding_only_where_they_may(monkeypatch, tp, name, axis, apart, differs):
    """The copies of norms along tp and of key/value heads, and those of its groups; every other bit must be the same.

    The other copy of `name` along `axis` is larger by `apart`.
    """
    params = {name: torch.ones(64) for name in (NORM, MATRIX, HEAD, KEYS)}
    theirs = params[name] + apart

    def spread(trainer, values, along):
        other = theirs if name in values and values[name].dim() else theirs.view(torch.int32).sum()
        return {n: abs(other - value) * (n == name and along == axis) for n, value in values.items()}

    monkeypatch.setattr(replicas, "_spread_along", spread)
    monkeypatch.setattr(replicas, "swap", lambda *_: theirs.view(torch.int32).sum())
    monkeypatch.setattr(replicas.dist, "all_reduce", lambda *_: None)
    trainer: Any = SimpleNamespace(
        shards=params, spec=SimpleNamespace(shape=TINY), layout=Layout(dp=2, tp=tp), device="cpu",
        mesh=SimpleNamespace(get_group=str), cuts=CUTS,
        ties_across_stages=axis == "pp", copy_name="head.weight", tied_peer=1, models=[], expert_mesh=None,
    )  # fmt: skip
    if differs:
        with pytest.raises(ReplicasDifferError, match=name):
            replicas.require_equal_replicas(trainer)
    else:
        replicas.require_equal_replicas(trainer)


def test_a_group_of_gloo_has_one_thread_and_the_long_time_out():
    """Two threads write the name of the last collective at once, which damages the heap where the name lies on it."""
    use_one_gloo_worker()
    store = dist.HashStore()
    for names in ("", "lo"):
        with mock.patch.dict(os.environ, GLOO_SOCKET_IFNAME=names):
            group = dist.ProcessGroupGloo(dist.PrefixStore(names, store), 0, 1)
        assert group.options._threads == 1
        assert group.options._timeout == GROUP_TIMEOUT
        assert len(group.options._devices) == 1
