"""Probes, checkpoints and traces report known times and bytes of a fake GPU."""

import gzip
import json
import tempfile
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from tests.parity.test_worker import shares
from tests.unit.kernel.fake_gpu import (
    BUSY_HZ,
    COPY_BYTES_PER_S,
    DATA_S,
    FLOPS_PER_S,
    INDEX,
    LAUNCH_S,
    LINK_BYTES_PER_S,
    NODE_LINK_BYTES_PER_S,
    PACE,
    PASSES_BYTES,
    PASSES_S,
    SLOWEST,
    STATE_BYTES,
    UPDATE_S,
    FakeGpu,
    FakeRanks,
    FakeTrainer,
)
from ultrabench.device_rates import OPERATIONS, ProbeSettings
from ultrabench.kernel.rank import checkpoint, environment, trace
from ultrabench.kernel.rank.probe import COPY_BYTES, GEMM_ROWS, NUM_CLOCK_GEMMS, probe
from ultrabench.layout import Layout

SETTINGS = ProbeSettings(operations=OPERATIONS, sizes_bytes=(2**25, 2**28), calls=5, device_s=0.1)
RANK, NUM_RANKS, GPUS_PER_NODE = 2, 4, 2
NEAR = {"rel": 2e-3}
"""Of the launch of one of five calls."""


@cache
def probed():
    """The GPU after a probe by the third of four ranks, two on each node; what it returned and its progress."""
    gpu, progress = FakeGpu(), []
    ranks = FakeRanks(gpu, RANK, NUM_RANKS)
    with gpu.installed(), ranks.installed():
        device = environment.use_device("cuda", INDEX)
        rates = probe(device, GPUS_PER_NODE, SETTINGS, lambda: progress.append(gpu.host_s))
    return gpu, ranks, rates, progress


def by_rank(value):
    """The values of all ranks, of which those of the others are smaller."""
    return pytest.approx([value / (1 + abs(rank - RANK)) for rank in range(NUM_RANKS)], **NEAR)


def test_a_probe_measures_products_copies_and_clocks():
    """Median rates of random bf16 matrices and of a copy that reads and writes, on an idle GPU; a busy GPU's clock."""
    gpu, _, rates, _ = probed()
    rows, copied = GEMM_ROWS["cuda"], COPY_BYTES["cuda"]
    assert rates["gemm_flops_per_s"] == by_rank(FLOPS_PER_S[torch.bfloat16])
    assert rates["memory_copy_bytes_per_s"] == by_rank(COPY_BYTES_PER_S)
    assert rates["gemm_sm_clock_hz"] == by_rank(BUSY_HZ)
    assert gpu.calls[:4] == [f"randn 2x{rows}x{rows}", "synchronize", "synchronize", "barrier"]
    groups = {"mm": SETTINGS.device_s, "copy_": SETTINGS.device_s / 3}
    for name, size, seconds in (
        ("mm", 2 * rows**2, 2 * rows**3 / FLOPS_PER_S[torch.bfloat16]),
        ("copy_", copied, 2 * copied / COPY_BYTES_PER_S),
    ):
        launches = gpu.num_launches[name, size] - 1 - NUM_CLOCK_GEMMS * (name == "mm")
        assert launches % 5 == 0, "one call to warm up, then five together"
        mean_pace = sum(PACE) / len(PACE)
        assert launches * seconds * mean_pace == pytest.approx(groups[name], abs=10 * seconds)


def test_a_probe_measures_the_links():
    """Times of the slowest rank and bandwidths of each operation and size, over all ranks and over those of a node."""
    gpu, ranks, rates, progress = probed()
    assert [*rates["collectives"]] == [*OPERATIONS]
    rounds = SETTINGS.warmup + SETTINGS.iterations
    for operation, rows_by_scope in rates["collectives"].items():
        for scope, num_ranks, link in (
            ("all", NUM_RANKS, LINK_BYTES_PER_S), ("intra_node", GPUS_PER_NODE, NODE_LINK_BYTES_PER_S)
        ):  # fmt: skip
            for row, size in zip(rows_by_scope[scope], SETTINGS.sizes_bytes, strict=True):
                seconds = SLOWEST * size * shares(num_ranks)[operation] / link
                assert row == pytest.approx({
                    "bytes": size, "seconds": seconds, "busbw_bytes_per_s": link / SLOWEST,
                    "busbw_p5_bytes_per_s": link / SLOWEST / max(PACE),
                    "busbw_p95_bytes_per_s": link / SLOWEST / min(PACE),
                }, rel=0.02)  # fmt: skip
    launches = [n for (name, _), n in gpu.num_launches.items() if " of " in name]
    assert launches == [rounds * SETTINGS.calls] * len(launches)
    assert len(launches) == 2 * len(OPERATIONS) * len(SETTINGS.sizes_bytes)
    assert len(progress) == 2 + len(launches)
    assert ranks.groups == [[0, 1]], "the group of this node is destroyed"


SAVE_S, COPY_S, LOAD_S, STAGE_S, WRITE_S, DISTURBED_S, STEP_S = 2.0, 1.0, 4.0, 0.5, 6.0, 2.0, 1.6
FILE_BYTES = (1000, 234)


class Storage:
    """Saves and loads the state of a rank in known seconds, which the host spends, and the GPU for copies."""

    def __init__(self, gpu):
        self.gpu, self.saved, self.pending, self.error = gpu, {}, None, None

    def save(self, tensors, storage_writer, process_group):
        """Writes files; the last copy is still under way when the host goes on."""
        self.saved = {name: tensor.clone() for name, tensor in tensors.items()}
        self.gpu.host_s += SAVE_S
        self.gpu.launch("copy to the host", COPY_S)
        folder = Path(storage_writer.path)
        folder.mkdir(parents=True)
        for n, size in enumerate(FILE_BYTES):
            (folder / f"{n}.distcp").write_bytes(bytes(size))

    def load(self, tensors, checkpoint_id, process_group):
        """Reads files into a state that must have been cleared."""
        assert Path(checkpoint_id).is_dir()
        assert not any(tensor.any() for tensor in tensors.values()), "the state was still there"
        self.gpu.host_s += LOAD_S
        self.gpu.launch("copy to the device", COPY_S)
        for name, tensor in tensors.items():
            tensor.copy_(self.saved[name])

    def async_save(self, tensors, storage_writer, process_group):
        """Copies the state to the host, and writes it later."""
        assert all(torch.equal(tensor, self.saved[name]) for name, tensor in tensors.items())
        self.gpu.host_s += STAGE_S
        self.gpu.launch("copy to the host", COPY_S)
        self.pending, self.end_s = Future(), self.gpu.host_s + WRITE_S
        return self.pending

    def train(self):
        """A step, during which the save may end."""
        step_end_s = self.gpu.host_s + DISTURBED_S
        if not self.pending.done() and self.end_s <= step_end_s:
            self.gpu.host_s = self.end_s
            self.pending.set_exception(self.error) if self.error else self.pending.set_result(None)
        self.gpu.host_s = step_end_s
        return DISTURBED_S


def saved(change=lambda storage: None):
    """What is measured of checkpoints by rank 0 of two, while the GPU still works on something else."""
    gpu = FakeGpu()
    storage, state = Storage(gpu), {"weight": torch.randn(5), "moment": torch.randn(3)}
    change(storage)
    fakes = {
        "sharded_state": lambda trainer: state, "save": storage.save, "load": storage.load,
        "async_save": storage.async_save,
    }  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as name, mock.patch.multiple(checkpoint, **fakes), gpu.installed(),
        (ranks := FakeRanks(gpu, 0, 2)).installed(),
    ):  # fmt: skip
        trainer = SimpleNamespace(device=environment.use_device("cuda", INDEX))
        gpu.launch("what came before", 20.0)
        measurement = checkpoint.CheckpointMeasurement(trainer, Path(name) / "checkpoint")
        synchronous = measurement.save_and_load()
        gpu.launch("what came before", 20.0)
        asynchronous = measurement.save_during_training(storage.train, STEP_S)
        assert not [*Path(name).iterdir()], "files are left"
    assert ranks.backends == ["gloo"], "the thread of a save in the background needs a group of CPUs"
    return synchronous | asynchronous, gpu.calls


def test_a_checkpoint_is_timed_on_the_slowest_rank_from_idle_to_idle():
    """Saving, loading, the part that blocks training and the end of a save in the background; bytes and lost steps."""
    results, calls = saved()
    num_steps = 3  # of 2 s; the save ends in the third one: the host is blocked until 1.5 s
    assert results == pytest.approx({
        "save_s": SLOWEST * (SAVE_S + COPY_S), "load_s": SLOWEST * (LOAD_S + COPY_S), "bytes": sum(FILE_BYTES),
        "async_blocking_s": SLOWEST * (STAGE_S + COPY_S), "async_s": SLOWEST * (STAGE_S + WRITE_S),
        "async_lost_steps": num_steps * (DISTURBED_S / STEP_S - 1),
    }, abs=1e-4)  # fmt: skip
    timed = ["barrier", "synchronize", "synchronize"]
    copied = ["to cpu"] * 2  # of both tensors, to compare them
    assert calls == timed + copied + timed + ["barrier"] + timed + ["barrier"]


def test_a_state_that_differs_by_a_bit_is_found():
    """Also by the sign of a zero."""

    def flip(storage):
        right = storage.load

        def load(tensors, **options):
            right(tensors, **options)
            tensors["moment"][1] = -0.0

        def save(tensors, **options):
            tensors["moment"][1] = 0.0
            right_save(tensors, **options)

        right_save, storage.save, storage.load = storage.save, save, load

    message = ""
    try:
        saved(flip)
    except checkpoint.NotLoadedError as error:
        message = str(error)
    assert message == "the loaded state differs: ['moment']"


def test_a_save_in_the_background_that_fails_is_told():
    with pytest.raises(OSError, match="full"):
        saved(lambda storage: setattr(storage, "error", OSError("full")))


class Profiler:
    """Traces the kernels of a fake GPU in the steps that its schedule records, as torch's profiler does."""

    def __init__(self, gpu, options):
        self.gpu, self.options, self.events, self.step_number, self.start_s = gpu, options, [], 0, 0.0

    def __enter__(self):
        self.start_s = self.gpu.host_s
        return self

    def step(self):
        """The end of a step."""
        action, gpu = self.options["schedule"](self.step_number), self.gpu
        if action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE):
            annotation = ("user_annotation", f"ProfilerStep#{self.step_number}", self.start_s, gpu.host_s)
            kernels = [("kernel", *k) for k in gpu.kernels if self.start_s <= k[1] < gpu.host_s]
            self.events += [annotation, *kernels]
        self.step_number, self.start_s = self.step_number + 1, gpu.host_s

    def export_chrome_trace(self, path):
        """Writes the events in microseconds."""
        events = [
            {"ph": "X", "cat": cat, "name": name, "ts": start * 1e6, "dur": (end - start) * 1e6, "tid": 1}
            for cat, name, start, end in self.events
        ]
        Path(path).write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))

    def __exit__(self, *_):
        self.options["on_trace_ready"](self)


def traced(rank):
    """The GPU, the trainer, the profiler's options and the summary of a trace of `rank` of two pipeline stages."""
    gpu = FakeGpu()
    trainer, profilers = FakeTrainer(gpu), []
    weight = torch.zeros(6, dtype=torch.float64)
    trainer.layout, trainer.shards = (
        Layout(dp=2, pp=2, gas=2, pp_schedule="1f1b"),
        {"weight": weight, "empty": torch.zeros(0)},
    )
    moments = {"exp_avg": torch.zeros(6), "exp_avg_sq": torch.zeros(6, dtype=torch.float64), "step": 3}
    trainer.optimizer = SimpleNamespace(state={weight: moments})

    def profile(**options):
        profilers.append(Profiler(gpu, options))
        return profilers[-1]

    with (
        tempfile.TemporaryDirectory() as name, mock.patch.object(trace, "profile", profile), gpu.installed(),
        FakeRanks(gpu, rank, 4).installed(),
    ):  # fmt: skip
        environment.use_device("cuda", INDEX)
        trainer.build()
        trace.trace_steps(trainer, 31, Path(name))
        summaries = [json.loads(path.read_text()) for path in Path(name).glob(f"rank{rank}/summary.json")]
        assert len([*Path(name).iterdir()]) == len(summaries)
    return gpu, trainer, [profiler.options for profiler in profilers], summaries


STEP_CALLS = ["batch", "passes", "update", "synchronize"]


def test_a_trace_has_the_times_of_two_steps_and_the_bytes_of_another():
    """The profiler's first step is left out; the peak is that of the step after the trace, as is the snapshot."""
    gpu, trainer, (options,), (summary,) = traced(0)
    device_s = DATA_S + PASSES_S + UPDATE_S
    seconds = {
        "steps": 2, "step_time_s": device_s + LAUNCH_S, "compute_s": device_s, "communication_s": 0,
        "exposed_communication_s": 0, "idle_s": LAUNCH_S,
    }  # fmt: skip
    assert {name: summary[name] for name in seconds} == pytest.approx(seconds, abs=1e-8)
    assert [(k["name"], k["calls"]) for k in summary["top"]] == [("passes", 1), ("batch", 1), ("update", 1)]
    assert [k["seconds"] for k in summary["top"]] == pytest.approx([PASSES_S, DATA_S, UPDATE_S])
    held = {"parameter": 48, "gradient": 48, "optimizer": 24 + 48}
    peak = STATE_BYTES + PASSES_BYTES
    assert summary["memory_bytes"] == held | {"activation": peak - sum(held.values()), "peak": peak}
    resets = ["empty_cache", "reset_peak", "reset_retries", "history all"]
    ends = ["snapshot memory.pickle", "history None", "barrier"]
    assert gpu.calls == ["build", *STEP_CALLS * 3, *resets, *STEP_CALLS, *ends]
    assert trainer.step_numbers == [31, 32, 33, 34]
    assert options["activities"] == [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    assert options["record_shapes"]
    assert not options["profile_memory"]


def test_a_rank_that_is_not_traced_trains_as_many_steps():
    """Traced are the first ranks of the first and of the last pipeline stage."""
    gpu, trainer, options, summaries = traced(1)
    assert (options, summaries, trainer.step_numbers) == ([], [], [31, 32, 33, 34])
    assert gpu.calls == ["build", *STEP_CALLS * 4, "barrier"]
    assert [len(traced(rank)[3]) for rank in (2, 3)] == [1, 0]
