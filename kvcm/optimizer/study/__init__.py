"""Asks a trace what cache is worth having: every question whose answer a report shows."""

from __future__ import annotations

from kvcm.optimizer.study.options import DEFAULT_POLICIES, Progress, StudyOptions, shown_name
from kvcm.optimizer.study.recommendation import BOUND, Recommendation
from kvcm.optimizer.study.rows import replays_of
from kvcm.optimizer.study.sampled import Estimate, Sampling, estimates_of, parse_sampling
from kvcm.optimizer.study.study import Study, study_of
from kvcm.optimizer.study.tiering import DEFAULT_TIERS, Splits, Tiering
from kvcm.optimizer.study.worth import Services, services_of

__all__ = [
    "BOUND", "DEFAULT_POLICIES", "DEFAULT_TIERS", "Estimate", "Progress", "Recommendation", "Sampling", "Services",
    "Splits", "Study", "StudyOptions", "Tiering", "estimates_of", "parse_sampling", "replays_of", "services_of",
    "shown_name", "study_of",
]  # fmt: skip
