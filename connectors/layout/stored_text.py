"""The stored format as one line of text, for the registration of an instance.

Engines share blocks exactly when their texts are equal, so there is one text per format, and what is not that text is
refused instead of read with good will.
"""

from __future__ import annotations

import re

from connectors.layout.stored import StoredFormat
from kvcm.model.errors import InvalidArgumentError

__all__ = ["format_text", "parse_format"]

_NUMBER = "([1-9][0-9]{0,6})"
_TEXT = re.compile(
    rf"kvcm-block/{_NUMBER} layer_ends=([0-9,]{{1,512}}) heads={_NUMBER} head_shards={_NUMBER} kv_parts={_NUMBER}"
    rf" head_dim={_NUMBER} block_tokens={_NUMBER} dtype=([a-z0-9_]{{1,32}}) order=([a-z.]{{1,64}})",
    re.ASCII,
)


def format_text(stored: StoredFormat) -> str:
    """Return the text of a format: `kvcm-block/2 layer_ends=16,32 heads=8 ...`."""
    ends = ",".join(map(str, stored.layer_ends))
    return (
        f"kvcm-block/{stored.VERSION} layer_ends={ends} heads={stored.heads} head_shards={stored.head_shards}"
        f" kv_parts={stored.kv_parts} head_dim={stored.head_dim} block_tokens={stored.block_tokens}"
        f" dtype={stored.dtype} order={stored.order}"
    )


def parse_format(text: str) -> StoredFormat:
    """Return the format that `format_text` wrote.

    Raises:
        InvalidArgumentError: the text is of another version, has another form, or describes what cannot be.
    """
    match = _TEXT.fullmatch(text)
    if match is None:
        raise InvalidArgumentError(f"stored format is {text[:200]!r}, must be as in {format_text(_EXAMPLE)!r}")
    version, ends, heads, head_shards, kv_parts, head_dim, block_tokens, dtype, order = match.groups()
    if int(version) != StoredFormat.VERSION:
        raise InvalidArgumentError(f"stored format has version {version}, must be {StoredFormat.VERSION}")
    if not re.fullmatch(rf"{_NUMBER}(,{_NUMBER})*", ends):
        raise InvalidArgumentError(f"layer_ends is {ends!r}, must be numbers joined by commas")
    return StoredFormat(
        layer_ends=tuple(map(int, ends.split(","))),
        heads=int(heads),
        head_shards=int(head_shards),
        kv_parts=int(kv_parts),
        head_dim=int(head_dim),
        block_tokens=int(block_tokens),
        dtype=dtype,
        order=order,
    )


_EXAMPLE = StoredFormat((16, 32), heads=8, head_shards=2, kv_parts=2, head_dim=128, block_tokens=64, dtype="bfloat16")
