"""Chains of blocks as the prefix explorer shows them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.console.pages.explorer import MAX_SHOWN, Chain, ChainFold, NumbersError, numbers_in

INT64 = 1 << 63


def block(position: int, state: str = "serving", **changes: Any) -> dict[str, Any]:
    is_there = state != "absent"
    location = {
        "storage": "disk", "storage_type": "file", "status": state, "specs": ["kv"], "size_bytes": 64,
        "began_at_ms": 1000 + position,
    }  # fmt: skip
    return {
        "position": position, "block_key": str(100 + position), "state": state, "is_readable": state == "serving",
        "why_not": "" if state == "serving" else f"because of {state}", "locations": [location] if is_there else [],
        "last_access_at_ms": 0, "accesses": 0, "age_seconds": 1.0, "is_pinned": False, "parent_is_present": is_there,
        **changes,
    }  # fmt: skip


def document(blocks: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    found = next((each["position"] for each in blocks if not each["is_readable"]), len(blocks))
    end = "none" if found == len(blocks) else blocks[found]["state"]
    summary = {
        "blocks": len(blocks), "tokens_per_block": 16, "matched_blocks": found, "matched_tokens": 16 * found,
        "complete_blocks": found, "end": end, "end_reason": "number within the piece alone",
    }  # fmt: skip
    return {"summary": {**summary, **changes}, "blocks": blocks}


def chain_of(*documents: Any) -> Chain:
    fold = ChainFold()
    for each in documents:
        fold.add(each)
    return fold.chain()


def in_pieces(blocks: list[dict[str, Any]], size: int) -> Chain:
    """Return the chain built from pieces, each of which counts from 0."""
    pages = [blocks[begin : begin + size] for begin in range(0, len(blocks), size)]
    return chain_of(*[document([{**each, "position": at} for at, each in enumerate(page)]) for page in pages])


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1, 2, 3", [1, 2, 3]),
        ("[1,2,\n 3]", [1, 2, 3]),
        ('{"token_ids": [7, 8]}', [7, 8]),
        ("1-2-3", [1, 2, 3]),
        ("tensor([101,  102])", [101, 102]),
        ("0042", [42]),
    ],
)
def test_tokens_are_read_whatever_stands_between_them(text: str, numbers: list[int]) -> None:
    assert numbers_in(text, are_tokens=True) == numbers


@given(
    st.lists(st.integers(-INT64, INT64 - 1), min_size=1, max_size=50), st.sampled_from([",", " ", "\n", ";\t", '","'])
)
def test_keys_of_64_bits_come_back_as_they_were(keys: list[int], between: str) -> None:
    assert numbers_in(f"[{between.join(map(str, keys))}]", are_tokens=False) == keys


@pytest.mark.parametrize(
    ("text", "are_tokens", "reason"),
    [
        ("", True, "no number"),
        ("none at all", False, "no number"),
        ("1.5", True, "1.5 is no whole number"),
        (str(INT64), False, "does not fit into 64 bits"),
        ("9" * 5000, True, "does not fit into 64 bits"),
        ("1 " * 65_537, False, "65,537 numbers in it, at most 65,536 block keys"),
    ],
)
def test_a_chain_that_is_no_list_of_numbers_is_refused(text: str, are_tokens: bool, reason: str) -> None:
    with pytest.raises(NumbersError, match=re.escape(reason)):
        numbers_in(text, are_tokens=are_tokens)


def test_blocks_that_are_same_are_one_run() -> None:
    blocks = [block(place) for place in range(640)] + [block(640 + place, "writing") for place in range(60)]
    blocks += [block(700 + place, "absent") for place in range(300)]
    chain = chain_of(document(blocks))
    assert [(run.first, run.last, run.state, run.label) for run in chain.runs] == [
        *[(0, 639, "readable", "found"), (640, 699, "writing", "being written"), (700, 999, "absent", "not there")]
    ]
    assert chain.headline == "The first 640 of 1,000 blocks are found: 10,240 of 16,000 tokens."
    assert chain.ending == "The match ends at block 640: because of writing."
    assert chain.legend == [("readable", "found"), ("writing", "being written"), ("absent", "not there")]
    assert [run.reason for run in chain.runs][1] == "the first: because of writing"
    assert chain.runs[2].reason.startswith("they are not there")
    first = chain.runs[0]
    assert (first.size_bytes, first.oldest_ms, first.newest_ms) == (640 * 64, 1000, 1639)
    assert (first.places, first.left_out, len(first.blocks)) == ("disk (file)", 640 - MAX_SHOWN, MAX_SHOWN)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"is_pinned": True}, "readable"),
        ({"parent_is_present": False}, "readable"),
        ({"why_not": "it lacks 1 of 2 specs: b"}, "incomplete"),
        ({"is_readable": False, "why_not": "storage disk is down"}, "unreadable"),
        ({"locations": [{**block(0)["locations"][0], "storage": "other"}]}, "readable"),
    ],
)
def test_a_differing_block_is_a_run_of_its_own(changes: dict[str, Any], state: str) -> None:
    chain = chain_of(document([block(0), block(1, **changes), block(2)]))
    assert [run.state for run in chain.runs] == ["readable", state, "readable"]
    assert [run.count for run in chain.runs] == [1, 1, 1]


def test_of_everything_and_of_nothing() -> None:
    whole = chain_of(document([block(0), block(1)]))
    assert (whole.headline, whole.ending, whole.lacking) == ("All 2 blocks are found: 32 of 32 tokens.", "", "")
    assert chain_of(document([block(0, "absent")])).headline == "The block is not found."
    partial = chain_of(document([block(0, why_not="it lacks b")], complete_blocks=0))
    assert partial.lacking == "Readers that ask for every part of a block find 0 of them."


@given(st.lists(st.sampled_from(["serving", "writing", "deleting", "absent"]), min_size=1, max_size=300))
def test_runs_have_every_block_once(states: list[str]) -> None:
    chain = chain_of(document([block(place, state) for place, state in enumerate(states)]))
    assert [place for run in chain.runs for place in range(run.first, run.last + 1)] == list(range(len(states)))
    assert all(run.count == len(run.blocks) + run.left_out for run in chain.runs)
    assert all(one.state != two.state for one, two in zip(chain.runs, chain.runs[1:], strict=False))


@given(
    st.lists(st.sampled_from(["serving", "serving", "serving", "writing", "absent"]), min_size=1, max_size=60),
    st.integers(1, 20),
)
def test_a_chain_reported_in_pieces_is_the_same(states: list[str], size: int) -> None:
    blocks = [block(place, state) for place, state in enumerate(states)]
    assert in_pieces(blocks, size) == in_pieces(blocks, len(blocks))


def test_of_a_long_run_in_pieces_as_much_is_listed() -> None:
    blocks = [block(place) for place in range(MAX_SHOWN + 100)]
    chain = in_pieces(blocks, 100)
    assert chain == in_pieces(blocks, len(blocks))
    assert len(chain.runs[0].blocks) == MAX_SHOWN


def test_of_very_many_runs_the_first_are_shown() -> None:
    chain = chain_of(document([block(at, "absent" if at % 2 else "serving") for at in range(1000)]))
    assert 100 < len(chain.runs) < 1000
    assert len(chain.runs) + chain.left_out == 1000
