"""What a cache is worth: nodes and GPUs it spares, time to the first token, money, and how sure that is."""

from __future__ import annotations

from kvcm.optimizer.roi.deployment import RANGES, Deployment
from kvcm.optimizer.roi.first_token import Spread, Work, spread_of, work_of
from kvcm.optimizer.roi.fleet import FirstTokens, first_tokens
from kvcm.optimizer.roi.length_profile import LengthProfile, fit_profile, read_profile
from kvcm.optimizer.roi.presets import INPUTS, PRESETS, parse_deployment
from kvcm.optimizer.roi.queueing import Queueing, simulate
from kvcm.optimizer.roi.returns import Returns, block_bytes, offered_tokens_per_second, returns
from kvcm.optimizer.roi.reuse import Reuse, hit_tokens, loaded_tokens, reuse_of
from kvcm.optimizer.roi.sensitivity import Grid, Swing, grid, sensitivity
from kvcm.optimizer.roi.services import Rank, Service, rank_services
from kvcm.optimizer.roi.splitting import Share, Split, split_budget

__all__ = [
    "INPUTS",
    "PRESETS",
    "RANGES",
    "Deployment",
    "FirstTokens",
    "Grid",
    "LengthProfile",
    "Queueing",
    "Rank",
    "Returns",
    "Reuse",
    "Service",
    "Share",
    "Split",
    "Spread",
    "Swing",
    "Work",
    "block_bytes",
    "first_tokens",
    "fit_profile",
    "grid",
    "hit_tokens",
    "loaded_tokens",
    "offered_tokens_per_second",
    "parse_deployment",
    "rank_services",
    "read_profile",
    "returns",
    "reuse_of",
    "sensitivity",
    "simulate",
    "split_budget",
    "spread_of",
    "work_of",
]
