"""What `ultrabench recommend` prints: the best predicted layout of each cell, its speed, price and command."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import typer
from rich.console import RenderableType

from ultrabench.analysis.page.commands import launch_words
from ultrabench.cli.sweep.consent import headline
from ultrabench.cli.tables import print_json, show, table, three_digits
from ultrabench.errors import ConfigError
from ultrabench.hardware import GIB
from ultrabench.layout import AXES
from ultrabench.sweep.candidate import NO_ROOM, Candidate, CellKey, cell_columns, cell_label
from ultrabench.sweep.config.compose import parts_of
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.extrapolation import BestRate, best_published, beyond_fit, published_mfu
from ultrabench.sweep.plan import narrowed
from ultrabench.sweep.predict.predict import largest_loss
from ultrabench.sweep.recommend import Recommendation, cell_search, recommendations, tokens_per_s_per_gpu

Row = dict[str, Any]
"""One recommended layout, as `--json` prints it."""
FULL_KEYS = {name: f"sweep.{name}" for name in ("nodes", *AXES[1:], "seq_len", "gbs")} | {
    "precision": "kernel.precision"
}
"""Short key of an override -> its key."""
SHARED_KEYS = ("step_time_s", "step_time_low_s", "step_time_high_s", "peak_mem_bytes", "p_oom", "limited_by")
"""Keys of a row that the prediction of its run has, too."""


def run_recommend(
    overrides: list[str], tokens: float | None, price: float | None, top: int, as_json: bool
) -> None:
    """Prints the best layouts of each cell that the overrides describe."""
    full_overrides = in_full(overrides)
    config = with_fp8(load_config(full_overrides), full_overrides)
    if config.kernel.kind == "probe":
        raise ConfigError(f"kernel={config.kernel.name} does not train; use kernel=embedded")
    price = config.price_per_gpu_hour if price is None else price
    extra_words = [word for word in full_overrides if not _is_in_row(word)]
    model = parts_of(full_overrides).get("model")  # maybe a path, which the name of the model does not say
    rows = [row for cell in recommendations(config, top) for row in _rows(config, cell, extra_words, model)]
    for row in rows:
        row.update(_training(row, tokens, price) if tokens and row["layout"] else {})
    if as_json:
        print_json({"hardware": config.hardware.name, "profile": config.profile.name, "rows": rows})
    else:
        show(*_page(config, rows, tokens))
    if not any(row["layout"] for row in rows):
        raise typer.Exit(1)


def in_full(overrides: Sequence[str]) -> list[str]:
    """The overrides as `sweep plan` takes them, such as sweep.nodes=[1,2] for nodes=[1,2], with the default sweep."""
    pairs = (override.partition("=") for override in overrides)
    words = [f"{FULL_KEYS.get(key, key)}{eq}{value}" for key, eq, value in pairs]
    return words if "sweep" in parts_of(words) else ["sweep=recommend", *words]


def with_fp8(config: SweepConfig, words: Sequence[str]) -> SweepConfig:
    """The sweep in fp8, too, where the hardware and a model have it and no override chooses the precision."""
    hardware, options = config.hardware, config.options
    has_fp8 = hardware.device == "cuda" and not hardware.fp8_refusal and "fp8" in hardware.peak_flops_per_s
    is_set = "kernel.precision" in parts_of(words)
    if is_set or not has_fp8 or config.kernel.kind != "embedded" or all(m.num_experts for m in config.models):
        return config
    precisions = tuple(dict.fromkeys((*options.values["precision"], "fp8")))
    return replace(config, options=replace(options, values={**options.values, "precision": precisions}))


def _is_in_row(word: str) -> bool:
    """Whether the command of a row has the setting of this override anyway."""
    key = word.lstrip("+~").partition("=")[0]
    return key in ("model", "hardware", "sweep", "kernel", "kernel.precision") or key.startswith("sweep.")


def _rows(
    config: SweepConfig, cell: Recommendation, extra_words: Sequence[str], model: str | None
) -> Iterator[Row]:
    """The rows of a cell: one for each run, or one with the reason why there is none."""
    cell_row = {**cell.cell._asdict(), "gpus": cell.cell.nodes * config.hardware.gpus_per_node}
    if not cell.runs:
        yield {**cell_row, "layout": None, "reason": cell.reason}
    best_rate = best_published(narrowed(config, cell.cell)) if cell.runs else None
    predictor = cell_search(config, cell.shape, cell.cell).cell_plan.predictor
    for run in cell.runs:
        prediction, spec = run.prediction, run.spec
        gpu_rate = tokens_per_s_per_gpu(spec, prediction.step_time_s)
        lost_to, lost_share = largest_loss(predictor.step_time(spec, predictor.stages(spec)))
        yield {
            **cell_row,
            "layout": spec.label(),
            **{name: getattr(run.layout, name) for name in AXES},
            "run_id": run.run_id,
            "mfu": run.mfu(gpu_rate),
            "tokens_per_s": gpu_rate * cell_row["gpus"],
            "tokens_per_s_per_gpu": gpu_rate,
            **{name: getattr(prediction, name) for name in SHARED_KEYS},
            "rank_mem_bytes": config.hardware.mem_bytes,
            "lost_to": lost_to,
            "lost_share": lost_share,
            "unmeasured": beyond_fit([spec], config.profile, config.hardware.gpu_at_limit),
            "above_published": _is_above_published(best_rate, run),
            "command": _command(config, run, {**cell_row, "model": model or cell_row["model"]}, extra_words),
            "reason": None,
        }


def _is_above_published(best_rate: BestRate | None, run: Candidate) -> bool:
    """Whether the predicted MFU is above the best that is published of the GPU in this precision, if one is."""
    if best_rate is None or run.peak_flops_per_s is None:
        return False
    mfu = published_mfu(run.spec, run.prediction.step_time_s, run.peak_flops_per_s, best_rate)
    return best_rate.below(mfu)


def _command(config: SweepConfig, run: Candidate, cell_row: Row, extra_words: Sequence[str]) -> str:
    """The command that measures a recommended layout; each precision is another kernel and needs a sweep of its own."""
    kernel = {"hardware": config.hardware.name, "kernel": config.kernel.name}
    preset = {"name": f"{config.name}-{cell_row['precision']}"}
    preset |= {"launcher": "slurm"} if config.hardware.device == "cuda" else {}
    extra_words = [*extra_words, *(f"{k}={v}" for k, v in preset.items() if k not in parts_of(extra_words))]
    axes = {name: getattr(run.layout, name) for name in AXES}
    words = launch_words({**cell_row, **kernel, **axes})
    return " ".join(("ultrabench sweep launch", words, *map(shlex.quote, extra_words)))


def _training(row: Row, tokens: float, price: float | None) -> Row:
    """Days and cost of a training of so many tokens, and their 80 % intervals."""
    days = tokens / row["tokens_per_s"] / 86400
    slowdown = {end: row[f"step_time{end}_s"] / row["step_time_s"] for end in ("", "_low", "_high")}
    needs = {f"days{end}": days * factor for end, factor in slowdown.items()}
    if price is not None:
        needs |= {f"cost{end}": days * factor * 24 * row["gpus"] * price for end, factor in slowdown.items()}
    return needs


def _page(config: SweepConfig, rows: Sequence[Row], tokens: float | None) -> Iterator[RenderableType]:
    """The table of the recommended layouts, their commands, and the cells without any."""
    cells = [CellKey(*(row[name] for name in CellKey._fields)) for row in rows]
    columns = cell_columns(cells)
    yield headline(config)
    layout_rows = [row for row in rows if row["layout"]]
    extra_columns = [name for name in ("days", "cost") if layout_rows and name in layout_rows[0]]
    numbers = (
        ">MFU",
        ">tokens/s",
        ">tokens/s/GPU",
        ">step s",
        ">peak GiB",
        ">P(OOM)",
        *(f">{name}" for name in extra_columns),
    )
    heads = ("model", *(f">{name}" for name in columns[1:]), "layout", *numbers, "limited by", "note")
    lines = ([*(row[name] for name in columns), *_numbers(row, extra_columns)] for row in layout_rows)
    if layout_rows:
        yield table("\nbest predicted layouts", *heads, rows=lines)
        yield f"MFU: relative to the peak of the precision, FLOPs by the formula {config.measure.flops_formula}; step s: 80 % interval in brackets"
        yield "peak GiB: includes the allocator's reserve; P(OOM) does not, because a full GPU gets the reserve back"
        yield "limited by: the main limit of the layout, and the largest part of the step that is not compute"
    for row, cell in zip(rows, cells, strict=True):
        if row["reason"]:
            yield f"{cell_label(cell, columns)}: {row['reason']}"
    if layout_rows:
        yield "\nto measure them, one command per layout; each adds its runs to the sweep name=:"
    yield from (row["command"] for row in layout_rows)


def _numbers(row: Row, extra_columns: Sequence[str]) -> Iterator[str]:
    """The cells of a line of the table after those of its place."""
    step, low, high = (three_digits(row[f"step_time_{part}"]) for part in ("s", "low_s", "high_s"))
    yield row["layout"]
    yield "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %"
    yield from (f"{row[name]:,.0f}" for name in ("tokens_per_s", "tokens_per_s_per_gpu"))
    yield f"{step} ({low}-{high})"
    yield f"{row['peak_mem_bytes'] / GIB:.1f}"
    yield f"{100 * row['p_oom']:.1f} %"
    yield from (three_digits(row[name]) for name in extra_columns)
    yield f"{row['limited_by']}; {row['lost_to']} {100 * row['lost_share']:.0f} %"
    is_tight = row["peak_mem_bytes"] > row["rank_mem_bytes"]
    notes = {NO_ROOM: is_tight, "extrapolated": row["unmeasured"], "above published": row["above_published"]}
    yield ", ".join(note for note, applies in notes.items() if applies)
