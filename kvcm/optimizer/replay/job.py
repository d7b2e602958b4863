"""What is asked of a replay, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.policy_spec import PolicySpec
from kvcm.optimizer.trace import Trace

__all__ = ["Job", "Mode", "check"]

Mode = Literal["block", "request"]
"""Whether a cache is held to its capacity before each block that it takes, or after each request."""


@dataclass(frozen=True, slots=True)
class Job:
    """One replay.

    Attributes:
        spec: the policy.
        capacity_blocks: 1 or more.
        mode: `block` or `request`.
        keep_requests: whether the outcome of each request is kept.
    """

    spec: PolicySpec
    capacity_blocks: int
    mode: Mode = "block"
    keep_requests: bool = False


def check(trace: Trace, job: Job) -> None:
    """Do nothing if a job can be done.

    Raises:
        OptionError: it cannot.
    """
    if job.capacity_blocks < 1:
        raise OptionError(f"capacity_blocks: {job.capacity_blocks} is out of range; allowed: 1 or more")
    if job.mode not in get_args(Mode):
        raise OptionError(f"mode: {job.mode!r} is none; allowed: {', '.join(get_args(Mode))}")
    if not trace.is_plain:
        raise OptionError(
            f"trace: {trace.name!r} has requests with query modes, masks or location specs; allowed here: plain "
            "prefix reads. Replay it as groups (kvcm.optimizer.groups)"
        )
