"""Staging memory: bounded, reused, and never lent again while a storage may still write to it."""

from __future__ import annotations

import threading

from connectors.reuse.staging import StagingTrays, Tray


def test_a_tray_comes_back_and_is_lent_again() -> None:
    trays = StagingTrays(64, 1)
    first = trays.take(0)
    assert first is not None
    assert trays.take(0) is None
    trays.give_back(first)
    assert trays.take(0) is first


def test_rows_share_the_memory_and_are_as_many_as_fit() -> None:
    tray = StagingTrays(64, 1).take(0)
    assert tray is not None
    assert tray.rows(16, 10).shape == (4, 16)
    assert tray.rows(16, 2).shape == (2, 16)
    tray.rows(16, 4)[3] = 7
    assert tray.rows(64, 1)[0, 48:].tolist() == [7] * 16


class Storage:
    """Something that may write to memory."""

    def __init__(self) -> None:
        self.hangs = True

    def may_change(self) -> bool:
        return self.hangs


def _lend(trays: StagingTrays) -> Tray:
    tray = trays.take(0)
    assert tray is not None
    return tray


def test_a_lost_tray_is_replaced_until_too_many_are_lost() -> None:
    trays, storage = StagingTrays(8, 1, most_lost=2), Storage()
    seen = []
    for _ in range(3):
        seen.append(_lend(trays))
        trays.lose(seen[-1], storage.may_change)
    assert len(set(map(id, seen))) == 3
    assert trays.take(0) is None  # three are lost, of which two were replaced
    assert trays.lost == 3
    storage.hangs = False
    _lend(trays)
    assert trays.lost == 0
    assert trays.take(0) is None  # as many as at the beginning


def test_a_tray_is_not_lent_while_the_storage_that_hangs_on_to_it_does() -> None:
    trays = StagingTrays(8, 2, most_lost=0)
    old, new = Storage(), Storage()  # the group's storages were changed while one of them hung
    kept, freed = _lend(trays), _lend(trays)
    trays.lose(kept, old.may_change)
    trays.lose(freed, new.may_change)
    new.hangs = False
    assert _lend(trays) is freed
    assert trays.take(0) is None
    old.hangs = False
    assert _lend(trays) is kept


def test_after_a_recovery_as_many_may_be_lost_again() -> None:
    trays = StagingTrays(8, 1, most_lost=1)
    for _ in range(5):
        storage = Storage()
        for _ in range(2):
            trays.lose(_lend(trays), storage.may_change)
        assert trays.take(0) is None
        storage.hangs = False


def test_who_waits_gets_the_tray_that_comes_back() -> None:
    trays = StagingTrays(8, 1)
    first = trays.take(0)
    assert first is not None
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(trays.take(10)))
    waiter.start()
    trays.give_back(first)
    waiter.join(10)
    assert got == [first]
