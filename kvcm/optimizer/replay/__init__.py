"""Replays a trace through a cache of one policy and one capacity."""

from __future__ import annotations

from kvcm.optimizer.replay.engine import replay, replay_all
from kvcm.optimizer.replay.job import Job, Mode
from kvcm.optimizer.replay.reference import reference_replay

__all__ = ["Job", "Mode", "reference_replay", "replay", "replay_all"]
