"""The page on a running manager: complete, and safe whatever groups are called."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from kvcm.model.groups import CacheConfig, CacheReclaimStrategy, InstanceGroup, InstanceGroupQuota, TriggerStrategy
from kvcm.optimizer.live.proposals import propose
from kvcm.optimizer.live.recording import read_recording
from kvcm.optimizer.live.situation import GroupState, Situation
from kvcm.optimizer.live.trials import rehearsals
from kvcm.optimizer.report.tuning import tuning_page

_NAME = "<script>alert(1)</script>&\"'"


def test_a_page_says_what_is_proposed_and_runs_nothing() -> None:
    events: list[dict[str, Any]] = [{"type": "recent", "most_keys": 1, "until_us": 1}]
    for turn in range(40):
        base = {"source": _NAME, "trigger_time_us": turn * 1_000_000, "keys": [turn % 4, 10 + turn % 4]}
        events.append({**base, "type": "GetCacheLocation", "query_type": "prefix_match"})
        events.append({**base, "type": "StartWriteCache", "write_session_id": ""})
    recording = read_recording(json.dumps(event).encode() for event in events)
    strategy = CacheReclaimStrategy(trigger_strategy=TriggerStrategy(0, 0.9))
    group = InstanceGroup(_NAME, quota=InstanceGroupQuota(4 << 20), cache_config=CacheConfig(strategy))
    situation = Situation([GroupState(group, {_NAME: 1 << 20}, 0)], recording)
    with rehearsals(recording, workers=1) as rehearse:
        proposals = propose(situation, rehearse)
    page = tuning_page(situation, [*proposals, replace(proposals[0], warnings=("<b>",))])
    assert "<script" not in page
    assert "<b>" not in page
    assert "&lt;script&gt;" in page
    assert page.count("<svg") == 4, "each chart for wide and for narrow screens"
    assert "http://" not in page.replace("http://www.w3.org", "")
