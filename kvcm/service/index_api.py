"""The calls behind the index API (RFC 1403): matches of a prompt over all instances of a model, and publishers.

A prompt is matched in one way for every dialect; `kvcm.residency.index_dialects` writes the answers down. What a
principal does not cover is not there for it: instances of other groups match nothing, and their publishers are neither
listed nor in the way.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcm.cache.instance_cache import InstanceCache
from kvcm.cache.manager import CacheManager
from kvcm.model.errors import InvalidArgumentError, UnknownInstanceError, UnsupportedError
from kvcm.model.instances import Instance
from kvcm.model.key_schemes import KVCM, SGLANG_SHA256, KeyScheme, vllm_root
from kvcm.model.keys import mixed_array
from kvcm.model.principals import Principal, call_context
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.registry.registry import Registry
from kvcm.registry.validation import require
from kvcm.residency.publishers import HashProfile, Publisher, PublisherRegistry
from kvcm.residency.residency import Engine, InstanceResidency, ReporterState, Residency
from kvcm.residency.tier_walk import TierWalk, windows
from kvcm.service.calls import Call, Plane, Reply
from kvcm.service.request_limits import RequestLimits
from kvcm.service.residency_api import REPORTER_STATES, keys_of_tokens

__all__ = ["IndexApi", "StoredBlocks"]

_SERVICE: Final = "kvcm.v1.ResidencyService"
_MOST_INSTANCES: Final = 64  # of a query: each is a prefix match of its own
_STORE: Final = "Mooncake"  # publishes the blocks of a store, and serves no requests

Keys = NDArray[np.int64]


class StoredBlocks(Protocol):
    """Which blocks of a prompt lie in storages."""

    async def stored(self, cache: InstanceCache, keys: Keys, residency: InstanceResidency) -> NDArray[np.bool_]:
        """Return it for each block, as far as it counts for a prefix."""


class IndexApi:
    """Handlers of the calls.

    Args:
        cache: blocks in storages.
        registry: of instances and groups.
        residency: blocks in engines' own memory.
        storages: of a prompt's blocks.
        limits: of keys and tokens.
        run_id: names this run of the manager.
        manager: this one: where it serves.
    """

    def __init__(
        self,
        cache: CacheManager,
        registry: Registry,
        residency: Residency,
        storages: StoredBlocks,
        limits: RequestLimits,
        *,
        run_id: str,
        manager: str,
    ) -> None:
        self._cache = cache
        self._registry = registry
        self._residency = residency
        self._storages = storages
        self._limits = limits
        self._publishers = PublisherRegistry()
        self._run_id, self._manager = run_id, manager

    def calls(self) -> list[Call]:
        """Return every call."""

        def call(name: str, handler: Any) -> Call:
            return Call(
                service=_SERVICE,
                name=name,
                plane=Plane.DATA,
                request_type=getattr(pb, f"{name}Request"),
                response_type=getattr(pb, f"{name}Response"),
                handler=handler,
            )

        return [
            call("MatchModel", self.match_model),
            call("RegisterPublisher", self.register),
            call("UnregisterPublisher", self.unregister),
            call("DescribeIndex", self.describe),
        ]

    # Matches.

    async def match_model(self, request: Any) -> Reply:
        """Answer MatchModel. An instance without reporters has no ranks, which is no error."""
        require(request.model_name, "MatchModel.model_name", "is required")
        if request.block_size < 0:
            raise InvalidArgumentError(f"MatchModel.block_size is {request.block_size}, must be at least 0")
        residencies, publishers = self._residencies_of(request), self._publishers_of(request)
        if not residencies and not publishers:
            raise UnknownInstanceError(
                f"no instance of model {request.model_name!r} is registered with such a group, adapter and block_size"
            )
        message = pb.MatchModelResponse()
        known: dict[KeyScheme, Keys] = {}
        for residency in residencies:
            keys = await self._keys(request, residency, known)
            await self._match(message, keys, residency, request.engine)
            await asyncio.sleep(0)
        _add_publishers(message, publishers)
        message.ranks.sort(key=lambda each: (each.engine, each.rank, each.instance_id))
        return Reply(message)

    def _residencies_of(self, request: Any) -> list[InstanceResidency]:
        """Return those of the instances that are asked.

        Raises:
            InvalidArgumentError: they are too many. They are counted first: to view one makes something.
        """
        if request.HasField("lora_id"):
            return []  # adapters have names here
        instances = [
            each
            for each in self._visible(request.instance_group, request.model_name)
            if each.model_deployment.lora_name == request.lora_name
            and (not request.block_size or each.block_size in {0, request.block_size})
        ]
        if len(instances) > _MOST_INSTANCES:
            raise InvalidArgumentError(
                f"MatchModel.model_name: {len(instances)} instances are of model {request.model_name!r}, at most "
                f"{_MOST_INSTANCES} are matched at a time: give instance_group, or the id of an instance"
            )
        residencies = map(self._residency.view, instances)
        return [each for each in residencies if request.block_size in {0, each.block_tokens}]

    def _publishers_of(self, request: Any) -> list[Publisher]:
        """Return the registered ranks of a model: they are listed without hits, too."""
        return [
            each
            for each in self._publishers.all(self._groups(request.instance_group))
            if (each.model_name, each.lora_name) == (request.model_name, request.lora_name)
            and each.type != _STORE
            and request.block_size in {0, each.block_size}
            and request.engine in {"", each.engine}
            and not request.HasField("lora_id")
        ]

    def _visible(self, group: str, model_name: str) -> Iterator[Instance]:
        principal = call_context.get().principal
        for instance in self._registry.instances.all(group):
            if model_name in {"", instance.instance_id, instance.model_deployment.model_name} and principal.covers(
                instance.instance_group_name
            ):
                yield instance

    async def _keys(self, request: Any, residency: InstanceResidency, known: dict[KeyScheme, Keys]) -> Keys:
        """Return the mixed keys of a prompt, none where they cannot be known: that matches nothing."""
        scheme = _scheme_of(residency)
        if not request.token_ids:
            # Hashes cover a salt already, but whether these do is not known.
            return _NO_KEYS if request.cache_salt else _keys_of_hashes(request.block_hashes, scheme)
        if scheme is None or (request.cache_salt and scheme.algorithm == KVCM):
            return _NO_KEYS
        plain = replace(scheme, mask=0)  # instances of one model differ in their masks, and hashing takes long
        if plain not in known:
            try:
                known[plain] = await keys_of_tokens("MatchModel", request, plain, self._limits.max_keys)
            except UnsupportedError:
                known[plain] = _NO_KEYS
        return mixed_array(known[plain] ^ scheme.mask)

    async def _match(self, message: Any, keys: Keys, residency: InstanceResidency, only: str) -> None:
        engines = [each for each in residency.engines() if only in {"", each.address}]
        if not engines:
            return
        cache = self._cache.cache(residency.instance.instance_id)
        stored = await self._storages.stored(cache, keys, residency) if len(keys) else np.zeros(0, np.bool_)
        walk = TierWalk(len(engines))
        for window in windows(len(keys), len(engines)):
            residency.extend_walk(walk, keys[window], engines, stored[window])
            if not walk.is_going:
                break
            await asyncio.sleep(0)
        _add_ranks(message, walk, engines, residency, stored)

    # Publishers.

    async def register(self, request: Any) -> Reply:
        """Answer RegisterPublisher."""
        given = request.publisher
        if given.instance_group not in {"", request.instance_group}:
            raise InvalidArgumentError(
                f"RegisterPublisher.publisher.instance_group is {given.instance_group!r}, must be empty or "
                f"instance_group, which is {request.instance_group!r}"
            )
        group = _group_of("RegisterPublisher", request.instance_group)
        if group and self._registry.groups.find(group) is None:
            raise InvalidArgumentError(f"RegisterPublisher.instance_group: group {group!r} does not exist")
        try:
            publisher = _publisher_of(given, group)
        except InvalidArgumentError as error:
            path = f"RegisterPublisher.publisher.{error.field}"
            raise InvalidArgumentError(f"{path} {error.reason}", path, error.reason) from None
        self._publishers.register(publisher)
        instances = _InstancesByModel(self._registry.instances.all(group))
        return Reply(pb.RegisterPublisherResponse(publisher=self._message_of(publisher, instances)))

    async def unregister(self, request: Any) -> Reply:
        """Answer UnregisterPublisher: the registrations of one group alone are removed."""
        require(request.engine, "UnregisterPublisher.engine", "is required")
        removed = self._publishers.unregister(
            {_group_of("UnregisterPublisher", request.instance_group)},
            request.engine,
            rank=request.rank if request.HasField("rank") else None,
            model_name=request.model_name,
        )
        return Reply(pb.UnregisterPublisherResponse(publishers=[_plain_message_of(each) for each in removed]))

    async def describe(self, request: Any) -> Reply:
        """Answer DescribeIndex."""
        message = pb.DescribeIndexResponse(run_id=self._run_id, manager=self._manager)
        publishers = self._publishers.all(self._groups(request.instance_group))
        instances = _InstancesByModel(self._registry.instances.all(request.instance_group) if publishers else ())
        for count, publisher in enumerate(publishers, start=1):
            if request.model_name in {"", publisher.model_name}:
                message.publishers.append(self._message_of(publisher, instances))
            if count % _BATCH == 0:
                await asyncio.sleep(0)
        known = {each.instance.instance_id for each in self._residency.instances()}
        for instance in list(self._visible(request.instance_group, request.model_name)):
            if instance.instance_id in known:
                _add_context(message, self._residency.view(instance))
                await asyncio.sleep(0)
        return Reply(message)

    def _groups(self, group: str) -> _Groups:
        return _Groups(call_context.get().principal, group)

    def _message_of(self, publisher: Publisher, instances: _InstancesByModel) -> Any:
        """Return a publisher with its instance and its state."""
        message = _plain_message_of(publisher)
        found = [
            instance
            for instance in instances.find(publisher.group, publisher.model_name)
            if instance.model_deployment.lora_name == publisher.lora_name
            and instance.block_size in {0, publisher.block_size}
        ]
        named = [instance for instance in found if instance.instance_id == publisher.model_name]
        found = named or found
        message.state = pb.PUBLISHER_PENDING
        if len(found) == 1:
            message.instance_id = found[0].instance_id
            state = self._residency.view(found[0]).state_of(Engine(publisher.engine, publisher.rank))
            message.state = pb.PUBLISHER_PENDING if state is None else _PUBLISHER_STATES[state]
        else:
            what = "no instance is" if not found else f"{len(found)} instances are"
            message.problem = (
                f"{what} registered with model {publisher.model_name!r}, this adapter and block_size "
                f"{publisher.block_size}: there must be one"
            )
        return message


_BATCH: Final = 32
_NO_KEYS: Final = np.zeros(0, np.int64)
_PUBLISHER_STATES: Final = {
    ReporterState.COMPLETE: pb.PUBLISHER_ACTIVE,
    ReporterState.PARTIAL: pb.PUBLISHER_ACTIVE,
    ReporterState.QUIET: pb.PUBLISHER_QUIET,
}


class _InstancesByModel:
    """Instances by group and model: one listing of them serves all publishers of an answer."""

    def __init__(self, instances: Iterable[Instance]) -> None:
        self._found: defaultdict[tuple[str, str], list[Instance]] = defaultdict(list)
        for each in instances:
            for name in {each.instance_id, each.model_deployment.model_name}:
                self._found["", name].append(each)
                self._found[each.instance_group_name, name].append(each)

    def find(self, group: str, model_name: str) -> Sequence[Instance]:
        """Return the instances of a group, "" for any, whose model name or id that is, in their order."""
        return self._found.get((group, model_name), ())


def _group_of(call: str, given: str) -> str:
    """Return the group of a registration; "", of none, is left to principals that cover all.

    Raises:
        InvalidArgumentError: the principal has several groups, and the request of the call names none.
    """
    principal = call_context.get().principal
    if given or principal.has_all_groups:
        return given
    if len(principal.groups) != 1:
        raise InvalidArgumentError(f"{call}.instance_group is empty: name the instance group")
    return next(iter(principal.groups))


class _Groups:
    """The groups that a request is about: one, or all that its principal covers."""

    def __init__(self, principal: Principal, group: str) -> None:
        self._principal = principal
        self._group = group

    def __contains__(self, group: object) -> bool:
        assert isinstance(group, str)
        is_covered = self._principal.covers(group) if group else self._principal.has_all_groups
        return is_covered and self._group in {"", group}


def _scheme_of(residency: InstanceResidency) -> KeyScheme | None:
    scheme, instance = residency.key_scheme, residency.instance
    if scheme is None and not residency.has_own_reporters and instance.block_size > 0:
        return KeyScheme(KVCM, b"", 0, instance.block_size)
    return scheme


def _keys_of_hashes(hashes: Sequence[int], scheme: KeyScheme | None) -> Keys:
    """Return block keys of rolling hashes.

    SGLang's events have the 64 bits that its keys are made of, so that one XOR joins them (wire_later 5.3). vLLM's have
    other bits of the same hash than its keys: for it, the given numbers are block keys.
    """
    mask = scheme.mask if scheme is not None and scheme.algorithm == SGLANG_SHA256 else 0
    return mixed_array([each ^ mask for each in hashes])


def _add_ranks(
    message: Any,
    walk: TierWalk,
    engines: Sequence[Engine],
    residency: InstanceResidency,
    stored: NDArray[np.bool_],
) -> None:
    tokens, instance_id = residency.block_tokens, residency.instance.instance_id
    in_storages = (len(stored) if stored.all() else int(stored.argmin())) * tokens
    columns = [(each * tokens).tolist() for each in walk.matches()]
    for engine, *counts in zip(engines, *columns, strict=True):
        gpu, host, disk, matched, matched_gpu, matched_host, matched_disk = counts
        message.ranks.add(
            engine=engine.address,
            rank=engine.rank,
            gpu_tokens=gpu,
            host_tokens=host,
            disk_tokens=disk,
            matched_tokens=matched,
            matched_gpu_tokens=matched_gpu,
            matched_host_tokens=matched_host,
            matched_disk_tokens=matched_disk,
            storage_tokens=in_storages,
            block_size=tokens,
            instance_id=instance_id,
        )


def _add_publishers(message: Any, publishers: Sequence[Publisher]) -> None:
    """Add the ranks that are registered and do not report yet."""
    known = {(each.engine, each.rank) for each in message.ranks}
    for each in publishers:
        if (each.engine, each.rank) not in known:
            message.ranks.add(engine=each.engine, rank=each.rank, block_size=each.block_size)


def _add_context(message: Any, residency: InstanceResidency) -> None:
    instance = residency.instance
    engines = residency.engines()
    if not engines:
        return
    context = message.contexts.add(
        instance_id=instance.instance_id,
        instance_group=instance.instance_group_name,
        model_name=instance.model_deployment.model_name or instance.instance_id,
        lora_name=instance.model_deployment.lora_name,
        block_size=residency.block_tokens,
        blocks=residency.blocks,
    )
    scheme = residency.key_scheme
    if scheme is not None:
        context.key_scheme.algorithm, context.key_scheme.root = scheme.algorithm, scheme.root
        context.key_scheme.mask, context.key_scheme.block_tokens = scheme.mask, scheme.block_tokens
    for engine in engines:
        state = residency.state_of(engine)
        context.reporters.add(
            engine=engine.address,
            rank=engine.rank,
            state=REPORTER_STATES[state] if state is not None else pb.REPORTER_STATE_UNSPECIFIED,
        )


def _publisher_of(given: Any, group: str) -> Publisher:
    profile = None
    if given.HasField("hash_profile"):
        shown = given.hash_profile
        profile = HashProfile(shown.strategy, shown.algorithm, shown.python_hash_seed, shown.index_projection)
    return Publisher(
        group=group,
        model_name=given.model_name,
        engine=given.engine,
        rank=given.rank,
        endpoint=given.endpoint,
        block_size=given.block_size,
        replay_endpoint=given.replay_endpoint,
        lora_name=given.lora_name,
        type=given.type,
        hash_profile=profile,
    )


def _plain_message_of(publisher: Publisher) -> Any:
    message = pb.Publisher(
        engine=publisher.engine,
        rank=publisher.rank,
        instance_group=publisher.group,
        model_name=publisher.model_name,
        lora_name=publisher.lora_name,
        block_size=publisher.block_size,
        endpoint=publisher.endpoint,
        replay_endpoint=publisher.replay_endpoint,
        type=publisher.type,
    )
    if publisher.hash_profile is not None:
        profile = publisher.hash_profile
        message.hash_profile.strategy = profile.strategy
        message.hash_profile.algorithm = profile.algorithm
        message.hash_profile.python_hash_seed = profile.python_hash_seed
        message.hash_profile.index_projection = profile.index_projection
        message.hash_profile.root_digest = _root_digest(profile)
    return message


def _root_digest(profile: HashProfile) -> str:
    """Return the hash before the first block, "" where it cannot be made here. The seed is a text for vLLM, `random`,
    too."""
    try:
        return vllm_root(f"vllm-{profile.algorithm.replace('_', '-')}", profile.python_hash_seed).hex()
    except UnsupportedError:
        return ""
