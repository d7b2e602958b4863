"""Leases between a lookup and the load that follows: each is given back once, and never too early."""

from __future__ import annotations

from random import Random

from fake_clock import FakeClock

from connectors.results import Location
from connectors.sglang.match_book import Lease, MatchBook
from kvcm.model.keys import BlockKey
from kvcm.model.uri import LocationUri


def place(number: int) -> Location:
    return Location({"tp0": LocationUri.parse(f"file://s/b{number}?size=1")})


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(number) for number in numbers]


class Book:
    """A book, a clock and what was given back."""

    def __init__(self, most: int = 100) -> None:
        self.clock = FakeClock()
        self.released: list[str] = []
        self.book = MatchBook(self.released.append, self.clock.now, most)

    def enter(self, name: str, *numbers: int, seconds: float = 10.0) -> None:
        lease = Lease(name, self.clock.time + seconds)
        self.book.enter(keys(*numbers), [place(number) for number in numbers], lease)


def test_a_lease_is_given_back_when_its_last_page_is_loaded() -> None:
    site = Book()
    site.enter("a", 1, 2, 3)
    first, rest = site.book.take(keys(1, 2)), site.book.take(keys(3))
    assert first.locations == (place(1), place(2))
    site.book.done(rest)
    assert site.released == []
    site.book.done(first)
    assert site.released == ["a"]


def test_only_leading_pages_are_taken() -> None:
    site = Book()
    site.enter("a", 1, 2, 4)
    found = site.book.take(keys(1, 2, 3, 4))
    assert len(found.locations) == 2
    assert site.book.take(keys(5)).locations == ()
    assert len(site.book) == 1
    site.book.done(found)
    assert site.released == []
    site.book.clear()
    assert site.released == ["a"]


def test_a_page_that_is_found_again_is_under_the_newer_lease() -> None:
    site = Book()
    site.enter("a", 1, 2)
    site.enter("b", 1, 2, 3)
    assert site.released == ["a"]
    found = site.book.take(keys(1, 2, 3))
    assert {lease.id for lease in found.leases} == {"b"}
    site.book.done(found)
    assert site.released == ["a", "b"]


def test_a_lease_whose_pages_are_being_loaded_stays() -> None:
    site = Book()
    site.enter("a", 1)
    found = site.book.take(keys(1))
    site.enter("b", 1)
    assert site.released == []
    site.book.done(found)
    assert site.released == ["a"]


def test_pages_are_dropped_when_their_lease_ends() -> None:
    site = Book()
    site.enter("a", 1, seconds=5)
    site.clock.time += 6
    assert site.book.take(keys(1)).locations == ()
    site.enter("b", 2)
    assert len(site.book) == 1
    assert site.released == []  # it has ended by itself


def test_too_many_pages_push_out_the_oldest() -> None:
    site = Book(most=3)
    site.enter("a", 1, 2)
    site.enter("b", 3, 4, 5)
    assert (len(site.book), site.released) == (3, ["a"])


def test_every_lease_is_given_back_once_whatever_happens() -> None:
    random, site = Random(7), Book(most=20)
    taken = []
    for number in range(500):
        first = random.randrange(40)
        if random.random() < 0.5:
            site.enter(f"lease-{number}", *range(first, first + random.randrange(1, 8)), seconds=1e6)
        else:
            taken.append(site.book.take(keys(*range(first, first + 5))))
        while taken and random.random() < 0.5:
            site.book.done(taken.pop(random.randrange(len(taken))))
    held = {lease.id for found in taken for lease in found.leases}
    assert not held & set(site.released)
    for found in taken:
        site.book.done(found)
    site.book.clear()
    assert len(site.released) == len(set(site.released))
    entered = {f"lease-{number}" for number in range(500)} & set(site.released)
    assert len(entered) == len(site.released) > 200
