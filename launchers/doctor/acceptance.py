"""The acceptance run of a cluster: it tests on one and two nodes what a large sweep relies on.

That is equal losses, a recognised lack of memory, and the speed. doctor.json records it; without one a large sweep warns.
"""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from ultrabench import checkout
from ultrabench.errors import ClusterError, ConfigError, UltrabenchError, counted
from ultrabench.hardware import GIB
from ultrabench.launchers.allocation_ends import interrupt
from ultrabench.launchers.choose import choose_launcher
from ultrabench.launchers.doctor.check import FAIL, Check, failed, first_problem, passed
from ultrabench.launchers.launcher import Say
from ultrabench.launchers.open_sweep import folder_of, open_sweep
from ultrabench.launchers.reconcile import Reconciler
from ultrabench.layout import AXES, BATCH, DEGREES, FOLLOWING, other_degrees
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.store.folder import SweepFolder, write_whole
from ultrabench.store.state import SweepState, final_attempts
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.config.files import files, read_yaml
from ultrabench.sweep.config.load import config_from_tree, load_model
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import Plan, make_plan
from ultrabench.sweep.plan_table import write_plan
from ultrabench.sweep.remedy import require_runs
from ultrabench.sweep.running.outliers import TOLERANCE
from ultrabench.sweep.running.price import SAFE_SHARE, committed_gpu_hours

Word = tuple[str, object]
"""An axis or a property of a layout, and its value."""
GPU_HOURS = 3.0
"""Largest number of GPU hours that an acceptance run may use."""
LAYOUTS = 12
"""Number of different layouts whose losses and gradients are compared."""
TOO_MUCH = 3.0
"""A run that is predicted to need this many times the memory of a rank certainly does not fit."""
MIN_SPEED_SHARE = 0.7
"""Smallest accepted share of the published speed; it still finds a network that runs at half its rate."""
GRADIENT_TOLERANCE = {"fp8": 5e-2, "bf16": 1e-2, "fp32": 1e-5, "fp64": 1e-9}
"""Precision -> largest relative difference of two gradient norms that count as equal; see docs/guide/cluster.md."""
EQUAL_NUMBERS = {"loss": ("loss_final", TOLERANCE), "gradient": ("gradient_norm", GRADIENT_TOLERANCE)}
"""Numbers of a result that must be equal in all layouts: word -> field and tolerances."""
PUBLISHED = ("nodes", *DEGREES, "zero_stage", *BATCH)
"""What tells the published runs of one model apart: the number of nodes, and axes of the layout."""
ALONE = {"nodes": [1], **{name: [1] for name in DEGREES[1:]}, "zero_stage": [0], FOLLOWING[-1]: None}
"""The sweep axes of plain data parallelism on one node, with the accumulation that makes the batch."""
SCHEMA_VERSION = 1
"""Version of doctor.json."""
MANY_NODES = 8
"""A launch on more nodes than this gives a warning if its cluster has not passed an acceptance run."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a sweep of an acceptance run ended."""

    folder: SweepFolder
    runs: Sequence[Candidate]
    state: SweepState
    stopped: str | None
    """Why the sweep ended before all its runs were done; None if it did not."""

    def result(self, run: Candidate) -> RunResult | None:
        """The result of a run after all its attempts; None if it has none."""
        final = final_attempts(self.state).get((run.run_id, 0))
        return final.result if final else None

    def failed(self, run: Candidate) -> Check:
        """A failed check that says how this run ended."""
        return failed(self.why(run), f"see {self.see(run)}")

    def why(self, run: Candidate) -> str:
        """A line that says how the run ended."""
        result = self.result(run)
        if result is None:
            return f"{_label(run)} has not run{f': {self.stopped}' if self.stopped else ''}"
        return f"{_label(run)}: {result.status.value}{f', {result.reason}' if result.reason else ''}"

    def see(self, run: Candidate) -> str:
        """The command that shows everything about the run."""
        return f"ultrabench sweep show {run.run_id} {self.folder.display_name}"


def run_acceptance(config: SweepConfig, say: Say) -> list[Check]:
    """Performs the acceptance run and writes doctor.json; returns its checks in order.

    Raises:
        ConfigError: an acceptance run of this configuration is impossible.
        ClusterError: the cluster cannot be used; doctor.json records this too.
    """
    if config.kernel.kind != "embedded":
        raise ConfigError(f"kernel={config.kernel.name} with --deep, which needs kernel=embedded; use that")
    acceptance, check_by_name = _Acceptance(config, say), dict[str, Callable[[], Check]]()
    for quantity in EQUAL_NUMBERS:
        check_by_name[f"same {quantity}"] = functools.partial(acceptance.same, quantity)
    check_by_name |= {"out of memory": acceptance.out_of_memory, "published speed": acceptance.speed}
    checks: list[Check] = []
    for name, check in check_by_name.items():
        say(f"acceptance run: {name}")
        try:
            checks.append(check().named(name))
        except ClusterError as error:
            acceptance.write([*checks, failed(str(error), "fix this, then try again").named(name)])
            raise
    say(f"wrote {acceptance.write(checks)}")
    return checks


class _Acceptance:
    """One acceptance run, with a method for each check; its sweeps share one budget."""

    def __init__(self, config: SweepConfig, say: Say) -> None:
        self._config, self._say = config, functools.cache(say)  # says nothing twice
        self._folder = acceptance_folder(config) / time.strftime("%Y%m%d-%H%M%S")
        self._published = published(config)  # an error in this file must cost no GPU time
        self._left_gpu_hours = GPU_HOURS

    @functools.cached_property
    def layouts(self) -> Outcome:
        """The runs of different layouts; the first access makes them."""
        return self._run(self._variant("layouts"), _differing)

    def write(self, checks: Sequence[Check]) -> Path:
        """Writes doctor.json; returns its path."""
        return write_acceptance(self._config, checks, self._folder, GPU_HOURS - self._left_gpu_hours)

    @functools.cached_property
    def one(self) -> Outcome:
        """The run of one GPU; the first access makes it."""
        axes = ALONE | {"mbs": [max(self._config.axes.layout["mbs"])]}
        config = self._variant("one", sweep=axes, hardware={"gpus_per_node": 1})
        return self._run(config, lambda plan: plan.runs)

    def same(self, quantity: str) -> Check:
        """Checks that every layout has the same loss, or gradient, as one GPU."""
        return check_equal(self.one, self.layouts, quantity)

    def out_of_memory(self) -> Check:
        """Checks that a run whose micro-batches do not fit is recognised as out of memory, and confirmed."""
        mbs, share = 1, 0.0
        while share <= TOO_MUCH:
            batch = {"mbs": [mbs], "gbs": mbs * self._config.hardware.gpus_per_node}
            config = self._variant("memory", sweep=ALONE | batch, max_p_oom=1.0)
            share, mbs = make_plan(config).candidates[0].prediction.memory_share, 2 * mbs
        return check_memory(self._run(config, lambda plan: plan.runs))

    def speed(self) -> Check:
        """Checks that the speed is close to the published speed on this hardware, if there is one."""
        if (publication := self._published) is None:
            return check_speed(None, self.layouts)
        config = self._variant("published", sweep=publication.axes, models=[publication.model])
        return check_speed(publication, self._run(config, publication.choose))

    def _variant(self, name: str, **groups: Any) -> SweepConfig:
        """The configuration as the sweep `name`; `groups` replace only the values they name."""
        tree = self._config.resolved
        changed = {k: {**tree[k], **v} if isinstance(v, dict) else v for k, v in groups.items()}
        return config_from_tree({**tree, **changed, "name": name, "results_dir": str(self._folder)})

    def _run(self, config: SweepConfig, choose: Callable[[Plan], Sequence[Candidate]]) -> Outcome:
        """Runs the chosen runs of a sweep to their end; if it is interrupted, all its jobs are ended.

        Raises:
            ClusterError: the cluster or this machine cannot be used.
        """
        folder = folder_of(config)
        launcher, budget = choose_launcher(config, folder), self._left_gpu_hours
        plan = require_runs(make_plan(config))
        sweep = open_sweep(plan, reuse="any", warn=self._say, say=self._say, max_gpu_hours=budget)
        sweep.plan = replace(sweep.plan, candidates=tuple(choose(sweep.plan)))
        write_plan(sweep.plan.candidates, folder.plan)
        run_ids = {run.run_id for run in sweep.plan.runs}

        def show(state: SweepState, alive: frozenset[str]) -> None:
            num_ended = len({k.run_id for k, a in state.attempts.items() if a.result} & run_ids)
            self._say(f"{config.name}: {num_ended} of {counted(len(run_ids), 'run')}")

        reconciler = Reconciler(sweep, launcher, show, self._say)
        try:
            state = reconciler.run()
        except BaseException:
            try:
                interrupt(sweep, launcher)
            except (UltrabenchError, OSError) as error:
                self._say(f"cannot end the jobs of {folder.path}: {error}")
            raise
        # A sweep that uses only some GPUs of a node holds the whole node.
        idle_factor = self._config.hardware.gpus_per_node / config.hardware.gpus_per_node
        self._left_gpu_hours -= idle_factor * committed_gpu_hours(sweep.plan, state, ())
        return Outcome(folder=folder, runs=sweep.plan.runs, state=state, stopped=reconciler.stopped)


def _differing(plan: Plan) -> Sequence[Candidate]:
    """At most LAYOUTS runs that certainly fit into memory, equally many for each number of nodes."""
    fitting = [run for run in plan.runs if run.prediction.memory_share <= SAFE_SHARE] or plan.runs
    node_counts = sorted({run.nodes for run in fitting})
    runs_of_sizes = ([run for run in fitting if run.nodes == nodes] for nodes in node_counts)
    return [run for runs in runs_of_sizes for run in pairwise_sample(runs, LAYOUTS // len(node_counts))]


def pairwise_sample(runs: Sequence[Candidate], count: int) -> tuple[Candidate, ...]:
    """At most `count` of `runs`, chosen so that they cover many values and pairs of values of the axes.

    Each choice is the run that adds the most new values and pairs; among equal runs it is the first. A fault
    of a form of parallelism shows where it is used alone or together with one other form, so a small
    selection should cover the pairs.
    """
    chosen_runs, pairs = list[Candidate](), set[tuple[Word, Word]]()
    while len(chosen_runs) < min(count, len(runs)):
        others = (run for run in runs if run not in chosen_runs)
        best = max(others, key=lambda run: len(_pairs(run) - pairs))  # max() keeps the first of equals
        chosen_runs.append(best)
        pairs |= _pairs(best)
    return tuple(chosen_runs)


def _pairs(run: Candidate) -> set[tuple[Word, Word]]:
    layout = run.layout
    coarse_axes = (DEGREES[0], *BATCH)
    words: list[Word] = [(name, getattr(layout, name)) for name in AXES if name not in coarse_axes]
    words += [(f"{name} > 1", getattr(layout, name) > 1) for name in coarse_axes]
    return {*combinations_with_replacement(words, 2)}


def acceptance_folder(config: SweepConfig) -> Path:
    """The folder RESULTS_DIR/doctor-CLUSTER-HARDWARE of doctor.json and of the sweeps of acceptance runs."""
    return Path(config.results_dir).absolute() / f"doctor-{config.cluster}-{config.hardware.name}"


def write_acceptance(config: SweepConfig, checks: Sequence[Check], folder: Path, gpu_hours: float) -> Path:
    """Writes doctor.json, which replaces an older one; returns its path.

    Args:
        folder: the one with the sweeps of this acceptance run.
        gpu_hours: the GPU hours that these sweeps used.
    """
    document = {
        "schema_version": SCHEMA_VERSION,
        "passed": not any(check.status is FAIL for check in checks),
        "cluster": config.cluster,
        "hardware": to_dict(config.hardware),
        "nodes": sorted(config.axes.nodes),
        "launcher": config.launcher.name,
        "time": time.time(),
        "gpu_hours": round(gpu_hours, 4),
        "kernel_digest": config.kernel.digest(),
        "git_commit": checkout.commit(),
        "sweeps": str(folder),
        "checks": [to_dict(check) for check in checks],
    }
    path = acceptance_folder(config) / "doctor.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(document, indent=1) + "\n")
    return path


def not_accepted(config: SweepConfig) -> str | None:
    """The warning for a large sweep on a cluster that has passed no acceptance run; None in other cases."""
    max_nodes, folder = max(config.axes.nodes), acceptance_folder(config)
    if config.launcher.name == "local" or config.hardware.simulated or max_nodes <= MANY_NODES:
        return None
    problem = "has no acceptance run"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        document = json.loads((folder / "doctor.json").read_text())
        if document["passed"] and max(document["nodes"]) > 1:
            return None
        if not document["passed"]:
            failed_checks = [c["name"] for c in document["checks"] if c["status"] == FAIL]
            problem = f"failed its acceptance run ({', '.join(failed_checks)})"
    cluster_words = f"cluster={config.cluster} hardware={config.hardware.name}"
    remedy = f"to make one, with at most 3 GPU hours on two nodes: ultrabench doctor --deep launcher=slurm {cluster_words}"
    return f"sweep.nodes up to {max_nodes}, and {cluster_words} {problem} in {folder}; {remedy}"


def check_equal(single_gpu: Outcome, layouts: Outcome, quantity: str) -> Check:
    """Checks that every layout has the number `quantity`, one of EQUAL_NUMBERS, of one GPU."""
    (field, tolerance), base_run = EQUAL_NUMBERS[quantity], single_gpu.runs[0]
    base_result = single_gpu.result(base_run)
    expected = getattr(base_result, field, None)
    if base_result is None or expected is None:
        return failed(f"one GPU alone: {single_gpu.why(base_run)}", f"see {single_gpu.see(base_run)}")
    allowed = tolerance[base_run.spec.kernel.precision]
    difference_of_run: dict[str, float] = {}
    for run in layouts.runs:
        result = layouts.result(run)
        if result is None or result.status != Status.OK or getattr(result, field) is None:
            return layouts.failed(run)
        difference_of_run[run.run_id] = abs(getattr(result, field) - expected) / abs(expected)
    worst = max(layouts.runs, key=lambda run: difference_of_run[run.run_id])
    num_wrong, count = sum(d > allowed for d in difference_of_run.values()), len(layouts.runs)
    step = base_result.loss_step if quantity == "loss" else 1
    return first_problem(
        f"{count - num_wrong} of {count} layouts match the {quantity} of one GPU at step {step}: {expected:.6f}; largest "
        f"difference {difference_of_run[worst.run_id]:.1g}, allowed {allowed:g}",
        (num_wrong, FAIL, f"a GPU or a link is faulty, or torch has a bug: compare the hosts in {layouts.see(worst)}",
         f"{worst.layout.label()} differs most"),
    )  # fmt: skip


def check_memory(outcome: Outcome) -> Check:
    """Checks that a lack of memory is recognised as such, and confirmed."""
    run = outcome.runs[0]
    result, need = outcome.result(run), f"predicted {run.prediction.peak_mem_bytes / GIB:.0f} GiB"
    if result and result.status == Status.OOM and result.confirmed:
        return passed(f"{run.layout.label()}, {need}: {result.reason}")
    ending = outcome.why(run) + (", but not confirmed" if result and result.status == Status.OOM else "")
    remedy = f"the GPUs must be free and have the memory of hardware=; see {outcome.see(run)}"
    return failed(f"{need}: {ending}", remedy)


@dataclass(frozen=True, kw_only=True)
class Published:
    """The part of configs/published/HARDWARE.yaml that can be compared with this configuration."""

    model: dict[str, Any]
    source: str
    axes: dict[str, Any]
    """Axes of a sweep that contains all published runs."""
    speeds: Mapping[tuple[int, ...], float]
    """The values of PUBLISHED -> tokens per second and GPU."""

    def choose(self, plan: Plan) -> Sequence[Candidate]:
        """The runs of `plan` whose speed is published."""
        return [run for run in plan.runs if _key(run) in self.speeds]


def published(config: SweepConfig) -> Published | None:
    """The published speeds for the hardware, precision and node counts of `config`; None if there are none.

    Raises:
        ConfigError: the file of published speeds is invalid.
    """
    if (path := files("published").get(config.hardware.name)) is None:
        return None
    content = read_yaml(path)
    runs = [run for run in content.get("runs", ()) if "model" not in run]  # others are read by compare alone
    if not runs:
        return None
    try:
        rows = [dict.fromkeys(DEGREES[1:], 1) | run for run in runs]
        rows = [row for row in rows if _fits(row, config)]
        axes = {name: sorted({row[name] for row in rows}) for name in PUBLISHED if name != "dp"}
        speeds = {tuple(row[name] for name in PUBLISHED): float(row["tokens_per_s_per_gpu"]) for row in rows}
        publication = Published(
            model=to_dict(load_model(content["model"])), source=str(content["source"]), speeds=speeds,
            axes=axes | {"seq_len": content["seq_len"], "gbs": content["gbs"], "pp_schedule": ["auto"]},
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        fault = (
            f"lacks the key {error.args[0]}"
            if isinstance(error, KeyError)
            else f"holds another kind of value ({error})"
        )
        raise ConfigError(f"{path} {fault}; write it like configs/published/h100x8.yaml") from error
    return publication if rows and content["precision"] == config.kernel.precision else None


def check_speed(publication: Published | None, outcome: Outcome) -> Check:
    """Compares our speed with the published one; shows our fastest run if nothing is published."""
    speeds, texts = dict[str, float](), dict[str, str]()
    for run in outcome.runs:
        if (result := outcome.result(run)) and result.status == Status.OK:
            speeds[run.run_id] = speed = run.tokens_per_s_per_gpu(result)
            texts[run.run_id] = f"{_label(run)}: {speed:,.0f} tokens/s/GPU"
    if publication is None:
        our_best = f"; ours: {texts[max(speeds, key=speeds.__getitem__)]}" if speeds else ""
        return passed(f"no published speed for this hardware and precision{our_best}")
    commands = []
    for run in outcome.runs:
        if run.run_id not in speeds:
            return outcome.failed(run)
        published_speed = publication.speeds[_key(run)]
        share = speeds[run.run_id] / published_speed
        texts[run.run_id] += f", published {published_speed:,.0f} ({share:.0%})"
        commands += [outcome.see(run)] if share < MIN_SPEED_SHARE else []
    advice = f"below {MIN_SPEED_SHARE:.0%}: check clocks, NVLink and the network between nodes (NCCL_DEBUG=INFO); see "
    problem = (commands, FAIL, advice + "".join(commands[:1]))
    return first_problem(f"{'; '.join(texts.values())}; source {publication.source}", problem)


def _fits(row: Mapping[str, int], config: SweepConfig) -> bool:
    """Whether the nodes and the GPUs per node of a published run are possible in this configuration."""
    ranks = row["dp"] * other_degrees(row)
    return row["nodes"] in config.axes.nodes and ranks == row["nodes"] * config.hardware.gpus_per_node


def _key(run: Candidate) -> tuple[int, ...]:
    return (run.nodes, *(getattr(run.layout, name) for name in PUBLISHED[1:]))


def _label(run: Candidate) -> str:
    return f"{run.shape.name} {run.layout.label()} on {counted(run.nodes, 'node')}"
