"""Replays traces as the original optimizer does, and writes what it writes (wire.md 12)."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.uri import check_name, path_component
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.groups.engine import Numbering
from kvcm.optimizer.trace import Int32Column, QueryMode, Trace
from kvcm.reclaim.policies import LeafLru, Lru

__all__ = [
    "HEADER",
    "POLICIES",
    "Fields",
    "OriginalCache",
    "OriginalConfig",
    "OriginalGroup",
    "OriginalInstance",
    "OriginalReplay",
    "OriginalStorage",
    "Row",
    "write_original_csv",
]

# Reads fields of a JSON document one by one, and rejects the first invalid one with the reason.

_MISSING = object()


class Fields:
    """An object of a document.

    Args:
        path: where it stands, "" for the document itself.
        value: what stands there.

    Raises:
        OptionError: it is no object.
    """

    def __init__(self, path: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise OptionError(f"{path or 'config'}: {_quoted(value)}; allowed: an object")
        self._path = path
        self._values: Mapping[str, Any] = value

    def text(self, name: str, *, allowed: Sequence[str] = (), default: str | None = None) -> str:
        """Return a text, one of those allowed.

        Raises:
            OptionError: it is none.
        """
        value = self._get(name, default)
        if not isinstance(value, str) or (allowed and value not in allowed):
            raise self._error(name, value, ", ".join(allowed) or "a text")
        return value

    def whole(self, name: str, least: int, most: int, *, default: int | None = None) -> int:
        """Return a whole number within bounds.

        Raises:
            OptionError: it is none.
        """
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._error(name, value, f"a whole number from {least} to {most}")
        return value

    def ratio(self, name: str, *, default: float | None = None, above_zero: bool = False) -> float:
        """Return a number from 0 to 1.

        Raises:
            OptionError: it is none.
        """
        value = self._get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= 1 or (above_zero and not value):
            raise self._error(name, value, "a number above 0 up to 1" if above_zero else "a number from 0 to 1")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return true or false.

        Raises:
            OptionError: it is neither.
        """
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._error(name, value, "true, false")
        return value

    def child(self, name: str, *, default: Mapping[str, Any] | None = None) -> Fields:
        """Return an object.

        Raises:
            OptionError: it is none.
        """
        return Fields(self._at(name), self._get(name, default))

    def children(self, name: str) -> Iterator[Fields]:
        """Yield the objects of a list that has at least one.

        Raises:
            OptionError: it is no such list.
        """
        values = self._get(name, None)
        if not isinstance(values, list) or not values:
            raise self._error(name, values, "a list of at least one object")
        for place, value in enumerate(values):
            yield Fields(f"{self._at(name)}[{place}]", value)

    def _get(self, name: str, default: object) -> Any:
        value = self._values.get(name, _MISSING if default is None else default)
        if value is _MISSING:
            raise OptionError(f"{self._at(name)}: missing; it has to be there")
        return value

    def _at(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _error(self, name: str, value: object, allowed: str) -> OptionError:
        return OptionError(f"{self._at(name)}: {_quoted(value)}; allowed: {allowed}")


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# The configuration of the original optimizer: read from its JSON document, or made from plain options.

_TRACE_TYPES = ("qwen_bailian", "publisher_log", "optimizer_schema")
POLICIES = ("lru", "random_lru", "leaf_aware_lru")
_OURS = {"leaf_lru": "leaf_aware_lru"}
_MODES = {1: "group-rough", 2: "instance-rough", 3: "instance-precise"}
_DEFAULT_RATE = 0.1
_MOST_BLOCKS = 1 << 53


@dataclass(frozen=True, slots=True)
class OriginalInstance:
    """An instance.

    Attributes:
        instance_id: as the trace calls it.
        block_size: tokens per block.
        policy: one of `POLICIES`.
        sample_rate: of `random_lru`: victims over blocks that are sampled for them.
    """

    instance_id: str
    block_size: int = 16
    policy: str = "lru"
    sample_rate: float = _DEFAULT_RATE


@dataclass(frozen=True, slots=True)
class OriginalStorage:
    """A tier; only the capacity of the first has an effect, and only with hierarchical eviction.

    Attributes:
        unique_name, storage_type: for people.
        band_width_mbps: of no effect.
        priority: the lowest is the first tier.
        capacity: in blocks.
    """

    unique_name: str
    storage_type: str
    band_width_mbps: int
    priority: int
    capacity: int


@dataclass(frozen=True, slots=True)
class OriginalGroup:
    """A group.

    Attributes:
        group_name: for people.
        quota_capacity: in blocks.
        used_percentage: part of the capacity that is used.
        instances: of the group.
        hierarchical: whether the capacity is that of the first tier.
        storages: its tiers, the first one first.
    """

    group_name: str
    quota_capacity: int
    used_percentage: float
    instances: tuple[OriginalInstance, ...]
    hierarchical: bool = False
    storages: tuple[OriginalStorage, ...] = ()

    @property
    def limit(self) -> int:
        """Return the blocks above which is evicted. The product is one of floats, as it is there."""
        capacity = self.storages[0].capacity if self.hierarchical and self.storages else self.quota_capacity
        return math.floor(capacity * self.used_percentage)


@dataclass(frozen=True, slots=True)
class OriginalConfig:
    """The whole document.

    Attributes:
        groups: with their instances.
        eviction_mode: 1 group-rough, 2 instance-rough, 3 instance-precise.
        batch_size: blocks that one eviction takes of an instance, in modes 1 and 2.
        trace_file_path: where the trace lies; "" where the options are plain.
        trace_type: one of `_TRACE_TYPES`; "" where the options are plain: then all of a trace is replayed.
        output_result_path: folder of the results; "" where the options are plain.
    """

    groups: tuple[OriginalGroup, ...]
    eviction_mode: int = 3
    batch_size: int = 0
    trace_file_path: str = ""
    trace_type: str = ""
    output_result_path: str = ""

    @property
    def instances(self) -> tuple[OriginalInstance, ...]:
        """Return the instances of all groups."""
        return tuple(instance for group in self.groups for instance in group.instances)

    @property
    def block_sizes(self) -> dict[str, int]:
        """Return the tokens per block of each instance, as readers of traces ask for them."""
        return {instance.instance_id: instance.block_size for instance in self.instances}

    @classmethod
    def parse(cls, document: str | bytes) -> OriginalConfig:
        """Read the document of the original. Fields that it does not know are ignored, as they are there.

        Raises:
            OptionError: naming the first field that is not as it should be.
        """
        try:
            value = json.loads(document)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"config: {error}; allowed: a JSON document") from error
        fields = Fields("", value)
        mode, batch_size = _eviction(fields.child("eviction_params"))
        return cls(
            groups=tuple(_group(group) for group in fields.children("instance_groups")),
            eviction_mode=mode,
            batch_size=batch_size,
            trace_file_path=fields.text("trace_file_path"),
            trace_type=fields.text("trace_type", allowed=_TRACE_TYPES),
            output_result_path=fields.text("output_result_path"),
        ).checked()

    @classmethod
    def plain(cls, instance_ids: Sequence[str], capacity_blocks: int, *, policy: str = "lru") -> OriginalConfig:
        """Return one group of instances that use all of a capacity, evicted instance by instance, block by block.

        Args:
            instance_ids: of a trace.
            capacity_blocks: of the group.
            policy: one of `POLICIES`; `leaf_lru` is called `leaf_aware_lru` there.

        Raises:
            OptionError: naming the first option that is not as it should be.
        """
        instances = [
            {
                "instance_id": instance_id,
                "block_size": 16,
                "eviction_policy_type": _OURS.get(policy, policy),
            }
            for instance_id in instance_ids
        ]
        tier = {"unique_name": "pool", "storage_type": "file", "capacity": capacity_blocks}
        group = {
            "group_name": "group",
            "quota_capacity": capacity_blocks,
            "used_percentage": 1.0,
            "storages": [tier],
            "instances": instances,
        }
        return cls((_group(Fields("", group)),)).checked()

    def checked(self) -> OriginalConfig:
        """Return the same.

        Raises:
            OptionError: two instances have one name.
        """
        seen: set[str] = set()
        for instance in self.instances:
            if instance.instance_id in seen:
                raise OptionError(f"instance_id: {instance.instance_id!r} stands there twice; allowed: each name once")
            seen.add(instance.instance_id)
        return self


def _eviction(fields: Fields) -> tuple[int, int]:
    mode = fields.whole("eviction_mode", min(_MODES), max(_MODES))
    name, is_needed = "eviction_batch_size_per_instance", _MODES[mode].endswith("rough")
    return mode, fields.whole(name, 1 if is_needed else 0, _MOST_BLOCKS, default=None if is_needed else 0)


def _group(fields: Fields) -> OriginalGroup:
    storages = sorted((_storage(each) for each in fields.children("storages")), key=lambda storage: storage.priority)
    return OriginalGroup(
        group_name=fields.text("group_name"),
        quota_capacity=fields.whole("quota_capacity", 0, _MOST_BLOCKS),
        used_percentage=fields.ratio("used_percentage"),
        instances=tuple(_instance(each) for each in fields.children("instances")),
        hierarchical=fields.flag("hierarchical_eviction_enabled", default=False),
        storages=tuple(storages),
    )


def _storage(fields: Fields) -> OriginalStorage:
    return OriginalStorage(
        unique_name=fields.text("unique_name"),
        storage_type=fields.text("storage_type"),
        band_width_mbps=fields.whole("band_width_mbps", 0, _MOST_BLOCKS, default=0),
        priority=fields.whole("priority", -(1 << 31), (1 << 31) - 1, default=0),
        capacity=fields.whole("capacity", 0, _MOST_BLOCKS),
    )


def _instance(fields: Fields) -> OriginalInstance:
    instance_id = fields.text("instance_id")
    try:
        check_name("instance_id", instance_id)
    except InvalidArgumentError as error:
        raise OptionError(str(error)) from error
    return OriginalInstance(
        instance_id=instance_id,
        block_size=fields.whole("block_size", 1, 1 << 31),
        policy=fields.text("eviction_policy_type", allowed=POLICIES),
        sample_rate=fields.child("eviction_policy_params", default={}).ratio(
            "sample_rate", default=_DEFAULT_RATE, above_zero=True
        ),
    )


# One instance of the original: a radix tree of blocks, and which of them is evicted next.
#
# A block's number names its prefix, so the tree is the set of blocks with the parent of each; one that was evicted
# stays in the tree without its KV. `lru` and `leaf_aware_lru` are the policies of the live reclaimer (`leaf_lru` by
# its own name). Within a chain `leaf_aware_lru` takes the last block first.


class OriginalCache:
    """The blocks of one instance, by their numbers in it.

    Args:
        instance: what it is.
        parents: the block before each block.
        seed: of samples; those of the original differ from run to run.

    Attributes:
        instance: what it is.
        here: whether each block is cached.
    """

    def __init__(self, instance: OriginalInstance, parents: Int32Column, seed: int = 1) -> None:
        count = len(parents)
        self.instance = instance
        self.here = bytearray(count)
        self._parents: list[int] = parents.tolist()
        self._children = array("i", [0]) * (count + 1)
        self._is_leafy = instance.policy == "leaf_aware_lru"
        self._order: Lru | LeafLru | _Sample
        if instance.policy == "random_lru":
            self._order = _Sample(instance.sample_rate, seed)
        else:
            self._order = LeafLru(lambda slot: not self._children[slot]) if self._is_leafy else Lru()

    def __len__(self) -> int:
        return len(self._order)

    def prefix(self, blocks: Int32Column) -> int:
        """Return how many leading blocks are cached."""
        numbers = blocks.tolist()
        for place, block in enumerate(numbers):
            if not self.here[block]:
                return place
        return len(numbers)

    def access(self, blocks: Int32Column) -> None:
        """Touch blocks that are cached and insert the others; they are in the order of their chain."""
        numbers: list[int] = list(dict.fromkeys(blocks.tolist()))
        if self._is_leafy:  # a chain leaves from its tail, which is found sooner where it is older than its head
            numbers.reverse()
        first = 0
        while first < len(numbers):
            first = self._access_run(numbers, first)

    def evict(self, count: int) -> None:
        """Evict so many blocks, or all there are."""
        if isinstance(self._order, _Sample):
            for block in self._order.oldest(count):
                self._drop(block)
            return
        for _ in range(min(count, len(self))):
            self._drop(next(self._order.victims()))

    def _access_run(self, numbers: list[int], first: int) -> int:
        """Touch blocks that are cached, or insert ones that are not, up to the first other one; return its place."""
        is_here = self.here[numbers[first]]
        end = first + 1
        while end < len(numbers) and self.here[numbers[end]] == is_here:
            end += 1
        run = numbers[first:end]
        if is_here:
            self._order.touch_all(run, [1] * len(run))
            return end
        self._order.insert_all(run, run)
        for block in run:
            self.here[block] = 1
            self._children[self._parents[block]] += 1
        return end

    def _drop(self, block: int) -> None:
        self._order.remove(block)
        self.here[block] = 0
        self._children[self._parents[block]] -= 1


class _Sample:
    """The oldest of a sample: `random_lru`.

    Args:
        rate: victims over blocks of the sample.
        seed: of the samples.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self._rate = rate
        self._random = np.random.default_rng(seed)
        self._clock = 0
        self._last: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._slots: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def insert_all(self, slots: list[int], keys: list[int]) -> None:
        """Add blocks, the last as the newest."""
        for slot in slots:
            self._places[slot] = len(self._slots)
            self._slots.append(slot)
        self.touch_all(slots, keys)

    def touch_all(self, slots: list[int], reads: list[int]) -> None:
        """Make blocks the newest, the last of them the newest of all."""
        for slot in slots:
            self._clock += 1
            self._last[slot] = self._clock

    def remove(self, slot: int) -> None:
        """Take a block out; the last one fills its gap."""
        place, last = self._places.pop(slot), self._slots.pop()
        if last != slot:
            self._slots[place] = last
            self._places[last] = place

    def oldest(self, count: int) -> list[int]:
        """Return so many blocks of a sample, the oldest first; fewer where there are fewer."""
        size = min(len(self), max(count, int(count / self._rate)))
        sample = self._random.choice(len(self), size, replace=False, shuffle=False).tolist()
        return nsmallest(count, (self._slots[place] for place in sample), key=self._last.__getitem__)


# Replays a trace as the original optimizer does.
#
# A read walks its keys until the first one that is not cached, masked ones included; hits are internal where they are
# masked and external elsewhere. A write inserts blocks that are not cached; then blocks are evicted while the group
# uses more than its limit: in mode 1 rounds of a batch from every instance of the group, in mode 2 batches from the
# instance that writes, in mode 3 from that one exactly what is too much. A turn of a dialogue reads and writes in one
# pass.

_ONLY_TURNS = "optimizer_schema"


class Row(NamedTuple):
    """The outcome of one read.

    Attributes:
        timestamp_us: of the request.
        cached_here: blocks of the instance, after the write and the eviction of a turn.
        cached: blocks of every instance of the configuration, in its order.
        internal_read, external_read: blocks that were asked for, masked and not masked.
        internal_hits, external_hits: that were cached.
        accumulated: internal hits, external hits and blocks of all reads of the instance so far.
    """

    timestamp_us: int
    cached_here: int
    cached: tuple[int, ...]
    internal_read: int
    external_read: int
    internal_hits: int
    external_hits: int
    accumulated: tuple[int, int, int]


class _Group:
    """A group at work."""

    def __init__(self, group: OriginalGroup, config: OriginalConfig, caches: Sequence[OriginalCache]) -> None:
        self._limit = group.limit
        self._mode = config.eviction_mode
        self._batch = config.batch_size
        self._caches = caches

    def evict_after(self, writer: OriginalCache) -> None:
        """Evict the excess after a write."""
        givers = self._caches if self._mode == 1 else [writer]
        while (excess := self._excess()) > 0 and any(givers):
            for cache in givers:
                cache.evict(excess if self._mode == 3 else self._batch)

    def _excess(self) -> int:
        return sum(len(cache) for cache in self._caches) - self._limit


class OriginalReplay:
    """A replay.

    Args:
        trace: any one; requests of instances that are not configured are left out, and so are reads that are none of
            a prefix.
        config: of the original.

    Attributes:
        caches: of the instances, in the order of the configuration, as they are now.
        unknown_instances: of the trace that are not configured.

    Raises:
        OptionError: no instance of the trace is configured.
    """

    def __init__(self, trace: Trace, config: OriginalConfig) -> None:
        self._trace = trace
        self._numbering = Numbering.of(trace)
        self._only_turns = config.trace_type == _ONLY_TURNS
        self.caches: list[OriginalCache] = []
        self._groups: dict[str, _Group] = {}
        for group in config.groups:
            self._open(group, config)
        by_name = {cache.instance.instance_id: cache for cache in self.caches}
        self._by_instance = [by_name.get(name) for name in trace.instance_names]
        self.unknown_instances = tuple(name for name in trace.instance_names if name not in by_name)
        if len(trace) and len(self.unknown_instances) == len(trace.instance_names):
            wanted, there = ", ".join(by_name), ", ".join(trace.instance_names)
            raise OptionError(f"instance_id: none of {wanted} is in the trace; allowed: {there}")
        self._sums = dict.fromkeys(by_name, (0, 0, 0))

    def _open(self, group: OriginalGroup, config: OriginalConfig) -> None:
        names = self._trace.instance_names
        caches = []
        for instance in group.instances:
            is_there = instance.instance_id in names
            parents = self._numbering.parents[names.index(instance.instance_id)] if is_there else np.zeros(0, np.int32)
            caches.append(OriginalCache(instance, parents))
        at_work = _Group(group, config, caches)
        self._groups.update(dict.fromkeys((instance.instance_id for instance in group.instances), at_work))
        self.caches += caches

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Replay, and yield the instance and the row of each read. To be called once."""
        trace = self._trace
        for request, instance in enumerate(trace.instances.tolist()):
            cache = self._by_instance[instance]
            if cache is None or not self._is_replayed(request):
                continue
            blocks = self._numbering.blocks[trace.offsets[request] : trace.offsets[request + 1]]
            hits = self._serve(cache, request, blocks)
            if hits is not None:
                yield cache.instance.instance_id, self._row(cache, request, *hits)

    def _is_replayed(self, request: int) -> bool:
        is_turn = self._trace.writes[request] and self._trace.read_blocks[request]
        return self._trace.modes.get(request, QueryMode.PREFIX) is QueryMode.PREFIX and (
            is_turn or not self._only_turns
        )

    def _serve(self, cache: OriginalCache, request: int, blocks: Int32Column) -> tuple[int, int, int] | None:
        """Replay a request; return the blocks that it read masked, and its internal and external hits."""
        trace = self._trace
        reads, writes = int(trace.read_blocks[request]), bool(trace.writes[request])
        prefix = cache.prefix(blocks[:reads])
        cache.access(blocks if writes else blocks[:prefix])
        if writes:
            self._groups[cache.instance.instance_id].evict_after(cache)
        if not reads:
            return None
        masked = trace.masks.get(request)
        if writes or masked is None:  # all that a turn reads is external
            return 0, 0, prefix
        internal = int(masked[:prefix].sum())
        return int(masked[:reads].sum()), internal, prefix - internal

    def _row(self, cache: OriginalCache, request: int, masked: int, internal: int, external: int) -> Row:
        name, reads = cache.instance.instance_id, int(self._trace.read_blocks[request])
        sums = self._sums[name]
        sums = self._sums[name] = (sums[0] + internal, sums[1] + external, sums[2] + reads)
        cached = tuple(len(each) for each in self.caches)
        time = int(self._trace.times_us[request])
        return Row(
            timestamp_us=time,
            cached_here=len(cache),
            cached=cached,
            internal_read=masked,
            external_read=reads - masked,
            internal_hits=internal,
            external_hits=external,
            accumulated=sums,
        )


# The CSV files of the original: one per instance that reads, one row per read.
#
# Fields are separated by a comma and a space, numbers have six significant digits. `CachedBlocksPerInstance` lists all
# instances in the order of the configuration; there, that order is arbitrary.

HEADER = (
    "TimestampUs,CachedBlocksCurrentInstance,CachedBlocksPerInstance,CachedBlocksAllInstance,InternalReadBlocks,"
    "ExternalReadBlocks,TotalReadBlocks,InternalHitBlocks,InternalHitRate,ExternalHitBlocks,ExternalHitRate,HitRate,"
    "AccInternalHitRate,AccExternalHitRate,AccHitRate"
)


def write_original_csv(trace: Trace, config: OriginalConfig, directory: Path) -> list[Path]:
    """Replay a trace and write `<instance_id>_hit_rates.csv` of each instance that reads.

    Names of files are those of the instances, percent-encoded as in design.md, decision 12.

    Args:
        trace: to be replayed.
        config: of the original.
        directory: made if it is not there.

    Returns:
        The files, in the order of the first read of each.

    Raises:
        OptionError: no instance of the trace is configured, or the files cannot be written.
    """
    replay = OriginalReplay(trace, config)
    files: dict[str, TextIO] = {}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as open_files:
            for instance_id, row in replay.rows():
                if instance_id not in files:
                    path = directory / f"{path_component(instance_id)}_hit_rates.csv"
                    files[instance_id] = open_files.enter_context(path.open("w", encoding="utf-8", newline="\n"))
                    files[instance_id].write(f"{HEADER}\n")
                files[instance_id].write(_line(row))
    except OSError as error:
        raise OptionError(f"output: {directory}: {error.strerror}; allowed: a folder that can be written") from error
    return [Path(file.name) for file in files.values()]


def _line(row: Row) -> str:
    total = row.internal_read + row.external_read
    internal, external, reads = row.accumulated
    fields = (
        str(row.timestamp_us),
        str(row.cached_here),
        ";".join(map(str, row.cached)),
        str(sum(row.cached)),
        str(row.internal_read),
        str(row.external_read),
        str(total),
        str(row.internal_hits),
        _rate(row.internal_hits, total),
        str(row.external_hits),
        _rate(row.external_hits, total),
        _rate(row.internal_hits + row.external_hits, total),
        _rate(internal, reads),
        _rate(external, reads),
        _rate(internal + external, reads),
    )
    return ", ".join(fields) + "\n"


def _rate(hits: int, blocks: int) -> str:
    return f"{hits / blocks:.6g}"
