"""/v1/storages."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response
from pydantic import Field

from kvcm.model.errors import ErrorCode
from kvcm.service.rest.call_book import CallBook, RefusedError
from kvcm.service.rest.changing import MOST_TRIES, Turns, check_same_name, fields_of, lost, merged, unless_absent
from kvcm.service.rest.documents import StoragePath
from kvcm.service.rest.etags import check_preconditions, etag_of
from kvcm.service.rest.messages import plain
from kvcm.service.rest.paging import Page, PageQuery, page_of
from kvcm.service.rest.routing import MERGE_PATCH, add_route, answer, answer_item, not_found
from kvcm.service.rest.storage_documents import StorageDocument, StorageStatusDocument

__all__ = ["StorageResource"]

_LIST = "AdminService.ListStorage"
_SWITCHES = ("is_available", "status")  # of the document, and not of the storage's config

_Storage = dict[str, Any]


class StorageQuery(PageQuery):
    """Which storages, and what of them."""

    with_status: Annotated[bool, Field(description="Also how each of them is for the manager that answers.")] = False


class StorageResource:
    """Storages. They have no versions: `If-Match` holds among clients of one manager's resources.

    Args:
        book: runs the calls behind them.
    """

    def __init__(self, book: CallBook) -> None:
        self._book = book
        self._turns = Turns()

    def routes(self, router: APIRouter) -> None:
        """Add the routes."""
        one = "/v1/storages/{name}"
        add_route(router, "GET", "/v1/storages", self.list_storages, Page[StorageDocument])
        add_route(router, "GET", one, self.get_storage, StorageDocument, problems=[404])
        add_route(router, "PUT", one, self.put_storage, StorageDocument, problems=[409, 412, 502])
        add_route(router, "PATCH", one, self.patch_storage, StorageDocument, problems=[404, 409, 412, 502])
        add_route(router, "DELETE", one, self.delete_storage, status=204, problems=[404, 412])
        add_route(router, "GET", f"{one}/status", self.get_storage_status, StorageStatusDocument, problems=[404])

    async def list_storages(self, request: Request, query: Annotated[StorageQuery, Query()]) -> Response:
        """List storages, ordered by name."""
        storages = await self._all(request)
        if not query.with_status:
            storages = [_without_status(storage) for storage in storages]
        return answer(page_of(storages, lambda storage: (storage["global_unique_name"],), query, dict))

    async def get_storage(self, request: Request, name: StoragePath) -> Response:
        """Get a storage."""
        storage = _without_status(await self._existing(request, name))
        return answer_item(request, storage, etag_of(storage))

    async def get_storage_status(self, request: Request, name: StoragePath) -> Response:
        """Tell how a storage is for the manager that answers."""
        storage = await self._existing(request, name)
        return answer(storage["status"])

    async def put_storage(
        self, request: Request, name: StoragePath, body: Annotated[StorageDocument, Body()]
    ) -> Response:
        """Create or replace a storage. `If-None-Match: *` only creates, `If-Match` only replaces that state."""
        check_same_name("global_unique_name", body.global_unique_name, name)
        async with self._turns.of(name):
            for _ in range(MOST_TRIES):
                known = await self._find(request, name)
                check_preconditions(request.headers, None if known is None else etag_of(_without_status(known)))
                if await self._store(request, name, body, known):
                    return await self._stored(request, name, 201 if known is None else 200)
        raise lost(request, name)

    async def patch_storage(
        self, request: Request, name: StoragePath, body: Annotated[dict[str, Any], Body(media_type=MERGE_PATCH)]
    ) -> Response:
        """Change fields of a storage by a JSON merge patch (RFC 7396); `is_available` switches it off and on."""
        async with self._turns.of(name):
            known = await self._existing(request, name)
            before = _without_status(known)
            check_preconditions(request.headers, etag_of(before))
            wanted = merged(StorageDocument, before, body)
            check_same_name("global_unique_name", wanted.global_unique_name, name)
            if fields_of(wanted) == {**before, "is_available": wanted.is_available}:
                await self._switch(request, name, before["is_available"], wanted.is_available)
            else:
                await self._store(request, name, wanted, known)
            return await self._stored(request, name, 200)

    async def delete_storage(self, request: Request, name: StoragePath) -> Response:
        """Remove a storage; its blocks count as missing. What is left of it to be forgotten is the task `removal:NAME`
        while that lasts."""
        async with self._turns.of(name):
            if "if-match" in request.headers:
                known = _without_status(await self._existing(request, name))
                check_preconditions(request.headers, etag_of(known))
            removal = self._book.run(request, "AdminService.RemoveStorage", storage_unique_name=name)
            await unless_absent(removal, lambda: self._existing(request, name))
        return Response(status_code=204)

    async def _store(self, request: Request, name: str, wanted: StorageDocument, known: _Storage | None) -> bool:
        """Create or replace a storage; False where somebody else has created it meanwhile."""
        config = fields_of(wanted, global_unique_name=name)
        for field in _SWITCHES:
            config.pop(field, None)
        call = "AdminService.AddStorage" if known is None else "AdminService.UpdateStorage"
        try:
            await self._book.run(request, call, storage=config)
        except RefusedError as error:
            if known is None and error.code is ErrorCode.DUPLICATE_ENTITY:
                return False
            raise
        await self._switch(request, name, known is None or known["is_available"], wanted.is_available)
        return True

    async def _switch(self, request: Request, name: str, is_available: bool, wanted: bool) -> None:
        if wanted is not is_available:
            call = "EnableStorage" if wanted else "DisableStorage"
            await self._book.run(request, f"AdminService.{call}", storage_unique_name=name)

    async def _all(self, request: Request) -> list[_Storage]:
        listed = await self._book.run(request, _LIST)
        statuses = {status.storage_unique_name: plain(status) for status in listed.storage_status}
        return [_document(plain(storage), statuses) for storage in listed.storage]

    async def _find(self, request: Request, name: str) -> _Storage | None:
        found = [each for each in await self._all(request) if each["global_unique_name"] == name]
        return found[0] if found else None

    async def _existing(self, request: Request, name: str) -> _Storage:
        if (storage := await self._find(request, name)) is None:
            raise not_found("storage", name)
        return storage

    async def _stored(self, request: Request, name: str, status: int) -> Response:
        storage = _without_status(await self._existing(request, name))
        headers = {"location": f"/v1/storages/{name}"} if status == 201 else None
        return answer_item(request, storage, etag_of(storage), status, headers)


def _document(storage: _Storage, statuses: dict[str, _Storage]) -> _Storage:
    status = statuses.get(storage["global_unique_name"])
    return {**storage, "is_available": status is None or status["is_enabled"], "status": status}


def _without_status(storage: _Storage) -> _Storage:
    return {key: value for key, value in storage.items() if key != "status"}
