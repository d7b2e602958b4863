"""/v1/keys, /v1/login and /v1/whoami."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query, Request, Response
from pydantic import Field

from kvcm.service.rest.calls import CallRunner, change_existing, fields_of
from kvcm.service.rest.conversion import message_to_dict
from kvcm.service.rest.documents import MAX_ENTRIES, Document, Page, PageQuery, Text, TokenPath, Whole, page_of
from kvcm.service.rest.routing import add_route, answer, not_found

__all__ = ["KeyDocument", "KeyResource", "LoginDocument", "NewKeyDocument", "RotationDocument", "WhoAmIDocument"]

RoleName = Literal["ROLE_VIEWER", "ROLE_OPERATOR", "ROLE_ADMIN", "ROLE_ENGINE"]
EngineVerbName = Literal["MATCH", "WRITE", "REMOVE", "PIN", "REPORT", "SCORE"]
Seconds = Annotated[Whole, Field(ge=0, lt=1 << 40)]


class KeyDocument(Document):
    """A key without its secret."""

    key_id: str
    """Names it, and is part of its text."""
    name: str
    """Of the principal; keys that replaced one another share it."""
    role: Literal["ROLE_UNSPECIFIED"] | RoleName
    """What it may do."""
    instance_groups: list[str]
    """Where: instance groups, or "*" for all of them."""
    verbs: list[Literal["ENGINE_VERB_UNSPECIFIED"] | EngineVerbName]
    """What an engine may do."""
    created_at_ms: int
    """When it was made, unix time in ms."""
    expires_at_ms: int
    """When it ends, unix time in ms; 0 = never."""
    last_used_at_ms: int
    """When it was last used, unix time in ms, to about a minute; 0 = never."""
    certificate_name: str
    """Name in client certificates that stands for the secret; "" for a key with a secret."""
    account: str
    """The account that logged in; "" for other keys."""


class NewKeyDocument(Document):
    """A key to make."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
    """Of the principal; taken by no other key."""
    role: RoleName
    """What it may do."""
    instance_groups: list[Text] = Field(default_factory=list, max_length=MAX_ENTRIES)
    """Where: required for engines; none means all groups for the other roles."""
    verbs: list[EngineVerbName] = Field(default_factory=list, max_length=MAX_ENTRIES)
    """Of engines; none means all."""
    ttl_seconds: Seconds = 0
    """When it ends; 0 = never."""
    certificate_name: Text = ""
    """A subject alternative name of client certificates that authenticate this principal; then no secret is made."""


class RotationDocument(Document):
    """How a key is replaced."""

    overlap_seconds: Seconds = 0
    """How long the old key goes on; 0 = it ends at once."""
    ttl_seconds: Seconds = 0
    """When the new key ends; 0 = never."""


class LoginDocument(Document):
    """A password to try."""

    user_name: Text
    """The account."""
    password: Annotated[str, Field(max_length=1024, json_schema_extra={"writeOnly": True})]
    """Its password."""
    ttl_seconds: Seconds = 0
    """How long the key lasts, up to 12 hours; 0 = one hour."""


class MadeKeyDocument(Document):
    """A key that was made."""

    key: KeyDocument
    """The key without its secret."""
    secret: str
    """Its text, to be sent as `authorization: Bearer <text>`. Shown this once."""


class WhoAmIDocument(Document):
    """The caller."""

    is_required: bool
    """Whether credentials are required; while they are not, all clients may do everything."""
    key: KeyDocument | None = None
    """The caller's key; none while none is required."""


class KeyQuery(PageQuery):
    """Which keys."""

    with_logins: Annotated[bool, Field(description="Also those of logins.")] = False


class KeyResource:
    """Keys.

    Args:
        calls: runs the calls behind them.
    """

    def __init__(self, calls: CallRunner) -> None:
        self._calls = calls

    def routes(self, router: APIRouter) -> None:
        """Add the routes of the calls that are served."""
        one, made = "/v1/keys/{key_id}", MadeKeyDocument
        routes: list[tuple[str, str, str, Any, Any, int, list[int]]] = [
            ("ListKeys", "GET", "/v1/keys", self.list_keys, Page[KeyDocument], 200, []),
            ("ListKeys", "GET", one, self.get_key, KeyDocument, 200, [404]),
            ("CreateKey", "POST", "/v1/keys", self.create_key, made, 201, [409]),
            ("RotateKey", "POST", f"{one}/rotate", self.rotate_key, made, 201, [404]),
            ("RevokeKey", "DELETE", one, self.revoke_key, None, 204, [404]),
            ("Login", "POST", "/v1/login", self.login, made, 201, []),
            ("Logout", "DELETE", "/v1/login", self.logout, None, 204, []),
            ("WhoAmI", "GET", "/v1/whoami", self.who_am_i, WhoAmIDocument, 200, []),
        ]
        for call, *route in routes:
            if self._calls.serves(f"AccessService.{call}"):
                add_route(router, *route)

    async def list_keys(self, request: Request, query: Annotated[KeyQuery, Query()]) -> Response:
        """List keys without their secrets, ordered by name and time."""
        keys = await self._all(request, with_logins=query.with_logins)
        return answer(page_of(keys, lambda key: (key["name"], key["created_at_ms"], key["key_id"]), query, dict))

    async def get_key(self, request: Request, key_id: TokenPath) -> Response:
        """Get a key without its secret."""
        return answer(await self._existing(request, key_id))

    async def create_key(self, request: Request, body: Annotated[NewKeyDocument, Body()]) -> Response:
        """Make a key. Its secret is in this answer, and nowhere else."""
        return _created(await self._calls.run(request, "AccessService.CreateKey", **fields_of(body)))

    async def rotate_key(
        self, request: Request, key_id: TokenPath, body: Annotated[RotationDocument, Body()]
    ) -> Response:
        """Make a key with the rights of another, which ends after a while."""
        rotation = self._calls.run(request, "AccessService.RotateKey", key_id=key_id, **fields_of(body))
        return _created(await change_existing(rotation, lambda: self._existing(request, key_id)))

    async def revoke_key(self, request: Request, key_id: TokenPath) -> Response:
        """End a key at once."""
        end = self._calls.run(request, "AccessService.RevokeKey", key_id=key_id)
        await change_existing(end, lambda: self._existing(request, key_id))
        return Response(status_code=204)

    async def login(self, request: Request, body: Annotated[LoginDocument, Body()]) -> Response:
        """Turn an account's password into a key that ends soon."""
        return _created(await self._calls.run(request, "AccessService.Login", **fields_of(body)))

    async def logout(self, request: Request) -> Response:
        """End the key that is shown if it is of a login. Other keys stay as they are."""
        await self._calls.run(request, "AccessService.Logout")
        return Response(status_code=204)

    async def who_am_i(self, request: Request) -> Response:
        """Get the principal of the caller and its permissions."""
        return answer(message_to_dict(await self._calls.run(request, "AccessService.WhoAmI")))

    async def _all(self, request: Request, *, with_logins: bool) -> list[dict[str, Any]]:
        listed = await self._calls.run(request, "AccessService.ListKeys", with_logins=with_logins)
        return [message_to_dict(key) for key in listed.keys]

    async def _existing(self, request: Request, key_id: str) -> dict[str, Any]:
        found = [key for key in await self._all(request, with_logins=True) if key["key_id"] == key_id]
        if not found:
            raise not_found("key", key_id)
        return found[0]


def _created(message: Any) -> Response:
    made = message_to_dict(message)
    return answer(made, 201, {"location": f"/v1/keys/{made['key']['key_id']}"})
