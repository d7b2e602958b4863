"""What the manager keeps in memory for one instance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcm.cache.pages import PAGE_KEYS, page_keys
from kvcm.index.answers import filter_specs
from kvcm.index.chunk_memo import ChunkMemo
from kvcm.index.meta_index import MetaIndex
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import Instance, LocationSpecInfo, Placement
from kvcm.model.locations import SpecUri, decode_chunk, encode_chunk
from kvcm.model.storages import StorageType

__all__ = ["IndexInCustody", "InstanceCache"]

_MOST_FILTERS = 16  # engines ask for their own rank's specs: a few distinct sets per instance
_MOST_SETS = 1024  # of specs that are stored together


class IndexInCustody(NamedTuple):
    """An index and whose it is."""

    instance: Instance
    uid: int
    meta_index: MetaIndex

    @property
    def instance_id(self) -> str:
        """Id of the instance."""
        return self.instance.instance_id


@dataclass(frozen=True, slots=True)
class InstanceCache:
    """An instance, its index, and what is derived from its registration once.

    Attributes:
        instance: the registration.
        placement: where its blocks are kept in the store.
        index: records of its blocks, shared with nobody.
        custody: the index as the background duties see it.
        placeholder: encoded answer for a miss in batch and window matches: every spec with an empty uri.
        specs_of_group: spec infos by spec group, in the order of registration.
        linear_specs: names of specs that hold linear-attention state.
        full_specs: names of the other specs.
        page_keys: blocks that are worked on without a pause. A shared store suspends itself, and is asked in few calls.
        present: remembers which specs a location holds.
        filters: remember locations reduced to some specs, by the names of those; the latest few.
    """

    instance: Instance
    placement: Placement
    index: MetaIndex
    custody: IndexInCustody = field(init=False)
    placeholder: bytes = field(init=False)
    specs_of_group: dict[str, tuple[LocationSpecInfo, ...]] = field(init=False)
    linear_specs: frozenset[str] = field(init=False)
    full_specs: frozenset[str] = field(init=False)
    page_keys: int = field(init=False)
    present: ChunkMemo[frozenset[str]] = field(init=False)
    filters: dict[frozenset[str], ChunkMemo[bytes]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        names = self.instance.spec_names
        placeholder = encode_chunk(StorageType.ST_UNSPECIFIED, len(names), [SpecUri(name, "") for name in names])
        groups = {
            group.name: tuple(info for info in self.instance.location_spec_infos if info.name in group.spec_names)
            for group in self.instance.location_spec_groups
        }
        linear = self.instance.linear_spec_names
        object.__setattr__(self, "custody", IndexInCustody(self.instance, self.placement.uid, self.index))
        object.__setattr__(self, "placeholder", placeholder)
        object.__setattr__(self, "specs_of_group", groups)
        object.__setattr__(self, "linear_specs", linear)
        object.__setattr__(self, "full_specs", frozenset(names) - linear)
        object.__setattr__(self, "page_keys", PAGE_KEYS if self.index.is_shared else page_keys(len(names)))
        object.__setattr__(self, "present", ChunkMemo(_NamesIn()))

    def filter_of(self, spec_names: frozenset[str]) -> ChunkMemo[bytes] | None:
        """Return what reduces locations to the named specs, None where those are all."""
        if spec_names >= frozenset(self.instance.spec_names):
            return None
        memo = self.filters.pop(spec_names, None) or ChunkMemo(lambda chunk: filter_specs(chunk, spec_names))
        self.filters[spec_names] = memo  # the latest in use stays longest
        if len(self.filters) > _MOST_FILTERS:
            del self.filters[next(iter(self.filters))]
        return memo

    def specs_per_key(self, group_names: Sequence[str], count: int) -> list[tuple[LocationSpecInfo, ...]]:
        """Return which specs each of `count` blocks is to be stored with.

        Args:
            group_names: empty for all specs, or one spec group per block.
            count: number of blocks.

        Raises:
            InvalidArgumentError: the number of names differs from the number of blocks, or a group is unknown.
        """
        if not group_names:
            return [self.instance.location_spec_infos] * count
        if len(group_names) != count:
            raise InvalidArgumentError(
                f"location_spec_group_names has {len(group_names)} entries for {count} blocks, must have one per block"
            )
        unknown = sorted(set(group_names) - set(self.specs_of_group))
        if unknown:
            raise InvalidArgumentError(
                f"location_spec_group_names holds {unknown}, registered are {sorted(self.specs_of_group)}"
            )
        return [self.specs_of_group[name] for name in group_names]


class _NamesIn:
    """The specs that a location holds: one set for all locations that hold the same."""

    def __init__(self) -> None:
        self._known: dict[frozenset[str], frozenset[str]] = {}

    def __call__(self, chunk: bytes) -> frozenset[str]:
        names = frozenset(spec.name for spec in decode_chunk(chunk).specs)
        if len(self._known) > _MOST_SETS:
            self._known.clear()
        return self._known.setdefault(names, names)
