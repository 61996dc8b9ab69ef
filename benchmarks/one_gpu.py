"""Checks layouts of several ranks on one GPU, which they share; their messages go through the memory of the host.

    python benchmarks/one_gpu.py [--device cpu] [--processes 4] LAYOUT...   # such as "tp=2 gas=2" "cp=2 --compile"

NCCL wants a GPU for each rank. Here a process group copies each message to the host, where gloo sends it, so that all
code of the kernel runs on the GPU but NCCL's. Each line is what `ultrabench kernel check` says of the layout in bf16.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._dynamo.variables import distributed as compiled
from torch.futures import Future

from ultrabench.cli.kernel.check import check_spec
from ultrabench.kernel.check import parity
from ultrabench.processes import thread_variables
from ultrabench.record import from_dict, to_dict

BACKEND = "staged"


def done() -> dist.Work:
    """The work of an operation that has ended."""
    future: Future[None] = Future()
    future.set_result(None)
    return c10d._create_work_from_future(future)


class Arriving:
    """A message that is copied to its device when it is waited for."""

    def __init__(self, work: dist.Work, host: Tensor, tensor: Tensor) -> None:
        self._work, self._host, self._tensor = work, host, tensor

    def wait(self, *_: Any) -> bool:
        self._work.wait()
        self._tensor.copy_(self._host)
        return True


class Staged(dist.ProcessGroup):
    """A process group that copies tensors to the host and back; each operation but a message ends at once."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo, self._sent = dist.ProcessGroupGloo(store, rank, size, timeout), list[Any]()
        for device in ("cpu", "cuda"):  # its name is that of a backend
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, self._gloo)

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def _run(
        self, op: Callable[..., dist.Work], outs: list[Tensor], ins: list[Tensor], opts: Any
    ) -> dist.Work:
        """Runs `op(out, in)` of gloo for each pair of tensors on the host; an average is a sum, then divided."""
        average = getattr(opts, "reduceOp", None) == dist.ReduceOp.AVG
        if average:
            opts.reduceOp = dist.ReduceOp.SUM
        for out, local in zip(outs, ins, strict=True):
            host = torch.empty(out.shape, dtype=out.dtype)
            op(host, local.detach().to("cpu", copy=True), opts).wait()
            out.detach().copy_(host / self.size() if average else host)
        return done()

    def _in_place(self, name: str, tensors: list[Tensor], opts: Any) -> dist.Work:
        def op(out: Tensor, local: Tensor, opts: Any) -> dist.Work:
            work: dist.Work = getattr(self._gloo, name)([local], opts)
            work.wait()
            out.copy_(local)
            return work

        return self._run(op, tensors, tensors, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._in_place("allreduce", tensors, opts or c10d.AllreduceOptions())

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        plain = c10d.AllreduceOptions()
        plain.reduceOp = opts.reduceOp
        return self._in_place("allreduce", tensors, plain)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._in_place("broadcast", tensors, opts or c10d.BroadcastOptions())

    def _allgather_base(self, out: Tensor, local: Tensor, opts: Any = None) -> dist.Work:
        return self.allgather_into_tensor_coalesced([out], [local], opts)

    def allgather_into_tensor_coalesced(
        self, outs: list[Tensor], ins: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._run(self._gloo._allgather_base, outs, ins, opts or c10d.AllgatherOptions())

    def allgather(self, outs: list[list[Tensor]], ins: list[Tensor], opts: Any = None) -> dist.Work:
        local = ins[0].flatten()
        flat = local.new_empty(len(outs[0]) * local.numel())
        self._allgather_base(flat, local)
        for out, part in zip(outs[0], flat.chunk(len(outs[0])), strict=True):
            out.detach().copy_(part.view_as(out))
        return done()

    def _reduce_scatter_base(self, out: Tensor, local: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_tensor_coalesced([out], [local], opts)

    def reduce_scatter_tensor_coalesced(
        self, outs: list[Tensor], ins: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._run(self._gloo._reduce_scatter_base, outs, ins, opts or c10d.ReduceScatterOptions())

    def alltoall_base(
        self, out: Tensor, local: Tensor, out_sizes: list[int], in_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        host, options = torch.empty(out.shape, dtype=out.dtype), opts or c10d.AllToAllOptions()
        self._gloo.alltoall_base(
            host, local.detach().to("cpu", copy=True), out_sizes, in_sizes, options
        ).wait()
        out.detach().copy_(host)
        return done()

    def barrier(self, opts: Any = None) -> dist.Work:
        self._gloo.barrier().wait()
        return done()

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> dist.Work:
        host = tensors[0].detach().to("cpu", copy=True)
        work = self._gloo.send([host], to, tag)
        self._sent.append((work, host))  # the copy lives until the end
        return done()

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        host = torch.empty(tensors[0].shape, dtype=tensors[0].dtype)
        return Arriving(self._gloo.recv([host], source, tag), host, tensors[0].detach())


def one_by_one(ops: list[dist.P2POp]) -> list[Any]:
    """`dist.batch_isend_irecv` without the coalescing of backends, which this group does not have."""
    return [p.op(p.tensor, group=p.group, tag=p.tag, group_dst=p.group_peer) if p.op is dist.isend else
            p.op(p.tensor, group=p.group, tag=p.tag, group_src=p.group_peer) for p in ops]  # fmt: skip


@contextlib.contextmanager
def shared_gpu() -> Iterator[None]:
    """Within it the ranks of a check share the GPU 0 and talk through `Staged`."""
    start, own_device, forked = dist.init_process_group, parity._prepare_device, parity.run_forked

    def init(_: str, **options: Any) -> None:
        start(BACKEND, **{**options, "device_id": None})

    def run(bodies: dict[str, Any], limit_s: float) -> dict[str, Any]:
        return {"GPUs": 1024} if "GPUs" in bodies else forked(bodies, limit_s)

    dist.Backend.register_backend(BACKEND, Staged, devices=["cpu", "cuda"])  # type: ignore[arg-type]
    if hasattr(compiled, "ProcessGroupVariable"):  # torch 2.11 compiles no call of a subclass otherwise
        compiled.ProcessGroupVariable.is_process_group = lambda value: isinstance(value, dist.ProcessGroup)
    with (
        patch.object(dist, "init_process_group", init), patch.object(parity, "run_forked", run),
        patch.object(parity, "_prepare_device", lambda spec, _: own_device(spec, 0)),
        patch.object(dist, "batch_isend_irecv", one_by_one),
    ):  # fmt: skip
        yield


def checked(device: str, precision: str, line: str) -> tuple[str, dict[str, Any]]:
    """What a process says of one layout."""
    layout, compile_, _ = line.partition("--compile")
    options = {"device": device, "precision": precision, "compile": bool(compile_), "dump": None}
    spec = check_spec(layout.split(), options)
    command, env = [sys.executable, "-P", __file__, "--rank"], os.environ | thread_variables(1)
    ran = subprocess.run(command, input=json.dumps(to_dict(spec)), stdout=subprocess.PIPE, text=True, env=env)
    return line, json.loads(ran.stdout) if ran.returncode == 0 else {"passed": False, "error": "no answer"}


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("layouts", nargs="*")
    cli.add_argument("--device", default="cuda")
    cli.add_argument("--precision", default="bf16")
    cli.add_argument("--processes", type=int, default=4, help="number of checks at a time")
    cli.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.rank:
        with shared_gpu():
            print(json.dumps(to_dict(parity.run_check(from_dict(parity.CheckSpec, json.load(sys.stdin))))))
        return 0
    from gpu_check import differences  # it starts a thread, which a process that forks ranks may not have

    failed = 0
    with ThreadPoolExecutor(args.processes) as pool:
        for line, result in pool.map(partial(checked, args.device, args.precision), args.layouts):
            failed += not result["passed"]
            verdict, difference_text = (
                "pass" if result["passed"] else "FAIL",
                result.get("error") or differences(result),
            )
            print(
                f"| {line} | {verdict} | {result.get('seconds', 0):.0f} s | {difference_text} |", flush=True
            )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
