"""Nine minutes on one GPU: twelve lines that decide which claims about GPUs hold, the most important first.

    python benchmarks/nine_minutes.py                    # all lines; `make gpu-check GPU_CHECK=--nine` is the same
    python benchmarks/nine_minutes.py --lines 1-6        # the lines that carry the claims, about 340 s
    python benchmarks/nine_minutes.py --cpu              # every line on small models on this machine's CPUs

This process imports torch once and never uses the GPU: each line runs in forks of it, so that an error, a crash or a
line that takes too long costs that line alone. Each measurement is one JSON line, written as soon as it is known,
with the clock and power of the GPU meanwhile, the versions and the command. benchmarks/first-gpu-hour.md
explains the lines.
"""

import argparse
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from ultrabench.processes import thread_variables

if __name__ == "__main__" and os.environ.get("OPENBLAS_NUM_THREADS") != "1":  # with threads it must not fork
    os.environ.update(thread_variables(1))
    os.execv(sys.executable, [sys.executable, *sys.argv])

import torch
import torch.distributed as dist
from gpu_facts import hardware_name, require_gpus
from one_gpu import shared_gpu
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from trace_parts import markdown, read_trace, summary

from ultrabench import checkout
from ultrabench.agent.ranks.gpus import CLOCK_SM, ask_nvml, visible_gpus
from ultrabench.cli.kernel.check import check_spec
from ultrabench.errors import ConfigError, UltrabenchError
from ultrabench.kernel.attention import BACKENDS
from ultrabench.kernel.check import parity
from ultrabench.kernel.children import ChildError, run_forked
from ultrabench.kernel.compat import activate_flash3, grouped_mm
from ultrabench.kernel.dp import COMPUTE_DTYPE
from ultrabench.kernel.fp8 import fp8_dtype, scaled_mm
from ultrabench.kernel.loss import head_loss, logits_to_gradient
from ultrabench.kernel.mesh import build_mesh, join_process_group
from ultrabench.kernel.rank import checkpoint, environment, memory
from ultrabench.kernel.rank.clock import run_timed
from ultrabench.kernel.rank.trace import trace_steps
from ultrabench.kernel.requests import CheckSpec
from ultrabench.kernel.step import TrainStep
from ultrabench.layout import Layout
from ultrabench.run import RunSpec
from ultrabench.sweep.config.load import load_config, load_model
from ultrabench.sweep.plan import predictor
from ultrabench.sweep.predict.predict import Predictor

Values = dict[str, Any]
"""What one measurement says: name with unit -> value."""
SAMPLE_S = 0.05
"""Seconds between two samples of the clock and the power of the GPU."""
OVERRUN = 3.0
"""A line may take this many times its estimate before it is ended."""
WARMUP_STEPS = 3
FAILURE_CHARACTERS = 400


class Bench(NamedTuple):
    """Where and how large the lines measure."""

    device_type: str
    hardware: str
    folder: Path
    """Where summaries of traces go."""

    @property
    def is_small(self) -> bool:
        """Whether models, matrices and sequences are those of CPUs."""
        return self.device_type == "cpu"

    def sized(self, on_gpu: Any, on_cpu: Any) -> Any:
        """One of two values, by the device."""
        return on_cpu if self.is_small else on_gpu

    @property
    def wide(self) -> str:
        """The precision that stands for bf16: on CPUs it is fp32."""
        return str(self.sized("bf16", "fp32"))


class Line(NamedTuple):
    """One of the twelve measurements."""

    what: str
    estimate_s: float
    """Expected seconds on one H200."""
    measure: Callable[[Bench], Iterator[Values]]
    forks: bool = False
    """Whether it forks ranks itself, so that it runs in the process that has not used the GPU."""


class GpuSampler:
    """Samples the clock, power and temperature of the first GPU while a block runs; nothing where NVML is absent."""

    def __init__(self) -> None:
        self._samples: list[tuple[float | None, float | None, float | None]] = []
        self._ended = threading.Event()
        self._handle = None

    def __enter__(self) -> "GpuSampler":
        if gpus := visible_gpus()[:1]:
            ask_nvml("nvmlInit")
            self._handle = ask_nvml("nvmlDeviceGetHandleByUUID", gpus[0].uuid)
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while self._handle and not self._ended.wait(SAMPLE_S):
            clock_mhz = ask_nvml("nvmlDeviceGetClockInfo", self._handle, CLOCK_SM)
            power_mw = ask_nvml("nvmlDeviceGetPowerUsage", self._handle)
            self._samples.append((clock_mhz, power_mw, ask_nvml("nvmlDeviceGetTemperature", self._handle, 0)))

    @property
    def values(self) -> Values:
        """The means of what the driver knows."""
        names, scales = ("sm_clock_hz", "power_w", "temperature_c"), (1e6, 1e-3, 1.0)
        columns = zip(names, scales, zip(*self._samples, strict=True), strict=False)
        return {
            name: mean(readings) * scale
            for name, scale, column in columns
            if (readings := [reading for reading in column if reading is not None])
        }


def rate(device: torch.device, work: Callable[[], object], measuring_s: float) -> tuple[float, Values]:
    """The median seconds of a call of `work`, and the state of the GPU meanwhile; calls are timed five at a time."""
    calls = 5 if device.type == "cuda" else 1

    def repeat() -> None:
        for _ in range(calls):
            work()

    run_timed(device, repeat)
    times_s, end_s = list[float](), time.perf_counter() + measuring_s
    with GpuSampler() as sampler:
        while time.perf_counter() < end_s or len(times_s) < 3:
            times_s.append(run_timed(device, repeat)[0] / calls)
    return median(times_s), sampler.values


# ---------------------------------------------------------------- 1: rates of single operations


def expert_ends(rows: int, experts: int, *, skewed: bool, device: torch.device) -> Tensor:
    """Where the rows of each expert end: all have as many, or each has half as many as the one before."""
    weights = torch.tensor(
        [0.5 ** min(n, 12) if skewed else 1.0 for n in range(experts)], dtype=torch.float64
    )
    ends = (
        weights.cumsum(0) / weights.sum() * rows / 16
    ).round() * 16  # grouped products want multiples of 16 bytes
    ends[-1] = rows
    return ends.to(device, torch.int32)


def product_rates(bench: Bench) -> Iterator[Values]:
    """Rates of products in bf16, fp8 and of experts, and of a copy."""
    device = environment.use_device(bench.device_type, 0)
    dtype = COMPUTE_DTYPE[bench.wide]
    seconds = bench.sized(0.7, 0.05)
    for m, n, k in bench.sized(
        ((8192, 8192, 8192), (8192, 4096, 14336), (8192, 28672, 4096), (2048, 8192, 8192)), ((128, 128, 128),)
    ):
        left, right = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
        wide_left, wide_right = left.to(dtype), right.to(dtype)
        call_s, state = rate(device, lambda a=wide_left, b=wide_right: a @ b.t(), seconds)
        yield {
            "what": f"{bench.wide} product {m} x {k} x {n}",
            "flops_per_s": 2 * m * n * k / call_s,
            **state,
        }
        narrow = fp8_dtype(device)
        rows, columns = left.to(narrow), right.to(narrow)
        for recipe in ("rowwise", "tensorwise"):
            scales = (torch.ones(m, 1, device=device), torch.ones(1, n, device=device))
            if recipe == "tensorwise":
                scales = (torch.ones((), device=device),) * 2
            call_s, state = rate(device, partial(scaled_mm, rows, columns.t(), *scales, "output"), seconds)
            name = f"fp8 {recipe} product {m} x {k} x {n}"
            yield {"what": name, "flops_per_s": 2 * m * n * k / call_s, **state}
    rows_count, k, n = bench.sized((16384, 2048, 768), (256, 64, 32))
    for experts, skewed in itertools.product(bench.sized((8, 128), (4,)), (False, True)):
        rows = torch.randn(rows_count, k, device=device, dtype=torch.bfloat16)
        weights = torch.randn(experts, k, n, device=device, dtype=torch.bfloat16)
        ends = expert_ends(rows_count, experts, skewed=skewed, device=device)
        call_s, state = rate(device, partial(grouped_mm, rows, weights, ends), seconds)
        name = f"grouped product, {experts} experts, {'skewed' if skewed else 'balanced'}"
        yield {"what": name, "flops_per_s": 2 * rows_count * k * n / call_s, **state}
    source, target = torch.zeros(2, bench.sized(2**30, 2**22), dtype=torch.uint8, device=device)
    call_s, state = rate(device, partial(target.copy_, source), seconds)
    yield {"what": "copy", "bytes_per_s": 2 * source.numel() / call_s, **state}


# ---------------------------------------------------------------- 2 and 8: correctness


def checks(bench: Bench, layouts: tuple[str, ...]) -> Iterator[Values]:
    """Layouts compared with one process; several ranks share the GPU, and their messages go through the host."""
    for words in layouts:
        arguments = words.split()
        precision = next((w for w in arguments if w in parity.COMPUTE_DTYPE), bench.sized("bf16", "fp64"))
        compiled = "compiled" in arguments
        axes = [word for word in arguments if "=" in word]
        options = {"device": bench.device_type, "precision": precision, "compile": compiled, "dump": None}
        with shared_gpu():
            result = parity.run_check(check_spec(axes, options))
        fields = dataclasses.asdict(result)
        names = (
            "passed",
            "loss_diff",
            "loss_allowed",
            "grad_diff",
            "grad_allowed",
            "param_diff",
            "param_allowed",
        )
        differences = {name: fields[name] for name in names}
        yield {"what": f"check {words}", **differences, "graphs": result.graphs, "error": result.error}


ONE_GPU_CHECKS = (
    "dp=1 gas=2 model=tiny-moe", "dp=1 gas=2 model=tiny-moe compiled", "dp=1 gas=2 fp8",
    "dp=1 gas=2 recompute=selective fp8 compiled", "dp=1 attention=cudnn",
)  # fmt: skip
SHARED_GPU_CHECKS = ("tp=2 gas=2 compiled", "cp=2 gas=2", "dp=2 ep=2 gas=2 model=tiny-moe", "tp=2 gas=2 fp8")


def one_rank_checks(bench: Bench) -> Iterator[Values]:
    """Line 2; attention by cuDNN is for GPUs."""
    return checks(
        bench, tuple(words for words in ONE_GPU_CHECKS if not (bench.is_small and "cudnn" in words))
    )


# ---------------------------------------------------------------- 3 to 7 and 10: training


class Training(NamedTuple):
    """A run of one rank: the fields of CheckSpec that differ between the lines."""

    model: str
    layers: int | None = None
    """None keeps those of the model."""
    precision: str = "bf16"
    compiled: bool = True
    routing: str = "balanced"
    seq_len: int = 4096
    mbs: int = 1
    recompute: str = "none"

    def spec(self, bench: Bench) -> RunSpec:
        """The run; on CPUs two layers of a tiny model, with short sequences."""
        shape = load_model(self.model)
        if bench.is_small:
            shape = load_model("tiny-moe" if shape.num_experts else "tiny")
        elif self.layers:
            shape = dataclasses.replace(shape, num_hidden_layers=self.layers)
        precision = bench.wide if self.precision == "bf16" else self.precision
        layout = Layout(dp=1, mbs=bench.sized(self.mbs, 1), recompute=self.recompute)
        seq_len = bench.sized(self.seq_len, 64)
        options = {"precision": precision, "compile": self.compiled, "routing": self.routing}
        return CheckSpec(layout=layout, shape=shape, seq_len=seq_len, **options).run

    @property
    def what(self) -> str:
        layers = f" {self.layers} layers" if self.layers else ""
        routing = "" if self.routing == "balanced" else f" routing={self.routing}"
        mode = "compiled" if self.compiled else "eager"
        batch = f"s{self.seq_len} mbs{self.mbs} recompute={self.recompute}"
        return f"{self.model}{layers} {self.precision} {mode} {batch}{routing}"


def one_rank_trainer(spec: RunSpec, bench: Bench) -> TrainStep:
    """A trainer whose process group has one rank."""
    device = environment.use_device(bench.device_type, 0)
    folder = tempfile.mkdtemp(prefix="ultrabench-nine-")
    join_process_group(device, dist.FileStore(f"{folder}/store", 1), 0, 1)  # type: ignore[attr-defined]
    backend = bench.sized("inductor", "aot_eager")
    return TrainStep(spec, device, build_mesh(spec.layout, device.type), compile_backend=backend)


def seconds_of_steps(trainer: TrainStep) -> Iterator[float]:
    """The seconds of one step after another, each of which runs when its seconds are asked for."""
    for number in itertools.count(1):
        batch = trainer.batch(number)
        yield run_timed(trainer.device, partial(train_on, trainer, batch))[0]


def train_on(trainer: TrainStep, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Runs the timed part of a step; returns its loss."""
    return trainer.update(trainer.accumulate(*batch))


def one_gpu_predictor(bench: Bench, precision: str) -> Predictor:
    """What predicts runs on one GPU with the profile of the embedded kernel.

    Raises:
        ConfigError: the GPU has no peak for this precision.
    """
    config = load_config(["sweep.nodes=[1]", f"hardware={bench.hardware}", "hardware.gpus_per_node=1"])
    return predictor(config, 1, config.hardware.peak(precision, 1, None, 1))


def prediction(spec: RunSpec, bench: Bench) -> Values:
    """What the profile of the embedded kernel predicts for a run on one GPU."""
    try:
        predicted = one_gpu_predictor(bench, spec.kernel.precision).predict(spec)
    except UltrabenchError as error:
        return {"prediction": str(error)}
    names = ("step_time_s", "step_time_low_s", "step_time_high_s", "peak_mem_bytes", "p_oom")
    return {f"predicted_{name}": getattr(predicted, name) for name in names}


def training(bench: Bench, run: Training, *, measuring_s: float, traced: bool = False) -> Iterator[Values]:
    """Trains and times steps; the first of them says what compiling takes."""
    spec = run.spec(bench)
    trainer = one_rank_trainer(spec, bench)
    device, step_seconds = trainer.device, seconds_of_steps(trainer)
    first_s, *_ = itertools.islice(step_seconds, 1 + bench.sized(WARMUP_STEPS, 1))
    gc.collect()
    memory.reset_peak(device)
    times_s, end_s = list[float](), time.perf_counter() + bench.sized(measuring_s, 0.1)
    with GpuSampler() as sampler:
        while time.perf_counter() < end_s or len(times_s) < 2:
            times_s.append(next(step_seconds))
    step_s, tokens = median(times_s), spec.tokens_per_step
    flops_per_s = spec.shape.flops_per_token(spec.workload.seq_len) * tokens / step_s
    yield {
        "what": run.what, "step_time_s": step_s, "steps": len(times_s), "first_step_s": first_s,
        "tokens_per_s": tokens / step_s, "model_flops_per_s": flops_per_s, **memory.peak(device),
        "attention": trainer.attention_backend, "graphs": trainer.compiler.num_graphs, "run_id": spec.run_id,
        **sampler.values, **prediction(spec, bench),
    }  # fmt: skip
    if traced:
        with tempfile.TemporaryDirectory() as name:
            first_traced_step = 2 + bench.sized(WARMUP_STEPS, 1) + len(times_s)
            trace_steps(trainer, first_traced_step, Path(name) / "profile")
            trace = read_trace(Path(name))
        hardware = load_config([f"hardware={bench.hardware}"]).hardware
        document = summary(trace, spec, hardware)
        path = bench.folder / f"nine-minutes-{bench.hardware}-{run.model}-{run.precision}.md"
        path.write_text(markdown(document))
        parts = {row["part"]: row["seconds"] for row in document["parts"]}
        times = {"traced_step_s": document["step_time_s"], "idle_s": document["idle_s"]}
        yield {"what": f"trace of {run.what}", **times, "seconds_by_part": parts}


def trained(*runs: Training, measuring_s: float, traced: bool = False) -> Callable[[Bench], Iterator[Values]]:
    """A measurement of several runs, each in a process of its own, since each needs the whole memory."""

    def measure(bench: Bench) -> Iterator[Values]:
        for run in runs:
            yield from forked(
                partial(training, bench, run, measuring_s=measuring_s, traced=traced), run.what, 240.0
            )

    return measure


def host_times(bench: Bench) -> Iterator[Values]:
    """Line 6: what the host costs a small step, eager, compiled, and captured in a CUDA graph."""
    run = Training("1B", seq_len=2048, compiled=False)
    for compiled in (False, True):
        train_traced = partial(training, bench, run._replace(compiled=compiled), measuring_s=3.0, traced=True)
        yield from forked(train_traced, f"host, compiled={compiled}", 120.0)
    if bench.is_small:
        yield {"what": "accumulate in a CUDA graph", "skipped": "CPUs have no graphs"}
        return
    yield from forked(partial(graphed_accumulate, bench, run._replace(compiled=True)), "CUDA graph", 120.0)


def graphed_accumulate(bench: Bench, run: Training) -> Iterator[Values]:
    """Forward and backward of a step replayed from a CUDA graph, beside the same launched by the host."""
    trainer = one_rank_trainer(run.spec(bench), bench)
    batch, device = trainer.batch(1), trainer.device
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(WARMUP_STEPS):
            trainer.update(trainer.accumulate(*batch))
    torch.cuda.current_stream().wait_stream(side)
    launched_s, _ = rate(device, partial(trainer.accumulate, *batch), 2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trainer.accumulate(*batch)
    replayed_s, state = rate(device, graph.replay, 2.0)
    yield {
        "what": f"accumulate in a CUDA graph: {run.what}",
        "launched_s": launched_s,
        "replayed_s": replayed_s,
        **state,
    }


def nearly_full(bench: Bench) -> Iterator[Values]:
    """Line 7: 8B whole with full recomputation, near the memory of the GPU, and a run that is predicted to fail."""
    shares = ((0.90, "near the limit"), (1.15, "predicted to fail"))
    for share, what in shares:
        run = largest_batch(bench, share)
        train_briefly = partial(training, bench, run, measuring_s=0.0)
        for values in forked(train_briefly, run.what, 90.0):
            if share > 1 and "failed" in values:
                values["ended_as_predicted"] = values.pop("failed")
            yield {**values, "what": f"{what}: {run.what}", **prediction(run.spec(bench), bench)}


def largest_batch(bench: Bench, share: float) -> Training:
    """8B with the largest micro-batch that is predicted to need at most `share` of the memory."""
    run = Training("llama3-8b", seq_len=4096, compiled=False, recompute="full")
    if bench.is_small:
        return run
    predicts = one_gpu_predictor(bench, "bf16")
    sizes = (run._replace(mbs=mbs) for mbs in range(1, 65))
    return max(
        (r for r in sizes if predicts.predict(r.spec(bench)).memory_share <= share),
        key=lambda r: r.mbs,
        default=run,
    )


# ---------------------------------------------------------------- 9: attention


def attention_rates(bench: Bench) -> Iterator[Values]:
    """Forward and backward of causal attention by implementation, length and widths of queries and of values."""
    device, dtype = environment.use_device(bench.device_type, 0), COMPUTE_DTYPE[bench.wide]
    for backend in bench.sized(("cudnn", "flash", "flash3"), ("math",)):
        try:
            if backend == "flash3":
                activate_flash3()
        except ConfigError as error:
            yield {"what": f"attention {backend}", "skipped": str(error)}
            continue
        for seq_len in bench.sized((4096, 16384, 32768), (64,)):
            for width, value_width in ((64, 64), (128, 128), (192, 128)):
                yield attention_rate(bench, device, dtype, backend, seq_len, width, value_width)


def attention_rate(
    bench: Bench,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
    seq_len: int,
    width: int,
    value_width: int,
) -> Values:
    """The rate of one case, with as many heads as make 8,192 channels; the error where torch refuses it."""
    heads = max(1, bench.sized(8192, 128) // width)
    queries, keys = (
        torch.randn(1, heads, seq_len, width, device=device, dtype=dtype, requires_grad=True) for _ in "qk"
    )
    values = torch.randn(1, heads, seq_len, value_width, device=device, dtype=dtype, requires_grad=True)
    grads = torch.randn(1, heads, seq_len, value_width, device=device, dtype=dtype)

    def forward_backward() -> None:
        with sdpa_kernel(BACKENDS[backend]):
            out = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        out.backward(grads)

    what = f"attention {backend} s{seq_len} widths {width}/{value_width}"
    try:
        call_s, state = rate(device, forward_backward, bench.sized(0.25, 0.02))
    except RuntimeError as error:
        return {"what": what, "refused": str(error).splitlines()[0][:FAILURE_CHARACTERS]}
    pairs = heads * seq_len * seq_len / 2
    flops = pairs * (2 * (width + value_width) + 2 * (3 * width + 2 * value_width))
    return {"what": what, "seconds": call_s, "flops_per_s": flops / call_s, **state}


# ---------------------------------------------------------------- 11 and 12: loss and checkpoint


def loss_rates(bench: Bench) -> Iterator[Values]:
    """The head with its loss, forward and backward, eager and compiled."""
    device, dtype = environment.use_device(bench.device_type, 0), COMPUTE_DTYPE[bench.wide]
    tokens, vocab_size, hidden_size = bench.sized((8192, 128256, 4096), (64, 256, 32))
    x = torch.randn(1, tokens, hidden_size, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab_size, hidden_size, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocab_size, (1, tokens), device=device)
    compiled = torch.compile(logits_to_gradient, backend=bench.sized("inductor", "aot_eager"))
    for name, to_gradient in (("eager", logits_to_gradient), ("compiled", compiled)):

        def forward_backward(to_gradient: Any = to_gradient) -> None:
            head_loss(x, weight, targets, to_gradient=to_gradient).backward()  # type: ignore[no-untyped-call]

        call_s, state = rate(device, forward_backward, bench.sized(1.0, 0.05))
        logits = tokens * vocab_size
        yield {
            "what": f"loss {name}, V={vocab_size}",
            "seconds": call_s,
            "s_per_logit": call_s / logits,
            **state,
        }


def checkpoint_times(bench: Bench) -> Iterator[Values]:
    """A checkpoint of about 8 GB, saved while training waits and while it continues."""
    trainer = one_rank_trainer(Training("llama3.2-1b", layers=6, compiled=False).spec(bench), bench)
    step_seconds = seconds_of_steps(trainer)
    step_s = median(itertools.islice(step_seconds, 5))
    with tempfile.TemporaryDirectory() as folder:
        measurement = checkpoint.CheckpointMeasurement(trainer, Path(folder))
        yield {"what": "checkpoint", "step_time_s": step_s, **measurement.save_and_load()}
        yield {
            "what": "checkpoint during training",
            **measurement.save_during_training(step_seconds.__next__, step_s),
        }


# ---------------------------------------------------------------- the lines

SHORT_8B = Training("llama3-8b", layers=8)
SPARSE = Training("qwen3-30b-a3b", layers=12)
LINES = (
    Line("rates of products and copies", 20, product_rates),
    Line("correctness on one rank", 75, one_rank_checks, forks=True),
    Line("8B, bf16", 60, trained(SHORT_8B, measuring_s=8.0, traced=True), forks=True),
    Line("8B, fp8", 60, trained(SHORT_8B._replace(precision="fp8"), measuring_s=8.0, traced=True), forks=True),
    Line("experts: balanced, learned, skewed", 70, trained(
        SPARSE, SPARSE._replace(compiled=False, routing="learned"), SPARSE._replace(routing="skew=1"),
        measuring_s=5.0), forks=True),
    Line("the host", 50, host_times, forks=True),
    Line("nearly full memory", 45, nearly_full, forks=True),
    Line("correctness of several ranks on one GPU", 60, partial(checks, layouts=SHARED_GPU_CHECKS), forks=True),
    Line("rates of attention", 20, attention_rates),
    Line("1B at the batch of the rows of an H100", 30, trained(Training("1B", mbs=8), measuring_s=8.0), forks=True),
    Line("the loss", 10, loss_rates),
    Line("checkpoint", 20, checkpoint_times),
)  # fmt: skip
"""The twelve lines in the order of their worth; the first six carry the claims."""


def forked(measure: Callable[[], Iterator[Values]], what: str, timeout_s: float) -> Iterator[Values]:
    """The values of a measurement that runs in a fork of this process, each as soon as it is known.

    The fork writes to a file, so that what was measured before it failed is kept; then the failure follows.
    """
    with tempfile.NamedTemporaryFile("r", prefix="ultrabench-nine-") as answers:

        def run() -> None:
            with open(answers.name, "a", buffering=1) as out:
                for values in measure():
                    out.write(json.dumps(values) + "\n")

        failure = None
        try:
            run_forked({what: run}, timeout_s)
        except ChildError as error:
            failure = str(error)[:FAILURE_CHARACTERS]
        yield from map(json.loads, answers)
        if failure:
            yield {"what": what, "failed": failure}


def selected_lines(text: str) -> list[int]:
    """The numbers of lines such as `1-6` or `3,7,9-12`.

    Raises:
        ConfigError: a number is no line.
    """
    numbers = list[int]()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            raise ConfigError(f"--lines {text}: {part!r} is not a number or a range such as 1-6")
        numbers += range(int(first), int(last or first) + 1)
    if wrong := [number for number in numbers if not 1 <= number <= len(LINES)]:
        raise ConfigError(f"--lines {text}: there is no line {wrong[0]}; lines are 1 to {len(LINES)}")
    return numbers


def measured_rows(bench: Bench, numbers: list[int], end_s: float) -> Iterator[Values]:
    """A row for each measurement of the lines; a line whose estimate exceeds the time left is left out by name."""
    for number in numbers:
        line, start_s = LINES[number - 1], time.monotonic()
        if line.estimate_s > end_s - start_s:
            yield {
                "line": number,
                "what": line.what,
                "skipped": f"{line.estimate_s:g} s do not fit in the time left",
            }
            continue
        limit_s = min(OVERRUN * line.estimate_s, end_s - start_s)
        measure = partial(line.measure, bench)
        rows = measure() if line.forks else forked(measure, line.what, limit_s)
        try:
            for values in rows:
                yield {"line": number, **values}
        except Exception as error:  # the other lines of a lent machine are worth more than a traceback
            traceback.print_exc()
            yield {"line": number, "what": line.what, "failed": f"{type(error).__name__}: {error}"}
        yield {"line": number, "what": "the whole line", "seconds": time.monotonic() - start_s}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lines", default=f"1-{len(LINES)}", help="which lines, such as 1-6 or 3,7; default: all"
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="start no line that would end later; default: 9"
    )
    parser.add_argument("--cpu", action="store_true", help="small models on this machine's CPUs")
    parser.add_argument(
        "--hardware", help="the file in configs/hardware/; default: the one that names this GPU"
    )
    parser.add_argument("--commit", help="the commit that is measured; default: that of this checkout")
    parser.add_argument("--out", type=Path, help="default: benchmarks/nine-minutes-HARDWARE.jsonl")
    options = parser.parse_args(arguments)
    numbers, end_s = selected_lines(options.lines), time.monotonic() + 60 * options.minutes
    facts = run_forked({"facts": environment.facts}, 120.0)["facts"]
    if not options.cpu:
        require_gpus(facts)
    hardware = options.hardware or ("cpu" if options.cpu else hardware_name(facts))
    out = options.out or Path(__file__).parent / f"nine-minutes-{hardware}.jsonl"
    bench = Bench("cpu" if options.cpu else "cuda", hardware, out.parent)
    header = {
        "command": " ".join(["python", "benchmarks/nine_minutes.py", *(arguments or sys.argv[1:])]),
        "commit": options.commit or checkout.commit_sha(), "hardware": hardware,
        **{name: facts.get(name) for name in ("gpu_name", "torch_version", "cuda_version", "driver_version")},
        "cores": len(os.sched_getaffinity(0)),
    }  # fmt: skip
    failed = False
    with out.open("a", buffering=1) as file:
        for row in measured_rows(bench, numbers, end_s):
            failed |= "failed" in row or row.get("passed") is False
            time_text = datetime.now(UTC).isoformat(timespec="seconds")
            file.write(json.dumps({**row, "time": time_text, **header}) + "\n")
            print(json.dumps(row), flush=True)
    print(f"wrote {out}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    try:
        with contextlib.suppress(BrokenPipeError):
            sys.exit(main())
    except UltrabenchError as error:
        print(f"nine_minutes: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
