"""What a pure function makes of encoded locations is remembered, bounded, and never wrong."""

from hypothesis import given
from hypothesis import strategies as st

from kvcm.index.chunk_memo import ChunkMemo

CHUNKS = st.lists(st.lists(st.sampled_from([b"a", b"bb", b"ccc", b"dddd", b""]), max_size=8), max_size=8)


@given(batches=CHUNKS, most=st.integers(0, 6))
def test_results_are_those_of_the_function_in_order(batches: list[list[bytes]], most: int) -> None:
    memo = ChunkMemo(len, most)
    for batch in batches:
        assert memo.map(batch) == [len(chunk) for chunk in batch]


def test_a_known_chunk_is_not_computed_again() -> None:
    calls: list[bytes] = []
    memo = ChunkMemo(lambda chunk: calls.append(chunk) or chunk.upper())  # type: ignore[func-returns-value]
    assert memo.map([b"a", b"b", b"a"]) == [b"A", b"B", b"A"]
    assert memo.map([b"b", b"a"]) == [b"B", b"A"]
    assert calls == [b"a", b"b"]


def test_memory_is_bounded() -> None:
    memo = ChunkMemo(len, most=10)
    for number in range(1000):
        memo.map([str(number).encode()])
    assert len(memo._known) <= 11
