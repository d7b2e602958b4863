"""Sizes as operators write and read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.model.errors import InvalidArgumentError
from kvcm.sizes import parse_size, shown_size

UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50,
}  # fmt: skip


@given(st.integers(0, 1 << 12), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_number_with_a_unit_is_so_many_of_them(number: int, unit: str, space: str) -> None:
    assert parse_size(f"{number}{space if unit else ''}{unit}") == number * UNITS[unit]


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1.5GiB", 3 << 29), ("0.001KB", 1), ("0", 0), ("007", 7), ("9223372036854775807", 2**63 - 1)],
)
def test_sizes_are_exact(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "GiB", "-1", "+1", "1gib", "1Gib", "1G", "1 GB ", " 1GB", "1  GB", "1e9", "1,5GB", ".5GB", "1.",
        "1_000", "1.GB", "0x10", "٣", "1٣GB", "nan", "inf", "1GiBGiB", "1\nGB", "9" * 50,
    ],
)  # fmt: skip
def test_what_is_no_size_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape("must be a number of bytes, or one with a unit of B, KB")):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("0.3B", "whole number"), ("1.0001KB", "whole number"), ("9223372036854775808", "larger"), ("8192PiB", "larger")],
)
def test_sizes_that_no_limit_can_have_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (999 * 1024, "999.0 KiB"), (1023 * 1024, "1.0 MiB"),
        (3 << 29, "1.5 GiB"), (1 << 62, "4,096.0 PiB"),
    ],
)  # fmt: skip
def test_sizes_are_shown_in_the_largest_unit(size_bytes: int, text: str) -> None:
    assert shown_size(size_bytes) == text


@given(st.integers(0, 1 << 59))
def test_what_is_shown_is_short_and_near(size_bytes: int) -> None:
    number, unit = shown_size(size_bytes).split()
    assert len(number) <= 5
    assert abs(float(number) * UNITS[unit] - size_bytes) <= 0.0501 * UNITS[unit]
