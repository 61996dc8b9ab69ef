"""`ultrabench kernel dryrun` shows what a step of a layout costs a rank, without GPUs."""

from dataclasses import replace
from typing import Any

from rich.table import Table

from ultrabench.cli.tables import print_json, say, show, table
from ultrabench.errors import counted
from ultrabench.hardware import GIB, Hardware
from ultrabench.kernel.requests import RankCost, dry_run
from ultrabench.kernel_config import KernelConfig
from ultrabench.record import to_dict
from ultrabench.run import RunSpec
from ultrabench.stages import stages_by_rank
from ultrabench.sweep.arguments import PREDICTION_DEFAULTS, read_run

DEFAULTS = {name: PREDICTION_DEFAULTS[name] for name in ("model", "hardware", "nodes", "seq_len", "precision")}
MEMORY_KINDS = ("static", "parameter", "gradient", "optimizer", "activation", "peak")


def run_dryrun(arguments: list[str], compiled: bool, as_json: bool) -> None:
    """Prints memory, FLOPs and collectives of a step for the first rank of each pipeline stage."""
    spec, hardware = dryrun_spec(arguments, compiled)
    layout, seq_len = spec.layout, spec.workload.seq_len
    run_text = f"{layout.label()} on {counted(layout.world_size, 'rank')}, {spec.kernel.precision}{', compiled' * spec.compiles}"
    say(f"dry run of {run_text}, seq_len {seq_len}: the first rank of each pipeline stage")
    costs: list[RankCost] = []
    for cost in dry_run(spec):
        costs.append(cost)
        say(f"  stage {cost.pp_rank} (rank {cost.rank}): peak {cost.peak_bytes / GIB:.2f} GiB")
    if as_json:
        print_json(_document(spec, hardware, costs))
    else:
        _show(spec, hardware, costs)


def dryrun_spec(arguments: list[str], compiled: bool = False) -> tuple[RunSpec, Hardware]:
    """The run that arguments such as `model=llama3-8b nodes=8 tp=8` describe, and its hardware.

    Raises:
        ConfigError: a word or a name is unknown, or the layout is impossible.
    """
    spec, config = read_run(arguments, DEFAULTS)
    kernel = KernelConfig(name="embedded", precision=spec.kernel.precision, compile=compiled)
    return replace(spec, kernel=kernel), config.hardware


def _model_flops(spec: RunSpec, cost: RankCost) -> float:
    """FLOPs of one step on the rank of this cost, counted as in ModelShape.flops_per_token."""
    shape, layout = spec.shape, spec.layout
    attention = shape.attention_flops(spec.workload.seq_len)
    stages = stages_by_rank(shape, layout)[cost.pp_rank]
    flops_per_token = sum(6 * s.matmul_params(shape) + s.num_layers * attention for s in stages)
    return flops_per_token * spec.tokens_per_step / (layout.dp * layout.cp * layout.tp)


def _document(spec: RunSpec, hardware: Hardware, costs: list[RankCost]) -> dict[str, Any]:
    ranks_per_stage = spec.layout.world_size // spec.layout.pp
    return {
        "label": spec.layout.label(),
        "world_size": spec.layout.world_size,
        "spec": to_dict(spec),
        "rank_mem_bytes": hardware.mem_bytes,
        "peak_bytes": max(cost.peak_bytes for cost in costs),
        "model_flops": spec.shape.flops_per_token(spec.workload.seq_len) * spec.tokens_per_step,
        "hardware_flops": ranks_per_stage * sum(cost.hardware_flops for cost in costs),
        "stages": [to_dict(cost) | {"model_flops": _model_flops(spec, cost)} for cost in costs],
    }


def _show(spec: RunSpec, hardware: Hardware, costs: list[RankCost]) -> None:
    largest_cost = max(costs, key=lambda cost: cost.peak_bytes)
    unit_bytes, unit_name = (GIB, "GiB") if largest_cost.peak_bytes >= GIB else (2**20, "MiB")
    title = f"{spec.shape.name}, {spec.layout.label()}: one step, one rank per pipeline stage, {unit_name}"
    rows = []
    for cost in costs:
        parts = (f"{getattr(cost, f'{part}_bytes') / unit_bytes:.2f}" for part in MEMORY_KINDS)
        tera_flops = (f"{flops / 1e12:.4g}" for flops in (_model_flops(spec, cost), cost.hardware_flops))
        rows.append((cost.pp_rank, *parts, *tera_flops))
    numbers = (f">{part}" for part in (*MEMORY_KINDS, "model TFLOP", "hardware TFLOP"))
    fits_text = "fits" if largest_cost.peak_bytes <= hardware.mem_bytes else "does NOT fit"
    peak_text = f"largest peak {largest_cost.peak_bytes / GIB:.2f} GiB (stage {largest_cost.pp_rank}) {fits_text} into"
    capacity_text = (
        f"{hardware.mem_bytes / GIB:.1f} GiB of {hardware.gpu}; allocator, NCCL and CUDA need extra memory"
    )
    show(table(title, "pp", *numbers, rows=rows), _collectives(costs), f"{peak_text} {capacity_text}")


def _collectives(costs: list[RankCost]) -> Table:
    """A table of the collectives of a step; stages that send the same bytes share a row."""
    stages_by_collective: dict[tuple[str, int, int], list[str]] = {}
    for cost in costs:
        for name, (calls, nbytes) in cost.collectives.items():
            stages_by_collective.setdefault((name, calls, nbytes), []).append(str(cost.pp_rank))
    rows = []
    for (name, calls, nbytes), stages in sorted(stages_by_collective.items()):
        size = f"{nbytes / 2**20:,.4g}" if nbytes >= 2**10 else "< 0.001"
        rows.append((*name.split(), calls, size, ",".join(stages)))
    columns = ("axis", "collective", ">calls", ">MiB", "stages")
    return table("collectives of one step, by mesh axis", *columns, rows=rows)
