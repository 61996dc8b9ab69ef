"""Real training of one rank on the fake GPU: the kernel runs as it is, on tensors of CPUs that pass for those of a GPU.

Each operator is work of the stream that launches it. Products and attention take the time of their FLOPs, collectives
that of their bytes, on a stream for each group, and all others none. An operator that uses what another stream may
still write, or overwrites what it may still read, is refused, as is a tensor on another GPU. What makes the host wait
for a value is recorded as the call `read`. Other ranks answer at once: with the values of this one.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from tests.unit.kernel.fake_gpu import INDEX, FakeGpu, Mark
from ultrabench.kernel import mesh, worker
from ultrabench.kernel.compat import WAIT_OPERATOR, group_name, storage_of
from ultrabench.kernel.dryrun.counts import ExecutedFlops, LiveBytes
from ultrabench.kernel.dryrun.fake_world import observe_resizes
from ultrabench.kernel.rank import environment
from ultrabench.run import RunSpec

FLOPS_PER_S = {torch.bfloat16: 1e8, torch.float32: 1e7}
"""Dtype of a result -> the rate of its products, so slow that launches do not count."""
SENT_BYTES_PER_S = 2e7
READS = ("tolist", "cpu", "numpy")
"""Methods of tensors that read values back."""
READING_OPERATORS = ("_local_scalar_dense", "bincount", "nonzero", "masked_select", "_unique2", "equal")
"""Operators of GPUs whose result, or its size, the host has to wait for."""


class Operators(LiveBytes):  # type: ignore[no-untyped-call]
    """Queues every operator on the fake GPU, and counts the bytes of its tensors there."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__()
        self._gpu, self._flops = gpu, ExecutedFlops()
        self.sent = Mark()
        """The end of the last collective that c10d started."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """Makes tensors of the GPU on the CPU."""
        kwargs, name = dict(kwargs or {}), func._schema.name
        if (device := kwargs.get("device")) is not None and device.type == "cuda":
            assert device == self._gpu.device, f"{name}: a tensor on {device}"
            kwargs["device"] = torch.device("cpu")
        if name == "aten::record_stream":
            return None
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _set_bytes(self, counted_storage: Any, new_bytes: int) -> None:
        self._gpu.allocate(new_bytes - self._bytes_by_storage.get(counted_storage, 0))
        super()._set_bytes(counted_storage, new_bytes)

    def read(self) -> None:
        """Makes the host wait for a value."""
        self._gpu.calls.append("read")
        self._gpu.wait_on_host()

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Launches what `func` did, on a stream of its group if it is a collective."""
        super().record(func, args, kwargs, out)
        gpu, name, stream = self._gpu, func._schema.name.partition("::")[2], self._gpu.stream
        inputs, outputs = (self._storages(tensors) for tensors in ((args, kwargs), out))
        if func is WAIT_OPERATOR:
            gpu.wait_for(gpu.mark(inputs[0].written[0]), stream)
        elif name in READING_OPERATORS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.read()
        elif not (func.is_view or name.startswith(("empty", "new_empty"))):
            group = next(filter(None, map(group_name, tree_leaves((args, kwargs)))), None)
            seconds = self._product_s(func, args, kwargs, out)
            if func.namespace in ("c10d", "_c10d_functional"):
                stream = f"group {group}"
                seconds = max(storage.num_bytes for storage in inputs + outputs) / SENT_BYTES_PER_S
                gpu.wait_for(gpu.mark(gpu.stream), stream)
            if name == "recv_":
                args[0][0].zero_()  # nothing was sent
            gpu.launch(name, seconds, stream=stream)
            self._require_order(name, stream, inputs, outputs + self._storages(_written(func, args, kwargs)))
            if func.namespace == "c10d":
                self.sent = gpu.mark(stream)

    def _product_s(self, func: Any, args: Any, kwargs: Any, out: Any) -> float:
        self._flops.flops = 0
        self._flops.record(func, args, kwargs, out)
        return self._flops.flops / FLOPS_PER_S[tree_leaves(out)[0].dtype] if self._flops.flops else 0.0

    def _storages(self, tensors: Any) -> list[Any]:
        """The records of the memory of tensors, with what has used it."""
        storages = [storage_of(t) for t in tree_leaves(tensors) if isinstance(t, Tensor) and not t.is_meta]
        records = []
        for storage in storages:
            if record := self._storage_by_id.get(id(storage)):
                vars(record).setdefault("written", ("", 0))
                vars(record).setdefault("reads", {})
                vars(record)["num_bytes"] = storage.nbytes()
                records.append(record)
        return records

    def _require_order(self, name: str, stream: str, inputs: list[Any], written: list[Any]) -> None:
        """Refuses work that does not wait for work of other streams on the same memory."""
        seen = self._gpu.seen_by_stream[stream]
        for storage in inputs:
            writer, number = storage.written
            assert seen[writer] >= number, f"{name} on {stream} reads what {writer} may still write"
            storage.reads[stream] = seen[stream]
        for storage in written:
            for user, number in (*storage.reads.items(), storage.written):
                assert seen[user] >= number, f"{name} on {stream} overwrites what {user} may still use"
            storage.written, storage.reads = (stream, seen[stream]), {}


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator overwrites."""
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    is_written = {a.name: a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments}
    return [value for name, value in named.items() if is_written[name]]


class Work(dist.Work):
    """A collective under way; who waits for it lets the stream of this thread wait."""

    def __init__(self, gpu: FakeGpu, mark: Mark) -> None:
        super().__init__()
        self._gpu, self._mark = gpu, mark

    def wait(self, timeout: Any = None) -> bool:
        """Whether it succeeded."""
        self._gpu.wait_for(self._mark, self._gpu.stream)
        return True


def _streams(gpu: FakeGpu) -> dict[str, Any]:
    """The streams and events of torch.cuda, on the fake GPU."""

    class Stream:
        def __init__(self, device: Any = None, priority: int = 0, *, name: str | None = None) -> None:
            self.name = name or f"stream {len(gpu.seen_by_stream)}"
            gpu.seen_by_stream[self.name]  # makes its name new

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        def wait_event(self, event: Any) -> None:
            gpu.wait_for(event.mark, self.name)

        def wait_stream(self, other: Any) -> None:
            gpu.wait_for(gpu.mark(other.name), self.name)

        def synchronize(self) -> None:
            gpu._synchronize()

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.mark = Mark()

        def record(self, stream: Any = None) -> None:
            self.mark = gpu.mark(stream.name if stream else gpu.stream)

        def wait(self, stream: Any = None) -> None:
            gpu.wait_for(self.mark, stream.name if stream else gpu.stream)

        def synchronize(self) -> None:
            gpu._synchronize()

    return {
        "Stream": Stream, "Event": Event, "current_stream": lambda _=None: Stream(name=gpu.stream),
        "stream": lambda stream: gpu.using(stream.name) if stream else nullcontext(),
    }  # fmt: skip


@contextmanager
def _installed(gpu: FakeGpu, operators: Operators, world_size: int) -> Iterator[None]:
    """Trains on the fake GPU inside the `with` block, as the first of so many ranks."""
    make_tensor, make_mesh, make_generator = torch.tensor, mesh.init_device_mesh, torch.Generator

    def waiting(start: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, async_op: bool = False, **options: Any) -> Work | None:
            start(*args, **options)
            work = Work(gpu, operators.sent)
            if async_op:
                return work
            work.wait()
            if start.__name__ == "all_reduce" and args[0].dim() == 0 and args[1] == dist.ReduceOp.SUM:
                args[0].mul_(world_size)  # a number of the host, such as its FLOPs
            return None

        return call

    def exchange(operations: list[Any], start: Callable[..., Any] = dist.batch_isend_irecv) -> list[Work]:
        start(operations)
        return [Work(gpu, operators.sent)]

    def reading(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: operators.read() or method(*args, **options)

    starts = {
        name: waiting(function) for name, function in vars(dist).items()
        if type(function) is FunctionType and "async_op" in inspect.signature(function).parameters
    }  # fmt: skip
    starts["batch_isend_irecv"] = exchange
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    with ExitStack() as stack:
        stack.callback(dist.destroy_process_group)
        for module in (dist, dist.distributed_c10d):
            stack.enter_context(mock.patch.multiple(module, **starts))
        methods = {name: reading(getattr(Tensor, name)) for name in READS}
        stack.enter_context(mock.patch.multiple(Tensor, **methods))
        on_cpu = {
            "Generator": lambda _=None: make_generator(),
            "tensor": lambda *args, device=None, **options: make_tensor(*args, **options),
        }
        stack.enter_context(mock.patch.multiple(torch, **on_cpu))
        # The tensors are those of CPUs, so that torch asks the module of CPUs for streams.
        functions_of_cpus = {**_streams(gpu), "get_rng_state": lambda _=None: torch.get_rng_state()}
        for module in (torch.cuda, torch.cpu, torch.accelerator):
            functions = {name: value for name, value in functions_of_cpus.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **functions))
        mesh_of_cpus = {"init_device_mesh": lambda _, *args, **options: make_mesh("cpu", *args, **options)}
        stack.enter_context(mock.patch.multiple(mesh, **mesh_of_cpus))
        stack.enter_context(observe_resizes(operators.count_resized))
        stack.enter_context(gpu.installed(operators))
        yield


class TrainedRun:
    """The reports and the calls of a rank that has been built and has trained three steps, the last one measured."""

    def __init__(self, spec: RunSpec) -> None:
        self.gpu, self.reports = FakeGpu(), list[dict[str, Any]]()
        operators, calls = Operators(self.gpu), self.gpu.calls
        self.gpu.count_freed = operators._subtract_freed
        limits = SimpleNamespace(
            warmup_steps=2,
            min_steps=1,
            max_steps=1,
            min_s=0.0,
            warmup_s=0.0,
            target_ci95_rel=1.0,
            loss_step=3,
        )
        self.spec = replace(spec, kernel=replace(spec.kernel, attention="flash"))
        task = SimpleNamespace(
            spec=self.spec,
            largest_spec=self.spec,
            measure=limits,
            slice=None,
            few_steps=False,
            traced=False,
            checkpoint=None,
        )
        report = SimpleNamespace(
            enter_part=lambda part, _: calls.append(f"part {part}"), phase=lambda _: None, microbatch=None,
            write=self._write,
        )  # fmt: skip
        finished = partial(calls.append, "micro-batch")
        progress = mock.patch.object(worker, "device_progress", return_value=finished)
        with _installed(self.gpu, operators, spec.layout.world_size), progress:
            worker._train(task, environment.use_device("cuda", INDEX), report)  # type: ignore[arg-type]

    def _write(self, event: str, **facts: Any) -> None:
        self.gpu.calls.append(event)
        self.reports.append({"event": event, **facts})

    def events(self, name: str) -> list[dict[str, Any]]:
        """The reports of this event."""
        return [report for report in self.reports if report["event"] == name]

    def step_calls(self) -> list[list[str]]:
        """What the host asked the GPU for in each step, from its data to its report."""
        calls = " ".join(call.replace(" ", "_") for call in self.gpu.calls)
        return [["part_0", *step.partition(" step")[0].split()] for step in calls.split("part_0")[1:]]
