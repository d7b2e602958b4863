"""What one call of generate did."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GenerationReport", "RowReport"]


@dataclass(frozen=True, slots=True)
class RowReport:
    """Figures of one prompt.

    Attributes:
        prompt_tokens: of the prompt, padding not counted.
        matched_tokens: of the prefix that the manager knows, as far as one can go on from it.
        loaded_tokens: whose KV was loaded and used.
        local_tokens: whose KV was in the pool of this process already. All others were computed.
    """

    prompt_tokens: int
    matched_tokens: int
    loaded_tokens: int
    local_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """Figures of one call of `KVReuse.generate`.

    Attributes:
        prompt_tokens: tokens of all prompts, padding not counted.
        matched_tokens: tokens of the prefixes that the manager knows, as far as one can go on from them.
        loaded_tokens: tokens whose KV was loaded and used.
        local_tokens: tokens whose KV was in the pool of this process already. All others were computed.
        new_tokens: tokens generated, of all rows until each of them ended.
        first_token_seconds: from the call to the choice of the first new token: match, load and prefill. Saving begins
            after it.
        load_seconds: match and load alone.
        total_seconds: from the call to its return, including the wait for saves.
        bytes_loaded: bytes read from storage.
        bytes_saved: bytes of the blocks that were published.
        blocks_saved: blocks that were published.
        blocks_corrupt: blocks that were loaded with other bytes than were saved; they were computed.
        reason: why less was loaded or saved than possible, "" when nothing went wrong.
        rows: figures of each prompt.
    """

    prompt_tokens: int
    matched_tokens: int
    loaded_tokens: int
    local_tokens: int
    new_tokens: int
    first_token_seconds: float
    load_seconds: float
    total_seconds: float
    bytes_loaded: int
    bytes_saved: int
    blocks_saved: int
    blocks_corrupt: int = 0
    reason: str = ""
    rows: tuple[RowReport, ...] = ()
