"""Deletion numbers: how new a metadata store is, by numbers that something outside of it can witness.

Where bytes are deleted for good, the store first gets a larger number, in each of its parts, and then a witness beside
the bytes gets the same. The order of changes of a part is that of its number, also in a copy, a dump or a replica of
it: so a part with the witness's number, or a larger one, has every change that came before it, and with them the
deletion of whatever is deleted. A part with a smaller one was rolled back.

With each number the store keeps the last one that the witness surely had. A witness with a smaller one than that was
rolled back itself, or is gone.

Numbers are microseconds since 1970, or more where that was given already: a store that went on by itself from an older
copy does not come to a number of the history that it lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from struct import Struct
from typing import Any, Final, NamedTuple

import msgspec

from kvcm.model.errors import StorageIOError
from kvcm.store.store import PART, Store

__all__ = ["DeletionNumber", "DeletionNumbers", "Witnessed", "decode_witness", "encode_witness"]

Witnessed = Mapping[str, int]
"""What a witness says: the number of each part of the store."""
_ENCODING: Final = Struct(">QQ")


class DeletionNumber(NamedTuple):
    """The number of one part.

    Attributes:
        number: 0 for none.
        witnessed: what the witness surely had; 0 for none.
    """

    number: int = 0
    witnessed: int = 0

    @classmethod
    def decoded(cls, document: bytes | None) -> DeletionNumber:
        """Read a document, None for none; one of another release is older than any witness."""
        known = document is not None and len(document) == _ENCODING.size
        return cls(*_ENCODING.unpack(document)) if known and document is not None else cls()


class DeletionNumbers:
    """The numbers of one store, each of a name.

    Args:
        store: keeps them.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def are_apart(self, name: str, read_witness: Callable[[], Awaitable[Witnessed | None]]) -> bool:
        """Return whether the store lacks changes that the witness knows, or the witness some that the store knows.

        Both may get larger numbers meanwhile: so the store is asked before and after the witness.

        Args:
            name: of the numbers.
            read_witness: returns what the witness says, None where there is none.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        earlier = await self._known(name, await self._store.parts())
        witnessed = await read_witness() or {}
        later = await self._known(name, witnessed)
        if any(later[part].number < seen for part, seen in witnessed.items() if part in later):
            return True
        compared = witnessed or dict.fromkeys(earlier, 0)
        return any(seen < earlier[part].witnessed for part, seen in compared.items() if part in earlier)

    async def advance(self, name: str, least: int, witnessed: Witnessed, *, force: bool = False) -> Witnessed | None:
        """Give every part a larger number, and return what a witness has to say from now on.

        Args:
            name: of the numbers.
            least: the number that they get, unless that was given or witnessed.
            witnessed: what the witness says now.
            force: also where the two are not of the same time, since all that is there was verified.

        Returns:
            None where the two are not of the same time, without `force`.

        Raises:
            StorageIOError: the store failed; some parts may have another number.
        """
        parts = await self._store.parts()
        asked = {part: witnessed.get(part, 0) for part in {*parts, *witnessed}}
        given = await asyncio.gather(
            *(self._try_advance(name, part, least, seen, force) for part, seen in asked.items())
        )
        await self._store.flush()
        numbers = {part: number for part, number in zip(asked, given, strict=True) if number is not None}
        return {part: numbers[part] for part in parts} if len(numbers) == len(asked) else None

    async def confirm(self, name: str, before: Witnessed, given: Witnessed) -> None:
        """Note that the witness has the numbers that `advance` returned.

        Args:
            name: of the numbers.
            before: what the witness said when they were given.
            given: the numbers.

        Raises:
            StorageIOError: the store failed.
        """
        await asyncio.gather(*(self._confirm(name, part, before.get(part, 0), of) for part, of in given.items()))

    async def _confirm(self, name: str, part: str, before: int, number: int) -> None:
        with _unless_of_others(part):
            await self._store.table(part).replace(name, _encode(number, before), _encode(number, number))

    async def _try_advance(self, name: str, part: str, least: int, seen: int, force: bool) -> int | None:
        """Do `_advance`; a part of a further store that is away stays as it was witnessed: no block of it goes now."""
        try:
            return await self._advance(name, part, least, seen, force)
        except StorageIOError:
            if "@" not in part:
                raise
            return seen

    async def _advance(self, name: str, part: str, least: int, seen: int, force: bool) -> int | None:
        table = self._store.table(part)
        while True:
            document = await table.get(name)
            known = DeletionNumber.decoded(document)
            if not force and not known.witnessed <= seen <= known.number:
                return None
            number = max(known.number + 1, seen + 1, least)
            if await table.replace(name, document, _encode(number, seen)):
                return number

    async def _known(self, name: str, parts: Iterable[str]) -> dict[str, DeletionNumber]:
        """Return the numbers of parts, without those of further stores that are away: their servers are compared when
        they answer again (`RedisStore.on_new_server`)."""
        known: dict[str, DeletionNumber] = {}

        async def read(part: str) -> None:
            with _unless_of_others(part):
                known[part] = DeletionNumber.decoded(await self._store.table(part).get(name))

        await asyncio.gather(*map(read, parts))
        return known


def _unless_of_others(part: str) -> AbstractContextManager[Any]:
    """Return what suppresses errors of a store where the part is of a further one, which may be away."""
    return suppress(StorageIOError) if "@" in part else nullcontext()


def _encode(number: int, seen: int) -> bytes:
    return _ENCODING.pack(number, max(seen, 0))


def decode_witness(text: bytes) -> Witnessed:
    """Read what `encode_witness` wrote. A damaged one fits no store."""
    try:
        return msgspec.json.decode(text, type=dict[str, int])
    except msgspec.MsgspecError:
        return {PART: -1}


def encode_witness(witnessed: Witnessed) -> bytes:
    """Return the content of a witness."""
    return msgspec.json.encode(witnessed)
