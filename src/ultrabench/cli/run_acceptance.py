"""Runs `ultrabench doctor --deep`: small sweeps on one and two nodes that test what a large sweep relies on.

That is equal losses, a recognised lack of memory, and the speed.
"""

import operator
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import typer

from ultrabench.analysis.results.collect import collect
from ultrabench.analysis.results.columns import column_of
from ultrabench.analysis.results.numbers import rate_text, with_unit
from ultrabench.analysis.results.published import PublishedRate, beside_published, published_rates
from ultrabench.analysis.results.rows import Row
from ultrabench.analysis.results.run_label import run_label
from ultrabench.cli.sweep.launch import follow, ignore_signals
from ultrabench.cli.tables import say, warn
from ultrabench.errors import ClusterError, ConfigError, counted
from ultrabench.launchers.allocation_ends import interrupt
from ultrabench.launchers.choose import choose_launcher
from ultrabench.launchers.doctor.acceptance import acceptance_folder, write_acceptance
from ultrabench.launchers.doctor.check import FAIL, Check, failure, first_problem, success
from ultrabench.launchers.open_sweep import folder_of, open_sweep
from ultrabench.layout import DEGREES, FOLLOWING
from ultrabench.record import to_dict
from ultrabench.result import Status
from ultrabench.store.folder import SweepFolder
from ultrabench.sweep.config.load import config_from_tree, load_model
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.grid import divisors
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.predict.predict import LIKELY_OOM
from ultrabench.sweep.remedy import require_runs
from ultrabench.sweep.running.outliers import LOSS_TOLERANCE
from ultrabench.sweep.running.price import committed_gpu_hours

MAX_GPU_HOURS = 3.0
"""Largest number of GPU hours that an acceptance run may use."""
CERTAIN_OOM_SHARE = 3.0
"""A run that is predicted to need this many times the memory of a rank certainly does not fit."""
MIN_SPEED_SHARE = 0.7
"""Smallest accepted share of the published speed; it still finds a network that runs at half its rate."""
GRADIENT_TOLERANCE = {"fp8": 5e-2, "bf16": 1e-2, "fp32": 1e-5, "fp64": 1e-9}
"""Precision -> largest relative difference of two gradient norms that count as equal; see docs/guide/cluster.md."""
EQUAL_COLUMNS = {"loss": ("loss_final", LOSS_TOLERANCE), "gradient": ("gradient_norm", GRADIENT_TOLERANCE)}
"""What must be equal in all layouts: quantity -> its result column, and precision -> largest relative difference."""
CHECK_NAMES = ("same loss", "same gradient", "out of memory", "published speed")
"""Names of the checks in order."""
DP_AXES: dict[str, Any] = {name: [1] for name in DEGREES[1:]} | {"zero_stage": [0], FOLLOWING[-1]: None}
"""The sweep axes of data parallelism alone, without ZeRO; gas None means that it follows from the batch."""


def run_acceptance(config: SweepConfig) -> list[Check]:
    """Performs the acceptance run and writes doctor.json; returns its checks in order.

    Raises:
        ConfigError: an acceptance run of this configuration is impossible.
        ClusterError: the cluster cannot be used; doctor.json records this too.
    """
    if not config.kernel.trains_itself:
        raise ConfigError(f"kernel={config.kernel.name} with --deep, which needs kernel=embedded; use that")
    acceptance, checks = _Acceptance(config), list[Check]()
    try:
        checks.extend(check.named(name) for name, check in zip(CHECK_NAMES, acceptance.checks(), strict=True))
    except ClusterError as error:
        failed_check = failure(str(error), "fix this, then try again").named(CHECK_NAMES[len(checks)])
        acceptance.write([*checks, failed_check])
        raise
    acceptance.write(checks)
    return checks


class _Acceptance:
    """One acceptance run, whose sweeps share one budget."""

    def __init__(self, config: SweepConfig) -> None:
        self._config, self._gpu_hours_left = config, MAX_GPU_HOURS
        self._folder = acceptance_folder(config) / time.strftime("%Y%m%d-%H%M%S")
        self._published_rates = comparable_rates(config)  # an error in these files must cost no GPU time

    def checks(self) -> Iterator[Check]:
        """The checks named in CHECK_NAMES, each after the sweeps that it needs."""
        gpus_per_node = self._config.hardware.gpus_per_node
        max_mbs = max(divisors(self._config.axes, "mbs", self._config.workload.gbs))
        axes = DP_AXES | {"nodes": [1], "mbs": [max_mbs]}
        changes: dict[str, Any] = {"sweep": axes, "hardware": {"gpus_per_node": 1}}
        single_gpu_folder = self._run_sweep(self._sweep_config("one", max_p_oom=LIKELY_OOM, **changes))
        speed_folder = layouts_folder = self._run_sweep(self._sweep_config("layouts"))
        rows = [*final_rows(single_gpu_folder), *final_rows(layouts_folder)]
        for quantity in EQUAL_COLUMNS:
            yield check_equal(rows, quantity)
        memory_share, oom_mbs = 0.0, 1
        while memory_share <= CERTAIN_OOM_SHARE:
            batch_axes = {"mbs": [oom_mbs], "gbs": oom_mbs * gpus_per_node}
            oom_config = self._sweep_config("memory", sweep=axes | batch_axes, max_p_oom=1.0)
            memory_share, oom_mbs = make_plan(oom_config).candidates[0].prediction.memory_share, 2 * oom_mbs
        yield check_memory(*final_rows(self._run_sweep(oom_config)))
        if self._published_rates:
            rate, node_counts = self._published_rates[0], {rate.nodes for rate in self._published_rates}
            batch_axes = {"mbs": [2], "seq_len": rate.seq_len, "gbs": rate.gbs}
            axes |= batch_axes | {"nodes": sorted(node_counts), "zero_stage": [0, 1]}
            changes = {"sweep": axes, "models": [to_dict(load_model(rate.model))]}
            speed_folder = self._run_sweep(self._sweep_config("published", max_p_oom=LIKELY_OOM, **changes))
        yield check_speed(speed_folder, has_published_rates=bool(self._published_rates))

    def write(self, checks: Sequence[Check]) -> None:
        """Writes doctor.json."""
        path = write_acceptance(self._config, checks, self._folder, MAX_GPU_HOURS - self._gpu_hours_left)
        say(f"wrote {path}")

    def _sweep_config(self, name: str, **changes: Any) -> SweepConfig:
        """The configuration as the sweep `name`; `changes` replace only the values that they name."""
        tree = self._config.resolved
        changed_groups = {k: {**tree[k], **v} if isinstance(v, dict) else v for k, v in changes.items()}
        return config_from_tree({**tree, **changed_groups, "name": name, "results_dir": str(self._folder)})

    def _run_sweep(self, config: SweepConfig) -> SweepFolder:
        """Runs a sweep to its end; if it is interrupted, all its jobs are ended.

        Raises:
            ClusterError: the cluster or this machine cannot be used.
        """
        folder = folder_of(config)
        launcher = choose_launcher(config, folder)
        plan = require_runs(make_plan(config))
        sweep = open_sweep(plan, reuse="any", warn=warn, say=say, max_gpu_hours=self._gpu_hours_left)
        try:
            exit_code = follow(
                sweep, launcher, folder.display_name, detach=False, ask=False, stderr=True, ends_jobs=True
            )
            if exit_code > 128:
                raise typer.Exit(exit_code)
        except BaseException:
            ignore_signals()
            interrupt(sweep, launcher)
            say(f"ended the jobs; finished runs are kept in {folder.path}. The same command starts anew.")
            raise
        # A sweep that uses only some GPUs of a node holds the whole node.
        gpus_held_per_used = self._config.hardware.gpus_per_node / config.hardware.gpus_per_node
        self._gpu_hours_left -= gpus_held_per_used * committed_gpu_hours(sweep.plan, sweep.state(), ())
        return folder


def comparable_rates(config: SweepConfig) -> list[PublishedRate]:
    """The published rates of one model and batch on the GPU, precision and node counts of a configuration.

    Raises:
        ConfigError: a file of published rates cannot be used.
    """
    gpu_and_precision, node_counts = (config.hardware.gpu, config.kernel.precision), config.axes.nodes
    rates_with_batch = [rate for rate in published_rates() if rate.gbs and rate.nodes in node_counts]
    rates = [rate for rate in rates_with_batch if (rate.gpu, rate.precision) == gpu_and_precision]
    workload_of = operator.attrgetter("model", "seq_len", "gbs")
    return [rate for rate in rates if workload_of(rate) == workload_of(rates[0])]


def final_rows(folder: SweepFolder) -> list[Row]:
    """The result rows of a sweep, one for each run, with `show`: the command that shows everything about the run."""
    return _final_rows_with_show(collect([folder], warn), folder)


def _final_rows_with_show(result_table: pa.Table, folder: SweepFolder) -> list[Row]:
    """`final_rows` of `folder`, whose result table is given."""
    rows = [row for row in result_table.to_pylist() if row["is_final"] and row["rule"] is None]
    return [row | {"show": f"ultrabench sweep show {row['run_id']} {folder.display_name}"} for row in rows]


def check_equal(rows: Sequence[Row], quantity: str) -> Check:
    """Checks that the layouts have the same loss or gradient norm as a single GPU.

    Args:
        rows: the result row of the single GPU, then those of the layouts.
        quantity: a key of EQUAL_COLUMNS.
    """
    column, tolerance_by_precision = EQUAL_COLUMNS[quantity]
    single_gpu_row, *layout_rows = rows
    for row in rows:
        # Ok runs have a speed, and so have runs that are invalid only because their loss differs from that of others.
        if row["tokens_per_s_per_gpu"] is None or row[column] is None:
            return _failed_check(row, "one GPU alone: " if row is single_gpu_row else "")
    expected_value, allowed_diff = single_gpu_row[column], tolerance_by_precision[single_gpu_row["precision"]]
    relative_diffs = [abs(row[column] / expected_value - 1) for row in layout_rows]
    num_differing = sum(diff > allowed_diff for diff in relative_diffs)
    worst_row = layout_rows[relative_diffs.index(max(relative_diffs))]
    return first_problem(
        f"{len(layout_rows) - num_differing} of {len(layout_rows)} layouts match the {quantity} of one GPU: "
        f"{column_of(column).unit.exact_text(expected_value)}; largest "
        f"difference {max(relative_diffs):.1g}, allowed {allowed_diff:g}",
        (num_differing, FAIL, "a GPU or a link is faulty, or torch has a bug: "
        f"compare the hosts in {worst_row['show']}",
         f"{run_label(worst_row)} differs most"),
    )  # fmt: skip


def check_memory(row: Row) -> Check:
    """Checks that a lack of memory is recognised as such, and confirmed."""
    is_oom = row["status"] == Status.OOM
    peak_text = with_unit("predicted_peak_mem_bytes", row["predicted_peak_mem_bytes"])
    if is_oom and row["confirmed"]:
        return success(f"{run_label(row)}, predicted {peak_text}: {row['reason']}")
    advice = "the GPUs must be free and have the memory of hardware=; "
    return _failed_check(row, f"predicted {peak_text}: ", ", but not confirmed" if is_oom else "", advice)


def check_speed(folder: SweepFolder, has_published_rates: bool) -> Check:
    """Checks that the best runs of a sweep are as fast as published ones; shows the fastest if nothing is published."""
    result_table = collect([folder], warn)
    rows = _final_rows_with_show(result_table, folder)
    if not has_published_rates:
        speeds_and_texts = [(row["tokens_per_s_per_gpu"] or 0.0, _run_text(row)) for row in rows]
        speed, run_text = max(speeds_and_texts)
        fact = "no published speed for this hardware and precision"
        return success(f"{fact}; ours: {run_text}: {rate_text(speed)}")
    if failed_rows := [row for row in rows if row["status"] != Status.OK]:
        return _failed_check(failed_rows[0])
    best_runs = [*beside_published(result_table)]
    is_slow = not best_runs or any((run.share or 0) < MIN_SPEED_SHARE for run in best_runs)
    advice = f"below {MIN_SPEED_SHARE:.0%}: check clocks, NVLink and the network between nodes (NCCL_DEBUG=INFO); see "
    problem = (is_slow, FAIL, f"{advice}ultrabench compare {folder.display_name} published")
    return first_problem("; ".join(run.text for run in best_runs) or "all runs are suspect", problem)


def _failed_check(row: Row, prefix: str = "", suffix: str = "", advice: str = "") -> Check:
    """A failed check that says how the run of a row ended, and which command shows everything about it."""
    end_text = ", ".join(part for part in (row["status"] or "has not run", row["reason"]) if part)
    return failure(f"{prefix}{_run_text(row)}: {end_text}{suffix}", f"{advice}see {row['show']}")


def _run_text(row: Row) -> str:
    """The model, layout and number of nodes of a run."""
    return f"{row['model']} {run_label(row)} on {counted(row['nodes'], 'node')}"
