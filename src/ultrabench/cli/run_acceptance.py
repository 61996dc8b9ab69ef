"""Runs `ultrabench doctor --deep`: small sweeps on one and two nodes that test what a large sweep relies on.

That is equal losses, a recognised lack of memory, and the speed.
"""

import operator
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import typer

from ultrabench.analysis.collect import collect
from ultrabench.analysis.compare import run_label
from ultrabench.analysis.published import PublishedRate, beside_published, published_rates
from ultrabench.analysis.rows import Row
from ultrabench.cli.sweep.launch import follow, ignore_signals
from ultrabench.cli.tables import say, warn
from ultrabench.errors import ClusterError, ConfigError, counted
from ultrabench.hardware import GIB
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
from ultrabench.sweep.plan import make_plan
from ultrabench.sweep.predict.predict import LIKELY_OOM
from ultrabench.sweep.remedy import require_runs
from ultrabench.sweep.running.outliers import TOLERANCE
from ultrabench.sweep.running.price import committed_gpu_hours

GPU_HOURS = 3.0
"""Largest number of GPU hours that an acceptance run may use."""
CERTAIN_OOM_SHARE = 3.0
"""A run that is predicted to need this many times the memory of a rank certainly does not fit."""
MIN_SPEED_SHARE = 0.7
"""Smallest accepted share of the published speed; it still finds a network that runs at half its rate."""
GRADIENT_TOLERANCE = {"fp8": 5e-2, "bf16": 1e-2, "fp32": 1e-5, "fp64": 1e-9}
"""Precision -> largest relative difference of two gradient norms that count as equal; see docs/guide/cluster.md."""
EQUAL_COLUMNS = {"loss": ("loss_final", TOLERANCE), "gradient": ("gradient_norm", GRADIENT_TOLERANCE)}
"""Numbers of a result that must be equal in all layouts: word -> column and tolerances."""
CHECKS = ("same loss", "same gradient", "out of memory", "published speed")
"""Names of the checks in order."""
DP_AXES: dict[str, Any] = {name: [1] for name in DEGREES[1:]} | {"zero_stage": [0], FOLLOWING[-1]: None}
"""The sweep axes of plain data parallelism, with the accumulation that makes the batch."""


def run_acceptance(config: SweepConfig) -> list[Check]:
    """Performs the acceptance run and writes doctor.json; returns its checks in order.

    Raises:
        ConfigError: an acceptance run of this configuration is impossible.
        ClusterError: the cluster cannot be used; doctor.json records this too.
    """
    if config.kernel.kind != "embedded":
        raise ConfigError(f"kernel={config.kernel.name} with --deep, which needs kernel=embedded; use that")
    acceptance, checks = _Acceptance(config), list[Check]()
    try:
        checks.extend(check.named(name) for name, check in zip(CHECKS, acceptance.checks(), strict=True))
    except ClusterError as error:
        problem = failure(str(error), "fix this, then try again").named(CHECKS[len(checks)])
        acceptance.write([*checks, problem])
        raise
    acceptance.write(checks)
    return checks


class _Acceptance:
    """One acceptance run, whose sweeps share one budget."""

    def __init__(self, config: SweepConfig) -> None:
        self._config, self._left_gpu_hours = config, GPU_HOURS
        self._folder = acceptance_folder(config) / time.strftime("%Y%m%d-%H%M%S")
        self._published = comparable_rates(config)  # an error in these files must cost no GPU time

    def checks(self) -> Iterator[Check]:
        """The checks of CHECKS, each after the sweeps that it needs."""
        num_gpus, mbs = self._config.hardware.gpus_per_node, max(self._config.axes.layout["mbs"])
        axes = DP_AXES | {"nodes": [1], "mbs": [mbs]}
        single_gpu = self._run(
            self._variant("one", sweep=axes, hardware={"gpus_per_node": 1}, max_p_oom=LIKELY_OOM)
        )
        layouts = self._run(self._variant("layouts"))
        rows = [*rows_of(single_gpu), *rows_of(layouts)]
        for quantity in EQUAL_COLUMNS:
            yield check_equal(rows, quantity)
        memory_share, mbs = 0.0, 1
        while memory_share <= CERTAIN_OOM_SHARE:
            batch = {"mbs": [mbs], "gbs": mbs * num_gpus}
            too_large = self._variant("memory", sweep=axes | batch, max_p_oom=1.0)
            memory_share, mbs = make_plan(too_large).candidates[0].prediction.memory_share, 2 * mbs
        yield check_memory(*rows_of(self._run(too_large)))
        if self._published:
            rate, nodes = self._published[0], sorted({rate.nodes for rate in self._published})
            batch = {"mbs": [2], "seq_len": rate.seq_len, "gbs": rate.gbs}
            axes |= batch | {"nodes": nodes, "zero_stage": [0, 1]}
            models = [to_dict(load_model(rate.model))]
            layouts = self._run(self._variant("published", sweep=axes, models=models, max_p_oom=LIKELY_OOM))
        yield check_speed(layouts, is_published=bool(self._published))

    def write(self, checks: Sequence[Check]) -> None:
        """Writes doctor.json."""
        path = write_acceptance(self._config, checks, self._folder, GPU_HOURS - self._left_gpu_hours)
        say(f"wrote {path}")

    def _variant(self, name: str, **groups: Any) -> SweepConfig:
        """The configuration as the sweep `name`; `groups` replace only the values they name."""
        tree = self._config.resolved
        changed_groups = {k: {**tree[k], **v} if isinstance(v, dict) else v for k, v in groups.items()}
        return config_from_tree({**tree, **changed_groups, "name": name, "results_dir": str(self._folder)})

    def _run(self, config: SweepConfig) -> SweepFolder:
        """Runs a sweep to its end; if it is interrupted, all its jobs are ended.

        Raises:
            ClusterError: the cluster or this machine cannot be used.
        """
        folder = folder_of(config)
        launcher, budget = choose_launcher(config, folder), self._left_gpu_hours
        plan = require_runs(make_plan(config))
        sweep = open_sweep(plan, reuse="any", warn=warn, say=say, max_gpu_hours=budget)
        try:
            code = follow(
                sweep, launcher, folder.display_name, detach=False, ask=False, stderr=True, ends_jobs=True
            )
            if code > 128:
                raise typer.Exit(code)
        except BaseException:
            ignore_signals()
            interrupt(sweep, launcher)
            say(f"ended the jobs; finished runs are kept in {folder.path}. The same command starts anew.")
            raise
        # A sweep that uses only some GPUs of a node holds the whole node.
        idle_factor = self._config.hardware.gpus_per_node / config.hardware.gpus_per_node
        self._left_gpu_hours -= idle_factor * committed_gpu_hours(sweep.plan, sweep.state(), ())
        return folder


def comparable_rates(config: SweepConfig) -> list[PublishedRate]:
    """The published rates of one model and batch on the GPU, precision and node counts of a configuration.

    Raises:
        ConfigError: a file of published rates cannot be used.
    """
    gpu_and_precision, nodes = (config.hardware.gpu, config.kernel.precision), config.axes.nodes
    rates_with_batch = [rate for rate in published_rates() if rate.gbs and rate.nodes in nodes]
    rates = [rate for rate in rates_with_batch if (rate.gpu, rate.precision) == gpu_and_precision]
    batch_of = operator.attrgetter("model", "seq_len", "gbs")
    return [rate for rate in rates if batch_of(rate) == batch_of(rates[0])]


def rows_of(folder: SweepFolder) -> list[Row]:
    """The result rows of a sweep, one for each run, with `show`: the command that shows everything about the run."""
    return _final_rows(collect([folder], warn), folder)


def _final_rows(table: pa.Table, folder: SweepFolder) -> list[Row]:
    rows = [row for row in table.to_pylist() if row["is_final"] and row["rule"] is None]
    return [row | {"show": f"ultrabench sweep show {row['run_id']} {folder.display_name}"} for row in rows]


def check_equal(rows: Sequence[Row], quantity: str) -> Check:
    """Checks that every layout has the number `quantity`, one of EQUAL_COLUMNS, of one GPU, whose row is the first."""
    column, tolerance = EQUAL_COLUMNS[quantity]
    single_gpu_row, *layouts = rows
    for row in rows:
        # Ok runs have a speed, and so have runs that are invalid only because their loss differs from that of others.
        if row["tokens_per_s_per_gpu"] is None or row[column] is None:
            return _failed(row, "one GPU alone: " if row is single_gpu_row else "")
    expected, limit = single_gpu_row[column], tolerance[single_gpu_row["precision"]]
    differences = [abs(row[column] / expected - 1) for row in layouts]
    num_wrong, outlier = sum(d > limit for d in differences), layouts[differences.index(max(differences))]
    return first_problem(
        f"{len(layouts) - num_wrong} of {len(layouts)} layouts match the {quantity} of one GPU: {expected:.6f}; largest "
        f"difference {max(differences):.1g}, allowed {limit:g}",
        (num_wrong, FAIL, f"a GPU or a link is faulty, or torch has a bug: compare the hosts in {outlier['show']}",
         f"{run_label(outlier)} differs most"),
    )  # fmt: skip


def check_memory(row: Row) -> Check:
    """Checks that a lack of memory is recognised as such, and confirmed."""
    fact, is_oom = f"predicted {row['predicted_peak_mem_bytes'] / GIB:.0f} GiB", row["status"] == Status.OOM
    if is_oom and row["confirmed"]:
        return success(f"{run_label(row)}, {fact}: {row['reason']}")
    remedy = "the GPUs must be free and have the memory of hardware=; "
    return _failed(row, f"{fact}: ", ", but not confirmed" if is_oom else "", remedy)


def check_speed(folder: SweepFolder, is_published: bool) -> Check:
    """Checks that the best runs of a sweep are as fast as published ones; shows the fastest if nothing is published."""
    table = collect([folder], warn)
    rows = _final_rows(table, folder)
    if not is_published:
        speeds = [(row["tokens_per_s_per_gpu"] or 0.0, _label(row)) for row in rows]
        ours_text = "ours: {1}: {0:,.0f} tokens/s/GPU".format(*max(speeds))
        return success(f"no published speed for this hardware and precision; {ours_text}")
    if failures := [row for row in rows if row["status"] != Status.OK]:
        return _failed(failures[0])
    entries = [*beside_published(table)]
    is_slow = not entries or any((entry.share or 0) < MIN_SPEED_SHARE for entry in entries)
    remedy = f"below {MIN_SPEED_SHARE:.0%}: check clocks, NVLink and the network between nodes (NCCL_DEBUG=INFO); see "
    problem = (is_slow, FAIL, f"{remedy}ultrabench compare {folder.display_name} published")
    return first_problem("; ".join(entry.text for entry in entries) or "all runs are suspect", problem)


def _failed(row: Row, prefix: str = "", suffix: str = "", advice: str = "") -> Check:
    """A failed check that says how the run of a row ended, and which command shows everything about it."""
    ending = ", ".join(text for text in (row["status"] or "has not run", row["reason"]) if text)
    return failure(f"{prefix}{_label(row)}: {ending}{suffix}", f"{advice}see {row['show']}")


def _label(row: Row) -> str:
    return f"{row['model']} {run_label(row)} on {counted(row['nodes'], 'node')}"
