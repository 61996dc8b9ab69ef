"""Groups of ranks, the copies that they hold, and the GPU of a rank's threads; without any other rank."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import kernel
from ultrabench.kernel import replicas
from ultrabench.kernel.check import parity
from ultrabench.kernel.compat import PATIENCE
from ultrabench.kernel.mesh import cp_group
from ultrabench.kernel.pp import tied_peer
from ultrabench.kernel.rank import environment, progress, stack_dump
from ultrabench.kernel.rank.failure import ReplicasDifferError
from ultrabench.kernel.requests import CheckSpec
from ultrabench.layout import Layout

ONE_ULP = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("on_nccl", [True, False])
def test_every_rank_asks_for_all_rings(monkeypatch, on_nccl):
    """With NCCL in one call, which splits the communicator of all ranks; with gloo in one for each ring."""
    asked: list[Any] = []
    names = set[str]()

    def make(**given):
        names.add(given["group_desc"])
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
    assert names == {"mesh_cp"}  # by which evidence of a hang calls the ring cp


@pytest.mark.parametrize(
    ("schedule", "virtual", "peers"),
    [("1f1b", 1, [2, None, 0]), ("interleaved", 2, [2, None, 0]), ("zbv", 2, [None, None, None])],
)
def test_who_holds_the_other_copy_of_a_tied_embedding(schedule, virtual, peers):
    """The other end of the pipeline; under zbv one rank holds both copies."""
    layout = Layout(dp=1, pp=3, gas=3, pp_schedule=schedule, virtual_stages=virtual)
    assert [tied_peer(layout, rank) for rank in range(3)] == peers


def trainer_with(tp, tied):
    """As much of a trainer as the comparison looks at, with two copies along every axis of more than one rank."""
    names = ("layers.0.attention_norm.weight", "layers.0.ffn.up.weight", "head.weight")
    sizes = {"tp": tp, "dp_replicate": 2, "pp": 1}
    groups = {axis: SimpleNamespace(axis=axis, size=lambda n=n: n) for axis, n in sizes.items()}
    return SimpleNamespace(
        params={name: torch.ones(64) for name in names}, layout=Layout(dp=2, tp=tp), device="cpu",
        mesh=SimpleNamespace(get_group=groups.__getitem__), tied=tied, tied_peer=1 if tied else None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tp", "name", "axis", "apart", "told"),
    [
        (2, "layers.0.attention_norm.weight", "tp", ONE_ULP, False),
        (2, "layers.0.attention_norm.weight", "dp_replicate", -ONE_ULP, False),
        (2, "layers.0.attention_norm.weight", "tp", 1e-5, True),
        (2, "layers.0.attention_norm.weight", "dp_replicate", -1e-5, True),
        (1, "layers.0.attention_norm.weight", "dp_replicate", ONE_ULP, True),
        (2, "layers.0.ffn.up.weight", "dp_replicate", ONE_ULP, True),
        (2, "head.weight", "pp", ONE_ULP, True),
        (2, "head.weight", "pp", 0.0, False),
    ],
)
def test_copies_differ_by_rounding_only_where_they_may(monkeypatch, tp, name, axis, apart, told):
    """The copies of norms along tp, and of its groups; every other bit must be the same."""
    trainer = trainer_with(tp, tied=axis == "pp")
    theirs = trainer_with(tp, tied=axis == "pp")
    theirs.params[name] = theirs.params[name] + apart
    calls: list[tuple[Any, torch.Tensor, Any]] = []

    def record(tensor, op, group=None):
        calls.append((group and group.axis, tensor, op))

    def swap(mine, *_):
        return theirs.params[name].view(torch.int32).sum()

    monkeypatch.setattr(replicas, "swap", swap)
    monkeypatch.setattr(replicas.dist, "all_reduce", record)
    replicas.require_equal_replicas(theirs)
    from_them = iter([tensor.clone() for _, tensor, _ in calls])

    def all_reduce(tensor, op, group=None):
        sent = next(from_them, tensor)
        if group is not None and group.axis == axis:
            tensor.copy_(torch.maximum(tensor, sent))

    monkeypatch.setattr(replicas.dist, "all_reduce", all_reduce)
    if told:
        with pytest.raises(ReplicasDifferError, match=name):
            replicas.require_equal_replicas(trainer)
    else:
        replicas.require_equal_replicas(trainer)


def test_variables_that_steer_a_run_are_recorded(monkeypatch):
    """Not those of launchers, and no folder of a cache, which would make each job an environment of its own."""
    for name in [name for name in environment.os.environ if name.startswith(environment.STEERING)]:
        monkeypatch.delenv(name)
    steering = ["CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "NCCL_TOPO_FILE", "NVTE_FLASH_ATTN",
                "PYTORCH_ALLOC_CONF", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCHINDUCTOR_MAX_AUTOTUNE"]  # fmt: skip
    others = ["CUDA_VISIBLE_DEVICES", "CUDA_CACHE_PATH", "CUDA_MPS_PIPE_DIRECTORY", "NCCL_DEBUG_FILE", "TORCH_HOME",
              "TORCH_FR_DUMP_TEMP_FILE", "TORCHELASTIC_RUN_ID", "TORCHINDUCTOR_CACHE_DIR", "HF_TOKEN"]  # fmt: skip
    for name in steering + others:
        monkeypatch.setenv(name, "1")
    assert [*environment.facts()["variables"]] == sorted(steering)


@pytest.mark.parametrize(
    ("given", "cuda", "set_to"),
    [
        ({}, "12.8", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({}, None, {}),
        ({"PYTORCH_ALLOC_CONF": ""}, "12.8", {"PYTORCH_ALLOC_CONF": ""}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, "12.8", {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}),
    ],
)
def test_segments_can_grow_unless_the_user_says_otherwise(monkeypatch, given, cuda, set_to):
    """Either name of the variable counts, and only GPUs have that allocator."""
    monkeypatch.setattr(environment.os, "environ", given)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    environment.set_defaults()
    assert given == set_to


@pytest.mark.parametrize(
    "joins",
    [
        lambda folder: parity._train_rank(CheckSpec(layout=Layout(dp=1)), 0, folder),
        lambda _: kernel.measure({"device": "cpu", "who": []}),
    ],
)
def test_checks_and_benchmarks_join_their_groups_as_a_rank_does(monkeypatch, tmp_path, joins):
    """The allocator is configured, and groups of all axes have the long time-out, before the first group is made."""
    seen, c10d = list[Any](), dist.distributed_c10d

    def join(*_, **__):
        seen.extend((c10d.default_pg_timeout, c10d.default_pg_nccl_timeout))
        raise InterruptedError

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(c10d, name, None)
    monkeypatch.setattr(environment, "set_defaults", lambda: seen.append("allocator"))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(dist, "init_process_group", join)
    with pytest.raises(InterruptedError):
        joins(tmp_path)
    assert seen == ["allocator", PATIENCE, PATIENCE]


def test_the_thread_that_watches_a_gpu_uses_it(monkeypatch):
    """It says so before it asks whether a micro-batch has ended, and in its own thread."""
    seen, counted = list[Any](), threading.Event()

    class Event:
        def record(self): ...

        def query(self):
            seen.append(("asked", threading.current_thread()))
            return True

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "set_device", lambda to: seen.append((to, threading.current_thread())))
    device = torch.device("cuda", 3)
    progress.device_progress(device, counted.set)()
    assert counted.wait(10)
    (first, one), (second, other), *_ = seen
    assert (first, second) == (device, "asked")
    assert one is other is not threading.current_thread()


def test_the_thread_that_tells_of_collectives_uses_the_gpu_of_its_rank(monkeypatch):
    """It is the one with the memory of this process; a new thread would look at GPU 0."""
    used = [0]
    reserved = [0, 0, 30]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(
        torch.cuda, "memory_reserved", lambda device=None: reserved[used[-1] if device is None else device]
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 20 if used[-1] == 2 else 0)
    assert stack_dump._device_memory() == {"allocated_bytes": 20, "reserved_bytes": 30}
