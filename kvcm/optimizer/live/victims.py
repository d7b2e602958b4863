"""Who goes when a rehearsed group is above a mark: what the live reclaimer would take, one block after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvcm.model.groups import EvictionPolicy
from kvcm.optimizer.live.resident_blocks import ResidentBlocks
from kvcm.reclaim.policies import Policy
from kvcm.reclaim.policies.sharing import Sharing

__all__ = ["Member", "evict"]

_NAMES_LEAVES = "leaf_lru"


@dataclass(slots=True, eq=False)
class Member:
    """An instance of the group.

    Attributes:
        name: its id.
        block_bytes: of each of its blocks.
        weight: of its claim to the group's space.
        rule: order and age of its blocks.
        policy: the order.
        used_blocks: resident, being written, or being deleted.
        asked_blocks, found_blocks: by lookups.
    """

    name: str
    block_bytes: int
    weight: float
    rule: EvictionPolicy
    policy: Policy
    used_blocks: int = 0
    asked_blocks: int = 0
    found_blocks: int = 0


class _Choice:
    """One look of the reclaimer.

    Args:
        members: from whom it may be taken.
        blocks: what is there.
        amount: bytes that have to go.
        share: which member gives: `group_lru`, `proportional` or `fixed`.
        now: seconds.
        gone: told of each block that goes, and of its member.
    """

    def __init__(
        self,
        members: Sequence[Member],
        blocks: ResidentBlocks,
        amount: int,
        share: str,
        now: float,
        gone: Callable[[Member, int], None],
    ) -> None:
        self._members = members
        self._blocks = blocks
        self._left = amount
        self._now = now
        self._gone = gone
        used = {turn: member.used_blocks * member.block_bytes for turn, member in enumerate(members)}
        self._sharing = Sharing(share, used, {turn: member.weight for turn, member in enumerate(members)}, amount)

    def run(self) -> None:
        """Take victims until it is enough, or there are no more."""
        walks = [member.policy.victims() for member in self._members]
        try:
            self._take(walks)
        finally:
            for walk in walks:
                walk.close()  # type: ignore[attr-defined] # they are generators: a cursor of the policy is closed

    def _take(self, walks: Sequence[Iterator[int]]) -> None:
        heads = [next(walk, -1) for walk in walks]
        while self._left > 0:
            turns = [turn for turn, head in enumerate(heads) if head >= 0]
            if not turns:
                return
            turn = turns[0] if len(turns) == 1 else min(turns, key=lambda turn: self._turn(turn, heads[turn]))
            left = self._left
            self._take_with_tail(self._members[turn], heads[turn])
            self._sharing.took(turn, left - self._left)
            if self._left > 0:
                heads[turn] = next(walks[turn], -1)

    def _turn(self, turn: int, head: int) -> tuple[float, float]:
        return self._sharing.turn(turn, self._now - self._blocks.read_at[head])

    def _take_with_tail(self, member: Member, head: int) -> None:
        if self._blocks.is_leaf(head):
            self._evict(member, head)
            if member.rule.name == _NAMES_LEAVES:
                self._take_colder_ends(member, head)
        elif member.rule.name != _NAMES_LEAVES:  # else something is being written behind it
            for block in self._blocks.tail_first(head):
                if self._left <= 0:
                    return
                self._evict(member, block)

    def _take_colder_ends(self, member: Member, block: int) -> None:
        """A block that is the end of its chain now, and colder than the one that was, has been left behind."""
        read_at, parent = self._blocks.read_at[block], self._blocks.parents[block]
        while self._left > 0 and parent >= 0 and self._blocks.is_resident[parent]:
            if self._blocks.read_at[parent] >= read_at or not self._blocks.is_leaf(parent):
                return
            self._evict(member, parent)
            parent = self._blocks.parents[parent]

    def _evict(self, member: Member, block: int) -> None:
        if not self._blocks.is_resident[block]:  # it is being written
            return
        self._left -= member.block_bytes
        self._gone(member, block)


def evict(
    members: Sequence[Member],
    blocks: ResidentBlocks,
    amount: int,
    share: str,
    now: float,
    gone: Callable[[Member, int], None],
) -> None:
    """Choose blocks of so many bytes, as far as there are any.

    Args:
        members: from whom they may be taken.
        blocks: what is there.
        amount: bytes that have to go.
        share: which member gives: `group_lru` (or ""), `proportional` or `fixed`.
        now: seconds.
        gone: takes a block out of the policy of its member and of what is there.
    """
    _Choice(members, blocks, amount, share, now, gone).run()
