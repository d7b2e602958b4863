"""The calls of kvcm.v1.ResidencyService: reports of what engines hold, and scores for routers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvcm.cache.manager import CacheManager
from kvcm.model.errors import InvalidArgumentError, NotReadyError, StorageIOError, UnsupportedError
from kvcm.model.instances import Instance
from kvcm.model.key_schemes import KVCM, KeyScheme, block_keys
from kvcm.model.keys import mixed_array
from kvcm.model.locations import encode_varint
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.registry.assignment import Assignment
from kvcm.registry.validation import require
from kvcm.residency.block_holders import ALL_PARTS, Medium
from kvcm.residency.residency import (
    Change,
    Engine,
    InstanceResidency,
    Report,
    ReporterState,
    Residency,
    SnapshotPart,
)
from kvcm.residency.scoring import Costs, Estimates, estimate
from kvcm.service.calls import Call, Reply, instance_call
from kvcm.service.meta_api import node_endpoint
from kvcm.service.request_limits import MAX_ENTRIES, MAX_NAME_BYTES, RequestLimits

__all__ = ["REPORTER_STATES", "ResidencyApi", "keys_of_tokens"]

_SERVICE: Final = "kvcm.v1.ResidencyService"
_KEY_BYTES: Final = 8
_MOST_KEYS: Final = 8192  # of a report: it takes effect in one step of some milliseconds
_MOST_TURNS: Final = 16  # between blocks that only engines hold and those that only storages hold; then all are read
_MOST_CHANGES: Final = 64  # of a report: each is an operation of its own
_MOST_STREAM: Final = 64
_MOST_RANK: Final = 65_535
_TOKENS_ON_LOOP: Final = 16_384  # some milliseconds; more are hashed in a thread, beside other requests
_BLOCKS_ON_LOOP: Final = 1024  # each is hashed by itself
_NO_KEYS: Final = np.zeros(0, np.int64)


class ResidencyApi:
    """Handlers of ResidencyService.

    Args:
        cache: blocks in storages.
        residency: blocks in engines' own memory.
        limits: sizes of requests.
        costs: that estimates use where a request names none.
        assignment: of instances to managers; None announces no managers.
    """

    def __init__(
        self,
        cache: CacheManager,
        residency: Residency,
        limits: RequestLimits,
        *,
        costs: Costs,
        assignment: Assignment | None = None,
    ) -> None:
        self._assignment = assignment if assignment is not None else Assignment("", {})
        self._cache = cache
        self._residency = residency
        self._limits = limits
        self._costs = costs

    def calls(self) -> list[Call]:
        """Return every call of the service."""

        call = partial(instance_call, _SERVICE)
        return [
            call("ReportResidency", pb.ReportResidencyRequest, pb.ReportResidencyResponse, self.report),
            call("Score", pb.ScoreRequest, pb.ScoreResponse, self.score),
            call("ListReporters", pb.ListReportersRequest, pb.ListReportersResponse, self.list_reporters),
        ]

    async def report(self, request: Any) -> Reply:
        """Answer ReportResidency. A report takes effect as a whole, or is refused and changes nothing."""
        instance = self._cache.cache(request.instance_id).instance
        report = self._report_of(request, instance)
        result = self._residency.open(instance).report(report)
        managers = () if request.changes else self._assignment.managers_of(instance.instance_id)
        return Reply(
            pb.ReportResidencyResponse(
                managers=map(node_endpoint, managers),
                node_id="" if request.changes else self._assignment.node_id,
                applied_sequence=result.applied_sequence,
                snapshot_required=result.snapshot_required,
                timeout_ms=int(self._residency.limits.timeout_seconds * 1000),
                resident_blocks=result.resident_blocks,
            )
        )

    def _report_of(self, request: Any, instance: Instance) -> Report:
        _check_engine("ReportResidency.engine", request.engine)
        if not 0 <= request.rank <= _MOST_RANK:
            raise InvalidArgumentError(f"ReportResidency.rank is {request.rank}, must be from 0 to {_MOST_RANK}")
        stream = request.stream
        if not (1 <= len(stream) <= _MOST_STREAM and stream.isascii() and stream.isprintable()):
            raise InvalidArgumentError(
                f"ReportResidency.stream is {stream[:_MOST_STREAM]!r}, must be 1 to {_MOST_STREAM} printable "
                "characters of ASCII: a random id of the reporter's run"
            )
        require(request.sequence, "ReportResidency.sequence", "must be at least 1")
        if request.stopped and (request.changes or request.HasField("snapshot")):
            raise InvalidArgumentError("ReportResidency.stopped: such a report has no changes and no snapshot")
        snapshot = None
        if request.HasField("snapshot"):
            snapshot = SnapshotPart(request.snapshot.first, request.snapshot.last)
        return Report(
            Engine(request.engine, request.rank),
            stream,
            request.sequence,
            self._changes_of(request, instance),
            snapshot=snapshot,
            stopped=request.stopped,
            key_scheme=_scheme_of(request, instance),
        )

    def _changes_of(self, request: Any, instance: Instance) -> list[Change]:
        if len(request.changes) > _MOST_CHANGES:
            raise InvalidArgumentError(
                f"ReportResidency.changes has {len(request.changes)} entries, at most {_MOST_CHANGES} are allowed: "
                "join those of one medium"
            )
        changes = [
            _change_of(change, f"ReportResidency.changes[{position}]", instance)
            for position, change in enumerate(request.changes)
        ]
        if request.HasField("snapshot") and any(change.cleared or len(change.removed) for change in changes):
            raise InvalidArgumentError("ReportResidency.changes: the part of a snapshot can only add keys")
        keys = sum(len(change.added) + len(change.removed) for change in changes)
        most = min(_MOST_KEYS, self._limits.max_keys)
        if keys > most:
            raise InvalidArgumentError(
                f"ReportResidency.changes has {keys} keys, at most {most} are allowed: send several reports"
            )
        return changes

    async def score(self, request: Any) -> Reply:
        """Answer Score. An instance that nothing was reported of is no error: its storages may hold the prompt."""
        cache = self._cache.cache(request.instance_id)
        instance, residency = cache.instance, self._residency.view(cache.instance)
        keys = await _keys_of(request, residency, self._limits.max_keys)
        engines = _candidates(request, residency)
        costs = _costs_of(request.costs, self._costs)
        stored = await self.stored(cache, keys, residency)
        prefixes = residency.prefixes(keys, engines, stored if stored.any() else None)
        block_tokens = residency.block_tokens
        prompt_tokens = _prompt_tokens(request, len(keys) * block_tokens)
        estimates = estimate(
            prefixes,
            prompt_tokens=prompt_tokens,
            block_tokens=block_tokens,
            bytes_per_token=instance.block_bytes / block_tokens,
            costs=costs,
        )
        tokens = np.stack(prefixes) * block_tokens
        message = pb.ScoreResponse(
            storage_tokens=_leading(stored) * block_tokens, prompt_tokens=prompt_tokens, block_tokens=block_tokens
        )
        is_complete = [residency.is_complete(engine) for engine in engines]
        return Reply(message, _encoded(engines, tokens, estimates, is_complete))

    async def stored(self, cache: Any, keys: NDArray[np.int64], residency: InstanceResidency) -> NDArray[np.bool_]:
        """Return which blocks can be read from storages, as far as it counts for a prefix.

        Behind a block that lies in no storage, others count only for engines that hold this one: so the lookup goes on
        as long as some engine holds what storages lack, and no further. A prompt of strangers costs one prefix match.
        """
        wanted = keys.tolist()
        stored = np.zeros(len(wanted), np.bool_)
        try:
            end = await self._mark(cache, wanted, stored, 0)
            for _ in range(_MOST_TURNS):
                run = residency.held_run(keys[end:])
                if not run:
                    return stored
                between = wanted[end + 1 : end + run]
                answers = await self._cache.answers(cache, between, stop_at_miss=False) if between else ()
                stored[end + 1 : end + run] = [answer is not None for answer in answers]
                end = await self._mark(cache, wanted, stored, end + run)
            answers = await self._cache.answers(cache, wanted[end:], stop_at_miss=False)
            stored[end:] = [answer is not None for answer in answers]
        except (NotReadyError, StorageIOError):
            pass  # storages that cannot be read hold nothing for now; engines' memory still counts
        return stored

    async def _mark(self, cache: Any, keys: Sequence[int], stored: NDArray[np.bool_], start: int) -> int:
        """Mark the blocks from a position on that storages hold without a gap, and return their end."""
        if start >= len(keys):
            return start
        end = start + len(await self._cache.answers(cache, keys[start:], stop_at_miss=True))
        stored[start:end] = True
        return end

    async def list_reporters(self, request: Any) -> Reply:
        """Answer ListReporters."""
        residency = self._residency.view(self._cache.cache(request.instance_id).instance)
        reporters = [
            pb.Reporter(
                engine=status.engine.address,
                rank=status.engine.rank,
                state=REPORTER_STATES[status.state],
                sequence=status.sequence,
                quiet_ms=int(status.quiet_seconds * 1000),
                media=[
                    pb.MediumBlocks(medium=_WIRE_MEDIA[medium], blocks=blocks)
                    for medium, blocks in sorted(status.blocks.items())
                ],
                gaps=status.gaps,
            )
            for status in residency.reporters()
        ]
        return Reply(
            pb.ListReportersResponse(reporters=reporters, memory_bytes=residency.memory_bytes, blocks=residency.blocks)
        )


def _scheme_of(request: Any, instance: Instance) -> KeyScheme | None:
    if not request.HasField("key_scheme"):
        return None
    given = request.key_scheme
    try:
        scheme = KeyScheme(given.algorithm, given.root, given.mask, given.block_tokens)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"ReportResidency.key_scheme.{error}") from None
    if instance.block_size not in {0, scheme.block_tokens}:
        raise InvalidArgumentError(
            f"ReportResidency.key_scheme.block_tokens is {scheme.block_tokens}, must be {instance.block_size}, the "
            f"block_size of instance {instance.instance_id!r}"
        )
    return scheme


def _change_of(change: Any, field: str, instance: Instance) -> Change:
    if change.medium not in _MEDIA:
        allowed = ", ".join(f"MEDIUM_{medium.name}" for medium in Medium)
        raise InvalidArgumentError(f"{field}.medium is {change.medium}, must be one of {allowed}")
    part = change.spec_name
    if part != ALL_PARTS and part not in instance.spec_names:
        raise InvalidArgumentError(
            f"{field}.spec_name is {part[:MAX_NAME_BYTES]!r}, must be empty or one of the instance's "
            f"location_spec_infos: {', '.join(instance.spec_names[:MAX_ENTRIES])}"
        )
    removed = _keys_in(change.removed_keys, f"{field}.removed_keys")
    return Change(
        _MEDIA[change.medium], part, change.cleared, removed, _keys_in(change.added_keys, f"{field}.added_keys")
    )


_MEDIA: Final = {int(medium): medium for medium in Medium}
_WIRE_MEDIA: Final = {Medium.GPU: pb.MEDIUM_GPU, Medium.HOST: pb.MEDIUM_HOST, Medium.DISK: pb.MEDIUM_DISK}
REPORTER_STATES: Final = {
    ReporterState.COMPLETE: pb.REPORTER_COMPLETE,
    ReporterState.PARTIAL: pb.REPORTER_PARTIAL,
    ReporterState.QUIET: pb.REPORTER_QUIET,
}


def _keys_in(data: bytes, field: str) -> NDArray[np.int64]:
    if not data:
        return _NO_KEYS
    if len(data) % _KEY_BYTES:
        raise InvalidArgumentError(f"{field} has {len(data)} bytes, must have {_KEY_BYTES} for each key")
    return mixed_array(np.frombuffer(data, "<i8"))


def _check_engine(field: str, engine: str) -> None:
    size = len(engine.encode())
    if not 1 <= size <= MAX_NAME_BYTES or not engine.isprintable() or "#" in engine:
        raise InvalidArgumentError(
            f"{field} is {engine[:MAX_NAME_BYTES]!r}, must be 1 to {MAX_NAME_BYTES} bytes without control characters "
            "and '#': host:port, as routers call the engine"
        )


async def _keys_of(request: Any, residency: InstanceResidency, most_keys: int) -> NDArray[np.int64]:
    if request.event_hashes and (request.block_keys or request.token_ids):
        raise InvalidArgumentError(
            "Score.event_hashes: block_keys or token_ids are given, too, must be one of the three"
        )
    if request.block_keys:
        return mixed_array(request.block_keys)
    require(request.event_hashes or request.token_ids, "Score.block_keys and token_ids", "is required: one of the two")
    scheme, instance = residency.key_scheme, residency.instance
    if scheme is None and residency.has_own_reporters:
        raise NotReadyError(
            f"no reporter of instance {instance.instance_id!r} has named its key_scheme since this manager started: "
            "try again, or give block_keys"
        )
    if request.event_hashes:
        return _keys_of_events(request.event_hashes, scheme)
    if scheme is None:
        if instance.block_size <= 0:
            raise InvalidArgumentError(
                f"Score.token_ids: instance {instance.instance_id!r} has block_size {instance.block_size}, and no "
                "reporter has named a key_scheme: give block_keys"
            )
        scheme = KeyScheme(KVCM, b"", 0, instance.block_size)
    return mixed_array(await keys_of_tokens("Score", request, scheme, most_keys))


async def keys_of_tokens(call: str, request: Any, scheme: KeyScheme, most_keys: int) -> NDArray[np.int64]:
    """Return the keys of a request's `token_ids` with its `cache_salt`.

    Args:
        call: its name, for errors.
        request: a Score or MatchModel.
        scheme: of the engines.
        most_keys: that a request may have.

    Raises:
        InvalidArgumentError: there are more, a value is no token, or keys of the scheme have no salt.
        UnsupportedError: the algorithm needs a package that is not installed.
    """
    tokens = list(request.token_ids)
    blocks = len(tokens) // scheme.block_tokens
    if blocks > most_keys:
        raise InvalidArgumentError(
            f"{call}.token_ids has {len(tokens)} tokens, which are {blocks} blocks, at most {most_keys} are allowed"
        )
    if len(tokens) <= _TOKENS_ON_LOOP and blocks <= _BLOCKS_ON_LOOP:
        keys = block_keys(scheme, tokens, request.cache_salt)
    else:
        keys = await asyncio.to_thread(block_keys, scheme, tokens, request.cache_salt)
    return np.array(keys, np.int64)


def _keys_of_events(hashes: Sequence[int], scheme: KeyScheme | None) -> NDArray[np.int64]:
    if scheme is None:  # reporters of events alone, whose keys are the hashes
        return mixed_array(hashes)
    if not scheme.has_keys_in_events:
        raise UnsupportedError(
            f"Score.event_hashes: hashes in events of algorithm {scheme.algorithm} have not the bits of block keys; "
            "give token_ids or block_keys"
        )
    return mixed_array(np.array(hashes, np.int64) ^ scheme.mask)


def _candidates(request: Any, residency: InstanceResidency) -> list[Engine]:
    addresses = list(request.engines)
    for position, address in enumerate(addresses):
        if not residency.has_reporter_of(address):
            _check_engine(f"Score.engines[{position}]", address)
    return residency.engines(addresses)


def _costs_of(message: Any, defaults: Costs) -> Costs:
    values = {}
    for name in Costs.__dataclass_fields__:
        value = getattr(message, name)
        if not 0 <= value < float("inf"):  # not a number is neither
            raise InvalidArgumentError(f"Score.costs.{name} is {value}, must be a number >= 0; 0 = as configured")
        values[name] = value or getattr(defaults, name)
    return Costs(**values)


def _prompt_tokens(request: Any, of_blocks: int) -> int:
    given = request.prompt_tokens
    if given < 0:
        raise InvalidArgumentError(f"Score.prompt_tokens is {given}, must be at least 0")
    of_tokens = 0 if request.block_keys else len(request.token_ids)
    return max(int(given), of_tokens, of_blocks)


def _encoded(
    engines: Sequence[Engine], tokens: NDArray[np.int64], estimates: Estimates, is_complete: Sequence[bool]
) -> list[bytes]:
    """Return the scores as fields of the answer, best first. Many engines have the same, which is encoded once."""
    peers = _peers(tokens[2])
    columns = *tokens.tolist(), *(seconds.tolist() for seconds in estimates), is_complete, peers
    rows = list(zip(*columns, strict=True))
    same: dict[tuple[Any, ...], bytes] = {}
    chunks = []
    for place in np.argsort(-estimates.saved, kind="stable").tolist():
        row, engine = rows[place], engines[place]
        behind = same.get(row)
        if behind is None:
            behind = same[row] = _encoded_values(row, engines, tokens[2])
        name = engine.address.encode()
        rank = b"\x10" + encode_varint(engine.rank) if engine.rank else b""
        body = b"".join((b"\x0a", encode_varint(len(name)), name, rank, behind))
        chunks.append(b"".join((b"\x12", encode_varint(len(body)), body)))
    return chunks


def _encoded_values(row: Sequence[Any], engines: Sequence[Engine], on_disk: NDArray[np.int64]) -> bytes:
    gpu, host, disk, joint, load, compute, saved, is_complete, peer = row
    message = pb.EngineScore(
        gpu_tokens=gpu,
        host_tokens=host,
        disk_tokens=disk,
        storage_tokens=joint,
        load_seconds=load,
        compute_seconds=compute,
        score=saved,
        is_complete=is_complete,
    )
    if peer >= 0:
        message.best_peer, message.best_peer_tokens = engines[peer].address, int(on_disk[peer])
    return message.SerializeToString()


def _peers(tokens: NDArray[np.int64]) -> list[int]:
    """Return for each engine the other one that holds the most, -1 where no other holds anything."""
    if len(tokens) < 2:
        return [-1] * len(tokens)
    first, second = np.argsort(-tokens, kind="stable")[:2].tolist()
    peers = np.full(len(tokens), first if tokens[first] else -1)
    peers[first] = second if tokens[second] else -1
    found: list[int] = peers.tolist()
    return found


def _leading(stored: NDArray[np.bool_]) -> int:
    return len(stored) if stored.all() else int(stored.argmin())
