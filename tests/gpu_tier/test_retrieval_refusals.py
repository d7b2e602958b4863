"""RetroInfer and PQCache when pools refuse: nothing is left half done, and other requests do not notice."""

from __future__ import annotations

from typing import Any

import pytest
from layer_traffic import Shape
from refused_allocations import refuse_each_once
from retrieval_cases import BLOCKS, CASES

SHAPE = Shape(layers=2, max_requests=4)
WINDOWS: dict[str, dict[str, Any]] = {
    f"{name}, a window": {**case, "prefill_window_tokens": 20} for name, case in BLOCKS.items()
}
ALL = {**CASES, **WINDOWS}


@pytest.mark.parametrize("name", ALL)
def test_every_allocation_may_be_refused_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_each_once(SHAPE, ALL[name], monkeypatch, has_prefix=name in BLOCKS)
