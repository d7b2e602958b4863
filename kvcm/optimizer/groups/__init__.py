"""Replays a trace through instances that share one capacity, whatever their requests ask."""

from __future__ import annotations

from kvcm.optimizer.groups.engine import replay_group

__all__ = ["replay_group"]
