"""The life of a request in the tier.

    REGISTERED → PREFILL → STAGING → SPARSE → FINISHED
                     └───→ DENSE ──→ STAGING

ABORTED is reached from every state but the two ends. A request in STAGING is decoded densely while its KV goes to the
host; it becomes SPARSE when that copy and the representations exist, and only then its dense pages are released. A
DENSE request that outgrows the buffer goes through STAGING like a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from gpu_tier.errors import StateError

__all__ = ["RequestState", "RequestTrackers", "Tracker"]


class RequestState(StrEnum):
    """Where a request is in its life."""

    REGISTERED = "registered"
    PREFILL = "prefill"
    STAGING = "staging"
    SPARSE = "sparse"
    DENSE = "dense"
    FINISHED = "finished"
    ABORTED = "aborted"


_S = RequestState
_LIVE = (_S.REGISTERED, _S.PREFILL, _S.STAGING, _S.SPARSE, _S.DENSE)
_NEXT: dict[RequestState, frozenset[RequestState]] = {
    _S.REGISTERED: frozenset({_S.PREFILL, _S.ABORTED}),
    _S.PREFILL: frozenset({_S.PREFILL, _S.STAGING, _S.SPARSE, _S.DENSE, _S.ABORTED}),
    _S.STAGING: frozenset({_S.SPARSE, _S.FINISHED, _S.ABORTED}),
    _S.SPARSE: frozenset({_S.FINISHED, _S.ABORTED}),
    _S.DENSE: frozenset({_S.STAGING, _S.SPARSE, _S.FINISHED, _S.ABORTED}),
    _S.FINISHED: frozenset(),
    _S.ABORTED: frozenset(),
}


@dataclass(slots=True)
class Tracker:
    """One request.

    Attributes:
        request: its row in the per-request tables.
        n_prompt: tokens of its prompt.
        wants_sparse: whether it becomes sparse after its prompt.
        cached_tokens: leading tokens that were attached from the host pool, a multiple of the page size.
        seq_len: tokens whose KV exists.
        state: where it is in its life.
        exact_tokens: leading tokens whose KV was computed with exact attention; only those may be published.
        starts_late: whether it was dense after its prompt and became sparse when it had grown.
    """

    request: int
    n_prompt: int
    wants_sparse: bool
    cached_tokens: int = 0
    seq_len: int = 0
    state: RequestState = RequestState.REGISTERED
    exact_tokens: int = 0
    starts_late: bool = False

    def move(self, state: RequestState) -> None:
        """Go to another state.

        Raises:
            StateError: the state cannot be reached from this one.
        """
        if state not in _NEXT[self.state]:
            raise StateError(f"request {self.request} is {self.state} and cannot become {state}")
        self.state = state

    @property
    def is_live(self) -> bool:
        """Whether the request has not ended."""
        return self.state in _LIVE

    def require(self, *states: RequestState) -> None:
        """Check that the request is in one of the states.

        Raises:
            StateError: it is not.
        """
        if self.state not in states:
            allowed = " or ".join(states)
            raise StateError(f"request {self.request} is {self.state}; this needs it to be {allowed}")


class RequestTrackers:
    """The requests of one engine, by their rows."""

    def __init__(self) -> None:
        self._by_request: dict[int, Tracker] = {}

    def register(self, tracker: Tracker) -> None:
        """Add a request."""
        if tracker.request in self._by_request:
            raise StateError(f"request {tracker.request} is registered already")
        self._by_request[tracker.request] = tracker

    def __getitem__(self, request: int) -> Tracker:
        try:
            return self._by_request[request]
        except KeyError:
            raise StateError(f"request {request} is not known") from None

    def __contains__(self, request: int) -> bool:
        return request in self._by_request

    def __iter__(self) -> Iterator[Tracker]:
        return iter(self._by_request.values())

    def __len__(self) -> int:
        return len(self._by_request)

    def remove(self, request: int) -> Tracker:
        """Forget a request and return it."""
        tracker = self[request]
        del self._by_request[request]
        return tracker
