"""One sample of the whole deployment: the rates of all managers summed up, and what groups use and may use."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvcm.model.vitals import METHODS, Vitals
from kvcm.service.vitals.rates import Rates, quantile
from kvcm.service.vitals.ring import Series

__all__ = [
    "ERRORS",
    "EVICTED",
    "HIT_KEYS",
    "MISSED_KEYS",
    "P50",
    "P99",
    "QUOTA",
    "REFUSED",
    "REQUESTS",
    "USED",
    "sample_of",
]

REQUESTS = "requests_per_second"
ERRORS = "errors_per_second"
HIT_KEYS = "hit_keys_per_second"
MISSED_KEYS = "missed_keys_per_second"
P50 = "match_p50_seconds"
P99 = "match_p99_seconds"
USED = "used_bytes"
QUOTA = "quota_bytes"
EVICTED = "evicted_bytes_per_second"
REFUSED = "refused_writes_per_second"


def sample_of(
    rates: Sequence[Rates], vitals: Iterable[Vitals], quotas: Mapping[str, int], name_of: Callable[[str], str]
) -> Mapping[Series, float]:
    """Return what is known at one moment; series of which nothing is known are missing.

    Args:
        rates: of every manager that has some.
        vitals: of every manager; that of the leader says what is used.
        quotas: bytes by group.
        name_of: what a group is called in series: there may be too many.
    """
    sample: defaultdict[Series, float] = defaultdict(float)
    if rates:
        _add_requests(sample, rates)
        _add_groups(sample, rates, name_of)
    leaders = [each for each in vitals if each.is_leader and each.used_bytes]
    if leaders:
        _add_used(sample, max(leaders, key=lambda each: each.at).used_bytes, name_of)
    for group, capacity in quotas.items():
        sample[_of_group(QUOTA, name_of(group))] += capacity
    return sample


def _of_group(name: str, group: str, *labels: tuple[str, str]) -> Series:
    return Series(name, (("group", group), *labels))


def _add_requests(sample: dict[Series, float], rates: Sequence[Rates]) -> None:
    for method in METHODS:
        sample[Series(REQUESTS, (("method", method),))] = sum(each.requests.get(method, 0.0) for each in rates)
    sample[Series(ERRORS)] = sum(sum(each.errors.values()) for each in rates)
    bounds = rates[0].match_bounds
    alike = [each.match_counts for each in rates if each.match_bounds == bounds]  # another release may have others
    counts = [sum(column) for column in zip(*alike, strict=True)]
    for name, share in ((P50, 0.5), (P99, 0.99)):
        if (seconds := quantile(share, bounds, counts)) is not None:
            sample[Series(name)] = seconds


def _add_groups(sample: defaultdict[Series, float], rates: Iterable[Rates], name_of: Callable[[str], str]) -> None:
    for each in rates:
        for group, found in each.groups.items():
            name = name_of(group)
            sample[_of_group(HIT_KEYS, name)] += found.hit_keys
            sample[_of_group(MISSED_KEYS, name)] += found.missed_keys
            sample[_of_group(EVICTED, name)] += found.evicted_bytes
            sample[_of_group(REFUSED, name)] += found.refused_writes


def _add_used(
    sample: defaultdict[Series, float], used_bytes: Mapping[str, Mapping[str, int]], name_of: Callable[[str], str]
) -> None:
    for group, tiers in used_bytes.items():
        for tier, size in tiers.items():
            sample[_of_group(USED, name_of(group), ("tier", tier))] += size
