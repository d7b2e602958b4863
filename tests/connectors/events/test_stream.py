"""The order of an engine's messages: gaps, replays, and the blocks that are dropped where nothing is certain."""

from __future__ import annotations

import math

import msgspec
from fake_clock import FakeClock

from kvcm.connectors.events.decoding import Event
from kvcm.connectors.events.stream import EventStream, StreamSettings
from kvcm.model.errors import CapacityError

REPLAY_SECONDS, ENGINE_SECONDS = 10.0, 5.0


def payload(number: int, run: int = 0) -> bytes:
    return msgspec.msgpack.encode([run + number / 1000, [["BlockRemoved", [number]]], 0])


class Rig:
    """A stream, the numbers that it applied since it last dropped everything, and its clock."""

    def __init__(
        self,
        has_replay: bool = True,
        most_waiting: int = 100,
        is_connected: bool = True,
        most_waiting_bytes: float = math.inf,
    ) -> None:
        self.clock = FakeClock()
        self.applied: list[int] = []
        self.losses = 0
        settings = StreamSettings(
            has_replay, REPLAY_SECONDS, ENGINE_SECONDS, most_waiting, most_waiting_bytes=most_waiting_bytes
        )
        self.stream = EventStream(settings, self.apply, self.lose, self.clock.now)
        if is_connected:
            self.stream.on_connected()

    def apply(self, events: tuple[Event, ...]) -> None:
        self.applied += [hashed for event in events for hashed in event.hashes]  # type: ignore[union-attr, misc]

    def lose(self) -> None:
        self.losses += 1
        self.applied.clear()

    def live(self, *numbers: int, run: int = 0) -> None:
        for number in numbers:
            self.stream.on_message(number, payload(number, run))

    def replay(self, *numbers: int, run: int = 0) -> None:
        for number in numbers:
            self.stream.on_replayed(number, payload(number, run))
        self.stream.on_replay_end()

    def wait(self, seconds: float) -> None:
        self.clock.time += seconds
        self.stream.tick()


def started(*numbers: int) -> Rig:
    rig = Rig()
    assert rig.stream.take_replay() == 0
    rig.replay(*numbers)
    return rig


def test_a_start_is_complete_when_the_replay_begins_with_0() -> None:
    rig = Rig()
    assert rig.stream.take_replay() == 0
    assert rig.stream.take_replay() is None
    rig.live(2, 3)
    rig.replay(0, 1, 2)
    assert rig.applied == [0, 1, 2, 3]
    assert rig.stream.is_complete
    assert rig.losses == 0


def test_a_start_is_complete_when_nothing_was_published() -> None:
    rig = started()
    assert rig.stream.is_complete
    rig.live(0, 1)
    assert rig.applied == [0, 1]
    assert rig.stream.is_complete


def test_a_start_in_the_middle_is_not_complete() -> None:
    rig = started(3, 4)
    assert (rig.applied, rig.stream.is_complete) == ([3, 4], False)
    rig.live(5)
    assert (rig.applied, rig.stream.is_complete) == ([3, 4, 5], False)


def test_a_gap_is_filled_from_the_last_message_on() -> None:
    rig = started(0, 1)
    rig.live(4)
    assert rig.stream.take_replay() == 1
    rig.live(5)
    rig.replay(1, 2, 3, 4)
    assert rig.applied == [0, 1, 2, 3, 4, 5]
    assert (rig.losses, rig.stream.counters.gaps) == (0, 1)


def test_messages_that_the_engine_does_not_keep_any_more_are_lost() -> None:
    for first in (2, 3):  # the message after the last one alone does not show that the engine is the same
        rig = started(0, 1)
        rig.live(4)
        assert rig.stream.take_replay() == 1
        rig.replay(first, *range(first + 1, 5))
        assert rig.applied == list(range(first, 5))
        assert (rig.losses, rig.stream.is_complete) == (1, False)


def test_another_run_of_the_engine_is_read_from_its_first_message() -> None:
    rig = started(0, 1)
    rig.stream.on_disconnected()
    rig.stream.on_connected()
    assert rig.stream.take_replay() == 1
    rig.replay(1, 2, run=1)
    assert rig.losses == 1
    assert rig.stream.take_replay() == 0
    rig.replay(0, 1, 2, run=1)
    assert (rig.applied, rig.stream.is_complete) == ([0, 1, 2], True)
    assert rig.stream.counters.engine_restarts == 1


def test_another_run_with_fewer_messages_has_none_to_replay() -> None:
    rig = started(0, 1)
    rig.stream.on_disconnected()
    rig.stream.on_connected()
    assert rig.stream.take_replay() == 1
    rig.replay()
    assert rig.stream.take_replay() == 0
    rig.replay(0, run=1)
    assert (rig.applied, rig.stream.is_complete) == ([0], True)


def test_the_same_run_goes_on_after_a_break() -> None:
    rig = started(0, 1)
    rig.stream.on_disconnected()
    rig.wait(ENGINE_SECONDS / 2)
    rig.stream.on_connected()
    assert rig.stream.take_replay() == 1
    rig.replay(1, 2)
    assert (rig.applied, rig.losses, rig.stream.is_complete) == ([0, 1, 2], 0, True)


def test_an_engine_that_stays_away_is_gone() -> None:
    rig = started(0, 1)
    rig.stream.on_disconnected()
    rig.wait(ENGINE_SECONDS)
    assert rig.stream.is_engine_gone
    assert (rig.applied, rig.losses) == ([], 1)
    rig.stream.on_connected()
    assert not rig.stream.is_engine_gone
    assert rig.stream.take_replay() == 0
    rig.replay(0, 1, 2)
    assert (rig.applied, rig.stream.is_complete) == ([0, 1, 2], True)


def test_an_engine_that_was_never_reached_is_not_connected_and_soon_gone() -> None:
    for has_replay in (True, False):
        rig = Rig(has_replay, is_connected=False)
        assert (rig.stream.is_connected, rig.stream.is_engine_gone) == (False, False)
        rig.wait(ENGINE_SECONDS / 2)
        assert not rig.stream.is_engine_gone
        rig.wait(ENGINE_SECONDS / 2)
        assert (rig.stream.is_connected, rig.stream.is_engine_gone) == (False, True)
        rig.wait(10 * REPLAY_SECONDS)
        assert rig.stream.counters.replay_timeouts == 0  # there was no engine that could have replayed
        rig.stream.on_connected()
        assert (rig.stream.is_connected, rig.stream.is_engine_gone) == (True, False)
        assert rig.stream.take_replay() == (0 if has_replay else None)
        rig.replay()
        rig.live(0, 1)
        assert (rig.applied, rig.stream.is_complete, rig.losses) == ([0, 1], True, 0)


def test_a_break_of_a_moment_is_still_a_connection() -> None:
    rig = started(0, 1)
    rig.stream.on_disconnected()
    assert rig.stream.is_connected
    rig.wait(ENGINE_SECONDS)
    assert not rig.stream.is_connected


def test_number_0_begins_another_run() -> None:
    for has_replay in (False, True):
        rig = Rig(has_replay)
        rig.replay()
        if has_replay:
            rig = started()
        rig.live(0, 1, 2)
        rig.live(0, 1, run=1)
        assert (rig.applied, rig.losses, rig.stream.is_complete) == ([0, 1], 1, True)


def test_without_a_replay_a_gap_and_a_break_drop_everything() -> None:
    rig = Rig(has_replay=False)
    assert rig.stream.take_replay() is None
    rig.live(0, 1)
    assert rig.stream.is_complete
    rig.live(3)
    assert (rig.applied, rig.losses, rig.stream.is_complete) == ([3], 1, False)
    rig.stream.on_disconnected()
    assert (rig.applied, rig.losses, rig.stream.is_engine_gone) == ([], 2, True)
    rig.stream.on_connected()
    rig.live(4)
    assert (rig.applied, rig.stream.is_complete, rig.stream.is_engine_gone) == ([4], False, False)


def test_a_replay_that_does_not_come_drops_everything() -> None:
    rig = started(0, 1)
    rig.live(3)
    assert rig.stream.take_replay() == 1
    rig.live(4)
    rig.wait(REPLAY_SECONDS)
    assert (rig.losses, rig.stream.is_complete, rig.stream.counters.replay_timeouts) == (1, False, 1)
    assert rig.applied == [4]
    rig.live(5)
    assert rig.applied == [4, 5]


def test_replies_to_an_earlier_request_are_passed_over() -> None:
    rig = Rig()
    assert rig.stream.take_replay() == 0
    rig.stream.on_connected()  # asks again
    rig.stream.on_replayed(7, payload(7))
    rig.stream.on_replay_end()
    assert rig.stream.take_replay() == 0
    rig.replay(0)
    assert (rig.applied, rig.stream.is_complete) == ([0], True)
    rig.stream.on_replayed(9, payload(9))
    rig.stream.on_replay_end()
    assert rig.applied == [0]


def test_replays_without_what_was_published_end() -> None:
    rig = started(0)
    for _ in range(3):
        rig.live(2)
        assert rig.stream.take_replay() == 0
        rig.replay(0)
    rig.live(2)
    assert rig.stream.take_replay() is None
    assert (rig.losses, rig.stream.is_complete) == (1, False)
    rig.live(3)
    assert rig.applied == [3]


def test_messages_that_wait_are_bounded() -> None:
    rig = Rig(most_waiting=2)
    assert rig.stream.take_replay() == 0
    rig.live(1, 2, 3)
    rig.replay(0)
    assert rig.stream.take_replay() == 0  # 1 was dropped: a gap, which another replay fills
    rig.replay(0, 1, 2, 3)
    assert (rig.applied, rig.stream.is_complete) == ([0, 1, 2, 3], True)
    assert rig.losses == 0


def test_a_gap_within_a_replay_drops_everything() -> None:
    rig = started(0, 1, 3, 4)
    assert (rig.applied, rig.losses, rig.stream.is_complete) == ([3, 4], 1, False)


def test_a_message_that_cannot_be_applied_drops_everything_and_numbers_go_on() -> None:
    rig = started(0)
    rig.stream.on_message(1, msgspec.msgpack.encode([0.0, [{"type": "AllBlocksCleared"}], 0]))  # the rig has none
    assert (rig.applied, rig.losses, rig.stream.is_complete) == ([], 1, False)
    assert rig.stream.counters.malformed == 1
    rig.live(2)
    assert rig.applied == [2]


def test_a_damaged_message_drops_everything_and_numbers_go_on() -> None:
    rig = started(0)
    rig.stream.on_message(1, b"\xc1")
    assert (rig.applied, rig.losses, rig.stream.is_complete) == ([], 1, False)
    rig.live(2)
    assert rig.applied == [2]
    assert rig.stream.counters.gaps == 0


def test_so_many_bytes_wait_for_a_replay() -> None:
    size = len(payload(1))
    rig = Rig(most_waiting_bytes=2 * size)
    assert rig.stream.take_replay() == 0
    rig.live(1, 2, 3)  # the first is one too many
    rig.replay(0)
    assert rig.stream.take_replay() == 0, "a gap, which another replay fills"
    rig.live(4, 5)
    rig.replay(0, 1, 2, 3)
    assert rig.applied == [0, 1, 2, 3, 4, 5]


def test_too_many_blocks_are_a_loss_and_no_damage() -> None:
    clock, losses = FakeClock(), []

    def refuse(events: tuple[Event, ...]) -> None:
        raise CapacityError("too many")

    stream = EventStream(StreamSettings(has_replay=False), refuse, lambda: losses.append(None), clock.now)
    stream.on_connected()
    stream.on_message(0, payload(0))
    assert (len(losses), stream.is_complete, stream.last) == (1, False, 0)
    assert (stream.counters.losses, stream.counters.malformed) == (1, 0)
