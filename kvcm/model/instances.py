"""Instances: one model deployment with one KV layout each; their config never changes."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Final, NamedTuple

__all__ = [
    "REGISTRY_STORE",
    "GroupStore",
    "Instance",
    "InstanceDifference",
    "LocationSpecGroup",
    "LocationSpecInfo",
    "LocationSpecKind",
    "ModelDeployment",
    "Placement",
    "QueryType",
    "Registration",
    "Removal",
    "StoreMove",
]


class LocationSpecKind(IntEnum):
    """What a spec holds. Unspecified ones are judged by the spec groups (`Instance.linear_spec_names`)."""

    LSK_UNSPECIFIED = 0
    LSK_FULL_ATTENTION = 1
    LSK_LINEAR_ATTENTION = 2


class QueryType(IntEnum):
    """How keys are matched; numbers are those of the wire protocol."""

    QT_UNSPECIFIED = 0
    QT_BATCH_GET = 1
    QT_PREFIX_MATCH = 2
    QT_REVERSE_ROLL_SW_MATCH = 3
    QT_PREFIX_MATCH_WITH_MAMBA = 4


@dataclass(frozen=True, slots=True)
class LocationSpecInfo:
    """One named part of a block and its size in bytes."""

    name: str
    size: int
    kind: LocationSpecKind = LocationSpecKind.LSK_UNSPECIFIED


@dataclass(frozen=True, slots=True)
class LocationSpecGroup:
    """A named set of spec names, kept sorted."""

    name: str
    spec_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModelDeployment:
    """Identity of a model; everything but `user_data` takes part in comparisons."""

    model_name: str = ""
    dtype: str = ""
    use_mla: bool = False
    tp_size: int = 0
    dp_size: int = 0
    lora_name: str = ""
    pp_size: int = 0
    extra: str = ""
    user_data: str = ""
    use_eagle_pop: bool = False


class InstanceDifference(NamedTuple):
    """The first field in which two registrations differ, and its values.

    Attributes:
        field: its path: `block_size`, `model_deployment.tp_size`, and inside JSON `model_deployment.extra.weights`.
        first: its value in one, None when a JSON object has no such name.
        second: its value in the other.
    """

    field: str
    first: object
    second: object


@dataclass(frozen=True, slots=True)
class Instance:
    """A registered instance.

    Attributes:
        quota_group_name: the group's global quota group when the instance was registered.
        block_size: tokens per block; 0 when engines only send block keys.
        location_spec_infos: parts of a block, in the order of registration.
        location_spec_groups: sorted by name, each with sorted spec names.
        default_query_type: how keys are matched where a request about hosts does not say it.
    """

    quota_group_name: str
    instance_group_name: str
    instance_id: str
    block_size: int
    location_spec_infos: tuple[LocationSpecInfo, ...]
    model_deployment: ModelDeployment
    location_spec_groups: tuple[LocationSpecGroup, ...] = ()
    default_query_type: QueryType = QueryType.QT_UNSPECIFIED

    @property
    def spec_names(self) -> tuple[str, ...]:
        """Names of all parts of a block."""
        return tuple(info.name for info in self.location_spec_infos)

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return sum(info.size for info in self.location_spec_infos)

    @property
    def linear_spec_names(self) -> frozenset[str]:
        """Specs that hold linear-attention (Mamba) state.

        Those registered as such; when none is, the specs that are missing from some spec group: groups exist so that
        blocks can be stored without such state, hence what every group holds is the full-attention part.
        """
        declared = [i.name for i in self.location_spec_infos if i.kind is LocationSpecKind.LSK_LINEAR_ATTENTION]
        if declared or not self.location_spec_groups:
            return frozenset(declared)
        everywhere = frozenset.intersection(*(frozenset(group.spec_names) for group in self.location_spec_groups))
        # Disjoint groups share no part that could be the full-attention one: then nothing can be said.
        return frozenset(self.spec_names) - everywhere if everywhere else frozenset()

    def is_readable_with(self, spec_names: Collection[str]) -> bool:
        """Return whether a block with only these specs is worth anything: specs of one spec group live and die
        together, and what a block must have at least is one group, or its full-attention part."""
        linear = self.linear_spec_names
        full = set(self.spec_names) - linear
        groups = [set(group.spec_names) for group in self.location_spec_groups]
        whole = [full, *(names for names in groups if names & full)] if full else [set(self.spec_names), *groups]
        return any(names <= set(spec_names) for names in whole)

    def difference(self, other: Instance) -> InstanceDifference | None:
        """Return the first field in which two registrations differ, None when they are the same."""
        for field in ("instance_group_name", "block_size"):
            if getattr(self, field) != getattr(other, field):
                return InstanceDifference(field, getattr(self, field), getattr(other, field))
        return (
            _infos_difference(self.location_spec_infos, other.location_spec_infos)
            or _groups_difference(self.location_spec_groups, other.location_spec_groups)
            or _query_type_difference(self.default_query_type, other.default_query_type)
            or _deployment_difference(self.model_deployment, other.model_deployment)
        )


def _infos_difference(
    first: Sequence[LocationSpecInfo], second: Sequence[LocationSpecInfo]
) -> InstanceDifference | None:
    names = [info.name for info in first], [info.name for info in second]
    if names[0] != names[1]:
        return InstanceDifference("location_spec_infos", *names)
    for at, (one, other) in enumerate(zip(first, second, strict=True)):
        if one.size != other.size:
            return InstanceDifference(f"location_spec_infos[{at}].size", one.size, other.size)
        if one.kind != other.kind:
            return InstanceDifference(f"location_spec_infos[{at}].kind", one.kind.name, other.kind.name)
    return None


def _groups_difference(
    first: Sequence[LocationSpecGroup], second: Sequence[LocationSpecGroup]
) -> InstanceDifference | None:
    members = [{group.name: list(group.spec_names) for group in groups} for groups in (first, second)]
    return None if first == second else InstanceDifference("location_spec_groups", *members)


def _query_type_difference(first: QueryType, second: QueryType) -> InstanceDifference | None:
    return None if first is second else InstanceDifference("default_query_type", first.name, second.name)


def _deployment_difference(first: ModelDeployment, second: ModelDeployment) -> InstanceDifference | None:
    for name in [field.name for field in fields(ModelDeployment) if field.name != "user_data"]:
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            inside = _extra_difference(one, other) if name == "extra" else None
            return inside or InstanceDifference(f"model_deployment.{name}", one, other)
    return None


def _extra_difference(first: str, second: str) -> InstanceDifference | None:
    """Return the setting in which two JSON objects differ, None when one of them is none."""
    one, other = _json_object(first), _json_object(second)
    for name in sorted(one.keys() | other.keys()) if one and other else ():
        if one.get(name) != other.get(name):
            return InstanceDifference(f"model_deployment.extra.{name}", one.get(name), other.get(name))
    return None


def _json_object(text: str) -> dict[str, Any]:
    """Return what the text describes, empty when it is no JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class Placement(NamedTuple):
    """Where the blocks of an instance are kept; a move to another store alone changes it.

    Attributes:
        uid: number of the registration; never used again, so a later registration of the same id starts empty.
        shard_count: lock shards that the keys are divided among.
        tags: of a Redis that keeps many blocks to a value: parts that the keys are divided among there. 0: it keeps a
            value per block, and the parts are the lock shards; so did releases that knew schema 1 only.
        store: name of the block store; "" for the store that has the registry.
    """

    uid: int
    shard_count: int
    tags: int = 0
    store: str = ""


@dataclass(frozen=True, slots=True)
class Registration:
    """An instance and its placement."""

    instance: Instance
    placement: Placement

    def stored(self) -> object:
        """Return the stored form: where it uses nothing of a newer release, that of the release before."""
        if self.placement.store:
            return self
        return {"instance": self.instance, "placement": self.placement[: 3 if self.placement.tags else 2]}


REGISTRY_STORE: Final = "registry"
"""What operators call the store that has the registry, whose name is empty; no block store is called so."""


@dataclass(frozen=True, slots=True)
class GroupStore:
    """The store that the blocks of a group's instances are to be kept in: those that lie elsewhere move there.

    Attributes:
        store: name of the block store; "" for the store that has the registry.
    """

    store: str


@dataclass(frozen=True, slots=True)
class StoreMove:
    """A move of an instance's blocks to another store.

    Attributes:
        uid: of the instance's registration.
        source: store that they leave.
        source_tags: their tags there.
        target: store that they come to.
        number: of the attempt; a later one has a greater number.
        is_placed: whether the registration names the target: what is left is to clear the source.
        placed_at: unix seconds when it first did, 0 before.
    """

    uid: int
    source: str
    source_tags: int
    target: str
    number: int
    is_placed: bool = False
    placed_at: float = 0.0


Removal = Registration
"""A registration that was taken back and whose blocks may not all be deleted yet."""
