"""How documents ended, in memory: told as long as it counts, forgotten as others come."""

from kvcm.store.outcomes import Outcomes


def test_an_outcome_is_told_until_it_is_over() -> None:
    outcomes = Outcomes()
    assert outcomes.keep("a", b"1", until=10.0, now=0.0) == []
    assert [outcomes.get("a", now) for now in (0.0, 9.99, 10.0)] == [b"1", b"1", None]
    assert outcomes.get("b", 0.0) is None


def test_what_is_over_goes_a_few_at_a_time_until_none_is_left() -> None:
    outcomes = Outcomes()
    for at in range(100):
        outcomes.keep(f"n{at}", b"", until=10.0, now=0.0)
    forgotten = []
    for at in range(40):
        some = outcomes.keep(f"late{at}", b"", until=90.0, now=50.0)
        assert len(some) <= 4
        forgotten += some
    assert forgotten == [f"n{at}" for at in range(100)]
    assert len(outcomes) == 40


def test_a_name_that_ends_again_is_as_young_as_its_last_end() -> None:
    outcomes = Outcomes()
    outcomes.keep("a", b"1", until=10.0, now=0.0)
    outcomes.keep("b", b"2", until=11.0, now=1.0)
    assert outcomes.keep("a", b"3", until=70.0, now=10.0) == []
    assert outcomes.keep("c", b"4", until=72.0, now=12.0) == ["b"]
    assert outcomes.get("a", 12.0) == b"3"
