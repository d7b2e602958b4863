"""Every call of InsightService: a good request and each documented refusal (decision 9)."""

from __future__ import annotations

from collections.abc import Callable

from test_meta_cases import Fields, Refused, invalid
from test_transport_sites import Site

GOOD: dict[str, Callable[[Site], Fields]] = {
    "InsightService.ListSessions": lambda site: {"instance_id": site.instance()},
    "InsightService.ExploreBlocks": lambda site: {"instance_id": site.instance(), "token_ids": list(range(8))},
    "InsightService.GetCurve": lambda site: {"instance_group": site.group()},
    "InsightService.ListAlerts": lambda site: {"instance_group": site.group()},
}


def _unknown_instance(**fields: object) -> Refused:
    named = {"instance_id": "nobody", **fields}
    return Refused("unknown instance", lambda _site: named, "INSTANCE_NOT_EXIST", ("'nobody'",))


_UNKNOWN_GROUP = invalid("unknown group", lambda _site: {"instance_group": "nowhere"}, "'nowhere'", "does not exist")

REFUSED: dict[str, list[Refused]] = {
    "InsightService.ListSessions": [_UNKNOWN_GROUP, _unknown_instance()],
    "InsightService.ExploreBlocks": [
        _unknown_instance(block_keys=[1]),
        invalid("no keys", lambda site: {"instance_id": site.instance()}, "block_keys and token_ids", "required"),
    ],
    "InsightService.GetCurve": [
        _UNKNOWN_GROUP,
        invalid("no group", lambda _site: {}, "GetCurve: {instance_group}", "required"),
    ],
    "InsightService.ListAlerts": [_UNKNOWN_GROUP],
}
