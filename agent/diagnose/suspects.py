"""Which hosts a failed attempt points at, by what the ranks of each host did;
texts decide only where they are proof.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from ultrabench.agent.diagnose.addresses import AddressBook
from ultrabench.agent.diagnose.findings import Finding
from ultrabench.agent.ranks.rank_progress import RankProgress
from ultrabench.result import EXITED_EARLY, TRANSIENT_CAUSES, Status


class HostEvidence(NamedTuple):
    """What one failed attempt says about its hosts, in the order of the hosts."""

    suspect_hosts: tuple[str, ...] = ()
    """Hosts that this attempt alone makes suspects."""
    began_on: tuple[str, ...] = ()
    """Hosts on which the failure began; only a comparison with other attempts says whether they are at fault."""


NO_EVIDENCE_ABOUT_HOSTS = HostEvidence()


def host_evidence(
    rank_findings: Sequence[Finding], ranks: Sequence[RankProgress], address_book: AddressBook
) -> HostEvidence:
    """The hosts that a failed attempt points at.

    A host is a suspect if a rank shows proof of its fault; if all its ranks failed by themselves and no rank of
    another host did; or if all ranks report network errors, and these name peers on this host only. In an attempt
    on one host nothing can be compared, so only proof makes it a suspect.

    Args:
        rank_findings: how each failed rank failed, the likeliest root first.
        ranks: all ranks of the attempt.
    """
    root = rank_findings[0].cause
    if root.proves_fault:
        hosts = _hosts_of([f.rank for f in rank_findings if f.cause.proves_fault], ranks)
        return HostEvidence(suspect_hosts=hosts, began_on=hosts)
    if root.status == Status.INVALID or root.name in TRANSIENT_CAUSES:
        return NO_EVIDENCE_ABOUT_HOSTS
    if root.status == Status.COMM_ERROR:
        return _network_evidence(rank_findings, ranks, address_book)
    # A rank that has lost its peers may report a network error, or end early without an error.
    weaker_causes = {EXITED_EARLY} - {root.name}
    independent_findings = [
        finding
        for finding in rank_findings
        if finding.cause.status != Status.COMM_ERROR and finding.cause.name not in weaker_causes
    ]
    # Kills and exits without a word do not say which of them came first; next to another failure they follow it.
    if not rank_findings[0].may_follow:
        independent_findings = [finding for finding in independent_findings if not finding.may_follow]
    failed_by_themselves = [finding.rank for finding in independent_findings]
    evidence = evidence_of_ranks(failed_by_themselves, ranks)
    # A lack of memory is the run's, unless it does not lack any on other nodes.
    return evidence._replace(suspect_hosts=()) if root.status == Status.OOM else evidence


def evidence_of_ranks(culprits: Collection[RankProgress], ranks: Sequence[RankProgress]) -> HostEvidence:
    """The evidence where `culprits` failed by themselves: their only host is a suspect if all its
    ranks are among them.
    """
    began_on, all_hosts = _hosts_of(culprits, ranks), {rank.host for rank in ranks}
    has_failed_entirely = len(began_on) == 1 and all(r in culprits for r in ranks if r.host == began_on[0])
    return HostEvidence(
        suspect_hosts=began_on if has_failed_entirely and len(all_hosts) > 1 else (), began_on=began_on
    )


def _network_evidence(
    rank_findings: Sequence[Finding], ranks: Sequence[RankProgress], address_book: AddressBook
) -> HostEvidence:
    """The evidence where all failures are network errors: the peers that ranks of other hosts name.

    Errors that name nobody blame nobody. If few ranks failed without a word, the failure began on their hosts.
    """
    all_hosts, failed_ranks = {rank.host for rank in ranks}, [finding.rank for finding in rank_findings]
    if len(all_hosts) == 1:
        return HostEvidence(began_on=(*all_hosts,))
    named_hosts = set[str]()
    for finding in rank_findings:
        # NCCL begins a line with the name of its own host.
        named_hosts |= address_book.hosts_in(finding.text_about_peers) - {finding.rank.host}
    if len(named_hosts) == 1:
        return HostEvidence(suspect_hosts=(*named_hosts,), began_on=(*named_hosts,))
    silent_ranks = [rank for rank in ranks if rank not in failed_ranks and not rank.done_line]
    if named_hosts or len(silent_ranks) >= len(failed_ranks):
        return NO_EVIDENCE_ABOUT_HOSTS
    return HostEvidence(began_on=_hosts_of(silent_ranks, ranks))


def _hosts_of(chosen_ranks: Collection[RankProgress], ranks: Sequence[RankProgress]) -> tuple[str, ...]:
    """The hosts of `chosen_ranks`, in the order of the ranks."""
    return tuple(dict.fromkeys(rank.host for rank in ranks if rank in chosen_ranks))
