"""Lines of the Bailian traces of Qwen: a turn of a dialogue each, with one hash per block's own content."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvcm.optimizer.formats.decoding import MOST_MICROS, Key, Length

__all__ = ["BLOCK_TOKENS", "NO_PARENT", "BailianLine"]

BLOCK_TOKENS = 16
NO_PARENT = -1


class BailianLine(msgspec.Struct, omit_defaults=True):
    """One request.

    Attributes:
        timestamp: seconds.
        input_length: tokens of the prompt.
        hash_ids: of its blocks, 16 tokens each; equal content has equal ids, whatever stands before it.
        output_length: tokens generated.
        chat_id: of this turn.
        parent_chat_id: of the turn before, -1 for the first.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MOST_MICROS / 1_000_000)]
    input_length: Length
    hash_ids: list[Key]
    output_length: Length = 0
    chat_id: int | str | None = None
    parent_chat_id: int | str | None = None
