"""The conversation as prompts of byte-level tokens: one token per byte of UTF-8."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["SHARED", "prompts"]

SHARED = "user"
_FILE = Path(__file__).with_name("conversation.txt")
_SECTION = re.compile(r"^\[(.+)\]\n", re.MULTILINE)


def prompts(speaker: str) -> list[bytes]:
    """Return the prompt of each turn of a speaker: everything said so far, up to the place of the answer.

    Args:
        speaker: `user` for the turns that both engines share, `user of engine B` for those of the second engine.
    """
    _, *parts = _SECTION.split(_FILE.read_text(encoding="utf-8"))
    so_far, found = "", []
    for role, text in zip(parts[::2], parts[1::2], strict=True):
        so_far += f"<{role.split()[0]}>\n{text.strip()}\n"
        if role == speaker:
            found.append(f"{so_far}<assistant>\n".encode())
    return found
