"""A GPU for tests on CPUs, with a clock that only queued work and waiting advance, and the ranks beside it.

What would spoil a measurement on a real GPU spoils it here: work that nobody waits for takes no time, a peak that is
not reset is that of earlier work, and calls go to the GPU that the calling thread has set. The GPU refuses calls that
mean another one, and it records all others in `calls`, so that a lost and an additional one show. Streams run beside
each other and know of each other only what they, or the host, waited for.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

GIB = 2**30
INDEX, NUM_GPUS = 2, 4
"""Index of the GPU, which is not the one that a thread uses by itself, and the number of GPUs of its node."""
LAUNCH_S = 1e-6
"""Seconds that the host needs to queue work."""
FLOPS_PER_S = {torch.bfloat16: 8e14, torch.float32: 5e13}
COPY_BYTES_PER_S = 4e12
"""Bytes that a copy reads and writes in a second."""
BUSY_HZ, IDLE_HZ = 1500e6, 345e6
"""The clock of the multiprocessors."""
PACE = (1.0, 1.4, 0.8)
"""Time of the same work in successive rounds, relative to the median; a round ends when the host waits."""
SLOW_START = 10.0
"""Time of the first round of the same work, relative to the median."""
FRAGMENTED_BYTES = 3 * GIB
"""What the allocator holds beside the largest number of bytes that were in use."""
NAME, CAPACITY_BYTES = "NVIDIA T1000", 128 * GIB
PROPERTIES = SimpleNamespace(
    name=NAME, total_memory=CAPACITY_BYTES, L2_cache_size=2**20, multi_processor_count=40, uuid="5a2c1e77-0b1d"
)  # fmt: skip
MAX_KERNELS = 20_000
"""More work is refused: where the clock stands still, a measurement of some seconds would not end."""
MAX_DATA_BYTES = 2**16
"""Tensors of more bytes have no data."""


@dataclass
class Mark:
    """A moment of a stream, for which the host and other streams can wait."""

    end_s: float = 0.0
    """When the stream will have done its work."""
    seen: Counter[str] = field(default_factory=Counter)
    """Stream -> number of its kernels that have ended by then, whatever they take."""


class FakeGpu:
    """The GPU `INDEX` of its node, and the host that queues work for it."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", INDEX)
        self.host_s = 0.0
        self.busy_until_s = Counter[str]()
        """Stream -> when it will have done its work."""
        self.seen_by_stream = defaultdict[str, Counter[str]](Counter)
        """Stream -> the kernels of each stream that end before its next one begins: its own, and those waited for."""
        self.seen_by_host = Counter[str]()
        """Stream -> number of its kernels that the host has waited for."""
        self.count_freed: Callable[[], object] = lambda: None
        """Counts memory that was freed since the last allocation."""
        self.allocated = self.reserved = self.peak = self.reserved_peak = self.num_retries = 0
        self.calls: list[str] = []
        """What the host asked for, in order."""
        self.kernels: list[tuple[str, float, float]] = []
        """Name of queued work, when it begins and when it ends."""
        self.num_launches = Counter[Any]()
        self._round_by_work, self._works_of_round = Counter[Any](), set[Any]()
        self._thread = threading.local()

    def allocate(self, num_bytes: int) -> None:
        """Takes memory, and holds some more of it in reserve."""
        self.allocated += num_bytes
        self.peak = max(self.peak, self.allocated)
        self.reserved = max(self.reserved, self.allocated + FRAGMENTED_BYTES)
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def retry(self) -> None:
        """Gives back what the allocator holds in reserve, as it does where the GPU is full."""
        self.reserved = self.allocated
        self.num_retries += 1

    @property
    def stream(self) -> str:
        """The stream that the calling thread uses."""
        return getattr(self._thread, "stream", "compute")

    @contextmanager
    def using(self, stream: str) -> Iterator[None]:
        """Queues the work of this thread on another stream inside the `with` block."""
        before, self._thread.stream = self.stream, stream
        yield
        self._thread.stream = before

    def mark(self, stream: str) -> Mark:
        """The end of the work that a stream has now."""
        return Mark(self.busy_until_s[stream], self.seen_by_stream[stream] | self.seen_by_host)

    def wait_for(self, mark: Mark, stream: str) -> None:
        """Lets a stream begin its next work after a moment of another one."""
        self.seen_by_stream[stream] |= mark.seen
        self.busy_until_s[stream] = max(self.busy_until_s[stream], mark.end_s)

    def wait_on_host(self) -> None:
        """Lets the host wait for all streams."""
        self.host_s = max(self.host_s, *self.busy_until_s.values(), 0.0)
        for seen in self.seen_by_stream.values():
            self.seen_by_host |= seen

    def launch(self, name: str, seconds: float, temporary_bytes: int = 0, stream: str = "compute") -> None:
        """Queues work; the host does not wait for it."""
        assert len(self.kernels) < MAX_KERNELS, "a measurement without an end"
        self.allocate(temporary_bytes)
        self.allocated -= temporary_bytes
        self.host_s += LAUNCH_S
        start_s = max(self.busy_until_s[stream], self.host_s)
        self.busy_until_s[stream] = start_s + seconds
        self.kernels.append((name, start_s, start_s + seconds))
        self.seen_by_stream[stream] |= self.seen_by_host
        self.seen_by_stream[stream][stream] += 1

    def launch_paced(self, name: str, size: int, seconds: float, num_slow: int = 1) -> None:
        """Queues work whose time changes from round to round; the first `num_slow` rounds take longest."""
        self._works_of_round.add((name, size))
        self.num_launches[name, size] += 1
        num_rounds = self._round_by_work[name, size] - num_slow
        self.launch(name, seconds * (SLOW_START if num_rounds < 0 else PACE[num_rounds % len(PACE)]))

    @property
    def is_busy(self) -> bool:
        """Whether a stream has work."""
        return max(self.busy_until_s.values(), default=0.0) > self.host_s

    def _is_mine(self, device: Any) -> bool:
        """Whether a device, an index, or None, which means the one that the thread uses, is this GPU."""
        index = device.index if isinstance(device, torch.device) else device
        return (getattr(self._thread, "index", 0) if index is None else index) == INDEX

    def _mine(self, name: str, device: Any = None) -> None:
        """Records a call; refuses it if it means another GPU."""
        assert self._is_mine(device), f"{name} of {device or 'the current GPU'}, which is not GPU {INDEX}"
        self.calls.append(name)

    def _set_device(self, device: Any) -> None:
        self._thread.index = device if isinstance(device, int) else device.index

    def _synchronize(self, device: Any = None) -> None:
        self._mine("synchronize", device)
        self.wait_on_host()
        self._round_by_work.update(self._works_of_round)
        self._works_of_round.clear()

    def _empty_cache(self) -> None:
        self._mine("empty_cache")
        self.reserved = self.allocated

    def _reset_peak(self, device: Any = None) -> None:
        self._mine("reset_peak", device)
        self.count_freed()
        self.peak, self.reserved_peak = self.allocated, self.reserved

    def _reset_retries(self, device: Any = None) -> None:
        self._mine("reset_retries", device)
        self.num_retries = 0

    def _value(self, attribute: str, device: Any = None) -> int:
        # The memory of other GPUs, for which anybody may ask, is empty.
        return getattr(self, attribute) if self._is_mine(device) else 0

    def _clock_rate(self, device: Any = None) -> float:
        self._mine("clock_rate", device)
        return (BUSY_HZ if self.is_busy else IDLE_HZ) / 1e6

    def _memory_info(self, device: Any = None) -> tuple[int, int]:
        self._mine("mem_get_info", device)
        return CAPACITY_BYTES - self.reserved, CAPACITY_BYTES

    def _event(gpu: "FakeGpu", *_: Any, **__: Any) -> Any:  # noqa: N805
        class Event:
            def record(self, stream: Any = None) -> None:
                gpu._mine("record")
                self.mark = gpu.mark(stream.name if stream else gpu.stream)
                self.mark.end_s = max(self.mark.end_s, gpu.host_s)

            def query(self) -> bool:
                gpu._mine("query")
                return gpu.host_s >= self.mark.end_s

        return Event()

    def _history(self, enabled: str | None = "all", **_: Any) -> None:
        self._mine(f"history {enabled}")

    @contextmanager
    def installed(self, tensors: AbstractContextManager[Any] | None = None) -> Iterator[None]:
        """Puts this GPU and its clock into the place of those of torch and of the host.

        `tensors` makes and watches its tensors, by default those of a measurement.
        """
        value = partial(partial, self._value)
        functions = {
            "synchronize": self._synchronize, "set_device": self._set_device, "empty_cache": self._empty_cache,
            "current_device": lambda: getattr(self._thread, "index", 0), "is_available": lambda: True,
            "is_initialized": lambda: True, "device_count": lambda: NUM_GPUS, "Event": self._event,
            "reset_peak_memory_stats": self._reset_peak, "reset_accumulated_memory_stats": self._reset_retries,
            "memory_allocated": value("allocated"), "memory_reserved": value("reserved"),
            "max_memory_allocated": value("peak"), "max_memory_reserved": value("reserved_peak"),
            "memory_stats": lambda device=None: {"num_alloc_retries": self._value("num_retries", device)},
            "get_device_name": lambda device=None: NAME,
            "get_device_properties": lambda device: PROPERTIES, "get_device_capability": lambda device: (9, 0),
            "mem_get_info": self._memory_info, "clock_rate": self._clock_rate,
        }  # fmt: skip
        snapshots = {
            "_record_memory_history": self._history,
            "_dump_snapshot": lambda path: self._mine(f"snapshot {path.rpartition('/')[2]}"),
        }
        with ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(torch.cuda, **functions))
            stack.enter_context(mock.patch.multiple(torch.cuda.memory, **snapshots))
            stack.enter_context(mock.patch.multiple(time, perf_counter=lambda: self.host_s))
            stack.enter_context(tensors or _Tensors(self))
            yield


class _Tensors(TorchFunctionMode):
    """Makes the tensors of the GPU on the CPU, large ones without data, and queues products and copies of those."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.__name__
        if kwargs.pop("pin_memory", False):
            self._gpu.calls.append("pinned")
        if name == "to" and isinstance(args[1], (torch.device, str)):
            assert torch.device(args[1]) in (self._gpu.device, torch.device("cpu")), f"a tensor to {args[1]}"
            self._gpu.calls.append(f"to {args[1]}")
            args = (args[0], "cpu", *args[2:])
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            assert torch.device(kwargs["device"]) == self._gpu.device, f"a tensor on {kwargs['device']}"
            shape = args[0] if args and isinstance(args[0], (tuple, torch.Size)) else args
            num_elements = 1
            for size in shape if name in ("empty", "zeros", "ones", "randn", "rand") else ():
                num_elements *= size
            kwargs["device"] = "meta" if num_elements > MAX_DATA_BYTES // 8 else "cpu"
            if kwargs["device"] == "meta":
                self._gpu.calls.append(f"{name} {'x'.join(map(str, shape))}")
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.is_meta:
            self._queue(name, args, out)
        return out

    def _queue(self, name: str, args: Any, out: Tensor) -> None:
        if name in ("mm", "matmul"):
            assert args[0] is not args[1], "a product of a matrix with itself"
            flops = 2 * out.numel() * args[0].shape[-1]
            self._gpu.launch_paced(name, out.nbytes, flops / FLOPS_PER_S[out.dtype])
        elif name in ("copy_", "clone", "zero_", "fill_"):
            num_bytes = out.nbytes * (2 if name in ("copy_", "clone") else 1)
            self._gpu.launch_paced(name, out.nbytes, num_bytes / COPY_BYTES_PER_S)


LINK_BYTES_PER_S, NODE_LINK_BYTES_PER_S = 5e10, 4e11
"""Bytes that cross a link in a second: between all ranks, and between those of one node."""
SLOWEST = 1.25
"""Time of the slowest rank, relative to this one."""
LINK_SHARE = {
    "all_reduce": 2.0, "all_gather_into_tensor": 1.0, "reduce_scatter_tensor": 1.0, "all_to_all_single": 1.0,
}  # fmt: skip
"""Collective -> bytes that cross a link, relative to (n - 1) / n of its larger tensor."""
SLOW_ROUNDS_OF_LINKS = 2
BARRIER_S = 0.05
"""Seconds that this rank waits for the others."""


class FakeRanks:
    """The process group of a rank: other ranks are slower, and collectives take the time of their bytes."""

    def __init__(self, gpu: FakeGpu, rank: int, world_size: int) -> None:
        self.gpu, self.rank, self.world_size = gpu, rank, world_size
        self.groups: list[list[int]] = []
        self.backends: list[str | None] = []

    def ranks_of(self, group: Any) -> list[int]:
        """The ranks of a group that has been made and not destroyed."""
        if group is None:
            return [*range(self.world_size)]
        assert any(group is made for made in self.groups), "a group that does not exist"
        assert self.rank in group, f"rank {self.rank} calls a collective of the ranks {group}"
        return group  # type: ignore[no-any-return]

    def _communicate(self, name: str, tensor: Tensor, group: Any, share: float | None = None) -> None:
        ranks = self.ranks_of(group)
        if share is None:
            share = LINK_SHARE[name] * (len(ranks) - 1) / len(ranks)
        rate = LINK_BYTES_PER_S if len(ranks) == self.world_size else NODE_LINK_BYTES_PER_S
        work_name = f"{name} of {len(ranks)}"
        self.gpu.launch_paced(work_name, tensor.nbytes, tensor.nbytes * share / rate, SLOW_ROUNDS_OF_LINKS)

    def _all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if tensor.is_meta or tensor.dtype == torch.float32:  # a buffer that is measured
            self._communicate("all_reduce", tensor, group)
        elif op == dist.ReduceOp.MAX:
            tensor.mul_(SLOWEST)
        elif op != dist.ReduceOp.SUM:
            raise AssertionError(f"{op} over ranks whose other values are unknown")
        elif tensor.shape == (self.world_size,):  # a value of each rank: those of the others are smaller
            (own_index,) = tensor.nonzero().flatten().tolist()
            assert own_index == self.rank, f"rank {self.rank} gave the value of rank {own_index}"
            value = tensor[self.rank].clone()
            for other in range(self.world_size):
                tensor[other] = value / (1 + abs(other - self.rank))
        else:
            tensor.mul_(self.world_size)

    def _all_gather(self, out: Tensor, part: Tensor, group: Any = None) -> None:
        assert out.numel() == part.numel() * len(self.ranks_of(group))
        self._communicate("all_gather_into_tensor", out, group)

    def _reduce_scatter(self, part: Tensor, tensor: Tensor, group: Any = None) -> None:
        assert tensor.numel() == part.numel() * len(self.ranks_of(group))
        self._communicate("reduce_scatter_tensor", tensor, group)

    def _all_to_all(self, out: Tensor, tensor: Tensor, group: Any = None) -> None:
        assert out.numel() == tensor.numel()
        assert out is not tensor
        self._communicate("all_to_all_single", tensor, group)

    def _exchange(self, operations: Any) -> list[Any]:
        """Sends to the next rank of the group and receives from the one before."""
        (_, sent, receiver, group), (_, received, sender, _) = operations
        ranks = self.ranks_of(group)
        position = ranks.index(self.rank)
        assert (receiver, sender) == (ranks[(position + 1) % len(ranks)], ranks[position - 1])
        assert sent is not received
        self._communicate("exchange", sent, group, share=1.0)
        return [SimpleNamespace(wait=lambda: None)] * 2

    def _barrier(self, group: Any = None) -> None:
        self.gpu.calls.append("barrier")
        self.gpu.host_s += BARRIER_S

    def _new_group(self, ranks: list[int] | None = None, backend: str | None = None) -> list[int]:
        self.backends.append(backend)
        self.groups.append([*range(self.world_size)] if ranks is None else ranks)
        return self.groups[-1]

    def _destroy(self, group: Any) -> None:
        self.groups = [made for made in self.groups if made is not group]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Puts these ranks into the place of those of torch.distributed."""
        functions = {
            "get_rank": lambda group=None: self.rank, "get_process_group_ranks": self.ranks_of,
            "get_world_size": lambda group=None: len(self.ranks_of(group)),
            "barrier": self._barrier, "broadcast": lambda tensor, src: None,
            "all_reduce": self._all_reduce, "all_gather_into_tensor": self._all_gather,
            "reduce_scatter_tensor": self._reduce_scatter, "all_to_all_single": self._all_to_all,
            "batch_isend_irecv": self._exchange, "P2POp": lambda *operation: operation,
            "new_group": self._new_group, "destroy_process_group": self._destroy,
        }  # fmt: skip
        with mock.patch.multiple(dist, **functions):
            yield


BUILD_S, DATA_S, PASSES_S, UPDATE_S = 7.0, 0.5, 1.0, 0.25
STATE_BYTES, PASSES_BYTES = 16 * GIB, 8 * GIB
"""Bytes of a trained model, and what a step needs beside them. PASSES_S are seconds of a micro-batch."""
RETRY_STEP = 8
"""The number of steps after which, once, the allocator gives back what it holds in reserve."""
PASSES_FLOPS, UPDATE_FLOPS = 2 * 3 * 4 * 5, 2 * 2 * 2 * 2
"""FLOPs of one rank: a product in the passes of each micro-batch, and one in the update."""


class FakeTrainer:
    """Trains on a fake GPU: its initial values need more memory than its steps."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.device, self.gradient_norm = gpu, gpu.device, 1.0
        self.compiler = SimpleNamespace(num_graphs=0)
        self.step_numbers: list[int] = []
        self.layout: Any = SimpleNamespace(gas=1)
        self.num_timed = 1
        """Micro-batches that the passes of the next steps take time for."""
        self.pace: Iterator[float] = repeat(1.0)
        """Time of the micro-batches of each step, relative to PASSES_S."""

    def set_gas(self, gas: int) -> None:
        """The next steps have so many micro-batches."""
        self.layout.gas = self.num_timed = gas

    def build(self, *_: Any, **__: Any) -> "FakeTrainer":
        """This trainer, when the work that makes its initial values is queued."""
        self._queue("build", BUILD_S, 64 * GIB)
        self.gpu.allocate(STATE_BYTES)
        self.gpu.num_retries = 3
        return self

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The data of a step, copied while the host goes on."""
        self.step_numbers.append(step)
        self._queue("batch", DATA_S, GIB)
        return torch.empty(3, 5), torch.empty(5, 4)

    def accumulate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward."""
        self._queue("passes", self.num_timed * PASSES_S * next(self.pace), PASSES_BYTES)
        for _ in range(self.num_timed):
            inputs @ targets
        return torch.ones(())

    def update(self, loss: Tensor) -> Tensor:
        """The optimizer."""
        torch.ones(2, 2) @ torch.ones(2, 2)
        self._queue("update", UPDATE_S, GIB)
        if len(self.step_numbers) == RETRY_STEP:
            self.gpu.retry()
        return loss

    def _queue(self, name: str, seconds: float, num_bytes: int) -> None:
        self.gpu.calls.append(name)
        self.gpu.launch(name, seconds, num_bytes)
