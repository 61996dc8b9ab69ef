"""Compares our speed with what others have published for the same hardware."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ultrabench.errors import ConfigError, counted
from ultrabench.launchers.doctor.acceptance_sweep import Outcome
from ultrabench.launchers.doctor.check import Check, failed, passed
from ultrabench.record import to_dict
from ultrabench.result import RunResult, Status
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.compose import read_yaml, search_path
from ultrabench.sweep.config import SweepConfig, load_model
from ultrabench.sweep.plan import Plan

LEAST = 0.7
"""Least share of the published speed: another training program may be slower, and a network at half its rate is found."""
WORDS = ("dp", "tp", "pp", "cp", "zero_stage", "mbs", "gas")


@dataclass(frozen=True, kw_only=True)
class Published:
    """The content of configs/published/HARDWARE.yaml, as far as it can be held against this configuration."""

    model: dict[str, Any]
    source: str
    axes: dict[str, Any]
    """Axes of a sweep that holds all published runs."""
    runs: Mapping[tuple[int, ...], float]
    """Nodes and WORDS -> tokens a second a GPU."""

    def choose(self, plan: Plan) -> Sequence[Candidate]:
        """The runs of `plan` that were published."""
        return [run for run in plan.runs if _key(run) in self.runs]


def published(config: SweepConfig) -> Published | None:
    """What is known of the hardware of `config` at its precision, on no more than its nodes; None: nothing.

    Raises:
        ConfigError: the file cannot be used.
    """
    names = (folder / "published" / f"{config.hardware.name}.yaml" for folder in search_path())
    path = next((path for path in names if path.is_file()), None)
    if path is None:
        return None
    told = read_yaml(path)
    try:
        defaults = {"tp": 1, "pp": 1, "cp": 1}
        rows = [row for row in (defaults | told_row for told_row in told["runs"]) if _fits(row, config)]
        axes = {word: sorted({row[word] for row in rows}) for word in ("nodes", *WORDS[1:])}
        runs = {tuple(row[w] for w in ("nodes", *WORDS)): float(row["tokens_per_s_per_gpu"]) for row in rows}
        known = Published(
            model=to_dict(load_model(told["model"])), source=str(told["source"]), runs=runs,
            axes=axes | {"seq_len": told["seq_len"], "gbs": told["gbs"], "pp_schedule": ["auto"]},
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error!r}; write it as configs/published/h100x8.yaml is") from error
    return known if rows and told["precision"] == config.kernel.precision else None


def check_speed(known: Published | None, outcome: Outcome | None) -> Check:
    """Our speed beside the published one; where nothing is published, the fastest of ours."""
    measured = [(run, outcome.result(run)) for run in outcome.runs] if outcome else []
    ours = {run.run_id: _tokens_per_s_per_gpu(run, r) for run, r in measured if r and r.status == Status.OK}
    if known is None:
        told = "nothing is published of this hardware and precision to compare with"
        best = max(
            (run for run, _ in measured if run.run_id in ours), key=lambda r: ours[r.run_id], default=None
        )
        return passed(
            "published speed", told + (f"; ours: {_shown(best, ours[best.run_id])}" if best else "")
        )
    assert outcome is not None
    texts, slow = [], []
    for run in outcome.runs:
        if run.run_id not in ours:
            return failed("published speed", outcome.why(run), f"see {outcome.see(run)}")
        theirs, our = known.runs[_key(run)], ours[run.run_id]
        texts.append(f"{_shown(run, our)}, published {theirs:,.0f} ({our / theirs:.0%})")
        slow += [run] if our < LEAST * theirs else []
    told = f"{'; '.join(texts)}; source {known.source}"
    if not slow:
        return passed("published speed", told)
    remedy = f"under {LEAST:.0%}: look at clocks, NVLink and the network between nodes (NCCL_DEBUG=INFO); "
    return failed("published speed", told, f"{remedy}see {outcome.see(slow[0])}")


def _fits(row: Mapping[str, int], config: SweepConfig) -> bool:
    """Whether it used as many GPUs of as many nodes as may be tried."""
    ranks = row["dp"] * row["tp"] * row["pp"] * row["cp"]
    return row["nodes"] in config.axes.nodes and ranks == row["nodes"] * config.hardware.gpus_per_node


def _key(run: Candidate) -> tuple[int, ...]:
    return (run.nodes, *(getattr(run.layout, word) for word in WORDS))


def _tokens_per_s_per_gpu(run: Candidate, result: RunResult) -> float:
    return run.spec.tokens_per_step / median(result.step_times_s) / run.layout.world_size


def _shown(run: Candidate, speed: float) -> str:
    nodes = counted(run.nodes, "node")
    return f"{run.shape.name} {run.layout.label()} on {nodes}: {speed:,.0f} tokens/s/GPU"
