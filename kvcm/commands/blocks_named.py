"""Blocks as a command line names them: by their keys, or by the tokens whose KV they hold."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvcm.admin_client import AdminClient
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.keys import block_keys_from_tokens
from kvcm.protocol import admin_service_pb2 as admin_pb

__all__ = ["Prompt", "instance_info", "numbers"]

_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_MOST_FILE_CHARACTERS = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Options that name the blocks of a prompt, from its start."""

    tokens: Annotated[
        str, typer.Option("--tokens", metavar="1,2,3", help="Token ids of the prompt, from its start.")
    ] = ""
    tokens_file: Annotated[
        str,
        typer.Option(
            "--tokens-file", metavar="FILE", help="The same from a file, between commas or blanks; - for the input."
        ),
    ] = ""
    keys: Annotated[str, typer.Option("--keys", metavar="1,2,3", help="Block keys, in the order of the prompt.")] = ""
    keys_file: Annotated[
        str,
        typer.Option("--keys-file", metavar="FILE", help="The same from a file; - for the standard input."),
    ] = ""

    def block_keys(self, block_size: int) -> list[int]:
        """Return the key of each block.

        Args:
            block_size: tokens of one.

        Raises:
            InvalidArgumentError: not exactly one of the options is given, it holds no numbers, or there is no block.
            OSError: the file cannot be read.
        """
        given = {name: value for name, value in self._texts().items() if value}
        if len(given) != 1:
            raise InvalidArgumentError(f"give one of --tokens, --tokens-file, --keys and --keys-file, not {len(given)}")
        ((name, text),) = given.items()
        values = numbers(f"--{name}", _read(text) if name.endswith("-file") else text)
        if name.startswith("keys"):
            return values
        return _hashed(values, block_size)

    def _texts(self) -> dict[str, str]:
        return {
            "tokens": self.tokens,
            "tokens-file": self.tokens_file,
            "keys": self.keys,
            "keys-file": self.keys_file,
        }


def _hashed(tokens: Sequence[int], block_size: int) -> list[int]:
    if block_size <= 0:
        raise InvalidArgumentError(
            f"the instance has block_size {block_size}, so that tokens make no keys: give --keys or --keys-file"
        )
    keys = block_keys_from_tokens(tokens, block_size)
    if not keys:
        raise InvalidArgumentError(f"{len(tokens)} tokens fill no block: one has {block_size} tokens")
    return keys


def _read(name: str) -> str:
    if name == "-":
        return sys.stdin.read(_MOST_FILE_CHARACTERS)
    with Path(name).open(encoding="utf-8") as file:
        return file.read(_MOST_FILE_CHARACTERS)


def numbers(option: str, text: str) -> list[int]:
    """Return the 64-bit numbers in a text, which are separated by commas, blanks or brackets, as in JSON.

    Raises:
        InvalidArgumentError: something else is in it, or nothing.
    """
    parts = text.translate(_BLANKS).split()
    if not parts:
        raise InvalidArgumentError(f"{option} has no numbers")
    try:
        values = [int(part) for part in parts]
    except ValueError:
        wrong = next(part for part in parts if not part.lstrip("-").isdigit())
        raise InvalidArgumentError(f"{option} has {wrong[:40]!r}, must be whole numbers: 1,2,3") from None
    if not all(_LEAST <= value <= _MOST for value in values):
        raise InvalidArgumentError(f"{option} has a number that does not fit 64 bits")
    return values


_BLANKS = str.maketrans(dict.fromkeys(",[]\"'", " "))


def instance_info(client: AdminClient, instance: str) -> admin_pb.InstanceInfo:
    """Return an instance as it was registered.

    Raises:
        UnknownInstanceError: there is none of the id.
    """
    request = admin_pb.GetInstanceInfoRequest(instance_id=instance)
    return client.call("GetInstanceInfo", request, admin_pb.GetInstanceInfoResponse).instance_info
