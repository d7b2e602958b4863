"""What is asked of a trace."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from kvcm.optimizer.capacities import DEFAULT_CAPACITIES
from kvcm.optimizer.policy_spec import PolicySpec, parse_policies
from kvcm.optimizer.replay import Mode
from kvcm.optimizer.roi import PRESETS, Deployment

__all__ = ["DEFAULT_POLICIES", "Progress", "StudyOptions", "nobody", "shown_name"]

DEFAULT_POLICIES = "lru,leaf_lru,belady,lfu,fifo,sieve,s3fifo"

_ENDINGS = re.compile(r"(?<!^)(\.(jsonl?|ndjson|log|txt|gz))+$")

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done, and of how much."""


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """What is asked.

    Attributes:
        policies: to replay.
        capacities: in blocks, or in % of the unique blocks of each trace, with commas.
        mode: of the replays.
        workers: threads; None for one per processor.
        deployment: in which hits are worth something.
        deployment_name: for people.
        tiers: of a hierarchy, as `parse_tiers` reads them; empty for those that are assumed.
        engines: to spread requests over, with caches of their own or one pool.
    """

    policies: tuple[PolicySpec, ...] = field(default_factory=lambda: parse_policies(DEFAULT_POLICIES))
    capacities: str = DEFAULT_CAPACITIES
    mode: Mode = "block"
    workers: int | None = None
    deployment: Deployment = PRESETS["deepseek_v3"]
    deployment_name: str = "deepseek_v3"
    tiers: str = ""
    engines: int = 4


def shown_name(name: str) -> str:
    """Return the name of a trace's file without the endings that say what it consists of."""
    return _ENDINGS.sub("", name) or name


def nobody(_what: str, _done: int, _total: int) -> None:
    """Watch nothing."""
