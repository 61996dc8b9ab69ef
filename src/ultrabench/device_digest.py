"""Digests of what GPUs compute from a fixed seed: how the journal keeps them, and which GPUs differ from the others.

`kernel/rank/digest_chain.py` computes them. Two GPUs with the same setup must have the same digest of each part.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple

from ultrabench.errors import counted

CHAIN_VERSION = 1
"""Version of the chain of operations; digests of different versions are never compared."""
MIN_COMPARED = 3
"""Smallest number of GPUs with the same setup that have a minority; of two that differ, either may be wrong."""
MIN_CONFIRMING = 2
"""Number of preflights in which a GPU must differ before its node is excluded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDigest:
    """What one device computed, twice."""

    device: str = ""
    """The UUID of a GPU; empty where it has none, and for CPUs."""
    setup: str
    """What must be equal where digests are compared: model, driver, torch and version of the chain."""
    parts: Mapping[str, str]
    """Part of the chain -> digest of its results."""
    second: Mapping[str, str] = field(default_factory=dict)
    """Part whose results differed the second time -> their digest; empty for a device that repeats its results."""


def digest_of(values: object) -> DeviceDigest | None:
    """The digest in a JSON value; None where the value is damaged."""
    if not isinstance(values, dict):
        return None
    device, setup = values.get("device", ""), values.get("setup")
    parts, second = values.get("parts"), values.get("second", {})
    if not (isinstance(device, str) and isinstance(setup, str)):
        return None
    if not (isinstance(parts, dict) and isinstance(second, dict)):
        return None
    parts, second = ({str(part): str(digest) for part, digest in table.items()} for table in (parts, second))
    return DeviceDigest(device=device, setup=setup, parts=parts, second=second)


class DatedDigest(NamedTuple):
    """A digest, and where and when it was computed."""

    time_s: float
    """Seconds since 1970, by the clock of who wrote it."""
    source: str
    """What computed it: an allocation, or a call of `ultrabench doctor --verify`."""
    host: str
    number: int
    """Number of the device on its host."""
    digest: DeviceDigest

    @property
    def identity(self) -> tuple[str, ...]:
        """What tells the device from all others: its UUID, or else its host and number."""
        return (self.digest.device,) if self.digest.device else (self.host, str(self.number))

    @property
    def device_text(self) -> str:
        """The name of the device on its host, such as `GPU 3 (GPU-5a2c1e77)`."""
        return (
            f"GPU {self.number} ({self.digest.device[:12]})"
            if self.digest.device
            else f"device {self.number}"
        )


def dated_digests(node_facts: object, source: str, time_s: float | None) -> Iterator[DatedDigest]:
    """The digests in the facts about nodes that a preflight wrote; earlier versions wrote none."""
    for facts in node_facts if isinstance(node_facts, list) else ():
        records = facts.get("digests") if isinstance(facts, dict) else None
        for number, values in enumerate(records if isinstance(records, list) else ()):
            if digest := digest_of(values):
                yield DatedDigest(time_s or 0.0, source, str(facts.get("host")), number, digest)


class Against(StrEnum):
    """With what a digest was compared that it differs from."""

    ITSELF = "itself"
    OTHERS = "others"
    PAST = "past"


class Difference(NamedTuple):
    """A digest that differs from what it must equal."""

    dated: DatedDigest
    against: Against
    parts: tuple[str, ...]
    """The parts of the chain that differ."""
    text: str
    """The difference as a sentence without its host, such as
    `GPU 3 (GPU-5a2c1e77) computed bf16 products differently from 15 of 16 equal GPUs`."""


class _Majority(NamedTuple):
    """What most devices with the same setup computed in one part."""

    digest: str
    num_agreeing: int
    num_compared: int


def differences(digests: Iterable[DatedDigest]) -> list[Difference]:
    """The digests that differ: from their second computation, from most other devices with the same setup, or, where
    there is no majority of three or more devices, from the first one of their device. They are in the order of time.
    """
    ordered = sorted(digests, key=lambda dated: (dated.time_s, dated.source, dated.host, dated.number))
    majorities = _majorities(ordered)
    first_by_device = dict[tuple[str, ...], DatedDigest]()
    all_differences = list[Difference]()
    for dated in ordered:
        first = first_by_device.setdefault((*dated.identity, dated.digest.setup), dated)
        all_differences += filter(None, [_difference(dated, first, majorities)])
    return all_differences


def _difference(
    dated: DatedDigest, first: DatedDigest, majorities: Mapping[tuple[str, str], _Majority]
) -> Difference | None:
    digest = dated.digest
    if digest.second:
        parts = tuple(digest.second)
        return Difference(
            dated, Against.ITSELF, parts, _text(dated, parts, "in two ways when it computed twice")
        )
    majority_by_part = {
        part: majorities[digest.setup, part] for part in digest.parts if (digest.setup, part) in majorities
    }
    if parts := tuple(p for p, majority in majority_by_part.items() if digest.parts[p] != majority.digest):
        majority = majority_by_part[parts[0]]
        share_text = f"{majority.num_agreeing} of {majority.num_compared} equal devices"
        return Difference(dated, Against.OTHERS, parts, _text(dated, parts, f"differently from {share_text}"))
    uncompared = (part for part in digest.parts if part not in majority_by_part)
    if parts := tuple(p for p in uncompared if digest.parts[p] != first.digest.parts.get(p, digest.parts[p])):
        day = datetime.fromtimestamp(first.time_s, UTC).date()
        return Difference(
            dated, Against.PAST, parts, _text(dated, parts, f"differently from itself on {day}")
        )
    return None


def _text(dated: DatedDigest, parts: Sequence[str], how: str) -> str:
    return f"{dated.device_text} computed {', '.join(parts)} {how}"


def _majorities(digests: Sequence[DatedDigest]) -> dict[tuple[str, str], _Majority]:
    """Setup and part -> what more than half of at least MIN_COMPARED devices computed; each device has one vote.

    A device votes for what it computed most often. What it did not repeat is no vote.
    """
    counts_by_device = defaultdict[tuple[str, str, tuple[str, ...]], Counter[str]](Counter)
    for dated in digests:
        for part, value in dated.digest.parts.items():
            if part not in dated.digest.second:
                counts_by_device[dated.digest.setup, part, dated.identity][value] += 1
    votes = defaultdict[tuple[str, str], Counter[str]](Counter)
    for (setup, part, _), counts in counts_by_device.items():
        votes[setup, part][counts.most_common(1)[0][0]] += 1
    majorities = dict[tuple[str, str], _Majority]()
    for key, counts in votes.items():
        (value, num_agreeing), num_compared = counts.most_common(1)[0], counts.total()
        if num_compared >= MIN_COMPARED and 2 * num_agreeing > num_compared:
            majorities[key] = _Majority(value, num_agreeing, num_compared)
    return majorities


class HostVerdict(NamedTuple):
    """What the differences of its devices say about a host."""

    is_confirmed: bool
    """Whether one device differed in at least MIN_CONFIRMING preflights."""
    reason: str


def host_verdicts(all_differences: Sequence[Difference]) -> dict[str, HostVerdict]:
    """Host with a device that differs -> the verdict on it."""
    by_host_and_device = defaultdict[tuple[str, tuple[str, ...]], list[Difference]](list)
    for difference in all_differences:
        by_host_and_device[difference.dated.host, difference.dated.identity].append(difference)
    verdicts = dict[str, HostVerdict]()
    for (host, _), of_device in by_host_and_device.items():
        num_sources = len({difference.dated.source for difference in of_device})
        is_confirmed = num_sources >= MIN_CONFIRMING
        reason = f"{of_device[-1].text} in {counted(num_sources, 'preflight')}"
        if host not in verdicts or (is_confirmed and not verdicts[host].is_confirmed):
            verdicts[host] = HostVerdict(is_confirmed, reason)
    return verdicts
