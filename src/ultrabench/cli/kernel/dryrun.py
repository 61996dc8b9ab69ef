"""`ultrabench kernel dryrun` shows what a step of a layout costs a rank, without GPUs."""

from dataclasses import replace
from typing import Any

from rich.table import Table

from ultrabench.cli.tables import print_json, say, show, table
from ultrabench.column import BYTES, FLOPS, MEBIBYTES, memory_axis
from ultrabench.errors import counted
from ultrabench.hardware import Hardware
from ultrabench.kernel.requests import RankCost, dry_run
from ultrabench.kernel_config import KernelConfig
from ultrabench.record import to_dict
from ultrabench.run import RunSpec
from ultrabench.stages import stages_by_rank
from ultrabench.sweep.arguments import PREDICTION_DEFAULTS, read_run

DEFAULT_ARGUMENTS = {
    name: PREDICTION_DEFAULTS[name] for name in ("model", "hardware", "nodes", "seq_len", "precision")
}
"""The value of an argument that is not given."""
MEMORY_KINDS = ("static", "parameter", "gradient", "optimizer", "activation", "peak")
"""Names of the fields of RankCost that hold bytes, without `_bytes`."""


def run_dryrun(arguments: list[str], compiled: bool, as_json: bool) -> None:
    """Prints memory, FLOPs and collectives of a step for the first rank of each pipeline stage."""
    spec, hardware = dryrun_spec(arguments, compiled)
    layout, seq_len = spec.layout, spec.workload.seq_len
    run_text = (
        f"{layout.label()} on {counted(layout.world_size, 'rank')}, "
        f"{spec.kernel.precision}{', compiled' * spec.compiles}"
    )
    say(f"dry run of {run_text}, seq_len {seq_len}: the first rank of each pipeline stage")
    costs: list[RankCost] = []
    for cost in dry_run(spec):
        costs.append(cost)
        say(f"  stage {cost.pp_rank} (rank {cost.rank}): peak {BYTES.text(cost.peak_bytes)}")
    if as_json:
        print_json(_cost_document(spec, hardware, costs))
    else:
        _show_costs(spec, hardware, costs)


def dryrun_spec(arguments: list[str], compiled: bool = False) -> tuple[RunSpec, Hardware]:
    """The run that arguments such as `model=llama3-8b nodes=8 tp=8` describe, and its hardware.

    Raises:
        ConfigError: a word or a name is unknown, or the layout is impossible.
    """
    spec, config = read_run(arguments, DEFAULT_ARGUMENTS)
    kernel = KernelConfig(name="embedded", precision=spec.kernel.precision, compile=compiled)
    return replace(spec, kernel=kernel), config.hardware


def _model_flops(spec: RunSpec, cost: RankCost) -> float:
    """FLOPs of one step on the rank of this cost, counted as in ModelShape.flops_per_token."""
    shape, layout = spec.shape, spec.layout
    attention_flops = shape.attention_flops(spec.workload.seq_len)
    rank_stages = stages_by_rank(shape, layout)[cost.pp_rank]
    flops_per_token = sum(6 * s.matmul_params(shape) + s.num_layers * attention_flops for s in rank_stages)
    return flops_per_token * spec.tokens_per_step / (layout.dp * layout.cp * layout.tp)


def _cost_document(spec: RunSpec, hardware: Hardware, costs: list[RankCost]) -> dict[str, Any]:
    """The document of `kernel dryrun --json`."""
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


def _show_costs(spec: RunSpec, hardware: Hardware, costs: list[RankCost]) -> None:
    """Prints memory and FLOPs of the first rank of each pipeline stage, the collectives, and whether the step fits."""
    max_cost = max(costs, key=lambda cost: cost.peak_bytes)
    memory_unit = memory_axis(max_cost.peak_bytes)
    title = f"{spec.shape.name}, {spec.layout.label()}: one step, one rank per pipeline stage, {memory_unit.symbol}"
    rows = []
    for cost in costs:
        memory_texts = (memory_unit.bare_text(getattr(cost, f"{kind}_bytes")) for kind in MEMORY_KINDS)
        flop_texts = map(FLOPS.bare_text, (_model_flops(spec, cost), cost.hardware_flops))
        rows.append((cost.pp_rank, *memory_texts, *flop_texts))
    flop_names = (f"{kind} {FLOPS.axis_symbol}" for kind in ("model", "hardware"))
    number_columns = (f">{name}" for name in (*MEMORY_KINDS, *flop_names))
    fits_text = "fits" if max_cost.peak_bytes <= hardware.mem_bytes else "does NOT fit"
    peak_text = f"largest peak {BYTES.text(max_cost.peak_bytes)} (stage {max_cost.pp_rank}) {fits_text}"
    device_text = f"{BYTES.brief_text(hardware.mem_bytes)} of {hardware.gpu}"
    memory_text = f"{peak_text} into {device_text}; allocator, NCCL and CUDA need extra memory"
    show(table(title, "pp", *number_columns, rows=rows), _collectives_table(costs), memory_text)


def _collectives_table(costs: list[RankCost]) -> Table:
    """A table of the collectives of a step; stages that send the same bytes share a row.

    The name of a collective is its mesh axis and its kind, such as `tp all_reduce`.
    """
    pp_ranks_by_collective: dict[tuple[str, int, int], list[str]] = {}
    for cost in costs:
        for name, (num_calls, num_bytes) in cost.collectives.items():
            pp_ranks = pp_ranks_by_collective.setdefault((name, num_calls, num_bytes), [])
            pp_ranks.append(str(cost.pp_rank))
    rows = []
    for (name, num_calls, num_bytes), pp_ranks in sorted(pp_ranks_by_collective.items()):
        size = num_bytes * MEBIBYTES.factor
        size_text = f"{size:,.4g}" if size >= 0.001 else "< 0.001"
        rows.append((*name.split(), num_calls, size_text, ",".join(pp_ranks)))
    headings = ("axis", "collective", ">calls", f">{MEBIBYTES.symbol}", "stages")
    return table("collectives of one step, by mesh axis", *headings, rows=rows)
