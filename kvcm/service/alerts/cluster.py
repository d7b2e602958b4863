"""What is wrong with managers and with what they share: leadership, the store, sessions, certificates, the loop."""

from __future__ import annotations

from collections.abc import Iterator

from kvcm.service.alerts.values import Alert, Facts, Severity, SubjectKind
from kvcm.service.alerts.wording import counted, lasting

__all__ = ["cluster_alerts"]

_LATE_SECONDS = 0.1
_CERTIFICATE_SECONDS = 14 * 86_400
_URGENT_SECONDS = 2 * 86_400


def cluster_alerts(facts: Facts) -> Iterator[Alert]:
    """Yield what is wrong with managers and the cluster."""
    yield from _of_leadership(facts)
    yield from _of_store(facts)
    yield from _of_sessions(facts)
    yield from _of_certificates(facts)
    if facts.lag_seconds > _LATE_SECONDS:
        yield Alert(
            *("KvcmLoopLag", Severity.ALERT_TICKET, SubjectKind.MANAGER, facts.node_id),
            f"The event loop of manager {facts.node_id} is late by {lasting(facts.lag_seconds)} all the time.",
            "It is asked for more than it can do on one core, or its host is short of processor time.",
            "Add a manager on the same store, or give it a core of its own.",
        )


def _of_leadership(facts: Facts) -> Iterator[Alert]:
    if not facts.leader:
        yield Alert(
            *("KvcmNoLeader", Severity.ALERT_PAGE, SubjectKind.CLUSTER, ""),
            "No manager leads: nothing is evicted and nothing deleted.",
            f"Manager {facts.node_id} sees nobody who holds the lease in the store.",
            "Look whether the store answers and takes writes, and at the managers' logs for `election_round_failed`.",
        )
    if len(facts.leaders) > 1:
        yield Alert(
            *("KvcmSeveralLeaders", Severity.ALERT_PAGE, SubjectKind.CLUSTER, ""),
            f"{len(facts.leaders)} managers say that they lead.",
            f"They are {', '.join(sorted(facts.leaders))}.",
            "Check that their clocks run evenly, and that they use one store.",
        )


def _of_store(facts: Facts) -> Iterator[Alert]:
    if facts.store_trouble:
        yield Alert(
            *("KvcmStoreAway", Severity.ALERT_PAGE, SubjectKind.CLUSTER, ""),
            f"The metadata store does not answer manager {facts.node_id}.",
            f"{facts.store_trouble}.",
            "Look at the Redis or Valkey server, or at the disk of the data directory. Reads go on from memory as "
            "far as they can; writes are refused until it is back.",
        )
    if facts.dropped_accesses:
        yield Alert(
            *("KvcmAccessesDropped", Severity.ALERT_PAGE, SubjectKind.MANAGER, facts.node_id),
            f"{counted(facts.dropped_accesses, 'read')} could not be written down in the last 5 minutes.",
            "The metadata store takes them more slowly than engines read, so that eviction does not know of them.",
            "Give the store more processor time or a faster network.",
        )


def _of_sessions(facts: Facts) -> Iterator[Alert]:
    if facts.overdue_sessions:
        yield Alert(
            *("KvcmWriteSessionsOverdue", Severity.ALERT_TICKET, SubjectKind.CLUSTER, ""),
            f"{counted(facts.overdue_sessions, 'write session')} should have ended and did not.",
            "The leader ends them; it is not there, the store does not answer, or there are too many at a time.",
            "Look at the write sessions and at the log of the leader for `session_not_ended`.",
        )


def _of_certificates(facts: Facts) -> Iterator[Alert]:
    for what, ends in sorted(facts.certificates.items()):
        left = ends - facts.now
        if ends <= 0 or left > _CERTIFICATE_SECONDS:
            continue
        is_urgent = left < _URGENT_SECONDS
        yield Alert(
            *("KvcmCertificateEnds", Severity.ALERT_PAGE if is_urgent else Severity.ALERT_TICKET),
            *(SubjectKind.MANAGER, facts.node_id),
            f"The certificate ({what}) of manager {facts.node_id} "
            + (f"ends in {lasting(left)}." if left > 0 else f"ended {lasting(-left)} ago."),
            "It was not replaced yet.",
            "Put another one in its place: the manager reads it anew by itself.",
        )
