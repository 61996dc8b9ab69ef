"""Measures how long the sharded state of training takes to save and to load, by torch.distributed.checkpoint."""

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from ultrabench.kernel.cut import num_tp_copies
from ultrabench.kernel.mesh import reduce_over_ranks
from ultrabench.kernel.moe import router_biases
from ultrabench.kernel.rank.clock import Result, run_timed
from ultrabench.kernel.step import TrainStep

SYNC_FOLDER, ASYNC_FOLDER = "sync", "async"
"""Names of the folders of the two saves, inside the folder of the checkpoints of a run."""


class NotLoadedError(RuntimeError):
    """The loaded state differs from the state that was saved."""


class CheckpointWriter(FileSystemWriter):
    """Writes files, and names the error of the file system, which torch hides behind an error of its archive."""

    def write_data(self, *args: Any) -> Any:
        """What torch's writer returns; the error that it raises is the one of the file system, if there is one."""
        try:
            return super().write_data(*args)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


def sharded_state(trainer: TrainStep) -> dict[str, Tensor]:
    """The parameters, moments and steps of the optimizer and biases of routers on this rank, in the trainer's memory.

    A name is that of the parameter and its place in the full one, so that ranks have a name in common only if they
    hold copies, which one of them saves. With tp the copies of norms, routers and key/value heads may differ by
    rounding (see `replicas.py`), so that each rank saves its own.
    """
    tensors = {name: bias for model in trainer.models for name, bias in router_biases(model).items()}
    for name, shard in trainer.shards.items():
        place_text = ",".join(f"{dim}:{start}+{length}" for dim, start, length in trainer.parts[name])
        if num_tp_copies(trainer.cuts[name], trainer.layout.tp) > 1:
            place_text = f"rank{dist.get_rank()}"
        if shard.numel():
            moment_by_key = trainer.optimizer.state[shard]
            tensors[f"{name}@{place_text}"] = shard
            tensors |= {f"{name}@{place_text}.{key}": moment for key, moment in moment_by_key.items()}
    return tensors


def have_same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one type hold the same bits, also where these are no numbers."""
    return torch.equal(*(t.cpu().contiguous().flatten().view(torch.uint8) for t in (a, b)))


class CheckpointMeasurement:
    """Measures the saves and the load of one run; all ranks have to call every method together."""

    def __init__(self, trainer: TrainStep, folder: Path) -> None:
        """`folder` is a new one that all ranks see; what is saved there is removed again."""
        self.device, self.folder, self.tensors = trainer.device, folder, sharded_state(trainer)
        # The thread of an async save needs a group of its own, and that of CPUs.
        self.group = dist.new_group(backend="gloo")

    def _time_all_ranks(self, work: Callable[[], Result]) -> tuple[float, Result]:
        """The seconds of the slowest rank for work that all begin together, and what `work` returns here."""
        dist.barrier()
        seconds, result = run_timed(self.device, work)
        return reduce_over_ranks(seconds, self.device), result

    def _remove_folder(self, path: Path) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)  # the agent removes what is left

    def save_and_load(self) -> dict[str, float]:
        """Saves and loads; meanwhile the host holds a copy of the state of its ranks, to compare it.

        Raises:
            NotLoadedError: a loaded tensor differs in a bit from the saved one.
            CheckpointException: a rank could not write or read; it is no Exception, and has the errors of all ranks.
        """
        save_path, tensors, saved_bytes = self.folder / SYNC_FOLDER, self.tensors, 0
        writer, group = CheckpointWriter(save_path), self.group
        save_s, _ = self._time_all_ranks(partial(save, tensors, storage_writer=writer, process_group=group))
        if dist.get_rank() == 0:
            saved_bytes = sum(file.stat().st_size for file in save_path.iterdir())
        copy_by_name = {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.zero_()
        load_s, _ = self._time_all_ranks(partial(load, tensors, checkpoint_id=save_path, process_group=group))
        differing_names = [n for n, t in tensors.items() if not have_same_bits(t, copy_by_name.pop(n))]
        if reduce_over_ranks(len(differing_names), self.device):
            raise NotLoadedError(f"the loaded state differs: {differing_names or 'only on other ranks'}")
        self._remove_folder(save_path)
        return {"save_s": save_s, "load_s": load_s, "bytes": saved_bytes}

    def save_during_training(self, train_step: Callable[[], float], step_time_s: float) -> dict[str, float]:
        """Saves while training goes on, and trains until all ranks have saved.

        Args:
            train_step: trains a step and returns its seconds.
            step_time_s: seconds of a step that no save disturbs.

        Raises:
            CheckpointException: as in `save_and_load`.
        """
        end_times_s, writer = list[float](), CheckpointWriter(self.folder / ASYNC_FOLDER)

        def begin_save() -> tuple[float, Any]:
            start_s = time.perf_counter()
            return start_s, async_save(self.tensors, storage_writer=writer, process_group=self.group)

        blocking_s, (start_s, pending_save) = self._time_all_ranks(begin_save)
        pending_save.add_done_callback(lambda _: end_times_s.append(time.perf_counter()))
        disturbed_times_s = [train_step()]
        while reduce_over_ranks(not end_times_s, self.device):
            disturbed_times_s.append(train_step())
        pending_save.result()
        save_s = reduce_over_ranks(end_times_s[0] - start_s, self.device)
        self._remove_folder(self.folder)
        lost_steps = sum(seconds / step_time_s - 1 for seconds in disturbed_times_s)
        return {"async_blocking_s": blocking_s, "async_s": save_s, "async_lost_steps": lost_steps}


def first_failure(error: BaseException) -> BaseException:
    """The first error of a rank, where torch wraps the errors of all ranks."""
    error_by_rank = getattr(error, "failures", None) or {}
    return next((rank_error for rank_error, _ in error_by_rank.values()), error)
