"""One server: its connections, and round trips of several commands at once.

Built on redis-py's connections and not on its clients. Those retry by policies of their own, so that a write whose
answer was lost is sent twice; their cluster pipelines refuse MGET and EVALSHA; and packing arguments in Python costs
more than the server needs for the answer.

1. A connection goes back only after every answer was read: whatever stops a round trip, cancellation included, closes
   its connection, so nobody reads the answer of another.
2. Nothing waits for ever: not for a free connection, a new one or an answer.
3. Commands are sent once. Only who knows that a command may run twice sends it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hiredis
from redis.asyncio.connection import Connection, SSLConnection
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from kvcm.model.errors import StorageIOError
from kvcm.store.redis.script import Argument
from kvcm.store.redis.uri import Address, RedisSettings

__all__ = ["Command", "Node", "open_connection"]

Command = Sequence[Argument]

_READ_BYTES = 1 << 18
_LOST = (OSError, RedisError)
_pack: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment] # says: one argument


async def open_connection(settings: RedisSettings, address: Address) -> Connection:
    """Return a new, authenticated connection.

    Raises:
        OSError, RedisError: there is none.
    """
    connection = _new_connection(settings, address)
    try:
        async with asyncio.timeout(settings.connect_timeout_seconds):
            await connection.connect()  # type: ignore[no-untyped-call]
    except BaseException:
        await connection.disconnect(nowait=True)
        raise
    return connection


def _new_connection(settings: RedisSettings, address: Address) -> Connection:
    options: dict[str, Any] = {
        "host": address.host,
        "port": address.port,
        "db": settings.database,
        "username": settings.user or None,
        "password": settings.password or None,
        "protocol": 2,
        "socket_timeout": None,
        "socket_connect_timeout": settings.connect_timeout_seconds,
        "socket_read_size": _READ_BYTES,
        "driver_info": None,
    }
    if settings.tls is None:
        return Connection(**options)
    for file in (settings.tls.ca_file, settings.tls.cert_file, settings.tls.key_file):
        if file and not Path(file).is_file():
            raise FileNotFoundError(f"{file} is not a file")  # the TLS library does not say which one is missing
    return SSLConnection(
        ssl_ca_certs=settings.tls.ca_file or None,
        ssl_certfile=settings.tls.cert_file or None,
        ssl_keyfile=settings.tls.key_file or None,
        ssl_check_hostname=settings.tls.check_hostname,
        **options,
    )


class Node:
    """One server.

    Args:
        settings: how to reach it.
        address: where it is.
        must_be_master: refuse to talk to it as long as it is a replica.
    """

    def __init__(self, settings: RedisSettings, address: Address, must_be_master: bool = False) -> None:
        self.address = address
        self._settings = settings
        self._must_be_master = must_be_master
        self._idle: list[Connection] = []
        self._places = asyncio.Semaphore(settings.pool_size)
        self._closed = False

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one packet and return their answers in order; an error answer is a ResponseError there.

        Answers are those of RESP2: bytes, numbers, None and lists of them.

        Raises:
            StorageIOError: there is no connection, or it was lost; some of the commands may have run.
        """
        await self._take_place()
        try:
            connection = await self._take()
            answers = await self._round_trip(connection, commands)
            await self._give_back(connection)
        except TimeoutError:
            raise self._failure(f"no answer within {self._settings.timeout_seconds:g} s") from None
        except AuthenticationError as error:
            raise StorageIOError(f"redis {self.address}: {error}; check user and password in the uri") from error
        except _LOST as error:
            raise self._failure(str(error)) from error
        else:
            return answers
        finally:
            self._places.release()

    async def forget_connections(self) -> None:
        """Close the connections that are not in use: they may lead to a server that changed its role."""
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect(nowait=True)

    async def close(self) -> None:
        """Close the connections, those in use after their round trips."""
        self._closed = True
        await self.forget_connections()

    async def _take_place(self) -> None:
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                await self._places.acquire()
        except TimeoutError:
            raise self._failure(
                f"all {self._settings.pool_size} connections were busy for {self._settings.timeout_seconds:g} s"
            ) from None

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if await _is_usable(connection):
                return connection
            await connection.disconnect(nowait=True)
        connection = await open_connection(self._settings, self.address)
        if self._must_be_master:
            role = (await self._round_trip(connection, [(b"ROLE",)]))[0]
            if not isinstance(role, list) or role[0] != b"master":
                await connection.disconnect(nowait=True)
                raise ResponseError("is not the master yet")
        return connection

    async def _give_back(self, connection: Connection) -> None:
        if self._closed:
            await connection.disconnect(nowait=True)
        else:
            self._idle.append(connection)

    async def _round_trip(self, connection: Connection, commands: Sequence[Command]) -> list[Any]:
        packed = b"".join([_pack(tuple(command)) for command in commands])
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                await connection.send_packed_command([packed], check_health=False)
                return [await _answer(connection) for _ in commands]
        except BaseException:
            await connection.disconnect(nowait=True)
            raise

    def _failure(self, what: str) -> StorageIOError:
        return StorageIOError(f"redis {self.address}: {what}; try again")


async def _answer(connection: Connection) -> Any:
    try:
        return await connection.read_response(disconnect_on_error=False)
    except ResponseError as error:
        return error


async def _is_usable(connection: Connection) -> bool:
    try:
        return not await connection.can_read()
    except _LOST:
        return False
