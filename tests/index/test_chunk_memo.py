"""What a pure function makes of encoded locations is remembered, bounded, and never wrong."""

from hypothesis import given
from hypothesis import strategies as st

from kvcm.index.chunk_memo import ChunkMemo

CHUNKS = st.lists(st.lists(st.sampled_from([b"a", b"bb", b"ccc", b"dddd", b""]), max_size=8), max_size=8)


class Time:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@given(batches=CHUNKS, most_bytes=st.integers(0, 2000), pause=st.sampled_from([0.0, 25.0, 90.0]))
def test_results_are_those_of_the_function_in_order(batches: list[list[bytes]], most_bytes: int, pause: float) -> None:
    time = Time()
    memo = ChunkMemo(bytes.upper, most_bytes, time)
    for batch in batches:
        assert memo.map(batch) == [chunk.upper() for chunk in batch]
        time.seconds += pause


def test_a_known_chunk_is_not_computed_again() -> None:
    calls: list[bytes] = []
    memo = ChunkMemo(lambda chunk: calls.append(chunk) or chunk.upper())  # type: ignore[func-returns-value]
    assert memo.map([b"a", b"b", b"a"]) == [b"A", b"B", b"A"]
    assert memo.map([b"b", b"a"]) == [b"B", b"A"]
    assert calls == [b"a", b"b"]


def test_memory_is_bounded() -> None:
    memo = ChunkMemo(bytes.upper, most_bytes=100_000)
    most = 0
    for number in range(10_000):
        memo.map([b"%d" % number * 100])
        most = max(most, sum(len(key) + len(value) for part in (memo._young, memo._old) for key, value in part.items()))
    assert 50_000 < most <= 100_000


def test_what_nobody_asks_for_any_more_goes_before_the_memory_is_full() -> None:
    """Blocks come and go all the time, so a memo of all that ever was grows as long as a manager runs."""
    time, calls = Time(), list[bytes]()
    memo = ChunkMemo(lambda chunk: calls.append(chunk) or chunk.upper(), clock=time)  # type: ignore[func-returns-value]
    for second in range(1000):
        time.seconds = float(second)
        memo.map([b"hot", b"cold%d" % second])
        assert len(memo) <= 125, second
    assert calls.count(b"hot") == 1
