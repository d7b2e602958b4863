"""`kvcm get` and `kvcm trim`: where the blocks of a prompt lie, and how to be rid of many."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Annotated, Any, NamedTuple

import typer

from kvcm.admin_client import AdminClient
from kvcm.commands.blocks_named import Prompt, instance_info
from kvcm.commands.completion import instance_ids
from kvcm.commands.connection import Connection
from kvcm.commands.options import AsJson, Yes, confirm, with_options
from kvcm.commands.shown import print_below, print_json, print_table, progress, waiting
from kvcm.model.errors import InvalidArgumentError
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol import meta_service_pb2 as meta_pb
from kvcm.refusals import asking
from kvcm.sizes import shown_size

__all__ = ["get", "trim"]

_PAGE_KEYS = 4096
_MISSING = "missing"
_MOST_SECONDS = (1 << 31) - 1

Instance = Annotated[str, typer.Argument(metavar="INSTANCE", help="Id of the instance.", autocompletion=instance_ids)]


class Block(NamedTuple):
    """A block as it lies in its best place; texts are empty where there is none.

    Attributes:
        state: serving, writing or missing.
        places: how many places it has.
        size_bytes: in the best of them.
        uri: of its first part there.
    """

    key: int
    state: str = _MISSING
    storage: str = ""
    places: int = 0
    size_bytes: int = 0
    uri: str = ""


class Run(NamedTuple):
    """Neighbouring blocks that lie alike; the first position counts from 0."""

    start: int
    blocks: list[Block]


@with_options
def get(connection: Connection, instance: Instance, prompt: Prompt, as_json: AsJson = False) -> None:
    """Show where the blocks of a prompt lie, and how much of it an engine could load.

    Looking is no access: what is evicted next stays as it is.
    """
    with asking():
        admin = connection.admin()
        block_size = instance_info(admin, instance).block_size
        keys = prompt.block_keys(block_size)
        with progress("blocks", len(keys)) as told:
            blocks = list(_looked_up(admin, instance, keys, told))
            matched = _matched(connection.data(), instance, keys)
    if as_json:
        print_json(_report(blocks, matched, block_size))
    else:
        _print_runs(blocks, matched, block_size)


def _looked_up(client: AdminClient, instance: str, keys: Sequence[int], told: Any) -> Iterator[Block]:
    for start in range(0, len(keys), _PAGE_KEYS):
        page = keys[start : start + _PAGE_KEYS]
        request = admin_pb.GetCacheMetaRequest(instance_id=instance, block_keys=page, detail_level=1)
        answer = client.call("GetCacheMeta", request, admin_pb.GetCacheMetaResponse)
        for key, text in zip(page, answer.metas, strict=True):
            yield _block(key, json.loads(text))
        told(start + len(page))


def _block(key: int, meta: dict[str, Any]) -> Block:
    places = meta.get("locations") or []
    if not places:
        return Block(key)
    best, parts = places[0], places[0]["location_specs"]
    state = best["status"].removeprefix("CLS_").lower()
    uri = parts[0]["uri"] if parts else ""
    return Block(key, state, best["storage"], len(places), int(best["size"]), uri)


def _matched(client: AdminClient, instance: str, keys: Sequence[int]) -> int:
    """Return the length of the prefix that can be read now, asked without that it counts as an access."""
    found = 0
    for start in range(0, len(keys), _PAGE_KEYS):
        page = keys[start : start + _PAGE_KEYS]
        request = meta_pb.GetCacheLocationLenRequest(
            instance_id=instance, block_keys=page, query_type=meta_pb.QT_PREFIX_MATCH, peek=True
        )
        length = client.call("GetCacheLocationLen", request, meta_pb.GetCacheLocationLenResponse).cache_location_len
        found += length
        if length < len(page):
            break
    return found


def _runs(blocks: Sequence[Block]) -> Iterator[Run]:
    start = 0
    for _, alike in groupby(blocks, key=lambda block: (block.state, block.storage, block.places)):
        run = list(alike)
        yield Run(start, run)
        start += len(run)


def _print_runs(blocks: Sequence[Block], matched: int, block_size: int) -> None:
    rows = []
    for start, run in _runs(blocks):
        last = start + len(run) - 1
        size = shown_size(sum(block.size_bytes for block in run))
        uris = run[0].uri if start == last else f"{run[0].uri}\n{run[-1].uri}".strip()
        rows.append(
            (f"{start:,}–{last:,}", f"{len(run):,}", run[0].state, run[0].storage, str(run[0].places), size, uris)
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
                "places": run[0].places,
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
    """Remove many blocks of an instance at once: all of them, or those written in a span of time."""
    with asking():
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
        with waiting("removing blocks"):
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
