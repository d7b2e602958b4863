"""Policies at capacities for traces whose requests do more than read a prefix: query modes, masks, location specs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from kvcm.optimizer.groups import replay_group
from kvcm.optimizer.results import Replay
from kvcm.optimizer.study.options import DEFAULT_POLICIES, Progress, StudyOptions
from kvcm.optimizer.study.recommendation import BOUND
from kvcm.optimizer.trace import Trace

__all__ = ["grouped_rows"]


def grouped_rows(
    trace: Trace, options: StudyOptions, capacities: Sequence[int], progress: Progress
) -> tuple[Replay, ...]:
    """Return what each policy counts at each capacity, with all instances in one group.

    Hits are the blocks of the answers and those that engines said they have. Which requests a bound would serve is not
    known where they read in different ways: it is left out unless it was asked for by name.

    Raises:
        OptionError: a policy cannot be replayed like this.
    """
    is_default = ",".join(spec.label for spec in options.policies) == DEFAULT_POLICIES
    policies = [spec for spec in options.policies if not (is_default and spec.name == BOUND)]
    jobs = list(product(policies, capacities))
    found = []
    for done, (spec, capacity) in enumerate(jobs):
        progress("replays", done, len(jobs))
        found.append(replay_group(trace, spec, capacity, mode=options.mode))
    progress("replays", len(jobs), len(jobs))
    return tuple(found)
