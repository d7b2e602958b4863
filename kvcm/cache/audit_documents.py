"""Verification of the store's documents: registry, write sessions, read leases and pins."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple, Protocol

from kvcm.cache.audit_report import AuditReport, Finding, Repair
from kvcm.cache.leases import ReadLease
from kvcm.cache.pin_values import Pin
from kvcm.cache.write_values import WriteSession
from kvcm.model.accounts import Account
from kvcm.model.errors import StorageIOError
from kvcm.model.groups import GlobalQuota, InstanceGroup
from kvcm.model.instances import Registration, Removal
from kvcm.model.storages import StorageConfig
from kvcm.registry.codec import decode_document
from kvcm.registry.seats import SeatsTaken
from kvcm.store.store import Table

__all__ = ["DocumentAudit"]

_ALL: Final = 1 << 62
_FOR_EVER: Final = float("inf")
_KINDS: Final[dict[str, type[Any]]] = {
    "storage/": StorageConfig,
    "group/": InstanceGroup,
    "instance/": Registration,
    "removal/": Removal,
    "account/": Account,
    "quota/": GlobalQuota,
    "seats/": SeatsTaken,
}
_UNREADABLE = "with --drop-unreadable removes the document"


class _Ending(Protocol):
    @property
    def uid(self) -> int: ...

    @property
    def deadline(self) -> float: ...


class _Wrong(NamedTuple):
    what: str
    repair: str
    is_unreadable: bool = False
    due: float | None = None  # None: the document goes


class DocumentAudit:
    """Looks at documents; what looks wrong is looked at again by `judge`.

    Args:
        known: numbers of the instances that are registered or being removed; asked anew at every look.
        repair: what may be changed.
        report: takes findings.
    """

    def __init__(self, known: Callable[[], Collection[int]], repair: Repair, report: AuditReport) -> None:
        self._known = known
        self._repair = repair
        self._report = report
        self._suspects: dict[str, tuple[Table, list[str]]] = {}

    async def look_at_registry(self, table: Table) -> None:
        """Look at every document of the registry."""
        await self._look("registry", table)

    async def look_at_sessions(self, table: Table) -> None:
        """Look at every write session."""
        await self._look("session", table)

    async def look_at_leases(self, table: Table) -> None:
        """Look at every read lease."""
        await self._look("lease", table)

    async def look_at_pins(self, table: Table) -> None:
        """Look at every pin."""
        await self._look("pin", table)

    @property
    def has_suspects(self) -> bool:
        """Whether something has to be looked at again."""
        return bool(self._suspects)

    async def judge(self) -> None:
        """Look at the suspects again, report those that still are wrong and mend them."""
        suspects, self._suspects = self._suspects, {}
        for kind, (table, names) in suspects.items():
            # Asked before and after: what comes or goes meanwhile must not look wrong.
            before = set(await table.due(_FOR_EVER, _ALL))
            documents = {name: await table.get(name) for name in names}
            after = set(await table.due(_FOR_EVER, _ALL))
            for name, document in documents.items():
                scheduled = before & after if document is None else before | after
                await self._judge_one(kind, table, name, document, is_scheduled=name in scheduled)

    async def _judge_one(
        self, kind: str, table: Table, name: str, document: bytes | None, *, is_scheduled: bool
    ) -> None:
        wrong = self._wrong(kind, name, document, is_scheduled=is_scheduled)
        if wrong is not None:
            is_mended = await self._mend(table, name, document, wrong)
            self._report.add(Finding(kind, _where(kind, name), wrong.what, wrong.repair, is_mended))

    async def _look(self, kind: str, table: Table) -> None:
        # The due times first: a document that is there afterwards and not in them came meanwhile, and is cleared by
        # the second look.
        scheduled = set(await table.due(_FOR_EVER, _ALL))
        documents = await table.all()
        self._report.looked_at["documents"] += len(documents)
        for name in sorted(documents.keys() | scheduled):
            if self._wrong(kind, name, documents.get(name), is_scheduled=name in scheduled) is not None:
                self._suspects.setdefault(kind, (table, []))[1].append(name)

    def _wrong(self, kind: str, name: str, document: bytes | None, *, is_scheduled: bool) -> _Wrong | None:
        if document is None:
            return _Wrong("is due some time, but is not there", "forgets the due time") if is_scheduled else None
        try:
            ending = _decoded(kind, name, document)
        except StorageIOError as error:
            return _Wrong(str(error), _UNREADABLE, is_unreadable=True)
        if ending is None:
            return None
        if ending.uid not in self._known():
            return _Wrong(f"belongs to registration {ending.uid}, which is gone", "removes the document")
        if not is_scheduled:
            return _Wrong("never becomes due", "sets its due time", due=ending.deadline)
        return None

    async def _mend(self, table: Table, name: str, document: bytes | None, wrong: _Wrong) -> bool:
        if not self._repair.mend or (wrong.is_unreadable and not self._repair.drop_unreadable):
            return False
        if wrong.due is not None:
            return await table.replace(name, document, document, wrong.due)
        return await table.replace(name, document, None)


def _decoded(kind: str, name: str, document: bytes) -> _Ending | None:
    if kind == "session":
        return WriteSession.decoded(name, document)
    if kind == "lease":
        return ReadLease.decoded(name, document)
    if kind == "pin":
        return Pin.decoded(name, document)
    for prefix, value_kind in _KINDS.items():
        if name.startswith(prefix):
            decode_document(value_kind, document)
    return None


def _where(kind: str, name: str) -> str:
    # The id of a session or a lease is the right to end it.
    return f"document {name!r}" if kind == "registry" else f"{kind} {name[:6]}…"
