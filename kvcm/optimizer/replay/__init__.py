"""Replays a trace through a cache of one policy and one capacity."""

from __future__ import annotations

from kvcm.optimizer.replay.engine import Job, Mode, replay, replay_all
from kvcm.optimizer.replay.reference import reference_replay

__all__ = ["Job", "Mode", "reference_replay", "replay", "replay_all"]
