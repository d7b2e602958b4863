"""Addresses, channel options and gRPC errors: what both clients need to know about the transport."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from connectors.calls import AnswerT
from connectors.credentials import Login, Shown
from connectors.policy import Reply
from kvcm.model.errors import InvalidArgumentError

__all__ = ["CHANNEL_OPTIONS", "failed", "left_seconds", "open_async_channel", "open_channel", "read_addresses"]

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    # a match of a long prompt is bigger than gRPC's default limit of 4 MiB
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # retries are ours; and a manager that is back should be noticed within seconds, not within two minutes
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # two clients of one process do not wait for each other's backoff
    ("grpc.use_local_subchannel_pool", 1),
    # managers are inside the cluster; proxies of the environment are for downloads
    ("grpc.enable_http_proxy", 0),
]


def read_addresses(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Return the addresses of a list or of a text separated by commas.

    Raises:
        InvalidArgumentError: there is none, or one is not `host:port`.
    """
    parts = addresses.split(",") if isinstance(addresses, str) else addresses
    stripped = tuple(part.strip() for part in parts)
    for address in stripped or ("",):
        host, _, port = address.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise InvalidArgumentError(f"addresses holds {address!r}, must be host:port with a port of 1 to 65535")
    return stripped


def open_channel(address: str, login: Login, shown: Shown) -> grpc.Channel:
    """Return a channel for threads."""
    options = [*CHANNEL_OPTIONS, *login.options]
    if shown.channel is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, shown.channel, options)


def open_async_channel(address: str, login: Login, shown: Shown) -> grpc.aio.Channel:
    """Return a channel for the running event loop."""
    options = [*CHANNEL_OPTIONS, *login.options]
    if shown.channel is None:
        return grpc.aio.insecure_channel(address, options)
    return grpc.aio.secure_channel(address, shown.channel, options)


def left_seconds(begin: float, timeout_seconds: float) -> float:
    """Return what is left of a time that began at `begin`."""
    return begin + timeout_seconds - time.monotonic()


def failed(error: Exception) -> Reply[AnswerT]:
    """Return the reply that a failed attempt stands for."""
    # Both flavours of gRPC raise subclasses of RpcError that also have the methods of a call.
    if isinstance(error, grpc.RpcError) and hasattr(error, "code") and hasattr(error, "details"):
        return Reply(None, error.code(), str(error.details()), _pushback_seconds(error))
    # a closed channel, an answer that is no protobuf
    return Reply(None, grpc.StatusCode.UNKNOWN, repr(error))


def _pushback_seconds(error: Any) -> float | None:
    """Return when the manager wants to be asked again (gRFC A6), None when it does not say."""
    told = dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms", "")
    return int(told) / 1000 if isinstance(told, str) and re.fullmatch("[0-9]{1,9}", told) else None
