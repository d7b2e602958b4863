"""API keys: what they allow, when they end, and logins of several managers at once."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import pytest
from fake_clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st
from registry_rig import Opener, SuspendingTable

from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError, StorageIOError
from kvcm.model.principals import (
    ALL_GROUPS,
    ENGINE_VERBS,
    AccountRole,
    ApiKey,
    PresentedKey,
    Role,
    Verb,
    new_key,
    redact_keys,
)
from kvcm.protocol.kvcm.v1 import access_service_pb2 as pb
from kvcm.registry.api_keys import ImportedKey, KeyRegistry, NewKey
from kvcm.registry.config_snapshots import AccountEntry, Configuration
from kvcm.registry.document_cache import decode_document
from kvcm.registry.registry import Registry
from kvcm.service.access_api import AccessApi
from kvcm.service.rejections import UnauthenticatedError
from kvcm.store.memory import MemoryTable


@dataclass
class World:
    """What managers share: each has a registry of its own."""

    clock: FakeClock = field(default_factory=FakeClock)
    table: MemoryTable = field(default_factory=MemoryTable)
    uses: MemoryTable = field(default_factory=MemoryTable)

    def manager(self) -> Registry:
        return Registry(Opener(), self.table, clock=self.clock, uses=self.uses)

    def registry(self) -> KeyRegistry:
        return self.manager().keys


def engine(name: str = "e", **changes: object) -> NewKey:
    return NewKey(**{"name": name, "role": Role.ROLE_ENGINE, "groups": ("a",), **changes})  # type: ignore[arg-type]


@given(st.text(max_size=80))
def test_only_keys_are_keys(text: str) -> None:
    parsed = PresentedKey.parse(text)
    assert parsed is None or parsed.text == text


def test_a_fresh_key_is_read_again_and_its_secret_is_never_shown() -> None:
    key = new_key()
    assert PresentedKey.parse(key.text) == key
    assert key.secret not in repr(key)
    assert re.fullmatch("kvcm_[a-z2-7]{16}_[A-Za-z0-9_-]{43}", key.text)
    assert redact_keys(f"x {key.text} y") == f"x kvcm_{key.id}_… y"


async def test_of_a_secret_only_a_digest_is_kept() -> None:
    world = World()
    key, presented = await world.registry().create(engine())
    assert presented is not None
    stored = await world.table.all()
    assert f"key/{key.id}" in stored
    assert not any(presented.secret.encode() in document for document in stored.values())
    assert presented.secret not in repr(key)
    assert key.is_proven_by(presented)
    assert not key.is_proven_by(PresentedKey(presented.id, new_key().secret))


async def test_a_key_of_a_certificate_is_proven_by_no_secret() -> None:
    registry = World().registry()
    key, presented = await registry.create(engine(certificate_name="spiffe://a"))
    assert presented is None
    assert not key.is_proven_by(PresentedKey(key.id, ""))
    assert registry.of_certificate(["other", "spiffe://a"]) == key
    assert registry.of_certificate(["other"]) is None


@pytest.mark.parametrize("verbs", [(), (Verb.PIN, Verb.MATCH)])
async def test_an_engine_may_what_it_was_given_and_all_if_nothing_was_said(verbs: tuple[Verb, ...]) -> None:
    key, _ = await World().registry().create(engine(verbs=verbs))
    assert set(key.engine_verbs) == set(verbs or ENGINE_VERBS)
    principal = key.principal()
    assert principal.verbs == set(verbs or ENGINE_VERBS)
    assert (principal.covers("a"), principal.covers("b"), principal.has_all_groups) == (True, False, False)
    assert Verb.VIEW not in principal.verbs


@pytest.mark.parametrize(
    ("stored", "may_report"),
    [(["match", "write", "remove", "pin"], True), (["match", "write"], True), (["match"], False)],
)
def test_a_key_of_a_release_without_the_verb_may_report_if_it_may_write(stored: list[str], may_report: bool) -> None:
    """It can do worse; a key that may only match could delete what it read by a report."""
    document = {"id": "k", "name": "n", "role": 4, "groups": ["a"], "verbs": stored, "created_at": 0, "expires_at": 0}
    old = decode_document(ApiKey, msgspec.json.encode({"version": 1, "value": document | {"digest": ""}}))
    assert (Verb.REPORT in old.principal().verbs) is may_report


@pytest.mark.parametrize("verbs", [(Verb.MATCH, Verb.REPORT), (Verb.MATCH, Verb.WRITE), (Verb.REPORT,)])
async def test_a_key_is_stored_so_that_the_release_before_can_read_it(verbs: tuple[Verb, ...]) -> None:
    """It knows no permission to report."""
    world = World()
    key, _ = await world.registry().create(engine(verbs=verbs))
    document = (await world.table.all())[f"key/{key.id}"]
    assert b'"report"' not in document
    assert decode_document(ApiKey, document).principal().verbs == set(verbs)


async def test_other_roles_have_all_groups_unless_some_are_given() -> None:
    registry = World().registry()
    everywhere, _ = await registry.create(NewKey("v", Role.ROLE_VIEWER))
    somewhere, _ = await registry.create(NewKey("w", Role.ROLE_VIEWER, ("b", "a", "b")))
    assert (everywhere.groups, somewhere.groups) == ((ALL_GROUPS,), ("a", "b"))


@given(st.lists(st.integers(0, 5), max_size=60), st.booleans())
async def test_of_two_keys_of_a_name_that_are_made_at_a_time_there_is_one(pauses: list[int], of_one: bool) -> None:
    """At one manager or two, of a name or of a certificate's; an ended one frees both."""
    world = World()
    await world.registry().create(engine(certificate_name="spiffe://a", ttl_seconds=5))
    slow = SuspendingTable(world.table, pauses)
    first, second = (Registry(Opener(), slow, clock=world.clock, uses=world.uses) for _ in range(2))
    await second.refresh()
    world.clock.time += 5
    wanted = [engine(certificate_name="spiffe://a"), engine("other", certificate_name="spiffe://a"), engine()]
    makers = [first, first if of_one else second, first]
    outcomes = await asyncio.gather(
        *(maker.keys.create(each) for maker, each in zip(makers, wanted, strict=True)), return_exceptions=True
    )
    await first.refresh()
    made = [outcome[0] for outcome in outcomes if isinstance(outcome, tuple)]
    refusals = [outcome for outcome in outcomes if isinstance(outcome, DuplicateEntityError)]
    assert len(made) + len(refusals) == 3
    assert sorted(key.id for key in first.keys.all()) == sorted(key.id for key in made)
    assert len({key.name for key in made}) == len(made)
    assert [key.certificate_name for key in made].count("spiffe://a") == 1


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.integers(0, 3), st.sampled_from([0, 5, 50])),
        st.tuples(st.just("rotate"), st.integers(0, 7), st.sampled_from([0, 5, 50])),
        st.tuples(st.just("revoke"), st.integers(0, 7), st.just(0)),
        st.tuples(st.just("wait"), st.just(0), st.sampled_from([1, 4, 30, 61])),
        st.tuples(st.just("tidy"), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@dataclass
class Model:
    """Keys in a plain dict beside the real ones.

    Attributes:
        world: time and tables.
        made: every key that ever was, oldest first.
        ends: of those that were not revoked; 0 = never.
        names: of their principals.
    """

    world: World
    made: list[PresentedKey] = field(default_factory=list)
    ends: dict[PresentedKey, float] = field(default_factory=dict)
    names: dict[PresentedKey, str] = field(default_factory=dict)

    def counts(self, key: PresentedKey) -> bool:
        return key in self.ends and not 0 < self.ends[key] <= self.world.clock.time

    async def create(self, registry: KeyRegistry, number: int, seconds: int) -> None:
        name = f"n{number}"
        if not any(self.names[key] == name for key in self.made if self.counts(key)):
            self._add((await registry.create(engine(name, ttl_seconds=seconds)))[1], seconds, name)

    async def rotate(self, registry: KeyRegistry, number: int, seconds: int) -> None:
        if (old := self._chosen(number)) is not None:
            self._add((await registry.rotate(old.id, seconds, 0))[1], 0, self.names[old])
            end = self.world.clock.time + seconds
            self.ends[old] = min(end, self.ends[old] or end)

    async def revoke(self, registry: KeyRegistry, number: int, _seconds: int) -> None:
        if (key := self._chosen(number)) is not None:
            await registry.revoke(key.id)
            del self.ends[key]

    async def wait(self, _registry: KeyRegistry, _number: int, seconds: int) -> None:
        self.world.clock.time += seconds

    async def tidy(self, registry: KeyRegistry, _number: int, _seconds: int) -> None:
        await registry.tidy()

    def _chosen(self, number: int) -> PresentedKey | None:
        key = self.made[number % len(self.made)] if self.made else None
        return key if key is not None and self.counts(key) else None

    def _add(self, key: PresentedKey | None, seconds: int, name: str) -> None:
        assert key is not None
        self.made.append(key)
        self.ends[key], self.names[key] = self.world.clock.time + seconds if seconds else 0.0, name

    def check(self, registry: KeyRegistry) -> None:
        for presented in self.made:
            key = registry.authenticate(presented)
            assert (key is not None and registry.use(key)) == self.counts(presented)
            assert key is None or key.name == self.names[presented]
        assert {key.id for key in registry.all()} == {each.id for each in self.made if self.counts(each)}


@given(_STEPS)
async def test_keys_count_from_their_making_to_their_end(steps: list[tuple[str, int, int]]) -> None:
    """Against a plain dict; another manager sees the same."""
    world = World()
    registry, model = world.registry(), Model(world)
    for step, number, seconds in steps:
        await getattr(model, step)(registry, number, seconds)
    other = world.manager()
    await other.refresh()
    model.check(registry)
    model.check(other.keys)


async def test_uses_are_written_down_by_the_minute_and_forgotten_with_the_key() -> None:
    world = World()
    registry = world.registry()
    key, _ = await registry.create(engine())
    assert await registry.last_used_at(key.id) == 0
    assert registry.use(key)
    used = world.clock.time
    await registry.tidy()
    assert await world.registry().last_used_at(key.id) == used
    world.clock.time += 10
    assert registry.use(key)
    await registry.tidy()
    assert await world.registry().last_used_at(key.id) == used
    await registry.revoke(key.id)
    assert await world.uses.all() == {}


async def _with_accounts(*names: str) -> Registry:
    manager = World().manager()
    for name in names:
        await manager.accounts.add(name, "password", AccountRole.ROLE_ADMIN)
    return manager


async def test_logins_of_an_account_are_revoked_together() -> None:
    manager = await _with_accounts("eve", "bob")
    for name in ("eve", "bob", "eve"):
        await manager.keys.log_in(name, Role.ROLE_ADMIN, 60)
    await manager.keys.revoke_logins("eve")
    assert [key.account for key in manager.keys.all()] == ["bob"]


@pytest.mark.parametrize("end", ["remove", "prune", "demote"])
async def test_a_login_counts_while_its_account_is_there_with_its_role(end: str) -> None:
    """Removal or demotion of the account ends its logins, also a slow one that stores its key only afterwards."""
    manager = await _with_accounts("eve", "bob")
    before, _ = await manager.keys.log_in("eve", Role.ROLE_ADMIN, 60)
    bob, _ = await manager.keys.log_in("bob", Role.ROLE_ADMIN, 60)
    assert manager.keys.use(before)
    kept = (AccountEntry("bob", AccountRole.ROLE_ADMIN),)
    if end == "remove":
        await manager.accounts.remove("eve")
    elif end == "prune":
        await manager.snapshots.load(Configuration(accounts=kept), prune=True)
    else:
        demoted = AccountEntry("eve", AccountRole.ROLE_USER)
        await manager.snapshots.load(Configuration(accounts=(*kept, demoted)))
    after, _ = await manager.keys.log_in("eve", Role.ROLE_ADMIN, 60)
    assert [manager.keys.use(key) for key in (before, after, bob)] == [False, False, True]
    assert manager.keys.all() == [bob]
    await manager.keys.tidy()
    assert [manager.keys.find(key.id) for key in (before, after, bob)] == [None, None, bob]


async def test_of_very_many_logins_of_an_account_the_oldest_end() -> None:
    world = World()
    manager = world.manager()
    for name in ("eve", "bob"):
        await manager.accounts.add(name, "password", AccountRole.ROLE_ADMIN)
    bob, _ = await manager.keys.log_in("bob", Role.ROLE_ADMIN, 3600)
    made = []
    for _ in range(35):
        world.clock.time += 1
        made.append((await manager.keys.log_in("eve", Role.ROLE_ADMIN, 3600))[0])
    kept = [key for key in manager.keys.all() if key.account == "eve"]
    assert kept == made[-32:]
    assert manager.keys.use(bob)
    world.clock.time -= 100  # whose clock is behind logs in all the same
    late, _ = await manager.keys.log_in("eve", Role.ROLE_ADMIN, 3600)
    assert manager.keys.find(late.id) == late
    assert manager.keys.find(made[-32].id) is None


async def test_another_manager_ends_a_login_when_it_sees_the_account_go() -> None:
    world = World()
    first, second = world.manager(), world.manager()
    await first.accounts.add("eve", "password", AccountRole.ROLE_ADMIN)
    key, _ = await first.keys.log_in("eve", Role.ROLE_ADMIN, 60)
    await second.refresh()
    assert second.keys.use(key)
    await first.accounts.remove("eve")
    await second.refresh()
    assert not second.keys.use(key)


@pytest.mark.parametrize("end", ["revoke", "rotate", "expire"])
async def test_a_key_of_a_file_is_taken_over_once(end: str) -> None:
    """By any manager, and not again after its end, however long ago that was."""
    world = World()
    first, second, presented = world.manager(), world.manager(), new_key()
    for manager in (first, second, first):
        key = await manager.taken_keys.import_key("admin", presented)
        assert key == manager.keys.authenticate(presented)
        assert manager.keys.all() == [key]
    if end == "revoke":
        await first.keys.revoke(presented.id)
    else:
        await first.keys.rotate(presented.id, 5 if end == "expire" else 0, 0)
        world.clock.time += 5
    for manager in (second, world.manager()):
        assert await manager.taken_keys.import_key("admin", presented) is None
        await manager.keys.tidy()
        assert await manager.taken_keys.import_key("admin", presented) is None
        assert manager.keys.authenticate(presented) is None


async def test_when_a_key_was_taken_over_stays_what_it_was_here() -> None:
    manager = World().manager()
    await manager.taken_keys.remember(ImportedKey("elsewhere", 5.0))
    await manager.taken_keys.remember(ImportedKey("elsewhere", 9.0))
    assert await manager.taken_keys.all() == [ImportedKey("elsewhere", 5.0)]


async def test_a_key_of_a_file_that_was_taken_over_by_an_older_release_counts_as_taken_over() -> None:
    manager = World().manager()
    _, presented = await manager.keys.create(NewKey("admin", Role.ROLE_ADMIN))
    assert presented is not None
    assert await manager.taken_keys.import_key("admin", presented) == manager.keys.authenticate(presented)
    await manager.keys.revoke(presented.id)
    assert await manager.taken_keys.import_key("admin", presented) is None


async def test_a_key_of_a_file_with_a_known_id_and_another_secret_is_refused() -> None:
    manager = World().manager()
    presented = new_key()
    key = await manager.taken_keys.import_key("admin", presented)
    with pytest.raises(InvalidArgumentError, match=f"{presented.id}.*another secret"):
        await manager.taken_keys.import_key("admin", PresentedKey(presented.id, new_key().secret))
    assert manager.keys.authenticate(presented) == key


@given(st.lists(st.integers(0, 5), max_size=60))
async def test_managers_that_start_together_take_a_key_over_together(pauses: list[int]) -> None:
    slow, presented = SuspendingTable(MemoryTable(), pauses), new_key()
    managers = [Registry(Opener(), slow) for _ in range(3)]
    keys = await asyncio.gather(*(manager.taken_keys.import_key("admin", presented) for manager in managers))
    assert keys[0] is not None
    assert keys == [managers[0].keys.authenticate(presented)] * 3


# ── Logins while their account changes, here or at another manager ──


_LOGIN = pb.LoginRequest(user_name="ann", password="old")


class Pair:
    """Two managers on one table, and the way of the second one to it."""

    def __init__(self) -> None:
        table = MemoryTable()
        self.way = SuspendingTable(table)
        self.a, self.b = Registry(Opener(), table), Registry(Opener(), self.way)

    def log_in(self) -> Awaitable[object]:
        """Log in at the second one."""
        return AccessApi(self.b, is_required=True).log_in(_LOGIN)

    async def logins(self) -> list[str]:
        """Return the accounts of all keys that there are."""
        await self.b.refresh()
        return [key.account for key in self.b.keys.all()]


@pytest.fixture
async def pair() -> Pair:
    pair = Pair()
    await pair.a.accounts.add("ann", "old", AccountRole.ROLE_ADMIN)
    return pair


async def _set_password(registry: Registry) -> None:
    await registry.accounts.set_password("ann", "new")
    await registry.end_logins("ann")


async def _remove(registry: Registry) -> None:
    await registry.accounts.remove("ann")
    await registry.end_logins("ann")


@pytest.mark.parametrize("call", ["get", "replace"])
@pytest.mark.parametrize("change", [_set_password, _remove])
async def test_a_login_that_a_change_overtakes_is_refused(
    pair: Pair, change: Callable[[Registry], Awaitable[None]], call: str
) -> None:
    """Its account was read, or its key made, before the change; it goes on behind it."""
    answer = pair.way.hold(call)
    login = asyncio.ensure_future(pair.log_in())
    while call not in pair.way.asked and not login.done():
        await asyncio.to_thread(int)
    for _ in range(2):  # the pause before the call
        await asyncio.sleep(0)
    await change(pair.a)
    answer.set()
    with pytest.raises(UnauthenticatedError):
        await login
    assert await pair.logins() == []


async def test_logins_that_another_manager_made_a_moment_ago_end(pair: Pair) -> None:
    await pair.log_in()
    assert await pair.logins() == ["ann"]
    await pair.a.end_logins("ann")
    assert await pair.logins() == []


async def test_a_password_that_another_manager_set_a_moment_ago_counts(pair: Pair) -> None:
    await pair.b.refresh()
    await pair.a.accounts.set_password("ann", "new")
    assert await pair.b.accounts.authenticate("ann", "old") is None
    assert await pair.b.accounts.authenticate("ann", "new") is not None


async def test_of_two_changes_with_one_old_password_one_is_made(pair: Pair) -> None:
    proven = await pair.a.accounts.authenticate("ann", "old")
    changes = [each.accounts.set_password("ann", password, proven) for each, password in ((pair.a, "1"), (pair.b, "2"))]
    outcomes = await asyncio.gather(*changes)
    assert sorted(outcomes) == [False, True]
    winner = str(outcomes.index(True) + 1)
    assert await pair.a.accounts.authenticate("ann", winner) is not None


async def test_tries_that_the_store_did_not_receive_are_none(pair: Pair) -> None:
    api = AccessApi(pair.b, is_required=True)
    pair.way.outage = StorageIOError("the store went away")
    for _ in range(20):
        with pytest.raises(StorageIOError):
            await api.log_in(_LOGIN)
    pair.way.outage = None
    await api.log_in(_LOGIN)
    assert await pair.logins() == ["ann"]
