"""How blocks move between the levels of a hierarchy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvcm.optimizer.errors import OptionError

__all__ = ["Promotion", "Rules", "TierPolicy", "Writing"]

TierPolicy = Literal["lru", "leaf_lru", "fifo"]
Promotion = Literal["hit", "second_hit", "never"]
Writing = Literal["back", "through"]


@dataclass(frozen=True, slots=True)
class Rules:
    """An exclusive hierarchy holds a block in one level, an inclusive one in a level and in all below it.

    Exclusive: a new block goes to the fastest level; what a level evicts moves to the next one, what the last evicts is
    gone. Inclusive: a new block gets a place in every level, and a block that is promoted gets one in all levels above.

    Attributes:
        policy: of every level. `leaf_lru` touches the blocks of a request from the last to the first once its prefix
            is read, so that prefixes leave from their tail; the others touch in order, block by block.
        inclusive: whether lower levels hold what upper ones hold.
        promote: whether a hit in a lower level moves (inclusive: copies) the block to the fastest one: always, at the
            second hit since it came to that level, or never. Blocks behind the first miss count: the engine has just
            computed them.
        write: inclusive only. `through`: a new block is written to every level at once. `back`: to the fastest, and to
            a lower one when the level above evicts it. What is held where is the same.
        back_invalidates: inclusive only. Whether a block that a lower level evicts is dropped from the levels above.
            If not, a block may be above only, and is written below when it leaves there (`demote`) or is lost.
        demote: whether it is written below then; exclusive hierarchies always demote.
        lower_sees_hits: inclusive only. Whether a hit in an upper level makes the block the newest of the lower ones
            as well: a manager that is asked for whole prefixes sees them, one that is asked only for what an engine
            lacks does not.

    Raises:
        OptionError: there is no such policy, promotion or way of writing, or it means nothing here.
    """

    policy: TierPolicy = "lru"
    inclusive: bool = False
    promote: Promotion = "hit"
    write: Writing = "back"
    back_invalidates: bool = True
    demote: bool = True
    lower_sees_hits: bool = True

    def __post_init__(self) -> None:
        for field, value, kind in (
            ("policy", self.policy, TierPolicy),
            ("promote", self.promote, Promotion),
            ("write", self.write, Writing),
        ):
            if value not in get_args(kind):
                raise OptionError(f"tiers: {field} is {value!r}; allowed: {', '.join(get_args(kind))}")
        if not self.inclusive and self.write == "through":
            raise OptionError("tiers: write is 'through' in an exclusive hierarchy; allowed: back")
        if not self.inclusive and not self.demote:
            raise OptionError(
                "tiers: without demotion lower levels of an exclusive hierarchy stay empty; allowed: True"
            )

    @property
    def label(self) -> str:
        """Return what differs from the default, for people."""
        parts = [self.policy, "inclusive" if self.inclusive else "exclusive"]
        parts += [] if self.promote == "hit" else [f"promote {self.promote}".replace("_", " ")]
        if self.inclusive:
            parts.append(f"write-{self.write}")
            parts += [] if self.back_invalidates else ["no back-invalidation"]
            parts += [] if self.demote else ["no demotion"]
            parts += [] if self.lower_sees_hits else ["lower levels see misses only"]
        return ", ".join(parts)
