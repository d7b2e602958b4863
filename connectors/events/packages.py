"""Packages of the extra `subscriber`, imported when they are first used: engines do without them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

from kvcm.model.errors import UnsupportedError

__all__ = ["msgpack_decoder", "require_packages", "zmq"]

_PACKAGES = ("zmq", "msgspec", "cbor2")


def require_packages() -> None:
    """Check that the packages of the subscriber are installed.

    Raises:
        UnsupportedError: one is not; names it, and the extra that has it.
    """
    for name in _PACKAGES:
        _package(name)


@lru_cache(1)
def msgpack_decoder() -> Callable[[bytes], Any]:
    """Return a function that decodes msgpack.

    Raises:
        UnsupportedError: `msgspec` is not installed.
    """
    decode: Callable[[bytes], Any] = _package("msgspec.msgpack").Decoder().decode
    return decode


def zmq() -> Any:
    """Return the package `zmq`.

    Raises:
        UnsupportedError: it is not installed.
    """
    return _package("zmq")


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UnsupportedError(
            f"kvcm-subscriber needs the package {package} ({error}): pip install 'kvcm[subscriber]'"
        ) from None
