"""Recordings of what a manager published, for proposals and rehearsals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kvcm.optimizer.live.recording import Recording, read_recording


def recorded(
    turns: Sequence[tuple[float, list[int]]], *, source: str, hits: int = 0, dropped: int = 0, until_us: int = 1
) -> Recording:
    """Return a recording of turns that look up and then write.

    Args:
        turns: seconds, and keys of the blocks.
        source: the instance.
        hits: of the blocks of each turn that were found.
        dropped: events that were pushed out.
        until_us: when it ends.
    """
    events: list[dict[str, Any]] = [{"type": "recent", "most_keys": 1, "until_us": until_us, "dropped_events": dropped}]
    for number, (at, keys) in enumerate(turns):
        base = {"source": source, "trigger_time_us": int(at * 1e6)}
        events += [
            {**base, "type": "GetCacheLocation", "query_type": "prefix_match", "keys": keys, "hit_keys": hits},
            {**base, "type": "StartWriteCache", "keys": keys, "write_session_id": str(number), "block_mask": hits},
            {**base, "type": "FinishWriteCache", "write_session_id": str(number), "success_block": len(keys) - hits},
        ]
    return read_recording(json.dumps(event).encode() for event in events)
