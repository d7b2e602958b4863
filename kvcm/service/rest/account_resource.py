"""/v1/accounts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query, Request, Response
from pydantic import Field

from kvcm.service.rest.calls import CallRunner, change_existing
from kvcm.service.rest.conversion import encode_name, message_to_dict
from kvcm.service.rest.documents import Document, NamePath, Page, PageQuery, page_of
from kvcm.service.rest.routing import add_route, answer, answer_item, check_preconditions, etag_of, not_found

__all__ = ["AccountDocument", "AccountResource", "NewAccountDocument", "PasswordDocument"]

AccountRoleName = Literal["ROLE_USER", "ROLE_ADMIN", "ROLE_OPERATOR"]


class AccountDocument(Document):
    """An account, without its password."""

    user_name: str
    """Its name."""
    role: AccountRoleName
    """What it may do."""


class NewAccountDocument(Document):
    """An account to add."""

    password: Annotated[str, Field(min_length=1, max_length=1024, json_schema_extra={"writeOnly": True})]
    """Its password, which is never shown."""
    role: AccountRoleName = "ROLE_USER"
    """What it may do."""


class PasswordDocument(Document):
    """A password to set."""

    password: Annotated[str, Field(min_length=1, max_length=1024, json_schema_extra={"writeOnly": True})]
    """The new one, which is never shown."""
    old_password: Annotated[str, Field(max_length=1024, json_schema_extra={"writeOnly": True})] = ""
    """The present one. Required when the account changes its own password; an administrator may leave it out."""


class AccountResource:
    """Accounts.

    Args:
        calls: runs the calls behind them.
    """

    def __init__(self, calls: CallRunner) -> None:
        self._calls = calls

    def routes(self, router: APIRouter) -> None:
        """Add the routes."""
        one = "/v1/accounts/{name}"
        add_route(
            router=router, method="GET", path="/v1/accounts", endpoint=self.list_accounts, model=Page[AccountDocument]
        )
        add_route(
            router=router, method="GET", path=one, endpoint=self.get_account, model=AccountDocument, problems=[404]
        )
        add_route(
            router=router,
            method="PUT",
            path=one,
            endpoint=self.put_account,
            model=AccountDocument,
            status=201,
            problems=[409, 412],
        )
        add_route(
            router=router, method="DELETE", path=one, endpoint=self.delete_account, status=204, problems=[404, 412]
        )
        add_route(
            router=router,
            method="PUT",
            path=f"{one}/password",
            endpoint=self.set_account_password,
            status=204,
            problems=[404],
        )

    async def list_accounts(self, request: Request, query: Annotated[PageQuery, Query()]) -> Response:
        """List accounts, ordered by name."""
        return answer(page_of(await self._all(request), lambda account: (account["user_name"],), query, dict))

    async def get_account(self, request: Request, name: NamePath) -> Response:
        """Get an account."""
        account = await self._existing(request, name)
        return answer_item(request, account, etag_of(account))

    async def put_account(
        self, request: Request, name: NamePath, body: Annotated[NewAccountDocument, Body()]
    ) -> Response:
        """Add an account. One that exists is a conflict: delete it first, to change its role."""
        if "if-none-match" in request.headers or "if-match" in request.headers:
            known = await self._find(request, name)
            check_preconditions(request.headers, None if known is None else etag_of(known))
        await self._calls.run(request, "AdminService.AddAccount", user_name=name, **body.model_dump())
        account = {"user_name": name, "role": body.role}
        return answer_item(
            request=request,
            item=account,
            etag=etag_of(account),
            status=201,
            headers={"location": f"/v1/accounts/{encode_name(name)}"},
        )

    async def delete_account(self, request: Request, name: NamePath) -> Response:
        """Delete an account."""
        if "if-match" in request.headers:
            check_preconditions(request.headers, etag_of(await self._existing(request, name)))
        removal = self._calls.run(request, "AdminService.DeleteAccount", user_name=name)
        await change_existing(removal, lambda: self._existing(request, name))
        return Response(status_code=204)

    async def set_account_password(
        self, request: Request, name: NamePath, body: Annotated[PasswordDocument, Body()]
    ) -> Response:
        """Change the password of an account, or give it one, and end its logins."""
        change = self._calls.run(request, "AccessService.SetPassword", user_name=name, **body.model_dump())
        await change_existing(change, lambda: self._existing(request, name))
        return Response(status_code=204)

    async def _all(self, request: Request) -> list[dict[str, Any]]:
        listed = await self._calls.run(request, "AdminService.ListAccount")
        return [message_to_dict(account) for account in listed.accounts]

    async def _find(self, request: Request, name: str) -> dict[str, Any] | None:
        found = [account for account in await self._all(request) if account["user_name"] == name]
        return found[0] if found else None

    async def _existing(self, request: Request, name: str) -> dict[str, Any]:
        if (account := await self._find(request, name)) is None:
            raise not_found("account", name)
        return account
