"""Faults that are injected on purpose, for tests of clients (wire.md 7). They belong to this process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

from kvcm.model.errors import InvalidArgumentError, KvcmError
from kvcm.service.calls import Call, Reply

__all__ = ["Faults"]

_BREAKABLE = {"GetCacheLocation", "StartWriteCache", "FinishWriteCache"}
_NUMBER = re.compile("_([+-]?[0-9]{1,19})$")


class Faults:
    """Which calls fail: by name of the rpc, and of those all, or those whose trace id ends in `_` and a number."""

    def __init__(self) -> None:
        self._by_api: dict[str, int | None] = {}

    def inject(self, api_name: str, number: int | None) -> None:
        """Make an api fail, in place of what was injected for it before.

        Args:
            api_name: name of the rpc; of unknown ones nothing follows.
            number: that the trace id has to end in; None for any trace id.
        """
        self._by_api[api_name] = number

    def remove(self, api_name: str) -> None:
        """End a fault.

        Raises:
            InvalidArgumentError: there is none.
        """
        if api_name not in self._by_api:
            raise InvalidArgumentError(f"api_name is {api_name!r}, which has no fault")
        del self._by_api[api_name]

    def clear(self) -> None:
        """End all faults."""
        self._by_api.clear()

    def breakable(self, calls: Iterable[Call]) -> list[Call]:
        """Return the calls, those that can fail on purpose wrapped."""
        return [self._wrapped(call) if call.name in _BREAKABLE else call for call in calls]

    def _wrapped(self, call: Call) -> Call:
        answer: Callable[[Any], Any] = call.handler

        async def answer_or_fail(request: Any) -> Reply:
            if self._hits(call.name, request.trace_id):
                raise KvcmError("this fault was injected through the debug service")
            reply: Reply = await answer(request)
            return reply

        return dataclasses.replace(call, handler=answer_or_fail)

    def _hits(self, api_name: str, trace_id: str) -> bool:
        if api_name not in self._by_api:
            return False
        number = self._by_api[api_name]
        if number is None:
            return True
        found = _NUMBER.search(trace_id)
        return found is not None and int(found[1]) == number
