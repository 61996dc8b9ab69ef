"""The health of a node before work: the table of checks with limits and remedies, and what readings say of each check.

A reading holds what a node shows without privileges: name of a check -> place, such as a GPU or a port -> number, or
None where the source is missing. A fact that is there or not has the numbers 1 and 0. `agent/health_reader.py` reads.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, StrEnum
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from ultrabench.column import BYTES
from ultrabench.errors import counted


class Health(StrEnum):
    """What is known about one check of a node, the worst first."""

    FAIL = "fail"
    WARN = "warn"
    UNKNOWN = "unknown"
    OK = "ok"


class ComparedQuantity(Enum):
    """Which quantity is compared with the limit of a check."""

    NOW = 0
    """The number itself, as it was last read."""
    NEW = 1
    """The growth of a counter between two readings: its total may be older than any fault of today."""
    PER_SECOND = 2
    """The growth of a counter between two readings, divided by the seconds between them."""


class HealthCheck(NamedTuple):
    """One row of the table."""

    limit_text: str
    """What a healthy node has, such as `no failure`."""
    remedy: str
    unit: str = ""
    """Unit of the numbers; empty for facts that are there or not."""
    excludes_node: bool = False
    """Whether a finding excludes its node; only for facts that a single observation proves."""
    compared: ComparedQuantity = ComparedQuantity.NOW
    bound: float = 0.0
    """Largest number that is ok, or smallest one if `at_least`."""
    at_least: bool = False
    multi_node_only: bool = False
    """Whether only runs on several nodes need it."""


BAD_HEALTHS = (Health.FAIL, Health.WARN)
"""Healths of a check that exceeds its limit."""
MAX_PLACES = 8
"""Largest number of places of a finding; those with the worst numbers are kept."""
_GIB_FREE = f"{BYTES.axis.symbol} free"
MIN_FREE_GIB = 1.0
"""Free GiB below which a folder gets a warning."""
CRC_ERRORS_PER_S = 100.0
"""CRC errors per second of an NVLink that its retries hide. Source: dcgm_gpu_hardware_limits.h of NVIDIA's DCGM."""
CHECKS = {
    "ECC errors": HealthCheck(
        "no uncorrected errors since the driver was loaded", "have the node drained and the GPU reset", "errors",
        excludes_node=True),
    "ECC errors in its life": HealthCheck(
        "no uncorrected errors in the life of a GPU", "watch the GPU; have it replaced if new errors appear", "errors"),
    "row remapping failed": HealthCheck("no failure", "have the GPU replaced; it has no spare rows left",
        excludes_node=True),
    "row remapping pending": HealthCheck("no rows wait for remapping", "have the GPU reset to activate the spare rows"),
    "NVLink errors": HealthCheck(
        "no new replays or recoveries on a link", "watch `nvidia-smi nvlink -e`, and have the GPU's board checked",
        "new errors", compared=ComparedQuantity.NEW),
    "NVLink CRC errors": HealthCheck(
        f"at most {CRC_ERRORS_PER_S:.0f} per second on a link",
        "watch `nvidia-smi nvlink -e`, and have the GPU's board checked",
        "per second", compared=ComparedQuantity.PER_SECOND, bound=CRC_ERRORS_PER_S),
    "power limit": HealthCheck(
        "not below the GPU's default", "have the default restored, or set hardware.power_limit_w= for predictions",
        "W below"),
    "GPU clocks": HealthCheck("no slowdown by heat or power supply",
        "have the node's cooling and power supply checked"),
    "InfiniBand link lost": HealthCheck(
        "no port is down that was up since the driver was loaded", "have cable, port and switch checked",
        excludes_node=True, multi_node_only=True),
    "InfiniBand ports": HealthCheck(
        "every port that is not disabled is active", "have cable and subnet manager checked, "
        "or disable an unused port"),
    "InfiniBand rate": HealthCheck(
        "as fast as the other ports of the same board type", "have cable and switch port checked", "Gb/s below"),
    "InfiniBand errors": HealthCheck(
        "no new errors on a port", "have the cable cleaned or replaced", "new errors", compared=ComparedQuantity.NEW),
    "InfiniBand access": HealthCheck(
        "every adapter has a driver, and its /dev/infiniband/uverbs* can be opened",
        "give the container /dev/infiniband (enroot: the hook 99-mellanox.sh, apptainer: --bind /dev/infiniband)"),
    "locked memory": HealthCheck(
        "`ulimit -l` is unlimited where InfiniBand is used", "put `ulimit -l unlimited` into launcher.setup=, "
        "or ask the site"),
    "NUMA": HealthCheck(
        "the job has cores of each GPU's NUMA node", "set launcher.exclusive=true, or get cores of both sockets "
        "with launcher.cpus="),
    "NUMA balancing": HealthCheck("kernel.numa_balancing is 0",
        "have it set to 0, because it halts processes while it moves their memory"),
    "CPU governor": HealthCheck("every core has `performance`", "have it set: cpupower frequency-set -g performance",
        "cores"),
    "/dev/shm": HealthCheck(
        f"at least {MIN_FREE_GIB:g} {_GIB_FREE}", "remove old files, or give the container the node's /dev/shm "
        "(apptainer: without --contain, docker: --ipc=host, enroot: --mount /dev/shm:/dev/shm)",
        _GIB_FREE, bound=MIN_FREE_GIB, at_least=True),
    "scratch": HealthCheck(
        f"at least {MIN_FREE_GIB:g} {_GIB_FREE} in the temporary folder",
        "choose another folder for the logs of ranks: launcher.setup=['export TMPDIR=FOLDER']",
        _GIB_FREE, bound=MIN_FREE_GIB, at_least=True),
    "NCCL variables": HealthCheck(
        "no variable turns off InfiniBand, peer access or shared memory",
        "unset the variable in launcher.setup= or in the container image"),
}  # fmt: skip
"""The only table of checks: name in the journal and in doctor -> the check. docs/guide/cluster.md shows it."""

NumberByPlace = Mapping[str, float | None]
"""Place, such as a GPU or a port -> its number for one check; None where the source is missing."""


class Reading(NamedTuple):
    """What a node showed at one moment."""

    time_s: float
    """The monotonic clock of the node."""
    values: Mapping[str, NumberByPlace]
    """Name of a check -> its numbers."""


class Finding(NamedTuple):
    """What is known about one check of a node."""

    health: Health = Health.UNKNOWN
    numbers: Mapping[str, float] = {}
    """Places beyond the limit -> their numbers; where all is ok, only the place with the worst number."""


Findings = dict[str, Finding]
"""Name of each check -> its finding."""


def examine(first: Reading, last: Reading) -> Findings:
    """The findings of two readings; if there is only one, it is given twice, and counters above 0 are unknown."""
    return {name: _finding(name, check, first, last) for name, check in CHECKS.items()}


def _finding(name: str, check: HealthCheck, first: Reading, last: Reading) -> Finding:
    first_numbers = first.values.get(name, {})
    numbers = last.values.get(name) or first_numbers  # each by place
    if check.compared is not ComparedQuantity.NOW:
        divisor = last.time_s - first.time_s if check.compared is ComparedQuantity.PER_SECOND else 1.0
        if first is last or name not in last.values:  # there is only one reading
            first_numbers = {}
        numbers = {place: _growth(first_numbers.get(place), n, divisor) for place, n in numbers.items()}
    severity_sign = -1 if check.at_least else 1
    known_pairs = [(place, round(number, 3)) for place, number in numbers.items() if number is not None]
    worst_pairs = sorted(known_pairs, key=lambda pair: -severity_sign * pair[1])[:MAX_PLACES]
    if excess := {place: n for place, n in worst_pairs if severity_sign * n > severity_sign * check.bound}:
        return Finding(Health.FAIL if check.excludes_node else Health.WARN, excess)
    if not known_pairs or len(known_pairs) < len(numbers):
        return Finding()
    return Finding(Health.OK, dict(worst_pairs[:1]) if check.unit else {})


def _growth(before: float | None, after: float | None, divisor: float) -> float | None:
    """Growth of a counter from its total `before` to its total `after`, divided by `divisor`; None if unknown,
    or if it was reset.
    """
    if after == 0:
        return 0.0
    return None if before is None or after is None or after < before else (after - before) / divisor


def to_facts(findings: Findings) -> dict[str, dict[str, dict[str, float]]]:
    """The findings as the journal keeps them: health -> name of a check -> its places; without what is unknown."""
    facts = defaultdict[str, dict[str, dict[str, float]]](dict)
    for name, finding in findings.items():
        if finding.health is not Health.UNKNOWN:
            facts[str(finding.health)][name] = dict(finding.numbers)
    return facts


def findings_of(facts: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Findings:
    """The findings that `to_facts` has written; a check of which nothing was written is unknown."""
    written_keys = ((health, name) for health in Health for name in facts.get(health, ()) if name in CHECKS)
    finding_by_name = {name: Finding(health, facts[health][name]) for health, name in written_keys}
    return dict.fromkeys(CHECKS, Finding()) | finding_by_name


def places_text(check_name: str, finding: Finding) -> str:
    """The places of a finding, such as `GPU 3: 2 errors`."""
    unit = CHECKS[check_name].unit
    return ", ".join(f"{place}: {n:.4g} {unit}" if unit else place for place, n in finding.numbers.items())


def complaints(facts: Mapping[str, Any], *healths: Health, num_nodes: int = 2) -> dict[str, str]:
    """Name of a check -> its finding as a text, for findings with these healths that concern runs on so many nodes."""
    findings = {name: finding for name, finding in findings_of(facts).items() if finding.health in healths}
    relevant_names = (name for name in findings if num_nodes > 1 or not CHECKS[name].multi_node_only)
    return {name: f"{name} ({places_text(name, findings[name])})" for name in relevant_names}


Warnings = dict[tuple[str, str], str]
"""Name of a check and host -> the finding of a check that exceeds its limit, as a text."""


def node_warnings(node_facts: Iterable[Mapping[str, Any]]) -> Warnings:
    """The warnings in the facts about some nodes, one mapping for each node, as their agents report them."""
    host_texts = ((node["host"], complaints(node.get("health", {}), *BAD_HEALTHS)) for node in node_facts)
    return {(name, str(host)): text for host, check_texts in host_texts for name, text in check_texts.items()}


def warning_lines(warnings: Warnings) -> Iterator[str]:
    """A line for each check, with limit and remedy; it names the first of several hosts, whose finding it shows."""
    for name, keys_of_check in groupby(sorted(warnings), key=itemgetter(0)):
        (_, host), *other_keys = keys_of_check
        hosts_text = f"{host} and {counted(len(other_keys), 'other node')}" if other_keys else host
        check = CHECKS[name]
        yield f"{hosts_text}: {warnings[name, host]}; limit: {check.limit_text}; remedy: {check.remedy}"
