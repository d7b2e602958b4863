"""What one call of generate did."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GenerationReport"]


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """Figures of one call of `KVReuse.generate`.

    Attributes:
        prompt_tokens: tokens of the prompt.
        matched_tokens: tokens of the prefix that the manager knows.
        loaded_tokens: tokens whose KV was loaded and used; the others were computed.
        new_tokens: tokens generated.
        first_token_seconds: from the call to the choice of the first new token: match, load and prefill. Saving begins
            after it.
        load_seconds: match and load alone.
        total_seconds: from the call to its return, including the wait for saves.
        bytes_loaded: bytes read from storage.
        bytes_saved: bytes of the blocks that were published.
        blocks_saved: blocks that were published.
        blocks_corrupt: blocks that were loaded with other bytes than were saved; they were computed.
        reason: why less was loaded or saved than possible, "" when nothing went wrong.
    """

    prompt_tokens: int
    matched_tokens: int
    loaded_tokens: int
    new_tokens: int
    first_token_seconds: float
    load_seconds: float
    total_seconds: float
    bytes_loaded: int
    bytes_saved: int
    blocks_saved: int
    blocks_corrupt: int = 0
    reason: str = ""
