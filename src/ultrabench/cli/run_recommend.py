"""What `ultrabench recommend` prints: the best predicted layout of each cell, its speed, price and command."""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import typer
from rich.console import RenderableType

from ultrabench.analysis.page.commands import launch_words
from ultrabench.analysis.results.columns import RATE, column_of
from ultrabench.analysis.results.numbers import with_interval, with_unit
from ultrabench.cli.sweep.consent import headline
from ultrabench.cli.sweep.layout_notes import layout_notes
from ultrabench.cli.tables import print_json, show, table, three_digits
from ultrabench.cli.written import written_lines
from ultrabench.errors import ConfigError
from ultrabench.layout import AXES
from ultrabench.routing import BALANCED_ROUTING, LEARNED_ROUTING, routing_text
from ultrabench.run import RunSpec
from ultrabench.store.kernel_secrets import redact_arguments
from ultrabench.sweep.arguments import knobs_of
from ultrabench.sweep.best_runs import cell_search, tokens_per_s_per_gpu
from ultrabench.sweep.candidate import NO_ROOM, Candidate, CellKey, cell_columns, cell_label
from ultrabench.sweep.config.compose import parts_of
from ultrabench.sweep.config.launcher_config import CLUSTER_LAUNCHER
from ultrabench.sweep.config.load import load_config
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.config.sweep_file import require_writable_name
from ultrabench.sweep.extrapolation import BestRate, best_published, beyond_fit, published_mfu, unproven
from ultrabench.sweep.predict.predict import Predictor, largest_loss
from ultrabench.sweep.recommend import Recommendation, recommendations
from ultrabench.sweep.similar_layouts import group_column, group_lines, shown_runs
from ultrabench.variant import FLAGS

LayoutRow = dict[str, Any]
"""One recommended layout, as `--json` prints it."""
FULL_KEYS = {name: f"sweep.{name}" for name in ("nodes", *AXES[1:], "seq_len", "gbs")}
FULL_KEYS["precision"] = "kernel.precision"
"""Short key of an override -> its full key."""
PEAK = "predicted_peak_mem_bytes"
"""The column whose name and unit the key peak_mem_bytes of a row has."""
SHARED_KEYS = ("step_time_s", "step_time_low_s", "step_time_high_s", "peak_mem_bytes", "p_oom", "limited_by")
"""Keys of a row that are fields of the prediction of its run, too."""


def run_recommend(
    overrides: list[str],
    tokens: float | None,
    gpu_hour_price: float | None,
    max_groups: int,
    with_similar: bool,
    as_json: bool,
    file_name: str | None,
    *,
    force: bool,
) -> None:
    """Prints the best layout of each group of similar ones, or all layouts, of each cell that the overrides describe.

    Args:
        tokens: tokens of a whole training, for its days and cost; None prints neither.
        gpu_hour_price: price of a GPU hour; None means that of the cluster's file.
        max_groups: largest number of groups for each cell.
        with_similar: whether all layouts of a group are shown and written.
        file_name: name of the sweep that is written with these layouts; None writes none.
        force: whether a file of that name is replaced.
    """
    path = None if file_name is None else require_writable_name(file_name, force=force)
    full_overrides = with_full_keys(overrides)
    typed_keys = parts_of(overrides).keys()
    short_keys = {full_key: key for key, full_key in _full_keys(overrides).items() if key in typed_keys}
    config = with_fp8(load_config(full_overrides, short_keys), full_overrides)
    if not config.kernel.is_predictable:
        fact = f"kernel.params={config.kernel.params}: the layouts of an unknown model cannot be predicted"
        raise ConfigError(fact, "give the number of its parameters, such as kernel.params=124e6")
    if not config.kernel.trains:
        raise ConfigError(f"kernel={config.kernel.name} does not train; use kernel=embedded")
    if not {"model", "sweep", "sweep.models"} & parts_of(overrides).keys():
        command = shlex.join(["ultrabench", *sys.argv[1:], "model=llama3-8b"])
        problem = "recommend needs a model: a name of ultrabench configs model, or the path of a config.json"
        raise ConfigError(problem, f"for example: {command}")
    gpu_hour_price = config.price_per_gpu_hour if gpu_hour_price is None else gpu_hour_price
    extra_overrides = [override for override in full_overrides if not _is_in_row(override)]
    model = parts_of(full_overrides).get("model")  # maybe a path, which the name of the model does not say
    rows, all_runs = list[LayoutRow](), list[Candidate]()
    advice = recommendations(config, max_groups, short_keys)
    if all(cell.is_refused for cell in advice) and len({cell.reason for cell in advice}) == 1:
        raise ConfigError(str(advice[0].reason))
    best_rates = {
        precision: best_published(config, precision) for precision in config.options.values["precision"]
    }
    for recommendation in advice:
        best_rate = best_rates[recommendation.cell.precision]
        runs = [*shown_runs(recommendation.groups, with_similar=with_similar)]
        all_runs += [run for run, _ in runs]
        rows += _rows(config, recommendation, runs, best_rate, extra_overrides, model)
    for row in rows:
        row.update(_training_needs(row, tokens, gpu_hour_price) if tokens and row["layout"] else {})
    document = {"hardware": config.hardware.name, "profile": config.profile.name, "rows": rows}
    launch_lines = written_lines(path, config, full_overrides, all_runs) if path and all_runs else []
    if as_json:
        print_json(document | ({"written": str(path)} if launch_lines else {}))
    else:
        page = _page(config, rows, with_similar=with_similar)
        show(*page, *(launch_lines or _write_lines(config, bool(all_runs))))
    if not any(row["layout"] for row in rows):
        raise typer.Exit(ConfigError.exit_code)


def with_full_keys(overrides: Sequence[str]) -> list[str]:
    """The overrides as `sweep plan` takes them, such as sweep.nodes=[1,2] for nodes=[1,2], with the default sweep."""
    full_keys = _full_keys(overrides)
    full_overrides = list[str]()
    for override in overrides:
        key, equals_sign, value = override.partition("=")
        is_knob = key in full_keys and key not in FULL_KEYS
        prefix = "++" if is_knob else ""  # the sweep has no such key yet
        full_overrides.append(f"{prefix}{full_keys.get(key, key)}{equals_sign}{value}")
    return full_overrides if "sweep" in parts_of(full_overrides) else ["sweep=recommend", *full_overrides]


def _full_keys(overrides: Sequence[str]) -> dict[str, str]:
    """Short key of an override -> its full key; the knobs of the kernel that the overrides name are among them."""
    return {knob: f"sweep.{FLAGS}.{knob}" for knob in knobs_of(overrides)} | FULL_KEYS


def with_fp8(config: SweepConfig, overrides: Sequence[str]) -> SweepConfig:
    """The sweep in fp8, too, where the hardware and a model have it and no override chooses the precision."""
    hardware, options = config.hardware, config.options
    has_fp8 = hardware.has_gpus and not hardware.fp8_refusal and "fp8" in hardware.peak_flops_per_s
    has_dense_model = not all(shape.num_experts for shape in config.models)
    if "kernel.precision" in parts_of(overrides) or not (
        config.kernel.trains_itself and has_fp8 and has_dense_model
    ):
        return config
    precisions = tuple(dict.fromkeys((*options.values["precision"], "fp8")))
    return replace(config, options=replace(options, values={**options.values, "precision": precisions}))


def _is_in_row(override: str) -> bool:
    """Whether the command of a row has the setting of this override anyway."""
    key = override.lstrip("+~").partition("=")[0]
    return key in ("model", "hardware", "sweep", "kernel", "kernel.precision") or key.startswith("sweep.")


def _rows(
    config: SweepConfig,
    recommendation: Recommendation,
    runs: Sequence[tuple[Candidate, Mapping[str, int]]],
    best_rate: BestRate | None,
    extra_overrides: Sequence[str],
    model: str | None,
) -> Iterator[LayoutRow]:
    """The rows of a cell: one for each run, or one with the reason why there is none.

    Args:
        runs: each run to show, with the keys that describe its group.
        best_rate: the best published rate of the GPU in the precision of the cell.
        extra_overrides: overrides for the command of a row that do not follow from the row.
        model: what `model=` is in the overrides; None if they do not say it.
    """
    cell = recommendation.cell
    cell_row = {**cell._asdict(), "gpus": cell.nodes * config.hardware.gpus_per_node}
    if not runs:
        yield {**cell_row, "layout": None, "reason": recommendation.reason}
    predictor = cell_search(config, recommendation.shape, cell).cell_plan.predictor
    for run, group_keys in runs:
        prediction, spec = run.prediction, run.spec
        gpu_rate = tokens_per_s_per_gpu(spec, prediction.step_time_s)
        overhead_part, overhead_share = largest_loss(predictor.step_time(spec, predictor.stages(spec)))
        yield {
            **cell_row,
            "layout": spec.label(),
            **{name: getattr(run.layout, name) for name in AXES},
            "run_id": run.run_id,
            **group_keys,
            "mfu": run.mfu(gpu_rate),
            "tokens_per_s": gpu_rate * cell_row["gpus"],
            "tokens_per_s_per_gpu": gpu_rate,
            "rate_by_routing": _rate_by_routing(predictor, spec),
            **{name: getattr(prediction, name) for name in SHARED_KEYS},
            "rank_mem_bytes": config.hardware.mem_bytes,
            "lost_to": overhead_part,
            "lost_share": overhead_share,
            "unmeasured": beyond_fit([spec], config.profile, config.hardware.gpu_at_limit),
            "unproven": unproven([spec], config.profile, config.hardware),
            "above_published": _is_above_published(best_rate, run),
            "faster_gbs": _faster_gbs(recommendation),
            "command": _command(config, run, {**cell_row, "model": model or cell.model}, extra_overrides),
            "reason": None,
        }


def _rate_by_routing(predictor: Predictor, spec: RunSpec) -> dict[str, float] | None:
    """Routing -> the predicted tokens/s/GPU of a run with it: its own one, and the other one of forced balance and a
    learned router; None for a model without experts.
    """
    if not spec.shape.num_experts:
        return None
    other_routing = BALANCED_ROUTING if spec.kernel.routing == LEARNED_ROUTING else LEARNED_ROUTING
    routings = (spec.kernel.routing, other_routing)
    specs = {routing: replace(spec, kernel=replace(spec.kernel, routing=routing)) for routing in routings}
    return {
        routing: tokens_per_s_per_gpu(spec, predictor.predict(of_routing).step_time_s)
        for routing, of_routing in specs.items()
    }


def _faster_gbs(recommendation: Recommendation) -> dict[str, Any] | None:
    """The batch of nearly the same size that is clearly faster, its speedup and its layout, if there is one."""
    if (other := recommendation.other_batch) is None:
        return None
    gbs, label = other.run.cell.gbs, other.run.spec.label()
    return {"gbs": gbs, "speedup": other.speedup, "layout": label}


def _is_above_published(best_rate: BestRate | None, run: Candidate) -> bool:
    """Whether the predicted MFU is above the best that is published of the GPU in this precision, if one is."""
    if best_rate is None or run.peak_flops_per_s is None:
        return False
    mfu = published_mfu(run.spec, run.prediction.step_time_s, run.peak_flops_per_s, best_rate)
    return best_rate.below(mfu)


def _command(config: SweepConfig, run: Candidate, cell_row: LayoutRow, overrides: Sequence[str]) -> str:
    """The command that measures a recommended layout; each precision is another kernel and needs a sweep of its own."""
    config_names = {"hardware": config.hardware.name, "kernel": config.kernel.name}
    settings = {"name": f"{config.name}-{cell_row['precision']}"}
    settings |= {"launcher": CLUSTER_LAUNCHER} if config.hardware.has_gpus else {}
    overrides = [*overrides, *(f"{k}={v}" for k, v in settings.items() if k not in parts_of(overrides))]
    axis_values = {name: getattr(run.layout, name) for name in AXES}
    launch_text = launch_words({**cell_row, **config_names, **axis_values})
    return " ".join(("ultrabench sweep launch", launch_text, *map(shlex.quote, overrides)))


def _training_needs(row: LayoutRow, tokens: float, gpu_hour_price: float | None) -> LayoutRow:
    """Days and cost of a training of so many tokens, and the ends of their 80 % intervals."""
    days = tokens / row["tokens_per_s"] / 86400
    slowdowns = {end: row[f"step_time{end}_s"] / row["step_time_s"] for end in ("", "_low", "_high")}
    needs = {f"days{end}": days * slowdown for end, slowdown in slowdowns.items()}
    if gpu_hour_price is not None:
        needs |= {f"cost{end}": needs[f"days{end}"] * 24 * row["gpus"] * gpu_hour_price for end in slowdowns}
    return needs


def _page(config: SweepConfig, rows: Sequence[LayoutRow], *, with_similar: bool) -> Iterator[RenderableType]:
    """The table of the recommended layouts, their groups, and the cells without any.

    Args:
        with_similar: whether the rows have all layouts of their groups.
    """
    cells = [CellKey(*(row[name] for name in CellKey._fields)) for row in rows]
    cell_keys = cell_columns(cells)
    yield headline(config)
    layout_rows = [row for row in rows if row["layout"]]
    extra_keys = [name for name in ("days", "cost") if layout_rows and name in layout_rows[0]]
    mfu_heading, oom_heading = column_of("mfu").heading, column_of("p_oom").heading
    step_heading, peak_heading = (column_of(name).bare_heading for name in ("step_time_s", PEAK))
    rate_headings = (column_of(name).heading for name in ("tokens_per_s", RATE))
    number_headings = (mfu_heading, *rate_headings, step_heading, peak_heading, oom_heading, *extra_keys)
    number_columns = (f">{heading}" for heading in number_headings)
    shown_keys = [
        key for key in cell_keys if key != "model" or len(config.models) > 1
    ]  # the headline has one
    cell_headings = (key if key == "model" else f">{key}" for key in shown_keys)
    group_key = group_column(with_similar=with_similar)
    columns = (*cell_headings, "layout", f">{group_key}", *number_columns, "limited by", "note")
    table_rows = (
        [*(row[key] for key in (*shown_keys, "layout", group_key)), *_row_texts(row, extra_keys)]
        for row in layout_rows
    )
    if layout_rows:
        layout_table = table("\nbest predicted layouts", *columns, rows=table_rows)
        layout_table.requested_names = extra_keys
        notes = {
            **layout_notes(config),
            "limited by": "limited by: the main limit of the layout, and the largest part of the step "
            "that is not compute",
        }
        routings = [*dict.fromkeys(chain.from_iterable(_other_rates(row) for row in layout_rows))]
        if routings:
            texts = [f"{routing_text(routing)}: {_SPREAD_BY_ROUTING[routing]}" for routing in routings]
            notes["note"] = "; ".join(texts)
        layout_table.note_by_column = notes
        yield layout_table
        yield from group_lines(layout_rows, with_similar=with_similar)
        if features := dict.fromkeys(text for row in layout_rows for text in row["unmeasured"]):
            yield (
                f"extrapolated: beyond the values that profile {config.profile.name} was fitted to (in brackets), "
                f"which widens intervals: {', '.join(features)}"
            )
        facts = dict.fromkeys(fact for row in layout_rows for fact in row["unproven"])
        yield from (f"unproven: {fact}" for fact in facts)
    for row, cell in zip(rows, cells, strict=True):
        if row["reason"]:
            yield f"{cell_label(cell, cell_keys)}: {row['reason']}"
    faster_by_cell = {cell: row["faster_gbs"] for row, cell in zip(rows, cells, strict=True) if row["layout"]}
    for cell, faster in faster_by_cell.items():
        if faster:
            speedup_text = f"gbs={faster['gbs']} is {100 * faster['speedup']:.0f} % faster"
            yield f"{cell_label(cell, cell_keys)}: {speedup_text} than gbs={cell.gbs} ({faster['layout']})"


_SPREAD_BY_ROUTING = {
    BALANCED_ROUTING: "with tokens that spread equally over the experts",
    LEARNED_ROUTING: "with tokens that spread unequally over the experts, as a trained router sends them",
}
"""Routing -> how a legend describes it."""


def _write_lines(config: SweepConfig, has_layouts: bool) -> Iterator[str]:
    """The command that writes the recommended layouts as a sweep, which the user has not asked for yet."""
    if has_layouts:
        yield "\nto measure these layouts, write them as a sweep first:"
        arguments = redact_arguments(sys.argv[1:], config.secrets)
        yield shlex.join(["ultrabench", *arguments, "--write", "best"])


def _other_rates(row: LayoutRow) -> Mapping[str, float]:
    """Routing -> tokens/s/GPU, of the routings that are not that of the kernel, which comes first."""
    return dict([*(row["rate_by_routing"] or {}).items()][1:])


def _row_texts(row: LayoutRow, extra_keys: Sequence[str]) -> Iterator[str]:
    """The texts of a table row after those of its layout and group."""
    yield from (with_unit(name, row[name]) or "" for name in ("mfu", "tokens_per_s", "tokens_per_s_per_gpu"))
    yield with_interval("step_time_s", *(row[f"step_time_{end}"] for end in ("s", "low_s", "high_s")))
    yield column_of(PEAK).unit.bare_text(row["peak_mem_bytes"])
    yield with_unit("p_oom", row["p_oom"]) or ""
    for name in extra_keys:
        needs, low_needs, high_needs = (three_digits(row[f"{name}{end}"]) for end in ("", "_low", "_high"))
        yield f"{needs} ({low_needs}-{high_needs})"
    yield f"{row['limited_by']}; {row['lost_to']} {100 * row['lost_share']:.0f} %"
    no_room = row["peak_mem_bytes"] > row["rank_mem_bytes"]
    routing_texts = [
        f"{routing_text(routing)} {with_unit(RATE, rate)} {column_of(RATE).heading}"
        for routing, rate in _other_rates(row).items()
    ]
    notes = {
        NO_ROOM: no_room,
        "extrapolated": row["unmeasured"],
        "unproven": row["unproven"],
        "above published": row["above_published"],
    }
    yield ", ".join((*routing_texts, *(note for note, applies in notes.items() if applies)))
