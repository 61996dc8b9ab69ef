"""The rows that one GPU is measured by: 1B and eight layers of 8B and 70B, in two precisions, eager and compiled.

Each is a sweep of one run. The rows of a size and length share a layout, so that they differ in precision and
compilation only: the first of `layouts` that is predicted to fit in bf16 and eager.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from gpu_machine import Finding, Line, Machine, Sweep, limits
from trace_parts import markdown, read_trace, summary

from ultrabench.analysis.results.columns import FLOAT, TEXT
from ultrabench.analysis.results.schema import SCHEMA, arrow_field
from ultrabench.column import Column
from ultrabench.hardware import peak_suffix
from ultrabench.kernel.requests import CheckSpec
from ultrabench.layout import Layout
from ultrabench.result import Status
from ultrabench.run import AttemptKey
from ultrabench.sweep.config.files import files, read_yaml
from ultrabench.sweep.config.load import load_config, load_model
from ultrabench.sweep.plan import predictor

MODELS: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {
    "cuda": {"1B": ("1B", (16,)), "8B": ("llama3-8b", (8,)), "70B": ("llama3-70b", (8, 6, 4, 3, 2))},
    "cpu": dict.fromkeys(("1B", "8B", "70B"), ("tiny", (2,))),
}
"""Device -> size -> the model, and the numbers of its layers to try, since no GPU of 80 GB holds 8 layers of 70B."""
VOCABULARY = {"llama3-70b": 32000}
"""Model -> another vocabulary: that of Llama 2 70B, which has the same layers, leaves memory for more of them."""
SEQ_LENS = {"cuda": {"4k": 4096, "32k": 32768}, "cpu": {"4k": 64, "32k": 128}}
PRECISIONS = {"cuda": {"bf16": "bf16", "fp8": "fp8"}, "cpu": {"bf16": "fp32", "fp8": "fp8"}}
"""CPUs multiply fp32 in place of bf16."""
MAX_TOKENS = {"cuda": 32768, "cpu": 128}
"""Tokens of a micro-batch at most, so that a step takes a small part of the measured seconds."""
MAX_MEMORY_SHARE = 0.9
"""Share of a GPU's memory that a row is predicted to need at most; fp8 may keep more than bf16."""
MEASURE = {
    "cuda": ("measure=default", "measure.confirm=1"),
    "cpu": ("measure=quick", "measure.min_s=0.2", "measure.target_ci95_rel=1.0", "measure.max_foreign_load=null",
            "launcher.control=false",
            "measure.start_deadline_s=600", "measure.run_limit_s=1200", "launcher.preflight=false",
            *(f"+hardware.peak_flops_per_s.{name}=1.0e11" for name in ("fp32", "bf16", "fp8"))),
}  # fmt: skip
"""On GPUs at least 10 s of steps and an interval of 1 %; on CPUs just enough to try every line, with a peak that saves
its measurement."""
EXTRA = (
    Column("min_s", FLOAT, "Shortest time of the measured steps together."),
    Column("warmup_s", FLOAT, "Shortest time of the warm-up."),
    Column("target_ci95_rel", FLOAT, "Half 95 % interval at which a run may end."),
    Column("measured_s", FLOAT, "Sum of step_times_s."),
    Column("mfu_causal", FLOAT, "mfu by the formula megatron, which counts the causal half of attention."),
    Column("bf16_gemm_share", FLOAT, "model_flops_per_s_per_gpu / gemm_flops_per_s; null on CPUs."),
    Column("bf16_gemm_share_at_clock", FLOAT, "That share times gemm_sm_clock_hz / sm_clock_hz."),
    Column("power_limit_w", FLOAT, "Power limit that is in force, by NVML."),
    Column("max_sm_clock_hz", FLOAT, "Highest SM clock, by NVML."),
    Column("settings", TEXT, "The overrides of the sweep, as a JSON list."),
)
"""The columns of rows that runs.parquet does not have."""


class Variant(NamedTuple):
    """What a row measures."""

    size: str
    precision: str
    compiled: bool
    length: str

    @property
    def name(self) -> str:
        return f"{self.size} {self.precision} {'compiled' if self.compiled else 'eager'} {self.length}"

    @property
    def is_traced(self) -> bool:
        """Whether the three summaries of traces include this row."""
        return self[2:] == (True, "4k") and self[:2] in (("1B", "bf16"), ("8B", "bf16"), ("8B", "fp8"))

    @property
    def estimate_s(self) -> float:
        """Seconds on one H100: start, preflight and 5 s of warm-up, 10 to 25 s of steps; 25 s of compilation."""
        return 40.0 + 25.0 * self.compiled + 20.0 * self.is_traced


VARIANTS = tuple(
    Variant(size, precision, compiled, length)
    for compiled, precision, length in (
        (True, "bf16", "4k"), (True, "fp8", "4k"), (True, "bf16", "32k"), (True, "fp8", "32k"),
        (False, "bf16", "4k"), (False, "bf16", "32k"), (False, "fp8", "4k"), (False, "fp8", "32k"),
    )
    for size in MODELS["cuda"]
)  # fmt: skip
"""All rows in the order of their worth."""
FIRST = tuple(variant for variant in VARIANTS[:6] if variant.size != "70B")
"""The rows that come before all others, three of them with their traces."""


def row_lines(machine: Machine, out: Path) -> Iterator[Line]:
    """A line for each row; the summaries of traces are written beside `out`."""
    for variant in VARIANTS:
        attempt = partial(measure_row, machine, variant, out)
        yield Line(variant.name, attempt, variant.estimate_s, may_be_refused=variant.precision == "fp8")


def layouts(seq_len: int, most_tokens: int) -> Iterator[Layout]:
    """The layouts to try: those that recompute nothing first, of these the one with the most tokens."""
    for recompute, mbs in product(("none", "selective", "full"), (8, 4, 2, 1)):
        if mbs * seq_len <= most_tokens:
            yield Layout(dp=1, mbs=mbs, recompute=recompute)


def model_file(results: Path, size: str, name: str, layers: int) -> Path:
    """A config.json with the sizes of the model `name` but for its layers; the name of its folder names the model."""
    path = results / "gpu-check-models" / f"{size}-{layers}-layers" / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = {**read_yaml(files("model")[name]), "num_hidden_layers": layers, "model_type": "llama"}
    sizes["vocab_size"] = VOCABULARY.get(name, sizes["vocab_size"])
    path.write_text(json.dumps(sizes, indent=1) + "\n")
    return path


def fitting(machine: Machine, variant: Variant) -> tuple[Path, Layout]:
    """The file of the model with the most layers of which a layout is predicted to fit, and that layout.

    If none is, they are the last ones tried.
    """
    config = load_config(["sweep.nodes=[1]", f"hardware={machine.hardware}", "hardware.gpus_per_node=1"])
    precision = PRECISIONS[machine.device]["bf16"]
    predicts = predictor(config, 1, config.hardware.peak(precision, 1, None, 1))
    (name, numbers), seq_len = MODELS[machine.device][variant.size], SEQ_LENS[machine.device][variant.length]
    for layers in numbers:
        path = model_file(machine.results, variant.size, name, layers)
        for layout in layouts(seq_len, MAX_TOKENS[machine.device]):
            run = CheckSpec(
                layout=layout, shape=load_model(str(path)), seq_len=seq_len, precision=precision
            ).run
            if predicts.predict(run).memory_share <= MAX_MEMORY_SHARE:
                return path, layout
    return path, layout


def measure_row(machine: Machine, variant: Variant, out: Path) -> Finding:
    """Measures a row; passes if its steps took min_s and, on GPUs, their interval met its target."""
    path, layout = fitting(machine, variant)
    overrides = (
        *MEASURE[machine.device], f"model={path}", f"sweep.seq_len={SEQ_LENS[machine.device][variant.length]}",
        f"sweep.gbs={layout.gbs}", "sweep.gas=[1]", f"sweep.mbs=[{layout.mbs}]",
        f"sweep.recompute=[{layout.recompute}]",
        "sweep.tp=[1]", "sweep.pp=[1]", "sweep.cp=[1]", "sweep.zero_stage=[0]", "launcher.control=false",
        f"kernel.precision={PRECISIONS[machine.device][variant.precision]}",
        f"kernel.compile={str(variant.compiled).lower()}",
        f"trace={str(variant.is_traced).lower()}",
    )  # fmt: skip
    sweep = machine.sweep(f"gpu-check-{variant.name.replace(' ', '-')}", *overrides, ranks=1)
    ok_rows = [row for row in sweep.rows if row["status"] == Status.OK]
    if not ok_rows:
        return Finding(
            False, "; ".join(f"{row['status']}: {row['reason']}" for row in sweep.rows) or "no row"
        )
    # A run in doubt is measured again, and so is one of another torch or driver.
    latest = max(ok_rows, key=lambda row: (row["suspect"] is None, row["started_at"]))
    row = full_row(latest, sweep, overrides)
    in_time, narrow = row["measured_s"] >= row["min_s"], row["ci_reached"] or machine.device == "cpu"
    text = (
        f"{row['tokens_per_s_per_gpu']:,.0f} tokens/s, MFU{peak_suffix(row['precision'])} "
        f"{row.get('mfu', 0):.1%} (causal {row.get('mfu_causal', 0):.1%}), "
        f"{row['num_hidden_layers']} layers, mbs={row['mbs']}, {row['num_steps_measured']} steps, "
        f"{row['measured_s']:.3g} s +- {row['step_time_ci95_rel']:.1%}"
    )
    text += f"; in doubt: {row['suspect']}" if row.get("suspect") else ""
    if variant.is_traced:
        text += f"; {write_summary(sweep, row, variant, out)}"
    return Finding(in_time and narrow, text, row)


def full_row(row: dict[str, Any], sweep: Sweep, overrides: tuple[str, ...]) -> dict[str, Any]:
    """A row of a sweep with the columns EXTRA, as JSON values; null columns are left out."""
    config = load_config([f"hardware={row['hardware']}", *overrides])
    measure = config.measure
    shape = sweep.specs[row["run_id"]].shape
    causal = shape.flops_per_token(row["seq_len"], "megatron") / shape.flops_per_token(row["seq_len"])
    row |= {
        "min_s": measure.min_s, "warmup_s": measure.warmup_s, "target_ci95_rel": measure.target_ci95_rel,
        "measured_s": sum(row["step_times_s"]), "mfu_causal": row["mfu"] and row["mfu"] * causal,
        **(gemm_shares(row) if config.hardware.has_gpus else {}), **limits(), "settings": json.dumps(overrides),
        "started_at": row["started_at"].isoformat(),
    }  # fmt: skip
    return {name: value for name, value in row.items() if value is not None}


def gemm_shares(row: dict[str, Any]) -> dict[str, float]:
    """The shares of the GEMM rate that a row of a GPU reaches, without those whose rate or clock is not known."""
    gemm, gemm_clock, clock = (row[name] for name in ("gemm_flops_per_s", "gemm_sm_clock_hz", "sm_clock_hz"))
    shares = {"bf16_gemm_share": row["model_flops_per_s_per_gpu"] / gemm} if gemm else {}
    if gemm and gemm_clock and clock:
        shares["bf16_gemm_share_at_clock"] = shares["bf16_gemm_share"] * gemm_clock / clock
    return shares


def write_summary(sweep: Sweep, row: dict[str, Any], variant: Variant, out: Path) -> str:
    """Writes the summary of a traced row as JSON and as a table; returns the name of the table."""
    run_folder = sweep.folder.log_folder(AttemptKey(row["run_id"], row["repeat"], row["attempt"]))
    spec = sweep.specs[row["run_id"]]
    hardware = load_config([f"hardware={row['hardware']}"]).hardware
    facts = {name: row.get(name) for name in ("gpu_name", "torch_version", "git_commit")}
    document = summary(read_trace(run_folder), spec, hardware) | facts | {"date": row["started_at"][:10]}
    path = out.with_name(f"{out.stem}-{variant.name.replace(' ', '-')}.md")
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    path.write_text(markdown(document))
    return path.name


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Writes rows as a table with the columns of runs.parquet and EXTRA."""
    schema = pa.schema([*SCHEMA, *map(arrow_field, EXTRA)], metadata=SCHEMA.metadata)
    timed_rows = [row | {"started_at": datetime.fromisoformat(row["started_at"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(timed_rows, schema), path)
