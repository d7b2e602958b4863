"""The schema of a store: what a release has to know to read everything that lies there.

It is one number in a document of the registry's table, beside the release that put it there. A store that has no such
document is of schema 1: releases before it had one wrote that. A release reads every schema up to its own, and goes on
writing the schema of the store, so that the release before it can come back. There is one schema so far: what raises
the number of a store comes with the second one.

Rows of blocks and documents have versions of their own, which say how their bytes are read. The schema is looked at
first, so that a release that is too old ends at its start and not at the first record that it cannot read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvcm import __version__
from kvcm.model.errors import StorageIOError
from kvcm.registry.shelf import Flush, Shelf
from kvcm.store.store import Table

__all__ = ["NEWEST_SCHEMA", "Schema", "check_schema", "keep_schema"]

NEWEST_SCHEMA: Final = 1
"""The highest that this release reads."""

_FIRST: Final = 1
_NAME: Final = "schema"


@dataclass(frozen=True, slots=True)
class Schema:
    """The schema of a store.

    Attributes:
        number: releases whose newest schema is lower cannot read the store.
        written_by: release that gave it to the store.
    """

    number: int
    written_by: str


async def check_schema(table: Table) -> None:
    """Return if this release can read the store.

    Args:
        table: of the registry.

    Raises:
        StorageIOError: it cannot, or the store cannot be asked.
    """
    _readable(await _shelf(table).read(_NAME))


async def keep_schema(table: Table, flush: Flush) -> None:
    """Do `check_schema`, and say in a store that has no schema yet which one it has.

    Raises:
        StorageIOError: as `check_schema`.
    """
    await _shelf(table).change(_NAME, lambda known: _readable(known) or Schema(_FIRST, __version__))
    await flush()


def _shelf(table: Table) -> Shelf[Schema]:
    return Shelf(table, "meta/", Schema)


def _readable(schema: Schema | None) -> Schema | None:
    if schema is not None and schema.number > NEWEST_SCHEMA:
        raise StorageIOError(
            f"the metadata has schema {schema.number}, given by release {schema.written_by}; this is release "
            f"{__version__}, which reads schemas up to {NEWEST_SCHEMA}: run {schema.written_by} or a later one, or "
            "move what is there with its `kvcm index export` and our `kvcm index import`"
        )
    return schema
