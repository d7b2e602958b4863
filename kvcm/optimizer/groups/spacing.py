"""What it is worth to store the state of linear attention with every so-many-th block.

A match can end only at a block that has it: where it is rare, much of a prefix that is there cannot be used; where it
is with every block, its bytes push other blocks out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.groups.engine import replay_groups
from kvcm.optimizer.groups.layout import GroupLayout, InstanceLayout
from kvcm.optimizer.trace import Trace

__all__ = ["Spacing", "worth_of_spacing"]


@dataclass(frozen=True, slots=True)
class Spacing:
    """One spacing.

    Attributes:
        every: the spec is written with every so-many-th block; 0 for none but what `at_end` gives it to.
        hit_tokens: that need not be computed.
        token_hit_rate: of all tokens of the prompts.
        mean_used_bytes: over the requests.
        written_blocks, evicted_blocks: of all instances.
    """

    every: int
    hit_tokens: int
    token_hit_rate: float
    mean_used_bytes: float
    written_blocks: int
    evicted_blocks: int

    @property
    def hit_tokens_per_byte(self) -> float:
        """Return what a used byte is worth."""
        return self.hit_tokens / self.mean_used_bytes if self.mean_used_bytes else 0.0


def worth_of_spacing(trace: Trace, layout: GroupLayout, spec: str, spacings: Sequence[int]) -> tuple[Spacing, ...]:
    """Replay a trace once per spacing of a spec.

    Args:
        trace: any one.
        layout: its quotas are in bytes; the spec of each instance that has it is replaced.
        spec: name of the spec.
        spacings: values of `SpecLayout.every`.

    Raises:
        OptionError: no instance has the spec, a quota is in blocks, or a spacing makes no sense.
    """
    names = {each.name for instance in layout.instances for each in instance.specs}
    if spec not in names:
        raise OptionError(f"spec: {spec!r} is none of any instance; allowed: {', '.join(sorted(names))}")
    for group in layout.groups:
        if group.unit != "bytes":
            raise OptionError(f"groups[{group.name}].unit: {group.unit!r}; allowed here: bytes")
    return tuple(_replayed(trace, layout, spec, every) for every in spacings)


def _replayed(trace: Trace, layout: GroupLayout, spec: str, every: int) -> Spacing:
    groups = [
        replace(group, instances=tuple(_spaced(instance, spec, every) for instance in group.instances))
        for group in layout.groups
    ]
    replay = replay_groups(trace, replace(layout, groups=tuple(groups)))
    tokens = sum(each.totals.tokens for each in replay.instances)
    return Spacing(
        every=every,
        hit_tokens=replay.hits.prefix_tokens,
        token_hit_rate=replay.hits.prefix_tokens / max(1, tokens),
        mean_used_bytes=replay.mean_used,
        written_blocks=sum(each.written_blocks for each in replay.instances),
        evicted_blocks=sum(each.evicted_blocks for each in replay.instances),
    )


def _spaced(instance: InstanceLayout, spec: str, every: int) -> InstanceLayout:
    specs = tuple(replace(each, every=every) if each.name == spec else each for each in instance.specs)
    return replace(instance, specs=specs)
