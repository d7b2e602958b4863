"""Charts of the history, whatever is known of it."""

from __future__ import annotations

import pytest
from history_documents import history

from kvcm.console.charts import chart
from kvcm.console.views.history import History, charts_of_all, charts_of_group
from kvcm.console.views.overview import tiles

_OF_ALL = [
    *[("requests_per_second", method) for method in ("match", "start", "finish", "other")],
    ("errors_per_second",),
    ("match_p50_seconds",),
    ("match_p99_seconds",),
]
_OF_GROUP = [
    ("hit_ratio", "chat"),
    ("lookup_keys_per_second", "chat", "hit"),
    ("lookup_keys_per_second", "chat", "miss"),
    ("evicted_bytes_per_second", "chat"),
    ("refused_writes_per_second", "chat"),
    ("used_bytes", "chat", "file"),
    ("quota_bytes", "chat"),
]
_EVERYTHING = [*_OF_ALL, *_OF_GROUP]


@pytest.mark.parametrize("known", [_OF_ALL, _OF_GROUP, *([each] for each in _EVERYTHING), _EVERYTHING, []])
def test_whatever_is_known_is_drawn(known: list[tuple[str, ...]]) -> None:
    found = History(history({series: [1.0, None, 0.5] for series in known}))
    for each in (*charts_of_all(found), *charts_of_group(found, "chat")):
        assert chart(each.title, each.lines, found.until_ms, found.interval_seconds, each.shown, each.base)
    assert tiles(found)
