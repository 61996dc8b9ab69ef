"""Compares what the GPUs of this machine compute, bit by bit, for `ultrabench doctor --verify`."""

import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from ultrabench.device_digest import CHAIN_VERSION, DatedDigest, Difference, differences
from ultrabench.errors import ClusterError, ConfigError, SweepFolderError, counted
from ultrabench.launchers.doctor.check import Check, failure, success
from ultrabench.processes import run_python
from ultrabench.store.digest_history import append_verified, past_digests

CHAIN_TIMEOUT_S = 600.0
"""Seconds for the chains of all GPUs of a machine, and for the import of torch."""
REMEDY = "verify it again; if it differs again, have the GPU replaced"


def verify_devices(device_type: str, results_dir: Path) -> list[Check]:
    """A check of each GPU of this machine, or of its CPU: it repeats its results, and equals others and its past.

    Raises:
        ConfigError: there is no GPU.
        ClusterError: the chain does not run.
        SweepFolderError: the results folder cannot be written.
    """
    module = "ultrabench.kernel.rank.digest_chain"
    try:
        digests = json.loads(run_python("-m", module, device_type, timeout_s=CHAIN_TIMEOUT_S))
    except (ClusterError, ValueError) as error:
        raise ClusterError(f"cannot compute the chain of --verify: {error}; see ultrabench doctor") from error
    if not digests:
        fact = "--verify found no GPU that torch can use on this machine"
        raise ConfigError(fact, "run it on a node with GPUs, or add hardware=cpu to try it on the CPU")
    past = [*past_digests(results_dir)]
    try:
        present = append_verified(results_dir, socket.gethostname(), digests, time.time())
    except OSError as error:
        fact = f"cannot write {results_dir}: {error.strerror}"
        raise SweepFolderError(f"{fact}; choose another folder with results_dir=FOLDER") from error
    difference_by_place = {d.dated.number: d for d in differences([*past, *present]) if d.dated in present}
    return [
        _check(dated, past, difference_by_place.get(dated.number)).named(dated.device_text)
        for dated in present
    ]


def _check(dated: DatedDigest, past: Sequence[DatedDigest], difference: Difference | None) -> Check:
    if difference:
        return failure(difference.text, REMEDY)
    num_own = sum(other.identity == dated.identity for other in past)
    others = {d.identity for d in past if d.digest.setup == dated.digest.setup} - {dated.identity}
    parts_text = f"{counted(len(dated.digest.parts), 'part')} of chain {CHAIN_VERSION} are equal twice"
    past_text = f"compared with {counted(num_own, 'earlier result')} of it"
    others_text = f"with {counted(len(others), 'other device')} of the same setup ({dated.digest.setup})"
    return success(f"{parts_text}; {past_text} and {others_text}")
