"""Examines a node for `ultrabench doctor`: `python -P -m ultrabench.agent.checkup FOLDER`.

FOLDER is inside the results folder and holds request.json; the findings are written to report.json beside it.
"""

import contextlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import ultrabench
from ultrabench import checkout
from ultrabench.agent.health_reader import HealthReader
from ultrabench.agent.node_identity import identify_node
from ultrabench.agent.ranks.gpus import foreign_processes, visible_gpus
from ultrabench.errors import ClusterError, UltrabenchError
from ultrabench.kernel_config import KernelConfig
from ultrabench.node_health import examine, to_facts
from ultrabench.processes import run_python
from ultrabench.record import from_dict
from ultrabench.store.claim import claim
from ultrabench.store.folder import write_whole

CANNOT_WRITE_CODE = 73
"""Exit code of sysexits.h for a file that cannot be created; it is useful when no job log can be written."""
TORCH_TIMEOUT_S = 180.0
"""Seconds to wait for torch, whose first import from a shared file system may take minutes."""


def main() -> int:
    """Writes the report; returns 0, or CANNOT_WRITE_CODE where the folder cannot be written on this node."""
    began_s, folder = time.time(), Path(sys.argv[1])
    try:
        report = {"began_s": began_s, **examine_node(folder), "ended_s": time.time()}
        write_whole(folder / "report.json", json.dumps(report))
    except OSError as error:
        sys.stderr.write(f"cannot write {folder}: {error.strerror} on {identify_node(os.environ).host}\n")
        return CANNOT_WRITE_CODE
    return 0


def examine_node(folder: Path) -> dict[str, Any]:
    """Facts about this node; None for a fact that could not be determined.

    Raises:
        OSError: `folder` cannot be written.
    """
    identity = identify_node(os.environ)
    request: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        request = json.loads((folder / "request.json").read_text())
    owner = identity.owner_facts("checkup")
    gpus = visible_gpus()
    health_reader = HealthReader(gpus)
    node_facts = {
        "host": identity.host,
        "job_id": identity.job and identity.job.job_id,
        "token": request.get("token"),
        "won_own_claim": claim(folder / "claims", "node", owner),  # must be won: nobody else has it
        "won_taken_claim": claim(folder / "claims", "login", owner),  # must not be won: the login node has it
        "python": sys.executable,
        "python_version": platform.python_version(),
        "ultrabench_version": ultrabench.__version__,
        "ultrabench_path": str(Path(ultrabench.__file__).parent),
        **_digest_facts(request),
        "git_commit": checkout.commit_sha(),
        "utc_offset": time.strftime("%z"),
        "gpus": len(gpus),
        # This comes before torch is tried, which is itself a process on the GPUs.
        "foreign": foreign_processes(lambda pid: False),
        "cores": len(os.sched_getaffinity(0)),
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
    }
    first_reading = health_reader.read()
    node_facts |= _torch_facts()  # this takes seconds, in which counters may grow
    node_facts["health"] = to_facts(examine(first_reading, health_reader.read_again()))
    health_reader.close()
    return node_facts


def _digest_facts(request: dict[str, Any]) -> dict[str, str | None]:
    """The digest of the sweep's training program as this node reads it, or why there is none."""
    try:
        with contextlib.chdir(request["work_dir"]):
            digest = from_dict(KernelConfig, request["kernel"]).digest()
            return {"kernel_digest": digest, "kernel_error": None}
    except (KeyError, OSError, UltrabenchError) as error:
        return {"kernel_digest": None, "kernel_error": f"{type(error).__name__}: {error}"}


def _torch_facts() -> dict[str, Any]:
    """What torch reports, in a process of its own: {torch: facts} or {torch: None, torch_error}."""
    try:
        output = run_python("-m", "ultrabench.kernel.rank.environment", timeout_s=TORCH_TIMEOUT_S)
        return {"torch": json.loads(output), "torch_error": None}
    except (ClusterError, ValueError) as error:
        return {"torch": None, "torch_error": str(error)[:300]}


if __name__ == "__main__":
    sys.exit(main())
