"""What a sweep's head, sweep.json, says of every run in it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ultrabench.errors import ConfigError, SweepFolderError
from ultrabench.hardware import Hardware, Peak, rank_peak
from ultrabench.kernel_config import KernelConfig
from ultrabench.model_shape import ModelShape
from ultrabench.record import from_dict
from ultrabench.store.folder import SweepFolder
from ultrabench.store.state import SweepState
from ultrabench.sweep.candidate import Candidate
from ultrabench.sweep.plan_table import run_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepHead:
    """The facts that all runs of a sweep share."""

    sweep: str
    cluster: str | None
    hardware: Hardware
    kernel: KernelConfig
    seed: int
    """Seed of parameters and tokens."""
    kernel_digest: str | None
    shapes: Mapping[str, ModelShape]
    """Model name -> shape."""
    core_flops_per_s: float | None
    """Measured rate of one CPU core, None on GPUs."""
    cores: int | None
    git_commit: str | None

    def peak(self, nodes: int, precision: str) -> Peak | None:
        """The rate mfu is a fraction of, for one rank; None where nobody knows it."""
        if not self.hardware.peak_flops_per_s and (self.core_flops_per_s is None or self.cores is None):
            return None
        return rank_peak(
            self.hardware,
            precision,
            nodes=nodes,
            core_flops_per_s=self.core_flops_per_s,
            cores=self.cores or 1,
        )

    def shapes_of(self, state: SweepState) -> dict[str, ModelShape]:
        """Shapes by model name: the head's, and those of the latest launch, which made the plan."""
        launched = state.config.get("models") or []
        try:
            shapes = [from_dict(ModelShape, model) for model in launched]
        except ConfigError:
            shapes = []
        return {**self.shapes, **{shape.name: shape for shape in shapes}}

    def runs(self, rows: Iterable[dict[str, Any]], state: SweepState) -> Iterator[Candidate]:
        """The runs among the rows of plan.parquet; `state` holds the latest launch, which made the plan.

        Raises:
            SweepFolderError: nobody knows the shape of a model.
        """
        shapes, runs = self.shapes_of(state), [row for row in rows if row["decision"] == "run"]
        peaks = {nodes: self.peak(nodes, self.kernel.precision) for nodes in {row["nodes"] for row in runs}}
        trains = self.kernel.kind != "probe"
        rates = {nodes: peak.flops_per_s if peak and trains else None for nodes, peak in peaks.items()}
        return (run_of(row, shapes, self.kernel, self.seed, rates[row["nodes"]]) for row in runs)


def read_head(folder: SweepFolder) -> SweepHead:
    """The head of a sweep.

    Raises:
        SweepFolderError: there is none, or it lacks something.
    """
    raw = folder.read_head()
    if raw is None:
        raise SweepFolderError(f"no sweep.json in {folder.path}; is it a sweep folder?")
    try:
        return _parse(folder.name, raw)
    except (ConfigError, KeyError, TypeError, AttributeError) as error:
        raise SweepFolderError(f"cannot read {folder.head}: {error}; was it edited by hand?") from error


def _parse(name: str, raw: Mapping[str, Any]) -> SweepHead:
    shapes = [from_dict(ModelShape, model) for model in raw["models"]]
    peak = raw.get("peak") or {}
    return SweepHead(
        sweep=raw.get("sweep") or name,
        cluster=raw.get("cluster"),
        hardware=_hardware(raw["hardware"]),
        kernel=from_dict(KernelConfig, raw["kernel"]),
        seed=raw["workload"].get("seed", 0),
        kernel_digest=raw.get("kernel_digest"),
        shapes={shape.name: shape for shape in shapes},
        core_flops_per_s=peak.get("core_flops_per_s"),
        cores=peak.get("cores"),
        git_commit=(raw.get("provenance") or {}).get("git_commit"),
    )


def _hardware(told: Mapping[str, Any]) -> Hardware:
    """The hardware of a sweep; the rates of one that was launched before they were written down come from its file."""
    if "source" in told:
        return from_dict(Hardware, told, where="hardware")
    from ultrabench.sweep.config import read_hardware  # imports Hydra

    return read_hardware(told)
