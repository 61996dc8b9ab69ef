"""What `ultrabench predict LAYOUT` prints: memory and step time of one layout, by part."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from itertools import accumulate, groupby
from operator import itemgetter, sub
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from ultrabench.analysis.results.collect import collect
from ultrabench.analysis.results.columns import RATE, column_of
from ultrabench.analysis.results.measured import MeasuredRun, measured_runs
from ultrabench.analysis.results.numbers import count, formula_text, params_text, rate_text, with_unit
from ultrabench.cli.tables import BAR_CHAR, print_json, show, table, warn
from ultrabench.column import FLOPS_PER_S, KIBIBYTES, MILLISECONDS, AxisUnit, capacity_text, memory_axis
from ultrabench.errors import UltrabenchError, counted
from ultrabench.hardware import PEAK_GUESSED, UNMEASURED_CPU_FLOPS_PER_S, Peak, peak_suffix
from ultrabench.kernel_config import ELEMENT_BYTES
from ultrabench.layout import AXES, BATCH, DEGREES
from ultrabench.record import to_dict
from ultrabench.result import Status
from ultrabench.run import RunSpec
from ultrabench.store.folder import SweepFolder
from ultrabench.sweep.arguments import PREDICTION_DEFAULTS, read_run
from ultrabench.sweep.config.checkpoint import modules_left_out
from ultrabench.sweep.config.load import is_checkpoint
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.extrapolation import (
    against_published,
    best_published,
    beyond_fit,
    published_mfu,
    unproven,
)
from ultrabench.sweep.plan import predictor
from ultrabench.sweep.predict.predict import LIKELY_OOM, oom_text
from ultrabench.sweep.predict.stage_memory import MEMORY_PARTS, StageMemory
from ultrabench.sweep.predict.ultrabench_memory import JOINED
from ultrabench.sweep.untrained import untrained_reason

BAR_WIDTH = 40
"""Number of characters of the longest bar."""
NUM_SHOWN_RUNS = 3
"""Number of measured runs that are shown."""


def run_predict(arguments: list[str], as_json: bool, results_dir: Path) -> None:
    """Prints the predicted memory and step time of one layout, and measured runs like it."""
    spec, config = read_run(arguments, PREDICTION_DEFAULTS, any_model=True)
    prediction = document(spec, config)
    model_names = [argument.removeprefix("model=") for argument in arguments if argument.startswith("model=")]
    prediction["modules_left_out"] = sum(map(modules_left_out, filter(is_checkpoint, model_names)))
    prediction["nearest"] = [*_nearest_runs(spec, config, results_dir)]
    if as_json:
        print_json(prediction)
    else:
        show(*_page(prediction, spec, config))


def _whole_bytes(stage: StageMemory) -> dict[str, int]:
    """The parts of a rank's memory, rounded so that they add up to its rounded peak."""
    cumulative_bytes = [round(total) for total in accumulate(getattr(stage, part) for part in MEMORY_PARTS)]
    return dict(zip(MEMORY_PARTS, map(sub, cumulative_bytes, [0, *cumulative_bytes]), strict=False))


def document(spec: RunSpec, config: SweepConfig) -> dict[str, Any]:
    """The prediction of a run as the document of `ultrabench predict --json`, without measured runs."""
    flops_peak = config.hardware.peak(spec.kernel.precision, spec.nodes, None, os.cpu_count() or 1)
    run_predictor = predictor(config, spec.nodes, flops_peak)
    stages = run_predictor.stages(spec)
    time_parts = run_predictor.step_time(spec, stages)
    run_prediction = run_predictor.predict_from(spec, stages, time_parts)
    peak_stage = max(stages, key=lambda stage: stage.peak_bytes)
    tokens_per_s_per_gpu = spec.tokens_per_step / run_prediction.step_time_s / spec.layout.world_size
    flops_per_token = spec.shape.flops_per_token(spec.workload.seq_len, config.measure.flops_formula)
    return {
        "label": spec.layout.label(),
        "world_size": spec.layout.world_size,
        "num_params": spec.shape.num_params,
        "num_active_params": spec.shape.num_active_params,
        "layer_types": [*_types(spec, config.measure.flops_formula)],
        "spec": to_dict(spec),
        "profile": config.profile.name,
        "peak_mem_bytes": run_prediction.peak_mem_bytes,
        "rank_mem_bytes": config.hardware.mem_bytes,
        "p_oom": round(run_prediction.p_oom, 6),
        "memory": _whole_bytes(peak_stage),
        "stages": [
            {"pp_rank": stage.pp_rank, "phase": stage.phase}
            | _whole_bytes(stage)
            | {"peak_bytes": round(stage.peak_bytes)}
            for stage in stages
        ],
        "step_time_s": run_prediction.step_time_s,
        "step_time_low_s": run_prediction.step_time_low_s,
        "step_time_high_s": run_prediction.step_time_high_s,
        "time": time_parts._asdict(),
        "communication_over_compute": run_predictor.communication_ratios(spec),
        "limited_by": run_prediction.limited_by,
        "tokens_per_s_per_gpu": tokens_per_s_per_gpu,
        "mfu": None
        if flops_peak.source == PEAK_GUESSED
        else tokens_per_s_per_gpu * flops_per_token / flops_peak.flops_per_s,
        "untrained": untrained_reason(spec.shape) if spec.kernel.trains_itself else None,
        "unmeasured": beyond_fit([spec], config.profile, config.hardware.gpu_at_limit),
        "unproven": unproven([spec], config.profile, config.hardware),
        "against_published": _published_text(spec, config, run_prediction.step_time_s, flops_peak),
    }


def _types(spec: RunSpec, formula: str) -> Iterator[dict[str, Any]]:
    """What each type of layer, each module for multi-token prediction, and embedding and head have and do.

    FLOPs are those of a token in forward and backward; bytes are what a layer keeps of a token for backward without
    recomputation, in the precision of the run.
    """
    shape, h = spec.shape, spec.shape.hidden_size
    num_bytes = ELEMENT_BYTES[spec.kernel.precision]
    num_by_kind = shape.num_by_kind(0, shape.num_hidden_layers)
    for num_layers, kind in zip(num_by_kind, shape.kinds, strict=True):
        product_flops, core_flops = kind.flops_per_token(h, spec.workload.seq_len, formula)
        yield {
            "name": kind.name,
            "num_layers": num_layers,
            "num_params": kind.num_params(h),
            "num_active_params": kind.num_active_params(h),
            "flops_per_token": round(product_flops + core_flops),
            "kept_bytes_per_token": num_bytes * kind.kept_channels(h),
        }
    if num_modules := shape.num_nextn_predict_layers:
        kind = shape.kinds[shape.kind_numbers[-1]]
        product_flops, core_flops = kind.flops_per_token(h, spec.workload.seq_len, formula)
        num_joining = shape.num_predict_params - kind.num_params(h)
        yield {
            "name": "module for multi-token prediction",
            "num_layers": num_modules,
            "num_params": shape.num_predict_params,
            "num_active_params": kind.num_active_params(h) + num_joining,
            "flops_per_token": round(product_flops + core_flops) + 6 * (2 * h * h + shape.embedding_params),
            "kept_bytes_per_token": num_bytes * (kind.kept_channels(h) + (JOINED + 1) * h),
        }
    num_tables = 1 if shape.tie_word_embeddings else 2
    table_params = num_tables * shape.embedding_params + h
    yield {
        "name": "embedding, norm and head" + ", tied" * shape.tie_word_embeddings,
        "num_layers": None,
        "num_params": table_params,
        "num_active_params": table_params,
        "flops_per_token": 6 * shape.embedding_params,
        "kept_bytes_per_token": num_bytes * 2 * h,
    }


def _type_table(prediction: dict[str, Any], spec: RunSpec) -> RenderableType:
    """The table of the types of layers."""
    rows = [
        (
            layer_type["name"],
            "" if layer_type["num_layers"] is None else layer_type["num_layers"],
            *(count(layer_type[key]) for key in ("num_params", "num_active_params", "flops_per_token")),
            KIBIBYTES.text(layer_type["kept_bytes_per_token"], decimals=1),
        )
        for layer_type in prediction["layer_types"]
    ]
    columns = "type of layer", ">layers", ">parameters", ">active", ">FLOPs/token", ">kept/token"
    return table(f"\nlayers of {spec.shape.name}, each", *columns, rows=rows)


def _published_text(spec: RunSpec, config: SweepConfig, step_time_s: float, peak: Peak) -> str | None:
    """A sentence that compares the predicted MFU with the best published one; None on CPUs or without one."""
    if not config.hardware.is_rated:
        return None
    best_run = best_published(config, config.kernel.precision)
    return against_published(config, published_mfu(spec, step_time_s, peak.flops_per_s, best_run), best_run)


def _page(prediction: dict[str, Any], spec: RunSpec, config: SweepConfig) -> Iterator[RenderableType]:
    """The tables of a prediction."""
    memory_unit = memory_axis(prediction["peak_mem_bytes"])
    stages, limit_text = prediction["stages"], capacity_text(prediction["rank_mem_bytes"])
    peak_stage = max(stages, key=lambda stage: stage["peak_bytes"])
    rank_text = f"pipeline rank {peak_stage['pp_rank']}, " if len(stages) > 1 else ""
    peak_text = rank_text + peak_stage["phase"]
    hardware_text = f"{counted(prediction['world_size'], 'GPU')} of {config.hardware.name}"
    size_text = params_text(prediction["num_params"], prediction["num_active_params"])
    yield (
        f"{spec.shape.name} ({size_text}), {prediction['label']}, {hardware_text}, "
        f"sequences of {counted(spec.workload.seq_len, 'token')}"
    )
    yield _type_table(prediction, spec)
    if num_modules := prediction["modules_left_out"]:
        yield (
            f"left out: {counted(num_modules, 'module')} for multi-token prediction in this config.json; "
            "to include such modules, set num_nextn_predict_layers in a YAML file"
        )
    yield _bar_table(f"\npeak memory ({peak_text})", prediction["memory"], memory_unit)
    if len(stages) > 1:
        rows, stage_keys = [], ("phase", *MEMORY_PARTS, "peak_bytes")
        for (phase, *sizes_bytes), equal_stages in groupby(stages, itemgetter(*stage_keys)):
            ranks = [stage["pp_rank"] for stage in equal_stages]
            ranks_text = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else ranks[0]
            rows.append((ranks_text, phase, *map(memory_unit.bare_text, sizes_bytes)))
        columns = ("rank", "at", *(f">{part}" for part in (*MEMORY_PARTS, "peak")))
        yield table(f"\nmemory of each pipeline rank, {memory_unit.symbol}", *columns, rows=rows)
    fit_text = "unlikely to fit" if prediction["p_oom"] > LIKELY_OOM else "likely to fit"
    if prediction["limited_by"] == "memory" and prediction["p_oom"] <= LIKELY_OOM:
        fit_text += ", but the allocator must release its reserve and wait"
    peak_text = f"peak {memory_unit.text(prediction['peak_mem_bytes'])} of {limit_text}"
    yield f"{peak_text}: {fit_text}, {oom_text(prediction['p_oom'])}"
    yield _bar_table("\nstep time", prediction["time"], MILLISECONDS)
    if ratios := prediction["communication_over_compute"]:
        yield ratio_line(ratios, spec.layout.dp_overlap)
    mfu, mfu_text = prediction["mfu"], ""
    if mfu is not None:
        mfu_text = f", {column_of('mfu').heading} {with_unit('mfu', mfu)}{peak_suffix(spec.kernel.precision)}"
    step_time = column_of("step_time_s")
    low_text = step_time.unit.bare_text(prediction["step_time_low_s"])
    high_text = step_time.unit.brief_text(prediction["step_time_high_s"])
    step_text = f"{step_time.short_heading} {step_time.unit.brief_text(prediction['step_time_s'])}"
    step_text += f" (80 % interval: {low_text} to {high_text})"
    tokens_rate_text = f"{rate_text(prediction[RATE])}{mfu_text}"
    yield f"{step_text}; {tokens_rate_text}; limited by {prediction['limited_by']}"
    if mfu is not None:
        yield formula_text([config.measure.flops_formula], has_experts=bool(spec.shape.num_experts))
    if mfu is None:
        flops_rate_text = FLOPS_PER_S.text(UNMEASURED_CPU_FLOPS_PER_S)
        yield f"assumes {flops_rate_text} per core; a sweep measures its cores first, so it predicts other times"
    if prediction["untrained"]:
        yield f"estimated, since {prediction['untrained']}"
    profile = config.profile
    yield f"profile {profile.name} ({profile.framework}, {profile.date}): {profile.source}"
    if prediction["unmeasured"]:
        yield f"extrapolated beyond the fitted values (in brackets): {', '.join(prediction['unmeasured'])}"
    yield from (f"unproven: {fact}" for fact in prediction["unproven"])
    if prediction["against_published"]:
        yield prediction["against_published"]
    if nearest_runs := prediction["nearest"]:
        rows = []
        for run in nearest_runs:
            step_s, predicted_s = run["step_time_s"], run["predicted_step_time_s"]
            time_texts = step_time.unit.bare_text(step_s), f"{predicted_s / step_s:.2f}"
            setting_cells = itemgetter("sweep", "nodes", "layout", "seq_len")(run)
            rows.append((*setting_cells, *time_texts, with_unit(RATE, run[RATE]), run["run_id"]))
        columns = (
            "sweep",
            ">nodes",
            "layout",
            ">seq_len",
            f">{step_time.bare_heading}",
            ">x predicted",
            f">{column_of(RATE).heading}",
            "run",
        )
        yield table("\nmost similar measured runs", *columns, rows=rows)


def ratio_line(ratios: Mapping[str, float], dp_overlap: str = "on") -> str:
    """One line with the communication time of each axis over its compute time, such as `tp 0.21, dp 1.4`.

    Args:
        dp_overlap: the value of this axis in the layout.
    """
    ratios_text = ", ".join(f"{axis} {ratio:.2g}" for axis, ratio in ratios.items())
    line = f"communication over compute: {ratios_text}; above 1, compute cannot hide it"
    if dp_overlap == "off" and "dp" in ratios:
        line += "; dp_overlap=off hides no gradient reduction"
    return line


def _bar_table(title: str, parts: dict[str, float], unit: AxisUnit) -> RenderableType:
    """A table with a bar for each part above 0.01 % of the sum; the largest part has the longest bar.

    Args:
        parts: name of a part -> its bytes or seconds.
        unit: the unit in which the table shows these.
    """
    total, max_value = sum(parts.values()), max(parts.values())
    visible_parts = {name: value for name, value in parts.items() if value > 1e-4 * total}
    bars = {name: BAR_CHAR * round(BAR_WIDTH * value / max_value) for name, value in visible_parts.items()}
    rows = [
        (name, unit.bare_text(value), f"{100 * value / total:.0f} %", bars[name])
        for name, value in visible_parts.items()
    ]
    return table(f"{title}, {unit.symbol}", "part", ">amount", ">share", "", rows=rows)


def _nearest_runs(spec: RunSpec, config: SweepConfig, results_dir: Path) -> Iterator[dict[str, Any]]:
    """The measured runs of the same model and hardware whose layouts differ least, from all sweeps of a folder."""
    runs: list[MeasuredRun] = []
    for path in sorted(results_dir.glob("*/sweep.json")):
        with contextlib.suppress(UltrabenchError):
            runs += measured_runs(collect([SweepFolder(path.parent)], warn))[0]
    model_and_hardware = spec.shape.name, config.hardware.name
    valid_runs = (r for r in runs if r.status == Status.OK and r.is_final and not r.suspect and r.step_time_s)
    similar_runs = [run for run in valid_runs if (run.spec.shape.name, run.hardware) == model_and_hardware]
    for run in sorted(similar_runs, key=lambda run: distance(run.spec, spec))[:NUM_SHOWN_RUNS]:
        assert run.step_time_s is not None
        yield {
            "sweep": run.sweep,
            "run_id": run.run_id,
            "nodes": run.spec.nodes,
            "layout": run.spec.layout.label(),
            "seq_len": run.spec.workload.seq_len,
            "step_time_s": run.step_time_s,
            "predicted_step_time_s": run.predicted_step_time_s or document(run.spec, config)["step_time_s"],
            "tokens_per_s_per_gpu": run.spec.tokens_per_step / run.step_time_s / run.spec.layout.world_size,
        }


def distance(a: RunSpec, b: RunSpec) -> float:
    """How much two runs differ: 1 for each factor of two in a number, and 1 for each other setting that differs."""
    number_axes = (*DEGREES, *BATCH)
    axis_pairs = ((getattr(a.layout, name), getattr(b.layout, name)) for name in number_axes)
    workload_pairs = ((a.nodes, b.nodes), (a.workload.seq_len, b.workload.seq_len))
    other_axes = (name for name in AXES if name not in number_axes)
    num_differing: float = sum(getattr(a.layout, name) != getattr(b.layout, name) for name in other_axes)
    return num_differing + sum(math.fabs(math.log2(n_a / n_b)) for n_a, n_b in (*axis_pairs, *workload_pairs))
