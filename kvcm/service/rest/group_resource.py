"""/v1/groups."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Query, Request, Response

from kvcm.model.errors import ErrorCode
from kvcm.service.rest.call_book import CallBook, RefusedError
from kvcm.service.rest.changing import MOST_TRIES, check_same_name, fields_of, lost, merged, unless_absent
from kvcm.service.rest.documents import NamePath
from kvcm.service.rest.etags import check_preconditions, etag_of
from kvcm.service.rest.group_documents import GroupDocument
from kvcm.service.rest.messages import plain
from kvcm.service.rest.names import encoded_name
from kvcm.service.rest.paging import Page, PageQuery, page_of
from kvcm.service.rest.routing import MERGE_PATCH, add_route, answer, answer_item, not_found

__all__ = ["GroupResource"]

_CREATE = "AdminService.CreateInstanceGroup"
_UPDATE = "AdminService.UpdateInstanceGroup"
_GET = "AdminService.GetInstanceGroup"

_Group = dict[str, Any]


class GroupResource:
    """Instance groups.

    Args:
        book: runs the calls behind them.
    """

    def __init__(self, book: CallBook) -> None:
        self._book = book

    def routes(self, router: APIRouter) -> None:
        """Add the routes."""
        one = "/v1/groups/{name}"
        add_route(router, "GET", "/v1/groups", self.list_groups, Page[GroupDocument])
        add_route(router, "GET", one, self.get_group, GroupDocument, problems=[404])
        add_route(router, "PUT", one, self.put_group, GroupDocument, problems=[409, 412])
        add_route(router, "PATCH", one, self.patch_group, GroupDocument, problems=[404, 409, 412])
        add_route(router, "DELETE", one, self.delete_group, status=204, problems=[404, 412])

    async def list_groups(self, request: Request, query: Annotated[PageQuery, Query()]) -> Response:
        """List instance groups, ordered by name."""
        listed = await self._book.run(request, "GroupService.ListInstanceGroup")
        return answer(page_of(listed.instance_groups, lambda group: (group.name,), query))

    async def get_group(self, request: Request, name: NamePath) -> Response:
        """Get a group."""
        group = await self._existing(request, name)
        return answer_item(request, group, _tag(group))

    async def put_group(self, request: Request, name: NamePath, body: Annotated[GroupDocument, Body()]) -> Response:
        """Create or replace a group. `If-None-Match: *` only creates, `If-Match` only replaces that state."""
        check_same_name("name", body.name, name)
        for _ in range(MOST_TRIES):
            known = await self._find(request, name)
            check_preconditions(request.headers, None if known is None else _tag(known))
            if await self._store(request, fields_of(body, name=name), known):
                return await self._stored(request, name, 201 if known is None else 200)
        raise lost(request, name)

    async def patch_group(
        self, request: Request, name: NamePath, body: Annotated[dict[str, Any], Body(media_type=MERGE_PATCH)]
    ) -> Response:
        """Change fields of a group by a JSON merge patch (RFC 7396): null takes a field back to its default."""
        for _ in range(MOST_TRIES):
            known = await self._existing(request, name)
            check_preconditions(request.headers, _tag(known))
            wanted = merged(GroupDocument, known, body)
            check_same_name("name", wanted.name, name)
            if await self._store(request, fields_of(wanted, name=name), known):
                return await self._stored(request, name, 200)
        raise lost(request, name)

    async def delete_group(self, request: Request, name: NamePath) -> Response:
        """Remove a group. Its instances stay readable and refuse writes."""
        if "if-match" in request.headers:
            check_preconditions(request.headers, _tag(await self._existing(request, name)))
        removal = self._book.run(request, "AdminService.RemoveInstanceGroup", name=name)
        await unless_absent(removal, lambda: self._existing(request, name))
        return Response(status_code=204)

    async def _store(self, request: Request, group: _Group, known: _Group | None) -> bool:
        """Create a group, or replace the one that is known; False where somebody else was faster.

        Raises:
            RefusedError: for any other reason.
        """
        try:
            if known is None:
                await self._book.run(request, _CREATE, instance_group={**group, "version": 1})
            else:
                version = known["version"]
                newer = {**group, "version": version + 1}
                await self._book.run(request, _UPDATE, instance_group=newer, current_version=version)
        except RefusedError as error:
            if error.code not in {ErrorCode.INVALID_ARGUMENT, ErrorCode.DUPLICATE_ENTITY}:
                raise
            now = await self._find(request, group["name"])
            if (now and now["version"]) == (known and known["version"]):
                raise
            return False
        return True

    async def _find(self, request: Request, name: str) -> _Group | None:
        found = await self._book.find(request, _GET, name=name)
        return None if found is None else plain(found.instance_group)

    async def _existing(self, request: Request, name: str) -> _Group:
        if (group := await self._find(request, name)) is None:
            raise not_found("group", name)
        return group

    async def _stored(self, request: Request, name: str, status: int) -> Response:
        group = await self._existing(request, name)
        headers = {"location": f"/v1/groups/{encoded_name(name)}"} if status == 201 else None
        return answer_item(request, group, _tag(group), status, headers)


def _tag(group: _Group) -> str:
    return etag_of(group, group["version"])
