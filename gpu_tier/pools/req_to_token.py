"""Where each token of each request lies in the device pool."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_tier.errors import AllocationError, ConfigError, PoolExhaustedError

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
        self.table[request, start:stop] = slots.to(self.table)

    def slots(self, request: int, start: int, stop: int) -> Tensor:
        """Return the slots of tokens start to stop - 1, ``int32 [stop - start]``: a view of the table."""
        return self.table[request, start:stop]

    def _check_held(self, request: int) -> None:
        if request not in self._held:
            raise AllocationError(f"request row {request} is not taken")
