"""How patient reuse is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ReuseSettings"]


@dataclass(frozen=True, slots=True)
class ReuseSettings:
    """Deadlines and sizes. What takes longer is a miss: the tokens are computed, or not stored.

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
            What a call leaves there, the next ones need not load. 0: each call has memory of its own; so has one that
            finds no room for its prompts and `max_new_tokens` in the pool, and one that returns its cache.
        transfer_threads: most accesses to a storage at once; None = number of cores, at most 4.
        checksums: tell the checksum of every block that is saved, and compute anew what was loaded with another one.
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
