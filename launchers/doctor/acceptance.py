"""The record of a cluster's acceptance run, doctor.json; without one that passed, a large sweep warns."""

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path

from ultrabench import checkout
from ultrabench.launchers.doctor.check import FAIL, Check
from ultrabench.record import to_dict
from ultrabench.store.folder import write_whole
from ultrabench.sweep.config.sweep_config import SweepConfig

SCHEMA_VERSION = 1
"""Version of doctor.json."""
MAX_UNTESTED_NODES = 8
"""A launch on more nodes than this gives a warning if its cluster has not passed an acceptance run."""


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
        "git_commit": checkout.commit_sha(),
        "sweeps": str(folder),
        "checks": [to_dict(check) for check in checks],
    }
    path = acceptance_folder(config) / "doctor.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(document, indent=1) + "\n")
    return path


def acceptance_warning(config: SweepConfig) -> str | None:
    """The warning for a large sweep on a cluster that has passed no acceptance run; None in other cases."""
    max_nodes, folder = max(config.axes.nodes), acceptance_folder(config)
    if not config.launcher.holds_nodes or config.hardware.simulated or max_nodes <= MAX_UNTESTED_NODES:
        return None
    problem = "has no acceptance run"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        document = json.loads((folder / "doctor.json").read_text())
        if document["passed"] and max(document["nodes"]) > 1:
            return None
        if not document["passed"]:
            failed_checks = [check["name"] for check in document["checks"] if check["status"] == FAIL]
            problem = f"failed its acceptance run ({', '.join(failed_checks)})"
    cluster_text = f"cluster={config.cluster} hardware={config.hardware.name}"
    remedy = (
        "to make one, with at most 3 GPU hours on two nodes: ultrabench doctor --deep "
        f"launcher={config.launcher.name} {cluster_text}"
    )
    return f"sweep.nodes up to {max_nodes}, and {cluster_text} {problem} in {folder}; {remedy}"
