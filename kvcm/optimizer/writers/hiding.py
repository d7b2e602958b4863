"""What is left of a line when nothing in it may tell whose it is, for each format.

Only fields that readers use are kept, so nothing that a format may gain slips through: keys, names and sessions are
replaced, tokens are dropped, times count from the first one. Lengths and the gaps between times stay: they are what a
trace is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kvcm.model.keys import block_keys_from_tokens
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.formats.decoding import decoder, signed_keys
from kvcm.optimizer.formats.mooncake import MooncakeLine
from kvcm.optimizer.formats.optimizer_schema import SchemaLine
from kvcm.optimizer.formats.publisher_log import FINISHED, LOOKUP, STARTED, AnyEvent, Finished, Lookup, Started
from kvcm.optimizer.formats.qwen_bailian import NO_PARENT, BailianLine
from kvcm.optimizer.writers.pseudonyms import Pseudonyms

__all__ = ["Hiding", "hiding"]


class Hiding(Protocol):
    """Hides whose lines of one format are."""

    def decode(self, line: bytes) -> Any:
        """Return a line; None where it is no request and can go; raises LineError where it is none."""

    def time_us(self, line: Any) -> int:
        """Return when it happened."""

    def hidden(self, line: Any, since_us: int) -> dict[str, object]:
        """Return what is left of it, with times since then; raises LineError where a key is none."""


class _Keys:
    """Replaces keys.

    Args:
        names: what stands for what.
        block_tokens: tokens per block, where known.
    """

    def __init__(self, names: Pseudonyms, block_tokens: int | None) -> None:
        self.names = names
        self._block_tokens = block_tokens

    def of(self, keys: list[int]) -> list[int]:
        return self.names.keys(signed_keys(keys, "keys"))

    def of_line(self, line: Lookup | Started | SchemaLine) -> list[int]:
        if line.keys or not line.tokens:
            return self.of(line.keys)
        if self._block_tokens is None:
            raise OptionError("block_tokens: lines name blocks by their tokens only; give the tokens per block")
        return self.of(block_keys_from_tokens(signed_keys(line.tokens, "tokens"), self._block_tokens))

    def query(self, line: Lookup | SchemaLine) -> dict[str, object]:
        return {
            "query_type": line.query_type,
            "block_mask": 0 if line.block_mask is None else line.block_mask,
            "sw_size": line.sw_size,
            "location_spec_names": [self.names.text("spec", each) for each in line.location_spec_names],
        }


class _Mooncake:
    def __init__(self, keys: _Keys) -> None:
        self._keys = keys
        self.decode = decoder(MooncakeLine)

    def time_us(self, line: MooncakeLine) -> int:
        return round(line.timestamp * 1000)

    def hidden(self, line: MooncakeLine, since_us: int) -> dict[str, object]:
        time_us = self.time_us(line) - since_us
        fields: dict[str, object] = {
            "timestamp": time_us / 1000 if time_us % 1000 else time_us // 1000,
            "input_length": line.input_length,
            "output_length": line.output_length,
        }
        if line.session is not None:
            fields["session"] = self._keys.names.session(line.session)
        return fields | {"hash_ids": self._keys.of(line.hash_ids)}


class _Bailian:
    def __init__(self, keys: _Keys) -> None:
        self._keys = keys
        self.decode = decoder(BailianLine)

    def time_us(self, line: BailianLine) -> int:
        return round(line.timestamp * 1_000_000)

    def hidden(self, line: BailianLine, since_us: int) -> dict[str, object]:
        chats = {"chat_id": line.chat_id, "parent_chat_id": line.parent_chat_id}
        fields: dict[str, object] = {
            name: chat if chat == NO_PARENT else self._keys.names.session(chat)
            for name, chat in chats.items()
            if chat is not None
        }
        return fields | {
            "timestamp": (self.time_us(line) - since_us) / 1_000_000,
            "input_length": line.input_length,
            "output_length": line.output_length,
            "type": "text",
            "turn": 1 if line.parent_chat_id in {None, NO_PARENT} else 2,
            "hash_ids": self._keys.of(line.hash_ids),
        }


class _Events:
    def __init__(self, keys: _Keys) -> None:
        self._keys = keys
        self._event = decoder(AnyEvent)
        self._kinds: dict[str, Callable[[bytes], Lookup | Started | Finished]] = {
            LOOKUP: decoder(Lookup),
            STARTED: decoder(Started),
            FINISHED: decoder(Finished),
        }
        self._count = 0

    def decode(self, line: bytes) -> Lookup | Started | Finished | None:
        kind = self._event(line).type
        return self._kinds[kind](line) if kind in self._kinds else None

    def time_us(self, line: Lookup | Started | Finished) -> int:
        return line.trigger_time_us

    def hidden(self, line: Lookup | Started | Finished, since_us: int) -> dict[str, object]:
        names = self._keys.names
        self._count += 1
        fields: dict[str, object] = {
            "id": f"{self._count:032x}",
            "source": names.text("instance", line.source),
            "component": "cache_manager",
            "trigger_time_us": line.trigger_time_us - since_us,
        }
        if isinstance(line, Lookup):
            query = self._keys.query(line)
            return fields | {"type": LOOKUP, "keys": self._keys.of_line(line), "tokens": []} | query
        fields["write_session_id"] = names.text("write", line.write_session_id)
        if isinstance(line, Finished):
            return fields | {"type": FINISHED, "success_block": line.success_block}
        mask = 0 if line.block_mask is None else line.block_mask
        return fields | {"type": STARTED, "keys": self._keys.of_line(line), "tokens": [], "block_mask": mask}


class _Schema:
    def __init__(self, keys: _Keys) -> None:
        self._keys = keys
        self.decode = decoder(SchemaLine)
        self._count = 0

    def time_us(self, line: SchemaLine) -> int:
        return line.timestamp_us

    def hidden(self, line: SchemaLine, since_us: int) -> dict[str, object]:
        self._count += 1
        fields: dict[str, object] = {
            "instance_id": self._keys.names.text("instance", line.instance_id),
            "trace_id": f"{self._count}",
            "timestamp_us": line.timestamp_us - since_us,
            "tokens": [],
            "keys": self._keys.of_line(line),
        }
        if line.query_type is not None:
            fields |= self._keys.query(line)
        if line.total_keys is not None:
            tokens = line.input_len if line.input_len is not None else len(line.tokens) or None
            lengths: dict[str, object] = {"input_len": tokens, "output_len": line.output_len}
            fields |= lengths | {"total_keys": self._keys.of(line.total_keys)}
        return fields


_KINDS: Mapping[str, Callable[[_Keys], Hiding]] = {
    "mooncake": _Mooncake,
    "qwen_bailian": _Bailian,
    "publisher_log": _Events,
    "optimizer_schema": _Schema,
}


def hiding(format_name: str, names: Pseudonyms, block_tokens: int | None) -> Hiding:
    """Return what hides whose lines of a format are.

    Args:
        format_name: one of the formats.
        names: what stands for what.
        block_tokens: tokens per block, for lines that name blocks by their tokens.
    """
    return _KINDS[format_name](_Keys(names, block_tokens))
