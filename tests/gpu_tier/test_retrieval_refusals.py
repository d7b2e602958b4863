"""RetroInfer and PQCache when pools refuse: nothing is left half done, and other requests do not notice."""

from __future__ import annotations

from typing import Any

import pytest
from layer_traffic import Shape
from refused_allocations import refuse_each_once
from retrieval_cases import BLOCKS, CASES

SHAPE = Shape(layers=2, max_requests=4)
ALL: dict[str, dict[str, Any]] = {
    **{name: CASES[name] for name in ("retroinfer", "retroinfer device", "pqcache", "pqcache lru")},
    "retroinfer gpu control, a window": {**BLOCKS["retroinfer gpu control"], "prefill_window_tokens": 20},
}


@pytest.mark.parametrize("name", ALL)
def test_every_allocation_may_be_refused_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_each_once(SHAPE, ALL[name], monkeypatch, has_prefix=name in BLOCKS)
