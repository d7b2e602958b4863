"""What a client of the soak does: lookups of many sizes and kinds, writes that end in every way, removals, pins,
leases, questions of operators, and mistakes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

from service_client import key_of
from soak_talk import Answer

from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.protocol.kvcm.v1 import lease_service_pb2 as lease_pb
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pin_pb

__all__ = ["BLOCK_TOKENS", "GROUPS", "INSTANCES", "MARKER", "Actions", "registration"]

GROUPS = {"soak-one": 1, "soak-eight": 8}
"""Groups, each with one instance of its name whose blocks have so many parts."""

INSTANCES = tuple(GROUPS)
BLOCK_TOKENS = 4
PART_BYTES = 4096
MARKER = "soakclient"
"""In every name that a client makes up; none may become a label."""

_SIZES = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
_SIZE_WEIGHTS = (50, 50, 100, 300, 150, 120, 60, 40, 8, 2)
_CHAINS = 400
_LENGTH = 4096
_MODES = (pb.QT_PREFIX_MATCH, pb.QT_BATCH_GET, pb.QT_REVERSE_ROLL_SW_MATCH, pb.QT_PREFIX_MATCH_WITH_MAMBA)
_OK = frozenset({pb.OK})
_FULL = frozenset({pb.OK, pb.REACH_MAX_ENTITY_CAPACITY})  # quotas are small on purpose
_LATE = _FULL | {pb.SERVICE_NOT_READY}  # a session of a second may end before its blocks are stored
_SHORT = frozenset({pb.OK, pb.INVALID_ARGUMENT})  # a session without blocks lives no longer than it has to
_UNKNOWN = frozenset({pb.INSTANCE_NOT_EXIST})

Ask = Callable[[Any, frozenset[int]], Awaitable[Answer | None]]
"""Sends a request and says which codes are expected; None when there was no answer, or another code."""


def registration(instance: str, trace_id: str = "") -> pb.RegisterInstanceRequest:
    """Return the registration of an instance, always the same."""
    request = pb.RegisterInstanceRequest(
        trace_id=trace_id, instance_group=instance, instance_id=instance, block_size=BLOCK_TOKENS
    )
    request.model_deployment.model_name, request.model_deployment.dtype = "model", "bf16"
    for number in range(GROUPS[instance]):
        request.location_spec_infos.add(name=f"tp{number}", size=PART_BYTES)
    return request


class Actions:
    """What one client does.

    Args:
        number: of the client.
        random: chooses its next action.
        ask: sends a request on the data port.
        ask_admin: the same on the admin port.
    """

    def __init__(self, number: int, random: Random, ask: Ask, ask_admin: Ask) -> None:
        self._number, self._random = number, random
        self._ask, self._ask_admin = ask, ask_admin
        self._sent = 0
        self._actions: dict[Callable[[], Awaitable[None]], float] = {
            self._match: 44,
            self._count: 6,
            self._match_tokens: 4,
            self._match_leased: 6,
            self._write: 20,
            self._read_metas: 4,
            self._remove: 3,
            self._trim: 0.05,  # reads every block
            self._pin: 4,
            self._register: 2,
            self._operate: 4,
            self._mistake: 2,
        }

    async def next(self) -> None:
        """Do something."""
        (action,) = self._random.choices([*self._actions], [*self._actions.values()])
        await action()

    def _common(self) -> dict[str, str]:
        """Return a trace id of its own and an instance; one in five hundred asks for the timing tree."""
        self._sent += 1
        suffix = "__kvcm_need_span_tracer" if self._random.random() < 0.002 else ""
        trace_id = f"{MARKER}{self._number}-{self._sent}{suffix}"
        return {"trace_id": trace_id, "instance_id": self._random.choice(INSTANCES)}

    def _keys(self) -> list[int]:
        """Return the beginning of a prompt: few are asked for often, most seldom."""
        chain = min(_CHAINS - 1, int(self._random.paretovariate(0.6)))
        (count,) = self._random.choices(_SIZES, _SIZE_WEIGHTS)
        return [key_of((1 << 40) + chain * _LENGTH + position) for position in range(count)]

    async def _match(self) -> None:
        keys, random = self._keys(), self._random
        mode = random.choice(_MODES) if random.random() < 0.4 else pb.QT_PREFIX_MATCH
        request = pb.GetCacheLocationRequest(
            **self._common(), query_type=mode, block_keys=keys, peek=random.random() < 0.05
        )
        if mode == pb.QT_REVERSE_ROLL_SW_MATCH:
            request.sw_size = random.randint(1, min(64, len(keys)))
        if random.random() < 0.1:
            request.location_spec_names.append("tp0")
        if random.random() < 0.1:
            request.block_mask.offset = random.randrange(len(keys) + 1)
        elif random.random() < 0.05:
            request.block_mask.bool_masks.values.extend(random.random() < 0.5 for _ in keys)
        await self._ask(request, _OK)

    async def _count(self) -> None:
        await self._ask(
            pb.GetCacheLocationLenRequest(**self._common(), query_type=pb.QT_PREFIX_MATCH, block_keys=self._keys()), _OK
        )

    async def _match_tokens(self) -> None:
        tokens = range(self._random.randrange(100), 10_000)[: BLOCK_TOKENS * self._random.choice((4, 64, 1024))]
        await self._ask(
            pb.GetCacheLocationRequest(**self._common(), query_type=pb.QT_PREFIX_MATCH, token_ids=tokens), _OK
        )

    async def _match_leased(self) -> None:
        """Read with a lease, which is renewed and released, or left to its end."""
        common = self._common()
        lease_ms = self._random.choice((500, 20_000))
        found = await self._ask(
            pb.GetCacheLocationRequest(
                **common, query_type=pb.QT_PREFIX_MATCH, block_keys=self._keys(), read_lease_ms=lease_ms
            ),
            _OK,
        )
        lease_id = found.get("read_lease_id") if found is not None else ""
        if not lease_id or lease_ms < 1000 or self._random.random() < 0.3:
            return
        await self._ask(lease_pb.RenewReadLeaseRequest(**common, read_lease_id=lease_id, read_lease_ms=60_000), _OK)
        await self._ask(lease_pb.ReleaseReadLeaseRequest(**common, read_lease_id=lease_id), _OK)

    async def _write(self) -> None:
        """Write, and end it in one of all ways: wholly, partly, not at all, or by leaving it to its deadline."""
        common, keys, way = self._common(), self._keys(), self._random.random()
        is_left = way < 0.08
        started = await self._ask(
            pb.StartWriteCacheRequest(**common, block_keys=keys, write_timeout_seconds=1 if is_left else 300),
            _LATE if is_left else _FULL,
        )
        session_id = started.get("write_session_id") if started is not None else ""
        if started is None or not session_id or is_left:
            return
        blocks = started.count("locations")
        if way < 0.15 and blocks:
            await self._ask(
                lease_pb.RenewWriteSessionRequest(**common, write_session_id=session_id, write_timeout_seconds=300), _OK
            )
        finish = pb.FinishWriteCacheRequest(**common, write_session_id=session_id)
        if way < 0.3:
            finish.success_blocks.bool_masks.values.extend(self._random.random() < 0.7 for _ in range(blocks))
        else:
            finish.success_blocks.offset = 0 if way < 0.4 else blocks
        if self._random.random() < 0.2:
            finish.retention.priority, finish.retention.ttl_seconds = 10, 20
        await self._ask(finish, _OK if blocks else _SHORT)

    async def _read_metas(self) -> None:
        level = self._random.randrange(2)
        await self._ask(
            pb.GetCacheMetaRequest(**self._common(), block_keys=self._keys()[:512], detail_level=level), _OK
        )

    async def _remove(self) -> None:
        await self._ask(pb.RemoveCacheRequest(**self._common(), block_keys=self._keys()), _OK)

    async def _trim(self) -> None:
        request = pb.TrimCacheRequest(**self._common(), strategy=pb.TS_TIMESTAMP, begin_timestamp=1, end_timestamp=2)
        await self._ask(request, _OK)

    async def _pin(self) -> None:
        common = self._common()
        seconds = self._random.choice((1, 5))
        pinned = await self._ask(
            pin_pb.PinPrefixRequest(**common, block_keys=self._keys()[:256], owner=MARKER, ttl_seconds=seconds), _FULL
        )
        await self._ask(pin_pb.ListPinsRequest(**common), _OK)
        if pinned is not None and pinned.get("pin_id") and seconds > 1 and self._random.random() < 0.7:
            await self._ask(pin_pb.UnpinPrefixRequest(**common, pin_id=pinned.get("pin_id")), _OK)

    async def _register(self) -> None:
        common = self._common()
        await self._ask(registration(common["instance_id"], common["trace_id"]), _OK)
        await self._ask(pb.GetInstanceInfoRequest(**common), _OK)
        await self._ask(pb.GetClusterInfoRequest(trace_id=common["trace_id"]), _OK)

    async def _operate(self) -> None:
        trace_id, group = self._common().values()
        questions: Sequence[Any] = (
            admin_pb.GetMetricsRequest(trace_id=trace_id),
            admin_pb.ListStorageRequest(trace_id=trace_id),
            admin_pb.GetInstanceGroupRequest(trace_id=trace_id, name=group),
            admin_pb.ListInstanceInfoRequest(trace_id=trace_id, instance_group_name=group),
            admin_pb.CheckHealthRequest(trace_id=trace_id),
            capacity_pb.GetUsageRequest(trace_id=trace_id),
        )
        await self._ask_admin(self._random.choice(questions), _OK)

    async def _mistake(self) -> None:
        """Ask for an instance that there is not, under an unused name."""
        common = self._common() | {"instance_id": f"{MARKER}{self._number}-{self._sent}"}
        keys = self._keys()
        await self._ask(pb.GetCacheLocationRequest(**common, query_type=pb.QT_PREFIX_MATCH, block_keys=keys), _UNKNOWN)
        await self._ask(pb.StartWriteCacheRequest(**common, block_keys=keys), _UNKNOWN)
