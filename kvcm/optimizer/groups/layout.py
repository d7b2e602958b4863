"""Who shares what: instances, what their blocks consist of, and the quotas that groups of them compete for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.policy_spec import PolicySpec
from kvcm.optimizer.trace import Trace
from kvcm.reclaim.policies.sharing import SHARES

__all__ = ["GroupLayout", "InstanceLayout", "QuotaGroup", "ReplayMode", "SpecKind", "SpecLayout", "one_group"]

ReplayMode = Literal["block", "request"]

_MOST_SPECS = 8
_UNITS = ("blocks", "bytes")
_MODES = ("block", "request")
_DEFAULT_POLICY = PolicySpec("leaf_lru")
_NOT_REPLAYED = "belady"  # it looks ahead in one cache; instances of a group compete


class SpecKind(Enum):
    """What a prefix needs of a spec."""

    FULL = "full"
    """Every block of the prefix has to have it: full attention, or a part of it on one rank."""
    STATE = "state"
    """The last block has to have it: linear-attention (Mamba) state."""
    WINDOW = "window"
    """The last `window_blocks` have to have it: sliding-window attention."""


@dataclass(frozen=True, slots=True)
class SpecLayout:
    """One part that blocks of an instance are stored with.

    Attributes:
        name: as requests name it (`Trace.specs`).
        bytes: that it takes per block that has it.
        kind: what a prefix needs of it.
        every: it is written with every so-many-th block of a chain, counted from 1; 0 for none of them.
        at_end: whether it is also written with the last block of each write.
        window_blocks: of the kind `WINDOW`.
    """

    name: str
    bytes: int
    kind: SpecKind = SpecKind.FULL
    every: int = 1
    at_end: bool = False
    window_blocks: int = 0

    def check(self, field: str) -> None:
        """Refuse what makes no sense.

        Raises:
            OptionError: naming the field.
        """
        _check_range(f"{field}.bytes", self.bytes, 0, 1 << 50)
        _check_range(f"{field}.every", self.every, 0, 1 << 30)
        if self.kind is SpecKind.WINDOW:
            _check_range(f"{field}.window_blocks", self.window_blocks, 1, 1 << 30)
        if not (self.every or self.at_end):
            raise OptionError(f"{field}: never written; allowed: every above 0, or at_end")

    def is_written(self, depth: int, length: int) -> bool:
        """Return whether a write of so many blocks gives this spec to the one at a depth, counted from 0."""
        return bool(self.every and not (depth + 1) % self.every) or (self.at_end and depth == length - 1)


@dataclass(frozen=True, slots=True)
class InstanceLayout:
    """One instance.

    Attributes:
        name: as the trace calls it.
        policy: its order of eviction.
        specs: that its blocks consist of.
        weight: its blocks count as younger by so much when instances of its group compete.
    """

    name: str
    policy: PolicySpec = _DEFAULT_POLICY
    specs: tuple[SpecLayout, ...] = (SpecLayout("kv", 1),)
    weight: float = 1.0

    def check(self, field: str) -> None:
        """Refuse what makes no sense.

        Raises:
            OptionError: naming the field.
        """
        if self.policy.name == _NOT_REPLAYED:
            raise OptionError(f"{field}.policy: {_NOT_REPLAYED} is not replayed in groups; allowed: any other policy")
        if not 0 < self.weight < 1e9:
            raise OptionError(f"{field}.weight: {self.weight!r}; allowed: a number above 0")
        if not 1 <= len(self.specs) <= _MOST_SPECS:
            raise OptionError(f"{field}.specs: {len(self.specs)} of them; allowed: 1 to {_MOST_SPECS}")
        _check_distinct(f"{field}.specs", (spec.name for spec in self.specs))
        for spec in self.specs:
            spec.check(f"{field}.specs[{spec.name}]")


@dataclass(frozen=True, slots=True)
class QuotaGroup:
    """Instances that share a quota.

    Attributes:
        name: for people.
        quota: what they may use together, in `unit`.
        instances: of the group.
        unit: `blocks` or `bytes`.
        share: whose turn it is to give up a block, one of `kvcm.reclaim.policies.sharing.SHARES`.
        mark: part of the quota above which eviction begins.
        hysteresis: part of the quota below the mark down to which it goes.
        tail_first: whether a victim that resident blocks follow is replaced by its coldest descendant leaf
            (invariant 7). A request is then written as a whole, its tail as the oldest.
        thins_states: whether states of linear attention go before whole blocks do, as in a live cache: of blocks that
            have exactly one follower, so that a match can still end where chains branch or end.
    """

    name: str
    quota: int
    instances: tuple[InstanceLayout, ...]
    unit: Literal["blocks", "bytes"] = "blocks"
    share: str = "group_lru"
    mark: float = 1.0
    hysteresis: float = 0.0
    tail_first: bool = False
    thins_states: bool = False

    @property
    def high(self) -> int:
        """Return the usage above which eviction begins."""
        return _part(self.quota, self.mark)

    @property
    def low(self) -> int:
        """Return the usage down to which it goes."""
        return _part(self.quota, max(0.0, self.mark - self.hysteresis))

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            OptionError: naming the field.
        """
        field = f"groups[{self.name}]"
        _check_range(f"{field}.quota", self.quota, 1, 1 << 62)
        _check_among(f"{field}.unit", self.unit, _UNITS)
        _check_among(f"{field}.share", self.share, SHARES)
        if not 0 < self.mark <= 1:
            raise OptionError(f"{field}.mark: {self.mark!r}; allowed: above 0 up to 1")
        if not 0 <= self.hysteresis <= 1:
            raise OptionError(f"{field}.hysteresis: {self.hysteresis!r}; allowed: 0 to 1")
        if self.thins_states and not (self.tail_first and self.unit == "bytes"):
            raise OptionError(f"{field}.thins_states: true; allowed: only with tail_first and a quota in bytes")
        if not self.instances:
            raise OptionError(f"{field}.instances: none; allowed: at least one")
        for instance in self.instances:
            instance.check(f"{field}.instances[{instance.name}]")


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """All groups.

    Attributes:
        groups: each with a quota of its own.
        mode: `block`: room is made before each block that is written; `request`: after all blocks of a request.
    """

    groups: tuple[QuotaGroup, ...]
    mode: ReplayMode = "block"

    @property
    def instances(self) -> tuple[InstanceLayout, ...]:
        """Return the instances of all groups."""
        return tuple(instance for group in self.groups for instance in group.instances)

    def check(self) -> None:
        """Refuse what makes no sense.

        Raises:
            OptionError: naming the field.
        """
        _check_among("mode", self.mode, _MODES)
        _check_distinct("groups", (group.name for group in self.groups))
        _check_distinct("instances", (instance.name for instance in self.instances))
        for group in self.groups:
            group.check()


def one_group(trace: Trace, policy: PolicySpec, capacity_blocks: int, *, mode: ReplayMode = "block") -> GroupLayout:
    """Return one group of all instances of a trace, one block as large as the other."""
    instances = tuple(InstanceLayout(name, policy) for name in trace.instance_names)
    return GroupLayout((QuotaGroup("group", capacity_blocks, instances),), mode)


def _part(whole: int, ratio: float) -> int:
    return int(whole * ratio + 1e-6)  # 0.8 of 10 is 8, whatever floats say


def _check_range(field: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise OptionError(f"{field}: {value!r}; allowed: {least} to {most}")


def _check_among(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{field}: {value!r}; allowed: {', '.join(allowed)}")


def _check_distinct(field: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise OptionError(f"{field}: {name!r} stands there twice; allowed: each name once")
        seen.add(name)
