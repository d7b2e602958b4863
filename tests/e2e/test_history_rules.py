"""The rules by which runs are judged find what they are there to find."""

from __future__ import annotations

from dataclasses import replace

from key_history import History, Outcome, Removal, Write
from mixed_load import Read
from read_checks import certain_bytes, judge_reads

_BLOCK = ("i", 1)


def _write(name: str, at: float, outcome: Outcome | None = Outcome.OK, *, keys: tuple[int, ...] = (1,)) -> Write:
    """A session from `at` on, that is granted and finished a tenth of a second later each."""
    write = Write("i", name, {key: f"{name}{key}" for key in keys}, at, at + 0.1, 1)
    if outcome is not None:
        write.succeeded, write.outcome = frozenset(keys), outcome
        write.finish_sent, write.finish_ended = at + 0.1, at + 0.2
    return write


def _history(*writes: Write, removals: tuple[Removal, ...] = ()) -> History:
    history = History()
    for write in writes:
        history.granted(write)
    for removal in removals:
        history.removing(removal)
    return history


def _removal(at: float, *, is_confirmed: bool = True) -> Removal:
    return Removal("i", frozenset({1}), at, at + 0.1, is_confirmed)


def test_confirmed_blocks_must_be_served() -> None:
    history = _history(_write("a", 0))
    assert history.verdicts([_BLOCK], {_BLOCK: "a1"}) == []
    assert any("lost" in text for text in history.verdicts([_BLOCK], {}))


def test_blocks_of_an_unconfirmed_removal_need_not_be_served() -> None:
    history = _history(_write("a", 0), removals=(_removal(5, is_confirmed=False),))
    assert history.verdicts([_BLOCK], {}) == history.verdicts([_BLOCK], {_BLOCK: "a1"}) == []


def test_blocks_of_a_confirmed_removal_must_not_be_served() -> None:
    history = _history(_write("a", 0), removals=(_removal(5),))
    assert any("removal" in text for text in history.verdicts([_BLOCK], {_BLOCK: "a1"}))


def test_unfinished_blocks_must_not_be_served() -> None:
    for outcome in (None, Outcome.REFUSED):
        assert _history(_write("a", 0, outcome)).verdicts([_BLOCK], {_BLOCK: "a1"})
    assert _history().verdicts([_BLOCK], {_BLOCK: "x"})


def test_an_unknown_finish_is_either_whole_or_nothing() -> None:
    history = _history(_write("a", 0, Outcome.UNKNOWN, keys=(1, 2)))
    blocks = [("i", 1), ("i", 2)]
    assert history.verdicts(blocks, {}) == history.verdicts(blocks, {("i", 1): "a1", ("i", 2): "a2"}) == []
    assert any("only some" in text for text in history.verdicts(blocks, {("i", 1): "a1"}))


def test_two_open_sessions_of_one_block_are_seen() -> None:
    first, second = _write("a", 0, None), _write("b", 0.5, None)
    assert any("two sessions" in text for text in _history(first, second).double_owners())
    assert not list(_history(first, _write("b", 1.0, None)).double_owners())
    assert not list(_history(first, second, removals=(_removal(0.3),)).double_owners())
    slow = replace(second, sent=-1.0)
    assert not list(_history(first, slow, removals=(_removal(-0.5),)).double_owners())


def test_stale_reads_are_measured_and_false_ones_are_found() -> None:
    history = _history(_write("a", 0), removals=(_removal(5),))
    fine, missed, stale = (Read("i", {1: uri}, at, at + 0.01) for uri, at in (("a1", 1.0), ("", 2.0), ("a1", 6.1)))
    verdict = judge_reads(history, [fine, missed, stale])
    assert verdict.wrong == []
    assert [round(seconds, 6) for seconds in verdict.written_but_missed] == [1.8]
    assert [round(seconds, 6) for seconds in verdict.removed_but_read] == [1.0]
    assert judge_reads(history, [Read("i", {1: "x"}, 1.0, 1.1)]).wrong
    assert judge_reads(history, [Read("i", {1: "a1"}, 0.01, 0.02)]).wrong


def test_bytes_that_are_certainly_there_are_counted_at_their_highest() -> None:
    history = _history(_write("a", 0, keys=(1, 2)), _write("b", 0.5, None, keys=(3,)), _write("c", 3, None, keys=(4,)))
    assert certain_bytes(history, ["i"], 10) == 30
