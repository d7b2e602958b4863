"""Instances: one model deployment with one KV layout each; their config never changes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

__all__ = [
    "Instance",
    "LocationSpecGroup",
    "LocationSpecInfo",
    "LocationSpecKind",
    "ModelDeployment",
    "Placement",
    "Registration",
    "Removal",
]


class LocationSpecKind(IntEnum):
    """What a spec holds. Unspecified ones are judged by the spec groups (`Instance.linear_spec_names`)."""

    LSK_UNSPECIFIED = 0
    LSK_FULL_ATTENTION = 1
    LSK_LINEAR_ATTENTION = 2


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


@dataclass(frozen=True, slots=True)
class Instance:
    """A registered instance.

    Attributes:
        quota_group_name: the group's global quota group when the instance was registered.
        block_size: tokens per block; 0 when engines only send block keys.
        location_spec_infos: parts of a block, in the order of registration.
        location_spec_groups: sorted by name, each with sorted spec names.
    """

    quota_group_name: str
    instance_group_name: str
    instance_id: str
    block_size: int
    location_spec_infos: tuple[LocationSpecInfo, ...]
    model_deployment: ModelDeployment
    location_spec_groups: tuple[LocationSpecGroup, ...] = ()

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

    def difference(self, other: Instance) -> str | None:
        """Return the name of the first field in which two registrations differ, None when they are the same."""
        for field in ("instance_group_name", "block_size", "location_spec_infos", "location_spec_groups"):
            if getattr(self, field) != getattr(other, field):
                return field
        same_model = replace(self.model_deployment, user_data="") == replace(other.model_deployment, user_data="")
        return None if same_model else "model_deployment"


class Placement(NamedTuple):
    """Where the metadata of an instance lies in the store; never changes.

    Attributes:
        uid: number of the registration; never used again, so a later registration of the same id starts empty.
        shard_count: lock shards that the keys are divided among.
    """

    uid: int
    shard_count: int


@dataclass(frozen=True, slots=True)
class Registration:
    """An instance and its placement."""

    instance: Instance
    placement: Placement


Removal = Registration
"""A registration that was taken back and whose blocks may not all be deleted yet."""
