"""Block masks (wire.md 5.1)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.model.masks import NO_MASK, BlockMask

FIXED = settings(max_examples=200, deadline=None, derandomize=True)
FLAGS = st.lists(st.booleans(), max_size=12)


@FIXED
@given(offset=st.integers(-20, 20), count=st.integers(0, 12))
def test_an_offset_masks_the_positions_before_it(offset: int, count: int) -> None:
    """A negative one masks everything: the original casts it to unsigned."""
    kept = BlockMask(offset=offset).unmasked(count)
    assert list(kept) == [i for i in range(count) if 0 <= offset <= i]


@FIXED
@given(flags=FLAGS, count=st.integers(0, 14))
def test_flags_mask_where_they_are_true_and_nothing_behind_their_end(flags: list[bool], count: int) -> None:
    kept = BlockMask(flags=flags).unmasked(count)
    assert list(kept) == [i for i in range(count) if not (i < len(flags) and flags[i])]


@pytest.mark.parametrize("mask", [NO_MASK, BlockMask(), BlockMask(flags=()), BlockMask(offset=0)])
def test_nothing_is_masked_by_default(mask: BlockMask) -> None:
    assert list(mask.unmasked(5)) == [0, 1, 2, 3, 4]
    assert list(mask.unmasked(0)) == []


@FIXED
@given(flags=FLAGS)
def test_of_masks_exactly_the_flagged_positions(flags: list[bool]) -> None:
    mask = BlockMask.of(flags)
    assert list(mask.unmasked(len(flags))) == [i for i, flag in enumerate(flags) if not flag]


@FIXED
@given(flags=FLAGS)
def test_of_is_an_offset_where_the_masked_positions_are_a_prefix(flags: list[bool]) -> None:
    is_prefix = flags == sorted(flags, reverse=True)
    mask = BlockMask.of(flags)
    assert (mask.offset is not None) == is_prefix
    assert (mask.flags is None) == is_prefix


@pytest.mark.parametrize(
    ("flags", "mask"),
    [
        ([], BlockMask(offset=0)),
        ([False, False], BlockMask(offset=0)),
        ([True, True], BlockMask(offset=2)),
        ([True, False], BlockMask(offset=1)),
        ([False, True], BlockMask(flags=(False, True))),
    ],
)
def test_of_by_example(flags: list[bool], mask: BlockMask) -> None:
    assert BlockMask.of(flags) == mask
