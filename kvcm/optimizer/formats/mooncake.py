"""Lines of the Mooncake format: a turn of a dialogue each, with one id per block of its prompt."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvcm.optimizer.formats.decoding import MOST_MICROS, Key, Length

__all__ = ["MooncakeLine"]


class MooncakeLine(msgspec.Struct, omit_defaults=True):
    """One request.

    Attributes:
        timestamp: milliseconds.
        input_length: tokens of the prompt.
        hash_ids: of its blocks; each names the whole prefix up to and including its block.
        output_length: tokens generated.
        session: of the conversation.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MOST_MICROS / 1000)]
    input_length: Length
    hash_ids: list[Key]
    output_length: Length = 0
    session: int | str | None = None
