"""Writes doctor.json after an acceptance run, and warns of large sweeps on clusters without one."""

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from ultrabench import checkout
from ultrabench.launchers.doctor.check import Check, CheckStatus
from ultrabench.record import to_dict
from ultrabench.store.folder import write_whole
from ultrabench.sweep.config.sweep_config import SweepConfig

SCHEMA_VERSION = 1
MANY_NODES = 8
"""A launch on more nodes than this gives a warning if its cluster has not passed an acceptance run."""


def acceptance_folder(config: SweepConfig) -> Path:
    """The folder RESULTS_DIR/doctor-CLUSTER-HARDWARE of doctor.json and of the sweeps of acceptance runs."""
    return Path(config.results_dir).absolute() / f"doctor-{config.cluster}-{config.hardware.name}"


def write_acceptance(config: SweepConfig, checks: Sequence[Check], sweeps: Path, gpu_hours: float) -> Path:
    """Writes doctor.json, which replaces an older one; returns its path.

    Args:
        sweeps: the folder with the sweeps of this acceptance run.
        gpu_hours: the GPU hours that these sweeps used.
    """
    document = {
        "schema_version": SCHEMA_VERSION,
        "passed": not any(c.status is CheckStatus.FAIL for c in checks),
        "cluster": config.cluster,
        "hardware": to_dict(config.hardware),
        "nodes": sorted(config.axes.nodes),
        "launcher": config.launcher.name,
        "time": time.time(),
        "gpu_hours": round(gpu_hours, 4),
        "kernel_digest": config.kernel.digest(),
        "git_commit": checkout.commit(),
        "sweeps": str(sweeps),
        "checks": [to_dict(check) for check in checks],
    }
    path = acceptance_folder(config) / "doctor.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(document, indent=1) + "\n")
    return path


def not_accepted(config: SweepConfig) -> str | None:
    """The warning for a large sweep on a cluster that has passed no acceptance run; None in other cases."""
    most, folder = max(config.axes.nodes), acceptance_folder(config)
    if config.launcher.name == "local" or config.hardware.simulated or most <= MANY_NODES:
        return None
    found = "has no acceptance run"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        document = json.loads((folder / "doctor.json").read_text())
        if document["passed"] and max(document["nodes"]) > 1:
            return None
        if not document["passed"]:
            bad = [c["name"] for c in document["checks"] if c["status"] == CheckStatus.FAIL]
            found = f"failed its acceptance run ({', '.join(bad)})"
    names = f"cluster={config.cluster} hardware={config.hardware.name}"
    return (
        f"sweep.nodes up to {most}, and {names} {found} in {folder}; at most 3 GPU hours on two nodes: "
        f"ultrabench doctor --deep launcher=slurm {names}"
    )
