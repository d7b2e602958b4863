"""Lookups, loads and saves of one rank's pages with a real manager and real files, without an engine."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_clock import FakeClock
from host_pools import PAGE, MHATokenToKVPoolHost, MLATokenToKVPoolHost, StrangePoolHost, slots
from manager_process import ManagerProcess
from stopping import stop_process
from waiting import until

from kvcm.connectors import calls
from kvcm.connectors.client import ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.results import CallCounters, Location, MatchMode, RegistrationState
from kvcm.connectors.reuse.registration import InstanceSpecs, ManagerLink
from kvcm.connectors.sglang.host_pool import PageMemory
from kvcm.connectors.sglang.identity import page_identity
from kvcm.connectors.sglang.options import SglangOptions
from kvcm.connectors.sglang.page_store import MatchCache, PageKeys, PageStore, RankParts, ReadLease
from kvcm.connectors.transfer import TransferEngine
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.keys import BlockKey
from kvcm.model.uri import LocationUri
from kvcm.protocol.meta_service_pb2 import CacheLocation

PATIENT = ("call_seconds", "load_seconds", "save_seconds", "shutdown_seconds")
_HASHES = [sha256(bytes([number])).hexdigest() for number in range(16)]


class Opened(PageStore):
    """A store, and what it is made of."""

    link: ManagerLink
    keys: PageKeys
    pool: MHATokenToKVPoolHost


Open = Callable[..., Opened]
"""Opens the store of a rank; all are closed at the end of the test."""


@pytest.fixture
def open_store(manager: ManagerProcess, instance_id: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Open stores of the test's instance, which are more patient than SGLang lets them be."""
    monkeypatch.setattr("kvcm.connectors.sglang.options._THREAD_SECONDS", 600.0)
    opened: list[Opened] = []

    def open_store(
        address: str | None = None,
        *,
        layout: str = "page_first",
        tp_rank: int = 0,
        tp_size: int = 1,
        is_mla: bool = False,
        **changed: Any,
    ) -> Opened:
        changed = dict.fromkeys(PATIENT, 30.0) | changed
        options = SglangOptions(manager=address or manager.address, instance_id=instance_id, **changed)
        config = SimpleNamespace(
            tp_rank=tp_rank, tp_size=tp_size, pp_rank=0, pp_size=1, attn_cp_size=1, dcp_size=1, is_mla_model=is_mla,
            model_name="tiny",
        )  # fmt: skip
        pool = (MLATokenToKVPoolHost if is_mla else MHATokenToKVPoolHost)(layout, fill=tp_rank * 100_000)
        memory, parts = PageMemory(pool), RankParts.of(config)
        identity = page_identity(options, config, memory.format, "sha256", "", {})
        client = ManagerClient(options.manager, instance_id, ClientSettings(timeout_seconds=options.call_seconds))
        specs = InstanceSpecs(
            "default", memory.format.tokens, parts.infos(memory.page_bytes), identity.deployment(), parts.groups
        )
        link = ManagerLink(client, specs, options.call_seconds, partial(TransferEngine.for_storages, checksums=True))
        keys = PageKeys(identity.namespace("weights"))
        store = Opened(link, memory, keys, parts, options)
        store.link, store.keys, store.pool = link, keys, pool
        link.register(30.0)
        opened.append(store)
        return store

    yield open_store
    for store in opened:
        store.close()


def pages_of(store: Opened) -> list[bytes]:
    memory = PageMemory(store.pool)
    return [b"".join(piece.tobytes() for piece in memory.pages(slots(page))[0]) for page in range(5)]


def uris(store: Opened, hashes: list[str], part: str = "tp0") -> list[LocationUri | None]:
    found = store.link.client.match(store.keys.keys(hashes), MatchMode.BATCH, timeout_seconds=20).locations
    return [None if location is None else location.uris.get(part) for location in found]


def damage(uri: LocationUri | None) -> None:
    assert uri is not None
    with Path(uri.path).open("r+b") as file:
        file.seek(uri.offset + 10)
        file.write(b"\xff\x00\xff")


@pytest.mark.parametrize("is_mla", [False, True])
@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_pages_come_back_where_they_are_wanted(open_store: Open, layout: str, is_mla: bool) -> None:
    writer, reader = (open_store(layout=layout, is_mla=is_mla) for _ in range(2))
    saved = writer.save(_HASHES[:4], slots(3, 1, 0, 4))
    assert (saved.flags, saved.pages) == ([True] * 4, 4)
    before = pages_of(writer)
    reader.pool.kv_buffer.zero_()
    assert reader.exists(_HASHES[:6]) == 4
    assert reader.load(_HASHES[:4], slots(0, 4, 2, 1)).flags == [True] * 4
    after = pages_of(reader)
    assert [after[page] for page in (0, 4, 2, 1)] == [before[page] for page in (3, 1, 0, 4)]
    assert after[3] == bytes(len(after[3]))


def test_a_load_without_a_lookup_asks_itself(open_store: Open) -> None:
    store = open_store()
    store.save(_HASHES[:3], slots(0, 1, 2))
    assert store.load(_HASHES[:4], slots(0, 1, 2, 3)).flags == [True, True, True, False]


def test_pages_that_are_stored_are_not_saved_again(open_store: Open) -> None:
    store = open_store()
    store.save(_HASHES[:3], slots(0, 1, 2))
    again = store.save(_HASHES[:4], slots(0, 1, 2, 3))
    assert (again.flags, again.pages) == ([True] * 4, 1)


def test_pages_are_stored_with_the_numbers_of_the_engines_events(open_store: Open) -> None:
    """Whether the engine publishes events or not, and for the parts of all ranks."""
    first, second = (open_store(tp_rank=rank, tp_size=2) for rank in range(2))
    pages = ["77d735ce838418aa" + "0" * 48, "f" * 64, *_HASHES[:1]]
    for store in (first, second):
        store.save(pages, slots(0, 1, 2))
    match = first.link.client.match_encoded(first.keys.keys(pages), spec_names=first._parts.names, timeout_seconds=20)
    found = [CacheLocation.FromString(each).event_hash for each in match.locations]
    assert found == [8635429971592222890, -1, int.from_bytes(bytes.fromhex(_HASHES[0])[:8], "big", signed=True)]


def test_a_page_counts_when_every_rank_has_saved_it(open_store: Open) -> None:
    first, second = (open_store(tp_rank=rank, tp_size=2) for rank in range(2))
    first.save(_HASHES[:3], slots(0, 1, 2))
    assert (first.exists(_HASHES[:3]), second.exists(_HASHES[:3])) == (0, 0)
    second.save(_HASHES[:2], slots(4, 3))
    assert (first.exists(_HASHES[:3]), second.exists(_HASHES[:3])) == (2, 2)
    expected = pages_of(second)
    second.pool.kv_buffer.zero_()
    assert second.load(_HASHES[:2], slots(4, 3)).flags == [True, True]
    assert pages_of(second)[3:] == expected[3:]


def test_ranks_save_at_the_same_time_without_each_other(open_store: Open) -> None:
    """While one rank has leave to write its part, another gets leave for its own."""
    first, second = (open_store(tp_rank=rank, tp_size=2) for rank in range(2))
    keys = first.keys.keys(_HASHES[:2])
    grant = first.link.client.start_write(keys, spec_groups=["tp0", "tp0"], timeout_seconds=20)
    assert grant is not None
    assert grant.mask == (False, False)
    assert second.save(_HASHES[:2], slots(0, 1)).pages == 2
    first.link.client.abort_write(grant.session_id)


def test_one_rank_saves_for_all_when_rows_are_latent(open_store: Open) -> None:
    first, second = (open_store(tp_rank=rank, tp_size=2, is_mla=True) for rank in range(2))
    first.save(_HASHES[:2], slots(0, 1))
    assert second.exists(_HASHES[:2]) == 2
    expected = pages_of(first)[:2]
    assert second.load(_HASHES[:2], slots(0, 1)).flags == [True, True]
    assert pages_of(second)[:2] == expected


def test_a_damaged_page_is_a_miss_that_the_manager_receives_of(open_store: Open) -> None:
    store = open_store()
    store.save(_HASHES[:4], slots(0, 1, 2, 3))
    damage(uris(store, _HASHES[:4])[2])
    store.exists(_HASHES[:4])
    before = pages_of(store)
    assert store.load(_HASHES[:4], slots(4, 4, 4, 4)).flags == [True, True, False, True]
    assert pages_of(store)[4] == before[3]
    until(lambda: uris(store, _HASHES[2:3]) == [None])
    assert store.save(_HASHES[:4], slots(0, 1, 2, 3)).pages == 1
    assert store.statistics.total()["corrupt_parts"] == 1


def test_a_page_whose_file_is_gone_is_a_miss_that_the_manager_receives_of(open_store: Open) -> None:
    store = open_store()
    store.save(_HASHES[:2], slots(0, 1))
    found = uris(store, _HASHES[:1])[0]
    assert found is not None
    Path(found.path).unlink()
    store.exists(_HASHES[:2])
    assert store.load(_HASHES[:2], slots(2, 3)).flags[0] is False
    until(lambda: uris(store, _HASHES[:1]) == [None])


def test_leases_are_given_back(open_store: Open) -> None:
    """Blocks removed under a lease stay readable until the load."""
    store = open_store(lease_seconds=300.0)
    store.save(_HASHES[:2], slots(0, 1))
    assert store.exists(_HASHES[:2]) == 2
    store.link.client.remove(store.keys.keys(_HASHES[:2]), timeout_seconds=20)
    assert store.load(_HASHES[:2], slots(2, 3)).flags == [True, True]
    name = calls.RELEASE_READ_LEASE.name
    until(lambda: store.link.client.counters().get(name, CallCounters()).ok == 1)


def test_chains_keep_their_depth_when_saved_in_pieces(open_store: Open) -> None:
    store = open_store()
    store.exists(_HASHES[:6])  # shows the chain
    store.save(_HASHES[:2], slots(0, 1))
    store.save(_HASHES[2:4], slots(2, 3))
    store.save(_HASHES[6:7], slots(4), prefix_hashes=_HASHES[:6])
    keys = store.keys.keys(_HASHES)
    assert store._parent(keys[2], ()) == keys[1]
    assert store._parent(keys[6], keys[:6]) == keys[5]
    assert store._parent(keys[9], ()) is None


def test_another_layout_is_refused_and_always_misses(open_store: Open) -> None:
    store = open_store(layout="page_first_direct")
    store.save(_HASHES[:2], slots(0, 1))
    stranger = open_store(layout="page_first")
    assert stranger.link.registration.state is RegistrationState.REFUSED
    assert stranger.exists(_HASHES[:2]) == 0
    assert stranger.load(_HASHES[:2], slots(0, 1)).flags == [False, False]
    assert stranger.save(_HASHES[:2], slots(0, 1)).flags == [False, False]


def test_without_a_manager_everything_misses_at_once(open_store: Open, closed_port: int) -> None:
    store = open_store(f"127.0.0.1:{closed_port}")
    begun = time.monotonic()
    for _ in range(100):
        assert store.exists(_HASHES[:2]) == 0
        assert store.load(_HASHES[:2], slots(0, 1)).flags == [False, False]
        assert store.save(_HASHES[:2], slots(0, 1)).flags == [False, False]
    assert time.monotonic() - begun < 30


def test_a_manager_that_hangs_costs_the_deadline(open_store: Open, new_manager: Callable[..., ManagerProcess]) -> None:
    manager = new_manager()
    assert open_store(manager.address).save(_HASHES[:2], slots(0, 1)).pages == 2
    store = open_store(manager.address, call_seconds=0.3)
    stop_process(manager.process.pid)
    try:
        begun = time.monotonic()
        assert store.exists(_HASHES[:2]) == 0
        assert store.save(_HASHES[2:4], slots(2, 3)).flags == [False, False]
        assert time.monotonic() - begun < 10
    finally:
        manager.process.send_signal(signal.SIGCONT)
    until(lambda: store.exists(_HASHES[:2]) == 2)


def test_pages_beyond_the_quota_are_not_stored(open_store: Open, new_manager: Callable[..., ManagerProcess]) -> None:
    manager = new_manager()
    store = open_store(manager.address)
    manager.set_quota("default", 3 * PageMemory(store.pool).page_bytes - 1)
    assert store.save(_HASHES[:4], slots(0, 1, 2, 3)).flags == [True, True, False, False]
    assert store.exists(_HASHES[:4]) == 2
    assert store.save(_HASHES[4:6], slots(0, 1)).flags == [False, False]


def test_nothing_is_stored_when_it_is_not_to_be(open_store: Open) -> None:
    store = open_store(publish=False)
    assert store.save(_HASHES[:2], slots(0, 1)).flags == [False, False]
    assert store.exists(_HASHES[:2]) == 0


def test_closing_aborts_open_sessions(open_store: Open) -> None:
    store, other = open_store(), open_store()
    keys = store.keys.keys(_HASHES[:2])
    assert store._sessions.start(keys, None) is not None
    assert other.save(_HASHES[:2], slots(0, 1)).pages == 0  # the open session writes them
    store.close()
    assert other.save(_HASHES[:2], slots(0, 1)).pages == 2


def test_options_of_sglang_itself_are_passed_over() -> None:
    given = {
        "backend_name": "kvcm", "module_path": "kvcm.connectors.sglang", "class_name": "KVCMStorage", "interface_v1": 1,
        "prefetch_threshold": 16, "manager": "localhost:1", "instance_id": "x", "load_seconds": 3,
    }  # fmt: skip
    options = SglangOptions.parse(given)
    assert (options.manager, options.instance_group, options.load_seconds) == ("localhost:1", "default", 3.0)
    assert replace(options, load_seconds=5.0) == SglangOptions(manager="localhost:1", instance_id="x")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"instance_id": ""}, "option 'instance_id' is empty"),
        ({"interface_v1": 0}, "option 'interface_v1' must be 1"),
        ({"load_seconds": 0}, "option 'load_seconds' is 0.0, must be > 0"),
        ({"save_seconds": 20}, "option 'save_seconds' is 20.0, must be <= 8 with call_seconds 1.0"),
        ({"lease_seconds": 601}, "option 'lease_seconds' is 601.0, must be <= 600.0"),
        ({"session_seconds": 3601}, "option 'session_seconds' is 3601, must be <= 3600"),
    ],
)
def test_wrong_options_are_named(option: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        SglangOptions.parse({"interface_v1": 1, "manager": "localhost:1", "instance_id": "x"} | option)
    assert message in str(refused.value)


# ---- Pages of SGLang's host pools as memory: every layout, byte by byte ----

_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
_POOLS = (MHATokenToKVPoolHost, MLATokenToKVPoolHost)


def stored(memory: PageMemory, *pages: int) -> list[bytes]:
    return [b"".join(piece.tobytes() for piece in page) for page in memory.pages(slots(*pages))]


def expected(pool: MHATokenToKVPoolHost, page: int) -> bytes:
    """The bytes of a page as the documentation has them, by plain indexing."""
    tokens = slice(page * PAGE, (page + 1) * PAGE)
    if pool.layout == "layer_first":
        part = pool.kv_buffer[:, :, tokens]  # [tensor][layer][token][head][dim]
    elif pool.layout == "page_first":
        part = pool.kv_buffer[:, tokens]  # [tensor][token][layer][head][dim]
    else:
        part = pool.kv_buffer[:, page]
    return part.contiguous().numpy().tobytes()


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("kind", _POOLS)
def test_pages_are_stored_in_the_documented_order(kind: type[MHATokenToKVPoolHost], layout: str) -> None:
    pool = kind(layout)
    memory = PageMemory(pool)
    assert stored(memory, 3, 0, 4) == [expected(pool, page) for page in (3, 0, 4)]
    assert memory.page_bytes == len(expected(pool, 0))


def test_other_orders_and_shapes_have_other_formats() -> None:
    formats = {PageMemory(kind(layout)).format.text for kind in _POOLS for layout in _LAYOUTS}
    assert len(formats) == 2 * (len(_LAYOUTS) - 1)
    found = PageMemory(MHATokenToKVPoolHost("page_first")).format
    others = [
        dataclasses.replace(found, **change)
        for change in ({"layers": (0, 4)}, {"layers": (1, 4)}, {"tokens": 8}, {"heads": 4}, {"dim": 16})
    ]
    others.append(dataclasses.replace(found, dtype="bfloat16"))
    assert len({found.text, *(other.text for other in others)}) == 7


def test_half_precision_is_bytes_too() -> None:
    pool = MHATokenToKVPoolHost("page_first_direct")
    pool.kv_buffer, pool.dtype = pool.kv_buffer.to(torch.bfloat16), torch.bfloat16
    memory = PageMemory(pool)
    assert stored(memory, 2)[0] == pool.kv_buffer[:, 2].contiguous().view(torch.uint8).numpy().tobytes()
    assert "bfloat16" in memory.format.text


def test_pools_whose_pages_cannot_be_stored_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="host pool is StrangePoolHost, must be one of MHATokenToKVPoolHost"):
        PageMemory(StrangePoolHost("page_first"))
    pool = MHATokenToKVPoolHost("page_first")
    pool.layout = "page_unified"
    with pytest.raises(InvalidArgumentError, match="hicache_mem_layout is 'page_unified', must be one of layer_first"):
        PageMemory(pool)
    pool = MHATokenToKVPoolHost("layer_first")
    pool.target_layer_num = 2
    with pytest.raises(InvalidArgumentError, match="layers of a draft model"):
        PageMemory(pool)
    pool = MHATokenToKVPoolHost("page_first")
    pool.kv_buffer = pool.kv_buffer.transpose(1, 2)
    with pytest.raises(InvalidArgumentError, match="not one piece of host memory"):
        PageMemory(pool)


def test_slots_that_are_no_pages_of_the_pool_are_refused() -> None:
    pool = MHATokenToKVPoolHost("page_first")
    memory = PageMemory(pool)
    with pytest.raises(InvalidArgumentError, match="must be whole pages"):
        memory.pages(slots(1)[:2])
    pool.kv_buffer = pool.kv_buffer.clone()  # what the pool says now is elsewhere
    with pytest.raises(InvalidArgumentError, match="not in the host pool"):
        memory.pages(slots(1))


# ---- Leases between a lookup and the load that follows: each is given back once, and never too early ----


def place(number: int) -> Location:
    return Location({"tp0": LocationUri.parse(f"file://s/b{number}?size=1")})


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(number) for number in numbers]


class Book:
    """A match cache, a clock and the released leases."""

    def __init__(self, most: int = 100) -> None:
        self.clock = FakeClock()
        self.released: list[str] = []
        self.book = MatchCache(self.released.append, self.clock.now, most)

    def enter(self, name: str, *numbers: int, seconds: float = 10.0) -> None:
        lease = ReadLease(name, self.clock.time + seconds)
        self.book.add(keys(*numbers), [place(number) for number in numbers], lease)


@pytest.fixture
def site() -> Book:
    return Book()


def test_a_lease_is_given_back_when_its_last_page_is_loaded(site: Book) -> None:
    site.enter("a", 1, 2, 3)
    first, rest = site.book.pop(keys(1, 2)), site.book.pop(keys(3))
    assert first.locations == (place(1), place(2))
    site.book.release(rest)
    assert site.released == []
    site.book.release(first)
    assert site.released == ["a"]


def test_only_leading_pages_are_taken(site: Book) -> None:
    site.enter("a", 1, 2, 4)
    found = site.book.pop(keys(1, 2, 3, 4))
    assert len(found.locations) == 2
    assert site.book.pop(keys(5)).locations == ()
    assert len(site.book) == 1
    site.book.release(found)
    assert site.released == []
    site.book.clear()
    assert site.released == ["a"]


def test_a_page_that_is_found_again_is_under_the_newer_lease(site: Book) -> None:
    site.enter("a", 1, 2)
    site.enter("b", 1, 2, 3)
    assert site.released == ["a"]
    found = site.book.pop(keys(1, 2, 3))
    assert {lease.id for lease in found.leases} == {"b"}
    site.book.release(found)
    assert site.released == ["a", "b"]


def test_pages_are_dropped_when_their_lease_ends(site: Book) -> None:
    site.enter("a", 1, seconds=5)
    site.clock.time += 6
    assert site.book.pop(keys(1)).locations == ()
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
            taken.append(site.book.pop(keys(*range(first, first + 5))))
        while taken and random.random() < 0.5:
            site.book.release(taken.pop(random.randrange(len(taken))))
    held = {lease.id for found in taken for lease in found.leases}
    assert not held & set(site.released)
    for found in taken:
        site.book.release(found)
    site.book.clear()
    assert len(site.released) == len(set(site.released))
    entered = {f"lease-{number}" for number in range(500)} & set(site.released)
    assert len(entered) == len(site.released) > 200
