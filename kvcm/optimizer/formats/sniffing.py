"""Tells the format of a file from its first lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.formats.lines import BadLines, LineFile, open_lines

__all__ = ["FORMATS", "checked_format", "format_of"]

FORMATS = ("mooncake", "qwen_bailian", "publisher_log", "optimizer_schema")

_LINES_LOOKED_AT = 100
_SIGNS = (  # in this order: fields that only this format has
    ("publisher_log", {"trigger_time_us"}),
    ("optimizer_schema", {"timestamp_us"}),
    ("qwen_bailian", {"hash_ids", "chat_id"}),
    ("qwen_bailian", {"hash_ids", "parent_chat_id"}),
    ("qwen_bailian", {"hash_ids", "turn"}),
    ("mooncake", {"hash_ids"}),
)


def checked_format(name: str) -> str:
    """Return the name of a format.

    Raises:
        OptionError: there is none of this name.
    """
    if name not in FORMATS:
        raise OptionError(f"format: {name!r} is none; allowed: {', '.join(FORMATS)}")
    return name


def format_of(path: Path) -> str:
    """Return the format of a file.

    Raises:
        TraceError: it cannot be read, or its first lines are of no format.
    """
    with open_lines(path, None, BadLines()) as file:
        return _format_of(path, file)


def _format_of(path: Path, file: LineFile) -> str:
    for (_, line), _ in zip(file, range(_LINES_LOOKED_AT), strict=False):
        try:
            fields = set(_decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        for name, sign in _SIGNS:
            if sign <= fields:
                return name
    raise TraceError(f"{path}: its first lines are of no known format ({', '.join(FORMATS)}); give the format")


_decode = msgspec.json.Decoder(dict[str, Any]).decode
