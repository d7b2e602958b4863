"""`kvcm get`, `kvcm trim` and `kvcm pin`: locations of the blocks of a prompt, removal of many blocks, pins."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from kvcm.commands.connection import Connection, instance_ids
from kvcm.commands.options import AsJson, Yes, confirm, noun, with_options
from kvcm.commands.output import plain_fields, print_below, print_json, print_table, progress, spinner
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.units import format_size, parse_duration
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol import meta_service_pb2 as meta_pb
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pin_pb
from kvcm.terminal.admin_client import AdminClient
from kvcm.terminal.exit_codes import exit_on_call_errors
from kvcm.terminal.tables import format_time

__all__ = ["Prompt", "get", "instance_info", "numbers", "pin_app", "trim"]

# A prompt on the command line: by block keys, or by tokens.

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
        str, typer.Option("--keys-file", metavar="FILE", help="The same from a file; - for the standard input.")
    ] = ""

    def block_keys(self, block_size: int) -> list[int]:
        """Return the key of each block.

        Args:
            block_size: tokens of one.

        Raises:
            InvalidArgumentError: not exactly one of the options is given, it holds no numbers, or there is no block.
            OSError: the file cannot be read.
        """
        name, values = self.values()
        return values if name == "block_keys" else _keys_of_tokens(values, block_size)

    def values(self) -> tuple[str, list[int]]:
        """Return the given field, `block_keys` or `token_ids`, and its values.

        Raises:
            InvalidArgumentError: not exactly one of the options is given, or it holds no numbers.
            OSError: the file cannot be read.
        """
        given = {name: value for name, value in self._texts().items() if value}
        if len(given) != 1:
            raise InvalidArgumentError(f"give one of --tokens, --tokens-file, --keys and --keys-file, not {len(given)}")
        ((name, text),) = given.items()
        field = "block_keys" if name.startswith("keys") else "token_ids"
        return field, numbers(f"--{name}", _read(text) if name.endswith("-file") else text)

    def _texts(self) -> dict[str, str]:
        return {"tokens": self.tokens, "tokens-file": self.tokens_file, "keys": self.keys, "keys-file": self.keys_file}


def _keys_of_tokens(tokens: Sequence[int], block_size: int) -> list[int]:
    if block_size <= 0:
        raise InvalidArgumentError(
            f"the instance has block_size {block_size}, so that tokens make no keys: give --keys or --keys-file"
        )
    from kvcm.model.keys import block_keys_from_tokens  # and NumPy with it: other commands start faster without

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


# `kvcm pin`.

pin_app = noun("pin", "Prefixes that are kept from eviction.")
Instance = Annotated[str, typer.Argument(metavar="INSTANCE", help="Id of the instance.", autocompletion=instance_ids)]


@pin_app.command("list")
@with_options
def list_pins(connection: Connection, instance: Instance, as_json: AsJson = False) -> None:
    """List the pins of an instance; those that end first come first."""
    with exit_on_call_errors():
        request = pin_pb.ListPinsRequest(instance_id=instance)
        answer = connection.data().call("ListPins", request, pin_pb.ListPinsResponse)
    pins = [plain_fields(pin) for pin in answer.pins]
    if as_json:
        print_json({"pins": pins})
        return
    rows = (
        (pin["pin_id"], pin["owner"], f"{pin['blocks']:,}", format_size(pin["bytes"]), format_time(pin["deadline_ms"]))
        for pin in pins
    )
    print_table(("pin", "owner", "blocks", "bytes", "until"), rows, words=("owner", "until"))


@pin_app.command("add")
@with_options
def add_pin(
    connection: Connection,
    instance: Instance,
    prompt: Prompt,
    owner: Annotated[str, typer.Option("--owner", metavar="NAME", help="Name of the owner, shown in lists.")],
    ttl: Annotated[str, typer.Option("--ttl", metavar="TIME", help="For how long, at most 30d: as in 90s, 15m, 12h.")],
    as_json: AsJson = False,
) -> None:
    """Keep the longest readable prefix of a prompt from eviction.

    It takes from the pin budget of the group: `kvcm group update NAME --pin-budget SIZE`.
    """
    with exit_on_call_errors():
        block_size = instance_info(connection.admin(), instance).block_size
        request = pin_pb.PinPrefixRequest(
            instance_id=instance, block_keys=prompt.block_keys(block_size), owner=owner, ttl_seconds=parse_duration(ttl)
        )
        answer = connection.data().call("PinPrefix", request, pin_pb.PinPrefixResponse)
        if not answer.pin_id:
            raise InvalidArgumentError(f"nothing of the prompt can be read in instance {instance!r}: nothing is pinned")
    if as_json:
        print_json(plain_fields(answer))
        return
    asked = len(request.block_keys)
    typer.echo(
        f"pin {answer.pin_id}: {answer.pinned_blocks:,} of {asked:,} blocks, {format_size(answer.pinned_bytes)}, "
        f"until {format_time(answer.deadline_ms)}"
    )


@pin_app.command("remove")
@with_options
def remove_pin(
    connection: Connection,
    instance: Instance,
    pin: Annotated[str, typer.Argument(metavar="PIN", help="Id of the pin, as listed.")],
) -> None:
    """End a pin early; one that is not there is no error."""
    with exit_on_call_errors():
        request = pin_pb.UnpinPrefixRequest(instance_id=instance, pin_id=pin)
        connection.data().call("UnpinPrefix", request, meta_pb.CommonResponse)


# `kvcm get` and `kvcm trim`.

_BATCH_KEYS = 4096
_MISSING = "missing"
_MOST_SECONDS = (1 << 31) - 1


class Block(NamedTuple):
    """A block and its best location; texts are empty without one.

    Attributes:
        state: serving, writing or missing.
        locations: how many it has.
        size_bytes: of the best one.
        uri: of the first spec there.
    """

    key: int
    state: str = _MISSING
    storage: str = ""
    locations: int = 0
    size_bytes: int = 0
    uri: str = ""


class Run(NamedTuple):
    """Consecutive blocks with the same state, storage and number of locations; positions count from 0."""

    start: int
    blocks: list[Block]


@with_options
def get(connection: Connection, instance: Instance, prompt: Prompt, as_json: AsJson = False) -> None:
    """Show where the blocks of a prompt lie, and how much of it an engine could load.

    This does not count as an access: the order of eviction stays as it is.
    """
    with exit_on_call_errors():
        admin = connection.admin()
        block_size = instance_info(admin, instance).block_size
        keys = prompt.block_keys(block_size)
        with progress("blocks", len(keys)) as show:
            blocks = list(_find_blocks(admin, instance, keys, show))
            matched = _matched(connection.data(), instance, keys)
    if as_json:
        print_json(_report(blocks, matched, block_size))
    else:
        _print_runs(blocks, matched, block_size)


def _find_blocks(
    client: AdminClient, instance: str, keys: Sequence[int], show: Callable[[int], None]
) -> Iterator[Block]:
    for start in range(0, len(keys), _BATCH_KEYS):
        batch = keys[start : start + _BATCH_KEYS]
        request = admin_pb.GetCacheMetaRequest(instance_id=instance, block_keys=batch, detail_level=1)
        answer = client.call("GetCacheMeta", request, admin_pb.GetCacheMetaResponse)
        for key, text in zip(batch, answer.metas, strict=True):
            yield _block(key, json.loads(text))
        show(start + len(batch))


def _block(key: int, meta: dict[str, Any]) -> Block:
    locations = meta.get("locations") or []
    if not locations:
        return Block(key)
    best, specs = locations[0], locations[0]["location_specs"]
    return Block(
        key,
        state=best["status"].removeprefix("CLS_").lower(),
        storage=best["storage"],
        locations=len(locations),
        size_bytes=int(best["size"]),
        uri=specs[0]["uri"] if specs else "",
    )


def _matched(client: AdminClient, instance: str, keys: Sequence[int]) -> int:
    """Return the length of the prefix that can be read now, without an access."""
    found = 0
    for start in range(0, len(keys), _BATCH_KEYS):
        batch = keys[start : start + _BATCH_KEYS]
        request = meta_pb.GetCacheLocationLenRequest(
            instance_id=instance, block_keys=batch, query_type=meta_pb.QT_PREFIX_MATCH, peek=True
        )
        length = client.call("GetCacheLocationLen", request, meta_pb.GetCacheLocationLenResponse).cache_location_len
        found += length
        if length < len(batch):
            break
    return found


def _runs(blocks: Sequence[Block]) -> Iterator[Run]:
    start = 0
    for _, same in groupby(blocks, key=lambda block: (block.state, block.storage, block.locations)):
        run = list(same)
        yield Run(start, run)
        start += len(run)


def _print_runs(blocks: Sequence[Block], matched: int, block_size: int) -> None:
    rows = []
    for start, run in _runs(blocks):
        last = start + len(run) - 1
        size = format_size(sum(block.size_bytes for block in run))
        uris = run[0].uri if start == last else f"{run[0].uri}\n{run[-1].uri}".strip()
        rows.append(
            (f"{start:,}–{last:,}", f"{len(run):,}", run[0].state, run[0].storage, str(run[0].locations), size, uris)
        )
    columns = ("blocks", "number", "state", "storage", "places", "bytes", "first and last")
    print_table(columns, rows, words=("state", "storage", "first and last"))
    tokens = f", {matched * block_size:,} tokens" if block_size > 0 else ""
    print_below(f"an engine can load the first {matched:,} of {len(blocks):,} blocks{tokens}")


def _report(blocks: Sequence[Block], matched: int, block_size: int) -> dict[str, Any]:
    return {
        "matched_blocks": matched,
        "matched_tokens": matched * max(block_size, 0),
        "blocks": len(blocks),
        "runs": [
            {
                "start": start,
                "blocks": len(run),
                "state": run[0].state,
                "storage": run[0].storage,
                "places": run[0].locations,
                "bytes": sum(block.size_bytes for block in run),
                "first_key": str(run[0].key),
                "last_key": str(run[-1].key),
                "first_uri": run[0].uri,
                "last_uri": run[-1].uri,
            }
            for start, run in _runs(blocks)
        ],
    }


@with_options
def trim(
    connection: Connection,
    instance: Instance,
    everything: Annotated[bool, typer.Option("--all", help="Every block: metadata and bytes.")] = False,
    metadata_only: Annotated[
        bool,
        typer.Option("--metadata-only", help="The metadata of every block; the bytes stay for a scrub, or for others."),
    ] = False,
    written_from: Annotated[
        str,
        typer.Option(
            "--written-from", metavar="TIME", help="Blocks written since then: unix seconds, or 2026-01-31T12:00."
        ),
    ] = "",
    written_before: Annotated[
        str, typer.Option("--written-before", metavar="TIME", help="Blocks written before then; in UTC unless it says.")
    ] = "",
    yes: Yes = False,
) -> None:
    """Remove many blocks of an instance at once: all of them, or those written in a period of time."""
    with exit_on_call_errors():
        by_time = bool(written_from or written_before)
        if everything + metadata_only + by_time != 1:
            raise InvalidArgumentError("give one of --all, --metadata-only, and --written-from with --written-before")
        request = meta_pb.TrimCacheRequest(instance_id=instance)
        if by_time:
            request.strategy = meta_pb.TS_TIMESTAMP
            request.begin_timestamp = _seconds("--written-from", written_from) if written_from else 0
            end = _seconds("--written-before", written_before) if written_before else int(time.time()) + 1
            request.end_timestamp = end
        else:
            request.strategy = meta_pb.TS_REMOVE_ALL_CACHE if everything else meta_pb.TS_REMOVE_ALL_META
        what = "blocks of that time" if by_time else "all blocks" if everything else "the metadata of all blocks"
        confirm(f"Remove {what} of instance {instance}?", yes=yes)
        with spinner("removing blocks"):
            connection.data().call("TrimCache", request, meta_pb.CommonResponse, _LONG_SECONDS)


_LONG_SECONDS = 600.0


def _seconds(option: str, text: str) -> int:
    try:
        found = int(text) if text.isdecimal() else _parsed(text)
    except ValueError:
        raise InvalidArgumentError(
            f"{option} is {text[:40]!r}, must be unix seconds or as in 2026-01-31T12:00"
        ) from None
    if not 0 <= found <= _MOST_SECONDS:
        raise InvalidArgumentError(f"{option} is {text[:40]!r}, must be from 1970 to 2038")
    return found


def _parsed(text: str) -> int:
    moment = datetime.fromisoformat(text)
    return int((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp())
