"""Lines of `event_publisher.log`, the original's, and of our own manager's events (wire.md 10.3).

Only lookups and write sessions are requests. Events of other types, of which ours has more than the original, say what
became of blocks; they are no bad lines.
"""

from __future__ import annotations

import msgspec

from kvcm.optimizer.formats.decoding import Key, Micros

__all__ = ["FINISHED", "LOOKUP", "STARTED", "AnyEvent", "Finished", "Lookup", "Mask", "Started"]

LOOKUP = "GetCacheLocation"
STARTED = "StartWriteCache"
FINISHED = "FinishWriteCache"

Mask = int | list[bool]
"""The first so many positions, or those whose flag is true."""


class AnyEvent(msgspec.Struct):
    """What every event has.

    Attributes:
        type: what happened.
    """

    type: str


class Lookup(msgspec.Struct, kw_only=True):
    """Blocks were looked up.

    Attributes:
        source: the instance.
        trigger_time_us: unix time.
        query_type: how keys were matched.
        keys: of the blocks.
        tokens: of the prompt, where the keys were computed from them.
        block_mask: positions that the caller has itself.
        sw_size: blocks per window.
        location_spec_names: specs that were asked for; empty: all.
    """

    source: str
    trigger_time_us: Micros
    query_type: str = "prefix_match"
    keys: list[Key] = []
    tokens: list[int] = []
    block_mask: Mask | None = None
    sw_size: int = 0
    location_spec_names: list[str] = []


class Started(msgspec.Struct, kw_only=True):
    """A write session began.

    Attributes:
        source, trigger_time_us, keys, tokens: as of a lookup.
        write_session_id: names the session.
        block_mask: positions that need not be written: they are there.
    """

    source: str
    trigger_time_us: Micros
    write_session_id: str
    keys: list[Key] = []
    tokens: list[int] = []
    block_mask: Mask | None = None


class Finished(msgspec.Struct, kw_only=True):
    """A write session ended.

    Attributes:
        source: the instance.
        trigger_time_us: unix time.
        write_session_id: names the session.
        success_block: which of the positions that had to be written were; None: all.
    """

    source: str
    trigger_time_us: Micros
    write_session_id: str
    success_block: Mask | None = None
