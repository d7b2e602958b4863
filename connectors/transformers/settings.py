"""Deadlines and sizes of reuse, and the report of one call of generate."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GenerationReport", "ReuseSettings", "RowReport"]


@dataclass(frozen=True, slots=True)
class ReuseSettings:
    """Deadlines and sizes. After a deadline the tokens are computed, or not stored.

    Attributes:
        register_seconds: for the registration when connecting.
        call_seconds: for each call to the manager afterwards.
        load_seconds: for loading all blocks of a prompt.
        save_seconds: for saving one batch of blocks; the manager's write session lasts a little longer.
        flush_seconds: how long `generate` waits at its end for blocks that are still being saved. They are saved by a
            thread of their own while tokens are generated; those that are late are saved after the return.
        save_batch_bytes: most bytes of one write session.
        staging_blocks: blocks in the buffer for models that are not on the CPU.
        pool_blocks: blocks of a pool that the KV of all calls lies in, each for `block_tokens` tokens in all layers.
            The next calls need not load blocks that a call leaves there. 0: each call has memory of its own; so has one
            whose prompts and `max_new_tokens` do not fit the pool, and one that returns its cache.
        transfer_threads: most accesses to a storage at once; None = number of cores, at most 4.
        checksums: report the checksum of every saved block, and compute blocks again that load with another one.
        compare_all_weights: read every element of the weights before each call, which takes about as long as computing
            one token. Finds what else `KVReuse.set_weights_version` must say: single elements that were written through
            `.data`, NumPy or code in C. Models of up to 4 MiB are always read.
        follow_assignment: see `ClientSettings`.
    """

    register_seconds: float = 5.0
    call_seconds: float = 1.0
    load_seconds: float = 10.0
    save_seconds: float = 20.0
    flush_seconds: float = 30.0
    save_batch_bytes: int = 64 << 20
    staging_blocks: int = 8
    pool_blocks: int = 0
    transfer_threads: int | None = None
    checksums: bool = True
    compare_all_weights: bool = False
    follow_assignment: bool = True


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
