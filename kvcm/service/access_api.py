"""AccessService: keys, logins, and the principal of the caller. Translation, and the limit on wrong passwords."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from urllib.parse import unquote

from kvcm.model.errors import InvalidArgumentError, KvcmError
from kvcm.model.principals import (
    ENGINE_VERBS,
    ROLE_OF_ACCOUNT,
    UNRESTRICTED,
    Account,
    ApiKey,
    PresentedKey,
    Role,
    Verb,
    call_context,
)
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol.kvcm.v1 import access_service_pb2 as pb
from kvcm.registry.api_keys import NewKey
from kvcm.registry.registry import Registry
from kvcm.registry.validation import require
from kvcm.service.admission import TokenBuckets
from kvcm.service.calls import Call, Plane, Reply
from kvcm.service.rejections import ForbiddenError, RateLimitedError, RejectedError, UnauthenticatedError

__all__ = ["AccessApi", "network_of"]

# The network of a client. With IPv6 each client has a whole network, and so any number of addresses.

_OWN_BITS = 64  # RFC 6177: no site has less


def network_of(peer: str) -> str:
    """Return the network that identifies the client of an address: the address itself, of IPv6 its network of 64 bits.
    A text that is no address is returned as it is."""
    try:
        address = ipaddress.ip_address(unquote(peer).strip("[]"))
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.IPv6Network((int(address), _OWN_BITS), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


_SERVICE: Final = "kvcm.v1.AccessService"
_LOGIN_SECONDS: Final = 3600
_MAX_LOGIN_SECONDS: Final = 12 * 3600
_MAX_PASSWORD_BYTES: Final = 1024
_MAX_ATTEMPTS: Final = 10.0  # in a row, of one network
_SECONDS_PER_ATTEMPT: Final = 6.0
_MAX_CONCURRENT_HASHES: Final = 2  # a hash takes 50 ms and 16 MiB
_MAX_WAITING_LOGINS: Final = 32
_RETRY_SECONDS: Final = 5.0
_WRONG_CREDENTIALS: Final = "user name or password is wrong"
_WRONG_OLD: Final = "old_password is not the password of the account; a login of that account has to give it"


class AccessApi:
    """Handlers of the calls about credentials. To be used inside one event loop.

    Args:
        registry: keys and accounts.
        is_required: whether credentials are asked for.
        clock: seconds of a clock that never runs backwards, for the patience.
    """

    def __init__(self, registry: Registry, *, is_required: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._keys = registry.keys
        self._accounts = registry.accounts
        self._is_required = is_required
        self._tries = TokenBuckets(clock)
        self._tries.set(1 / _SECONDS_PER_ATTEMPT, _MAX_ATTEMPTS)
        self._hashing = asyncio.Semaphore(_MAX_CONCURRENT_HASHES)
        self._waiting = 0

    def calls(self) -> list[Call]:
        """Return every call, all of the admin plane."""

        def call(name: str, request: type[Any], answer: type[Any], handler: Any) -> Call:
            return Call(
                service=_SERVICE,
                name=name,
                plane=Plane.ADMIN,
                request_type=request,
                response_type=answer,
                handler=handler,
            )

        return [
            call("CreateKey", pb.CreateKeyRequest, pb.CreateKeyResponse, self.create),
            call("ListKeys", pb.ListKeysRequest, pb.ListKeysResponse, self.list_keys),
            call("RotateKey", pb.RotateKeyRequest, pb.CreateKeyResponse, self.rotate),
            call("RevokeKey", pb.RevokeKeyRequest, admin_pb.CommonResponse, self.revoke),
            call("Login", pb.LoginRequest, pb.CreateKeyResponse, self.log_in),
            call("Logout", pb.LogoutRequest, admin_pb.CommonResponse, self.log_out),
            call("SetPassword", pb.SetPasswordRequest, admin_pb.CommonResponse, self.set_password),
            call("WhoAmI", pb.WhoAmIRequest, pb.WhoAmIResponse, self.who_am_i),
        ]

    async def create(self, request: Any) -> Reply:
        """Make a key."""
        wanted = NewKey(
            name=request.name,
            role=_role(request.role),
            groups=tuple(request.instance_groups),
            verbs=tuple(_verb(number, place) for place, number in enumerate(request.verbs)),
            ttl_seconds=request.ttl_seconds,
            certificate_name=request.certificate_name,
        )
        return _created_reply(*await self._keys.create(wanted))

    async def list_keys(self, request: Any) -> Reply:
        """List keys without their secrets."""
        message = pb.ListKeysResponse()
        for key in self._keys.all():
            if request.with_logins or not key.account:
                _fill(message.keys.add(), key, await self._keys.last_used_at(key.id))
        return Reply(message)

    async def rotate(self, request: Any) -> Reply:
        """Put a new key in the place of another."""
        require(request.key_id, "RotateKey.key_id")
        return _created_reply(*await self._keys.rotate(request.key_id, request.overlap_seconds, request.ttl_seconds))

    async def revoke(self, request: Any) -> Reply:
        """End a key at once."""
        require(request.key_id, "RevokeKey.key_id")
        await self._keys.revoke(request.key_id)
        return Reply(admin_pb.CommonResponse())

    async def log_in(self, request: Any) -> Reply:
        """Turn a password into a key that ends soon."""
        require(request.user_name, "Login.user_name")
        require(request.password, "Login.password")
        if len(request.password) > _MAX_PASSWORD_BYTES:
            raise InvalidArgumentError(
                f"password has {len(request.password)} characters, at most {_MAX_PASSWORD_BYTES}"
            )
        seconds = request.ttl_seconds or _LOGIN_SECONDS
        if not 0 < seconds <= _MAX_LOGIN_SECONDS:
            raise InvalidArgumentError(
                f"ttl_seconds is {seconds}, must be from 1 to {_MAX_LOGIN_SECONDS}; 0 = {_LOGIN_SECONDS}"
            )
        account = await self._check_password(request.user_name, request.password)
        if account is None:
            raise UnauthenticatedError(_WRONG_CREDENTIALS, "unauthenticated")
        key, presented = await self._keys.log_in(account.user_name, ROLE_OF_ACCOUNT[account.role], seconds)
        # A change of an account ends its logins: this one may have come a moment too late for that.
        if await self._accounts.read(account.user_name) != account:
            with suppress(InvalidArgumentError):  # it did not
                await self._keys.revoke(key.id)
            raise UnauthenticatedError(_WRONG_CREDENTIALS, "unauthenticated")
        return _created_reply(key, presented)

    async def log_out(self, _request: Any) -> Reply:
        """End the key that was shown if it is of a login."""
        await self._keys.log_out(call_context.get().principal.key_id)
        return Reply(admin_pb.CommonResponse())

    async def set_password(self, request: Any) -> Reply:
        """Change the password of an account and end its logins. A login of that account proves the present one, for
        a key that was left behind somewhere is not to become the account."""
        account, proven = call_context.get().principal.account, None
        if request.old_password or (account and account == request.user_name):
            proven = await self._check_password(request.user_name, request.old_password)
            if proven is None:
                raise ForbiddenError(_WRONG_OLD)
        if not await self._accounts.set_password(request.user_name, request.password, proven):
            raise ForbiddenError(_WRONG_OLD)
        await self._registry.end_logins(request.user_name)
        return Reply(admin_pb.CommonResponse())

    async def who_am_i(self, _request: Any) -> Reply:
        """Return the principal of the caller."""
        message = pb.WhoAmIResponse(is_required=self._is_required)
        principal = call_context.get().principal
        key = self._keys.find(principal.key_id) if principal is not UNRESTRICTED else None
        if key is not None:
            _fill(message.key, key, await self._keys.last_used_at(key.id))
        return Reply(message)

    async def _check_password(self, user_name: str, password: str) -> Account | None:
        """Return the account whose password is right, None where it is wrong. A name that is unknown takes as long as a
        wrong password. After too many wrong ones the client has to wait."""
        network = network_of(call_context.get().peer)
        wait_seconds = self._tries.acquire(network, 1)
        if wait_seconds:
            text = f"too many tries of passwords; the next one counts in {wait_seconds:.0f} s"
            raise RateLimitedError(text, "rate", wait_seconds)
        try:
            account = await self._compare_password(user_name, password)
        except (KvcmError, RejectedError):  # the password was not checked
            self._tries.refund(network, 1)
            raise
        if account is not None:
            self._tries.refund(network, 1)
        return account

    async def _compare_password(self, user_name: str, password: str) -> Account | None:
        if self._waiting >= _MAX_WAITING_LOGINS:
            raise RejectedError("too many log in at a time; retry later", "queue", _RETRY_SECONDS)
        self._waiting += 1
        try:
            async with self._hashing:
                return await self._accounts.authenticate(user_name, password)
        finally:
            self._waiting -= 1


def _role(number: int) -> Role:
    if number not in set(Role):
        allowed = ", ".join(f"{role.name}={role.value}" for role in Role)
        raise InvalidArgumentError(f"role is {number}, allowed are {allowed}")
    return Role(number)


def _verb(number: int, place: int) -> Verb:
    if not 1 <= number <= len(ENGINE_VERBS):
        allowed = ", ".join(f"{verb.name}={position}" for position, verb in enumerate(ENGINE_VERBS, start=1))
        raise InvalidArgumentError(f"verbs[{place}] is {number}, allowed are {allowed}")
    return ENGINE_VERBS[number - 1]


def _created_reply(key: ApiKey, presented: PresentedKey | None) -> Reply:
    message = pb.CreateKeyResponse(secret=presented.text if presented is not None else "")
    _fill(message.key, key, 0.0)
    return Reply(message)


def _fill(message: Any, key: ApiKey, last_used_at: float) -> None:
    message.key_id, message.name, message.role = key.id, key.name, int(key.role)
    message.instance_groups.extend(key.groups)
    message.verbs.extend(ENGINE_VERBS.index(verb) + 1 for verb in key.engine_verbs)
    message.created_at_ms = int(key.created_at * 1000)
    message.expires_at_ms = int(key.expires_at * 1000)
    message.last_used_at_ms = int(last_used_at * 1000)
    message.certificate_name, message.account = key.certificate_name, key.account
