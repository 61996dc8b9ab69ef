"""Checks the sweeps of an acceptance run: equal losses, a recognised lack of memory, and the speed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ultrabench.errors import ConfigError, counted
from ultrabench.hardware import GIB
from ultrabench.launchers.doctor.check import FAIL, Check, failed, first_problem, passed
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.store.folder import SweepFolder
from ultrabench.store.state import SweepState, final_attempts
from ultrabench.sweep.config.compose import files, read_yaml
from ultrabench.sweep.config.load import load_model
from ultrabench.sweep.config.sweep_config import SweepConfig
from ultrabench.sweep.plan import Candidate, Plan
from ultrabench.sweep.running.outliers import TOLERANCE

LEAST = 0.7
"""Smallest accepted share of the published speed.

It leaves room for a slower training program, and still finds a network that runs at half its rate.
"""
WORDS = ("dp", "tp", "pp", "cp", "zero_stage", "mbs", "gas")


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


def check_losses(one: Outcome, layouts: Outcome) -> Check:
    """Checks that every layout has the same loss as one GPU."""
    alone = one.result(one.runs[0])
    if alone is None or alone.loss_final is None:
        return failed(f"one GPU alone: {one.why(one.runs[0])}", f"see {one.see(one.runs[0])}")
    wanted, allowed = alone.loss_final, TOLERANCE[one.runs[0].spec.kernel.precision]
    off: dict[str, float] = {}
    for run in layouts.runs:
        result = layouts.result(run)
        if result is None or result.status != Status.OK or result.loss_final is None:
            return layouts.failed(run)
        off[run.run_id] = abs(result.loss_final - wanted) / abs(wanted)
    worst = max(layouts.runs, key=lambda run: off[run.run_id])
    wrong, count = sum(difference > allowed for difference in off.values()), len(layouts.runs)
    return first_problem(
        f"{count - wrong} of {count} layouts have the loss of one GPU at step {alone.loss_step}: {wanted:.6f}; largest "
        f"difference {off[worst.run_id]:.1g}, allowed {allowed:g}",
        (wrong, FAIL, f"a GPU or a link that computes wrongly, or a bug of torch: compare hosts in {layouts.see(worst)}",
         f"{worst.layout.label()} has another"),
    )  # fmt: skip


def check_memory(outcome: Outcome) -> Check:
    """Checks that a lack of memory is recognised as such, and confirmed."""
    run = outcome.runs[0]
    result, needs = outcome.result(run), f"predicted {run.prediction.peak_mem_bytes / GIB:.0f} GiB"
    if result and result.status == Status.OOM and result.confirmed:
        return passed(f"{run.layout.label()}, {needs}: {result.reason}")
    told = outcome.why(run) + (", but not confirmed" if result and result.status == Status.OOM else "")
    remedy = f"GPUs have to be free, and of the memory that hardware= says; see {outcome.see(run)}"
    return failed(f"{needs}: {told}", remedy)


@dataclass(frozen=True, kw_only=True)
class Published:
    """The part of configs/published/HARDWARE.yaml that can be compared with this configuration."""

    model: dict[str, Any]
    source: str
    axes: dict[str, Any]
    """Axes of a sweep that contains all published runs."""
    runs: Mapping[tuple[int, ...], float]
    """The number of nodes and the values of WORDS -> tokens per second and GPU."""

    def choose(self, plan: Plan) -> Sequence[Candidate]:
        """The runs of `plan` whose speed is published."""
        return [run for run in plan.runs if _key(run) in self.runs]


def published(config: SweepConfig) -> Published | None:
    """The published speeds for the hardware, precision and node counts of `config`; None if there are none.

    Raises:
        ConfigError: the file of published speeds is invalid.
    """
    if (path := files("published").get(config.hardware.name)) is None:
        return None
    told = read_yaml(path)
    try:
        rows = [row for one in told["runs"] if _fits(row := {"tp": 1, "pp": 1, "cp": 1} | one, config)]
        axes = {word: sorted({row[word] for row in rows}) for word in ("nodes", *WORDS[1:])}
        runs = {tuple(row[w] for w in ("nodes", *WORDS)): float(row["tokens_per_s_per_gpu"]) for row in rows}
        known = Published(
            model=to_dict(load_model(told["model"])), source=str(told["source"]), runs=runs,
            axes=axes | {"seq_len": told["seq_len"], "gbs": told["gbs"], "pp_schedule": ["auto"]},
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error!r}; write it as configs/published/h100x8.yaml is") from error
    return known if rows and told["precision"] == config.kernel.precision else None


def check_speed(known: Published | None, outcome: Outcome) -> Check:
    """Compares our speed with the published one; shows our fastest run if nothing is published."""
    ended = {run.run_id: (run, outcome.result(run)) for run in outcome.runs}
    ours = {i: run.tokens_per_s_per_gpu(r) for i, (run, r) in ended.items() if r and r.status == Status.OK}
    shown = {i: f"{_label(ended[i][0])}: {speed:,.0f} tokens/s/GPU" for i, speed in ours.items()}
    if known is None:
        best = f"; ours: {shown[max(ours, key=ours.__getitem__)]}" if ours else ""
        return passed(f"nothing is published of this hardware and precision to compare with{best}")
    texts, slow = [], []
    for run in outcome.runs:
        if run.run_id not in ours:
            return outcome.failed(run)
        theirs = known.runs[_key(run)]
        share = ours[run.run_id] / theirs
        texts.append(f"{shown[run.run_id]}, published {theirs:,.0f} ({share:.0%})")
        slow += [outcome.see(run)] if share < LEAST else []
    look = f"under {LEAST:.0%}: look at clocks, NVLink and the network between nodes (NCCL_DEBUG=INFO); see "
    return first_problem(f"{'; '.join(texts)}; source {known.source}", (slow, FAIL, look + "".join(slow[:1])))


def _fits(row: Mapping[str, int], config: SweepConfig) -> bool:
    """Whether the nodes and the GPUs per node of a published run are possible in this configuration."""
    ranks = row["dp"] * row["tp"] * row["pp"] * row["cp"]
    return row["nodes"] in config.axes.nodes and ranks == row["nodes"] * config.hardware.gpus_per_node


def _key(run: Candidate) -> tuple[int, ...]:
    return (run.nodes, *(getattr(run.layout, word) for word in WORDS))


def _label(run: Candidate) -> str:
    return f"{run.shape.name} {run.layout.label()} on {counted(run.nodes, 'node')}"
