"""A ledger that does not agree with what is there is told of, whatever the reason."""

from __future__ import annotations

from typing import Any

import pytest
from game_ledger import Found, Judgement, blocks_of, gone_of, judged
from game_storages import Spoiled

EVICTING = frozenset({"churning"})
PLACE = "/mnt/a/game/steady/tp0/00_4xab.cd"


def _uri(slot: int) -> str:
    return f"file://disk_a{PLACE}?blkid={slot}&size=100"


def _line(
    key: int = 1, slot: int = 0, instance: str = "steady", checksum: int = 77, at: float = 10.0
) -> dict[str, Any]:
    return {"instance": instance, "key": key, "parts": {"tp0": [_uri(slot), checksum]}, "at": at}


def _event(kind: str, reason: str, at: float = 11.0, instance: str = "steady") -> dict[str, Any]:
    return {"type": kind, "reason": reason, "source": instance, "keys": [1], "trigger_time_us": int(at * 1e6)}


def _judge(
    *lines: dict[str, Any],
    found: dict[tuple[str, int], Found] | None = None,
    events: tuple[dict[str, Any], ...] = (),
    spoiled: Spoiled | None = None,
    kills: tuple[float, ...] = (),
) -> Judgement:
    damage = spoiled or Spoiled()
    return judged(
        blocks_of(lines).values(),
        found or {},
        gone_of(events),
        lambda uri: damage.touches(uri.path, uri.offset, uri.size),
        EVICTING,
        kills,
    )


def test_a_block_with_its_bytes_is_served() -> None:
    judgement = _judge(_line(), found={("steady", 1): Found({"tp0": (_uri(0), 77)})})
    assert judgement == Judgement(served=1)


def test_a_block_that_is_not_there_is_lost() -> None:
    (text,) = _judge(_line()).lost
    assert "no manager tells why" in text


@pytest.mark.parametrize("reason", ["missing", "corrupt", "RemoveCache"])
def test_a_block_that_was_taken_away_without_a_good_reason_is_lost(reason: str) -> None:
    (text,) = _judge(_line(), events=(_event("removed", reason),)).lost
    assert reason in text


def test_a_block_of_an_instance_that_is_never_full_may_not_be_evicted() -> None:
    assert _judge(_line(), events=(_event("evicted", "group"),)).lost


def test_a_block_of_another_instance_may() -> None:
    event = _event("evicted", "group", instance="churning")
    assert _judge(_line(instance="churning"), events=(event,)) == Judgement(evicted=1)


def test_an_eviction_before_the_block_was_written_explains_nothing() -> None:
    event = _event("evicted", "group", at=7.0, instance="churning")
    assert _judge(_line(instance="churning"), events=(event,)).lost


def test_a_block_that_was_written_again_after_its_eviction_has_to_be_there() -> None:
    event = _event("evicted", "group", at=11.0, instance="churning")
    again = [_line(instance="churning"), _line(slot=1, instance="churning", at=20.0)]
    assert _judge(*again, events=(event,)).lost
    assert _judge(*again, events=(event, _event("evicted", "group", at=21.0, instance="churning"))).evicted == 1


def test_an_eviction_that_nobody_tells_of_is_a_loss_unless_a_manager_was_killed_since() -> None:
    line = _line(instance="churning")
    assert _judge(line).lost
    assert _judge(line, kills=(7.0,)).lost
    judgement = _judge(line, kills=(7.0, 30.0))
    assert len(judgement.untold) == 1
    assert not judgement.lost
    assert not judgement.evicted


def test_a_kill_explains_nothing_of_a_block_that_is_never_evicted_or_that_was_taken_away() -> None:
    assert _judge(_line(), kills=(30.0,)).lost
    event = _event("removed", "missing", instance="churning")
    assert _judge(_line(instance="churning"), events=(event,), kills=(30.0,)).lost


def test_a_block_that_nobody_could_be_asked_for_is_lost_also_where_blocks_are_evicted() -> None:
    found = {("churning", 1): Found({}, "no manager answers")}
    (text,) = _judge(_line(instance="churning"), found=found, kills=(30.0,)).lost
    assert "no manager answers" in text


def test_a_session_that_expired_explains_nothing() -> None:
    event = _event("expired", "session", instance="churning")
    assert _judge(_line(instance="churning"), events=(event,)).lost


def test_other_bytes_are_wrong() -> None:
    assert _judge(_line(), found={("steady", 1): Found({"tp0": (_uri(0), 78)})}).wrong


def test_bytes_that_cannot_be_loaded_are_wrong() -> None:
    (text,) = _judge(_line(), found={("steady", 1): Found({"tp0": (_uri(0), None)}, "no such file")}).wrong
    assert "no such file" in text


def test_damage_of_the_game_explains_what_lies_there_and_nothing_else() -> None:
    damage = Spoiled()
    damage.add(PLACE, 150, 151)  # slot 1
    there = {("steady", 1): Found({"tp0": (_uri(1), 5)})}
    assert _judge(_line(slot=1), spoiled=damage) == Judgement(spoiled=1)
    assert _judge(_line(slot=1), found=there, spoiled=damage) == Judgement(spoiled=1)
    assert _judge(_line(slot=0), spoiled=damage).lost
    assert _judge(_line(slot=2), spoiled=damage).lost


def test_damage_of_one_part_explains_no_other_bytes_in_another() -> None:
    damage = Spoiled()
    damage.add(PLACE, 0, 1)  # slot 0
    parts = {"tp0": [_uri(0), 77], "tp1": [_uri(1), 88]}
    found = {"tp0": (_uri(0), 5), "tp1": (_uri(1), 6)}
    assert _judge(_line() | {"parts": parts}, found={("steady", 1): Found(found)}, spoiled=damage).wrong
    found["tp1"] = (_uri(1), 88)
    assert _judge(_line() | {"parts": parts}, found={("steady", 1): Found(found)}, spoiled=damage).spoiled == 1


def test_a_block_with_one_copy_that_nobody_damaged_is_lost_when_it_is_gone() -> None:
    damage = Spoiled()
    damage.add(PLACE, 0, 1)
    assert _judge(_line(slot=0), _line(slot=1), spoiled=damage).lost
    assert _judge(_line(slot=0), _line(slot=0), spoiled=damage) == Judgement(spoiled=1)


def test_bytes_at_a_place_that_was_never_acknowledged_are_those_that_were_found() -> None:
    # Its writer got no answer, and the manager compares them with what it was told.
    assert _judge(_line(slot=0), found={("steady", 1): Found({"tp0": (_uri(3), 5)})}) == Judgement(served=1)
