"""Where each token of each request lies in the device pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_tier.errors import AllocationError, ConfigError, PoolExhaustedError
from gpu_tier.runtime import upload

__all__ = ["ReqToTokenPool"]


class ReqToTokenPool:
    """A table of device slots, one row per request.

    Attributes:
        table: ``int32 [R, max_tokens]``, -1 where a token is not in the dense region.

    Args:
        max_requests: rows R.
        max_tokens: most tokens of a request.
        device: of the table.
    """

    def __init__(self, max_requests: int, max_tokens: int, device: torch.device) -> None:
        if max_requests < 1:
            raise ConfigError("max_requests", max_requests, "must be at least 1")
        if max_tokens < 1:
            raise ConfigError("max_tokens", max_tokens, "must be at least 1")
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.table = torch.full((max_requests, max_tokens), -1, dtype=torch.int32, device=device)
        self._free = list(range(max_requests - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def available(self) -> int:
        """Rows that `alloc` can give out."""
        return len(self._free)

    def alloc(self) -> int:
        """Take a row.

        Raises:
            PoolExhaustedError: all rows are taken.
        """
        if not self._free:
            raise PoolExhaustedError(f"all {self.max_requests} request rows are taken; raise max_requests")
        request = self._free.pop()
        self._held.add(request)
        return request

    def take(self, request: int) -> None:
        """Take a certain row, for a second table that follows another one.

        Raises:
            AllocationError: somebody holds the row.
        """
        if request not in self._free:
            raise AllocationError(f"request row {request} is taken")
        self._free.remove(request)
        self._held.add(request)

    def free(self, request: int) -> None:
        """Empty a row and give it back.

        Raises:
            AllocationError: nobody holds the row.
        """
        self._check_held(request)
        self._held.remove(request)
        self.table[request] = -1
        self._free.append(request)

    def set_slots(self, request: int, start: int, slots: Tensor) -> None:
        """Say where the tokens from `start` on lie.

        Args:
            request: row.
            start: position of the first token.
            slots: ``int [n]`` device slots, -1 for tokens that left the dense region.

        Raises:
            ConfigError: the tokens do not fit into a row.
            AllocationError: nobody holds the row.
        """
        self._check_held(request)
        stop = start + slots.shape[0]
        if start < 0 or stop > self.max_tokens:
            raise ConfigError("max_tokens", self.max_tokens, f"tokens {start} to {stop - 1} must fit into a row")
        self.table[request, start:stop] = upload(slots.to(self.table.dtype), self.table.device)

    def put(self, requests: Sequence[int], tokens: Sequence[int], slots: Sequence[int]) -> None:
        """Say where single tokens of several requests lie, -1 for those that left the device.

        Raises:
            AllocationError: nobody holds one of the rows.
        """
        for request in requests:
            self._check_held(request)
        where = upload(torch.tensor([requests, tokens, slots], dtype=torch.int64), self.table.device)
        self.table[where[0], where[1]] = where[2].int()

    def clear(self, request: int, start: int, stop: int) -> None:
        """Take note that the tokens start to stop - 1 left the device.

        Raises:
            AllocationError: nobody holds the row.
        """
        self._check_held(request)
        self.table[request, start:stop] = -1

    def slots(self, request: int, start: int, stop: int) -> Tensor:
        """Return the slots of tokens start to stop - 1, ``int32 [stop - start]``: a view of the table."""
        return self.table[request, start:stop]

    def _check_held(self, request: int) -> None:
        if request not in self._held:
            raise AllocationError(f"request row {request} is not taken")
