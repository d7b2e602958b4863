"""Lua functions that run inside the server, atomically over the keys of one hash tag."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Argument", "Script", "ScriptCall"]

Argument = bytes | str | int | float


class Script:
    """A Lua text, known to servers by its SHA-1.

    Args:
        text: of the function.
        allow_oom: whether it runs on a server that is at its `maxmemory` too. For what ends or renews something and so
            must be possible then; it must not let the store grow with every call.
    """

    __slots__ = ("sha1", "text")

    def __init__(self, text: str, *, allow_oom: bool = False) -> None:
        # The server reads the flags of a script from its first line.
        self.text = f"#!lua flags=allow-oom\n{text}" if allow_oom else text
        self.sha1 = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()


class ScriptCall(NamedTuple):
    """One call of a script.

    Attributes:
        script: what runs.
        keys: at least one; all share one hash tag.
        args: further arguments.
    """

    script: Script
    keys: Sequence[bytes]
    args: Sequence[Argument] = ()

    @property
    def by_sha1(self) -> tuple[Argument, ...]:
        """The command, for a server that knows the script."""
        return (b"EVALSHA", self.script.sha1, len(self.keys), *self.keys, *self.args)

    @property
    def by_text(self) -> tuple[Argument, ...]:
        """The command, for a server that does not; it does afterwards."""
        return (b"EVAL", self.script.text, len(self.keys), *self.keys, *self.args)
