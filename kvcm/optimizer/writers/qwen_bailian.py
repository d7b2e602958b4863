"""Writes the format of Bailian's traces of Qwen.

Numbers of blocks serve as hashes of their content: with the prefix added to them, as readers do, they are the same
blocks. Each turn gets a number of its own as `chat_id`, and that of the turn before as `parent_chat_id`.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.formats.qwen_bailian import BLOCK_TOKENS, NO_PARENT
from kvcm.optimizer.trace import Trace
from kvcm.optimizer.writers.turns import Turn, turns

__all__ = ["bailian_lines"]


def bailian_lines(trace: Trace) -> Iterator[dict[str, object]]:
    """Return one line per request.

    Raises:
        OptionError: the trace has something else than turns of one instance, blocks of another size, or blocks that
            follow different ones.
    """
    size = trace.block_tokens
    if size != BLOCK_TOKENS:
        raise OptionError(f"format: blocks of qwen_bailian have {BLOCK_TOKENS} tokens, those of {trace.name} {size}")
    if not trace.has_one_parent:
        raise OptionError(f"format: qwen_bailian holds prefix trees only, and blocks of {trace.name} follow several")
    return _lines(turns(trace, "qwen_bailian"))


def _lines(found: Iterator[Turn]) -> Iterator[dict[str, object]]:
    last: dict[int, tuple[int, int]] = {}  # of each session: the chat of its last turn, and how many it had
    for chat, turn in enumerate(found, 1):
        line: dict[str, object] = {}
        count = 1
        if turn.session is not None:
            parent, before = last.get(turn.session, (NO_PARENT, 0))
            count = before + 1
            last[turn.session] = chat, count
            line = {"chat_id": chat, "parent_chat_id": parent}
        yield line | {
            "timestamp": turn.time_us / 1_000_000,  # with a point always: the original reads whole numbers as 0
            "input_length": turn.input_tokens,
            "output_length": turn.output_tokens,
            "type": "text",
            "turn": count,
            "hash_ids": turn.blocks,
        }
