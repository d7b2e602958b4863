"""The registry's table of a shared store, guarded: whose the store is, and whether its registry is still there.

A server may lose everything (FLUSHALL, a restart without its files, an eviction policy), or another deployment's may
answer in its place. A manager that followed would forget all that is configured, or write into what belongs to others.
So the registry has three documents that every manager remembers: schema, cluster id, and the *incarnation*, which names
the deployment at random. They are read together with everything else, and every change compares them.

1. Nothing is taken over from a store whose documents are others', and nothing is written there.
2. An emptied registry is put back from what a manager knew last, as one change: of several managers one wins. One that
   knew more replaces it within seconds, one that knew less takes it over.
3. While it is not clear whose the store is, the gate is closed: no other part of the manager asks or changes the store.

Blocks are not put back: nobody remembers them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import structlog

from kvcm.model.clock import Clock
from kvcm.model.errors import StorageIOError
from kvcm.registry.document_cache import decode_document, encode_document
from kvcm.registry.loss_journal import LossJournal, utc
from kvcm.store.store import MARK_BITS, ReadDocuments, Replacement, Revision, StoreGate, Table

__all__ = ["GuardedTable", "Incarnation", "StoreGuard"]

_INCARNATION: Final = "meta/incarnation"
_SCHEMA: Final = "meta/schema"
_CLUSTER: Final = "meta/cluster_id"
_IDENTITY: Final = (_INCARNATION, _SCHEMA, _CLUSTER)
_MOST_TRIES: Final = 8
_NEWER_SECONDS: Final = 10.0  # after a restoration in which a manager that knew more replaces it
_log = structlog.get_logger("kvcm.registry")


@dataclass(frozen=True, slots=True)
class Incarnation:
    """The document that says which deployment a store is of.

    Attributes:
        deployment: random id, which stays.
        made_at: unix seconds.
        restored_at: when the registry was put back last, unix seconds; 0 for never.
        restored_from: what `restored_at` was in what the manager knew that put it back.
        restored_changes: how many changes of that it knew.
        replaced: id of a deployment that a manager began in the emptied store before the registry was put back.
    """

    deployment: str
    made_at: float
    restored_at: float = 0.0
    restored_from: float = 0.0
    restored_changes: int = 0
    replaced: str = ""


class GuardedTable(Table, Protocol):
    """A table that returns several documents of one moment."""

    async def get_many(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """Return documents, None where there is none."""


class StoreGuard:
    """A table of the registry, whose reads and changes are those of this deployment only.

    Args:
        table: of the registry, which the gate does not close.
        gate: closed for all others while it is not clear whose the store is.
        clock: time source.
        journal: keeps the losses; one of its own without.

    Attributes:
        journal: keeps the losses.
        on_lost: called with the reason when the store lost changes, before anything else is read from it.
        restored: how often this manager put the registry back.
        new_servers: how often a server answered as a master that this manager did not know as one.
    """

    def __init__(self, table: GuardedTable, gate: StoreGate, clock: Clock, journal: LossJournal | None = None) -> None:
        self.journal = journal if journal is not None else LossJournal(clock)
        self.journal.is_ours = self._is_unchanged
        self._table = table
        self._gate = gate
        self._clock = clock
        self._known: dict[str, bytes] = {}
        self._incarnation: Incarnation | None = None
        self._version = 0
        self._sound_at = 0.0
        self._doubts = 0
        self.on_lost: Callable[[str], None] = lambda _reason: None
        self.restored = 0
        self.new_servers = 0

    async def open(self) -> None:
        """Find out which deployment the store is of; a store without a registry begins one.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        while self._incarnation is None:
            document = await self._table.get(_INCARNATION)
            if document is None:
                new = Incarnation(secrets.token_hex(8), self._clock.now())
                await self._table.replace(_INCARNATION, None, encode_document(new))
            else:
                self._incarnation, self._known = decode_document(Incarnation, document), {_INCARNATION: document}
        self._sound_at = self._clock.now()
        await self.journal.open(self._incarnation.deployment, self._incarnation.made_at)

    # The table, for the registry.

    async def get(self, name: str) -> bytes | None:
        while True:
            document, *identity = await self._table.get_many([name, *_IDENTITY])
            if await self._is_sound(identity):
                self._remember(name, document)
                return document

    async def all(self) -> Mapping[str, bytes]:
        for _ in range(_MOST_TRIES):
            version = await self._table.version()
            documents = await self._table.all()
            if await self._settle(documents, version):
                return documents
        raise StorageIOError("the registry of the store is put back by several managers; try again")

    async def replace(self, name: str, old: bytes | None, new: bytes | None, due: float = 0.0) -> bool:
        assert not due, "documents of the registry are never due"
        return await self.replace_together([Replacement(name, old, new)])

    async def replace_together(self, replacements: Sequence[Replacement]) -> bool:
        if not replacements:
            return True
        changed = {each.name for each in replacements}
        identity = [Replacement(name, self._known.get(name), self._known.get(name)) for name in _IDENTITY]
        guards = [each for each in identity if each.name not in changed and each.old is not None]
        if await self._table.replace_together([*guards, *replacements]):
            for each in replacements:
                self._remember(each.name, each.new)
            return True
        await self._is_sound(await self._table.get_many(_IDENTITY), changed)
        return False

    async def finish(self, name: str, old: bytes, outcome: bytes, now: float, seconds: float) -> bool:
        return await self._table.finish(name, old, outcome, now, seconds)

    async def outcome(self, name: str, now: float) -> bytes | None:
        return await self._table.outcome(name, now)

    async def due(self, now: float, most: int) -> list[str]:
        return await self._table.due(now, most)

    @property
    def due_from(self) -> float:
        return self._table.due_from

    @property
    def revision(self) -> Revision | None:
        """None: the registry is compared, and not only followed."""
        return None

    async def version(self) -> int:
        version = await self._table.version()
        if self._differing(await self._table.get_many(_IDENTITY)) or self._gate.closed:
            self._doubts += 1
            return -self._doubts  # to be read again, whatever the counter says: `all` decides
        if version == self._version:
            self._sound_at = self._clock.now()
        return version

    async def on_new_server(self, read: ReadDocuments, _seconds: float) -> None:
        """Say that a server answers that this manager did not know as a master: it may lack acknowledged changes last.
        Close the gate before it gets a command if it has another registry; `all` opens it again."""
        self.new_servers += 1
        since = await self.journal.compare(read)
        _log.warning(
            "store_server_new",
            sound_until=utc(self._sound_at if since is None else min(since, self._sound_at)),
            noticed_at=utc(self._clock.now()),
            reason="another process or replica answers as a master: changes of this window may be lost",
        )
        found = await read("registry", _IDENTITY)
        if found is not None and self._differing(found):
            self._close("a server of the metadata store has another registry than it had: it is looked at")

    # Judgement.

    def _remember(self, name: str, document: bytes | None) -> None:
        if document is None:
            self._known.pop(name, None)
        else:
            self._known[name] = document

    def _differing(self, identity: Sequence[bytes | None]) -> list[str]:
        """Return which of the three documents differ from those that are known; those not known yet do not."""
        pairs = zip(_IDENTITY, identity, strict=True)
        return [name for name, found in pairs if name in self._known and found != self._known[name]]

    async def _is_unchanged(self) -> bool:
        """Return whether the store has the three documents that are known."""
        return not self._differing(await self._table.get_many(_IDENTITY))

    async def _is_sound(self, identity: Sequence[bytes | None], changed: Container[str] = ()) -> bool:
        """Return whether the three documents are those that are known, but for those that were to be changed.

        Raises:
            StorageIOError: they are not.
        """
        differing = [name for name in self._differing(identity) if name not in changed]
        if not differing:
            return True
        if self._version:
            raise StorageIOError(
                f"the metadata store does not have the registry that it had ({differing[0]} is another one or gone): "
                "it is looked at; try again"
            )
        self._incarnation = None  # nothing was read yet: another manager was faster
        await self.open()
        return False

    async def _settle(self, documents: Mapping[str, bytes], version: int) -> bool:
        """Accept the documents and return True, or put the registry back, so that they are to be read again.

        Raises:
            StorageIOError: they are of another deployment.
        """
        found = documents.get(_INCARNATION)
        incarnation = None if found is None else decode_document(Incarnation, found)
        self._refuse_foreign(documents, incarnation)
        assert self._incarnation is not None
        if incarnation is not None and self._is_rival(incarnation):
            rival = replace(self._incarnation, replaced=incarnation.deployment)
            await self._restore(documents, rival, "was begun again")
        elif _SCHEMA not in documents and _SCHEMA in self._known:
            await self._restore(documents, self._incarnation, "is gone")
        elif incarnation is None:  # an older dump, of a release that did not write it
            await self._table.replace(_INCARNATION, None, encode_document(self._incarnation))
        elif self._is_behind(incarnation):
            await self._restore_newer(documents, version)
        else:
            self._accept(documents, incarnation, version)
            return True
        return False

    def _refuse_foreign(self, documents: Mapping[str, bytes], found: Incarnation | None) -> None:
        known, cluster = self._known.get(_CLUSTER), documents.get(_CLUSTER)
        is_foreign = None not in (known, cluster) and known != cluster
        if not is_foreign and found is not None and not self._is_ours(found):
            is_foreign = not self._is_rival(found)
        if is_foreign:
            reason = (
                "the metadata store is another deployment's: this manager neither reads nor writes it. Correct "
                "kvcm.registry_storage.uri, or put the store of this deployment back"
            )
            self._close(reason, "store_foreign")
            raise StorageIOError(reason)

    def _is_ours(self, found: Incarnation) -> bool:
        assert self._incarnation is not None
        return self._incarnation.deployment in (found.deployment, found.replaced)

    def _is_rival(self, found: Incarnation) -> bool:
        """Return whether a manager that started in the emptied store began a registry of its own there."""
        return not self._is_ours(found) and not found.restored_at and found.made_at >= self._sound_at

    def _is_behind(self, found: Incarnation) -> bool:
        """Return whether a manager that knew less than this one put the registry back a moment ago."""
        assert self._incarnation is not None
        is_of_mine = found.restored_from == self._incarnation.restored_at != found.restored_at
        is_young = self._clock.now() - found.restored_at <= _NEWER_SECONDS
        return is_of_mine and is_young and found.restored_changes < self._version >> MARK_BITS

    def _accept(self, documents: Mapping[str, bytes], incarnation: Incarnation, version: int) -> None:
        before = self._incarnation
        assert before is not None
        if incarnation.restored_at == before.restored_at and version >> MARK_BITS < self._version >> MARK_BITS:
            lost = (self._version >> MARK_BITS) - (version >> MARK_BITS)
            text = f"at least {lost} changes of the registry are lost: the store went back in time"
            self._report_loss(text, self._sound_at)
        elif incarnation.restored_at != before.restored_at:
            text = "it was emptied; its registry was put back, its blocks are lost"
            self._report_loss(text, incarnation.made_at)
        self._incarnation, self._version = incarnation, version
        self._known, self._sound_at = dict(documents), self._clock.now()
        if self._gate.closed:
            self._gate.closed = ""
            _log.info("store_sound", deployment=incarnation.deployment)

    async def _restore(self, found: Mapping[str, bytes], incarnation: Incarnation, what: str) -> None:
        self._close(f"the registry of the metadata store {what}: it is put back")
        new = self._restored_now(incarnation)
        wanted = {**self._known, _INCARNATION: encode_document(new)}
        await self._put_back([Replacement(name, found.get(name), wanted[name]) for name in sorted(wanted)], what)

    def _restored_now(self, incarnation: Incarnation) -> Incarnation:
        assert self._incarnation is not None
        return replace(
            incarnation,
            restored_at=self._clock.now(),
            restored_from=self._incarnation.restored_at,
            restored_changes=self._version >> MARK_BITS,
        )

    async def _restore_newer(self, found: Mapping[str, bytes], version: int) -> None:
        """Replace a restored registry by that of this manager; once it was changed, only what it lacks is added."""
        assert self._incarnation is not None
        is_untouched = version >> MARK_BITS == 1
        gone = found.keys() - self._known.keys() if is_untouched else set[str]()
        wanted = {name: each for name, each in self._known.items() if is_untouched or name not in found}
        changes = [Replacement(name, found.get(name), wanted[name]) for name in sorted(wanted.keys() - {_INCARNATION})]
        changes += [Replacement(name, found[name], None) for name in sorted(gone)]
        new = self._restored_now(self._incarnation)
        changes.append(Replacement(_INCARNATION, found[_INCARNATION], encode_document(new)))
        await self._put_back(changes, "was put back by a manager that knew less")

    async def _put_back(self, changes: Sequence[Replacement], what: str) -> None:
        if await self._table.replace_together([each for each in changes if each.old != each.new]):
            self.restored += 1
            removed = sum(each.new is None for each in changes)
            _log.error("store_restored", reason=f"the registry {what}", documents=len(changes), removed=removed)

    def _report_loss(self, what: str, since: float) -> None:
        self.journal.note(what, since)
        self.on_lost(what)

    def _close(self, reason: str, event: str = "store_emptied") -> None:
        if self._gate.closed != reason:
            self._gate.closed = reason
            _log.error(event, reason=reason)
