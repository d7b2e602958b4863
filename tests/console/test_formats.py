"""Numbers as people read them."""

from __future__ import annotations

import pytest

from kvcm.console import formats


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (-1, "no limit"), (0, "0 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes(value: int | None, shown: str) -> None:
    assert formats.size(value) == shown


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [(None, "–"), (0, "0.0 %"), (0.98234, "98.2 %"), (0.99999, "99.9 %"), (1, "100.0 %"), (1.2, "120.0 %")],
)
def test_what_is_not_quite_all_is_not_shown_as_all(ratio: float | None, shown: str) -> None:
    assert formats.percent(ratio) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *[(None, "–"), (0.00004, "40 µs"), (0.0032, "3.2 ms"), (0.5, "500 ms"), (12, "12 s"), (300, "5 min")],
        *[(7500, "2 h 5 min"), (3 * 86400, "3 days")],
    ],
)
def test_durations(seconds: float | None, shown: str) -> None:
    assert formats.duration(seconds) == shown


@pytest.mark.parametrize(
    ("at_ms", "shown"), [(0, "–"), (None, "–"), (1_000_000, "now"), (990_000, "10 s ago"), (1_005_000, "in 5 s")]
)
def test_when_something_was_or_will_be(at_ms: float | None, shown: str) -> None:
    assert formats.ago(at_ms, 1_000_400 if at_ms == 1_000_000 else 1_000_000) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "–"), (0, "0/s"), (0.25, "0.25/s"), (12.4, "12/s"), (1250, "1,250/s")]
)
def test_rates(value: float | None, shown: str) -> None:
    assert formats.rate(value) == shown
