"""The configuration of the original optimizer: read from its JSON document, or made from plain options."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.names import check_name
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.groups.original.fields import Fields

__all__ = ["POLICIES", "TRACE_TYPES", "OriginalConfig", "OriginalGroup", "OriginalInstance", "OriginalStorage"]

TRACE_TYPES = ("qwen_bailian", "publisher_log", "optimizer_schema")
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
        trace_type: one of `TRACE_TYPES`; "" where the options are plain: then all of a trace is replayed.
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
            trace_type=fields.text("trace_type", allowed=TRACE_TYPES),
            output_result_path=fields.text("output_result_path"),
        ).checked()

    @classmethod
    def plain(cls, instance_ids: Sequence[str], capacity_blocks: int, *, policy: str = "lru") -> OriginalConfig:
        """Return one group of instances that use all of a capacity, evicted instance by instance, block by block.

        Args:
            instance_ids: of a trace.
            capacity_blocks: of the group.
            policy: one of `POLICIES`; `leaf_lru` is what is called `leaf_aware_lru` there.

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
