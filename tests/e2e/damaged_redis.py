"""Histories of managers that share a Redis which lies: old dumps, a lagging replica, emptied, evicting, foreign."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from damage_histories import BLOCK_BYTES, GROUP, History, manager_of
from damaged_files import cut, fill, flip
from knowing_client import Block, KnowingClient
from manager_site import GroupPlan, Manager, Site
from redis_servers import RedisServer, Sentinels, Standalone, sentinel, standalone

__all__ = ["REDIS_DAMAGES", "RedisHistory"]

_NAME = "histories"
_TIMEOUT_MS = 2000
_BACK_SECONDS = 30.0  # ten on a machine that has nothing else to do
_OLD_SECONDS = 2.5  # what is lost is older than the moment in which that is noticed
_WATCH_SECONDS = 90.0  # managers look at the server's policy once a minute


class RedisHistory(History):
    """Two managers, sometimes one, on one Redis.

    Args:
        directory: of its own.
        seed: of everything.
        damage: name of `REDIS_DAMAGES`, "" for a random one.
        disk: a small one for the blocks, that is filled; None for none.
    """

    def __init__(self, directory: Path, seed: int, damage: str = "", disk: Path | None = None) -> None:
        super().__init__(directory, seed)
        self.root = (disk or directory) / "kv"
        self.disk = disk
        self.damage = damage or self.random.choice(list(REDIS_DAMAGES))
        self.count = self.random.choice((1, 2, 2))
        self.then: dict[Block, float] = {}  # acknowledged when the old dump was made
        self.export = directory / "backup.kvcm"

    def _run(self) -> None:
        self.report.damage.append(f"redis: {self.damage}")
        if self.damage == "foreign":
            self._make_foreign()  # long before: a deployment that begins in an emptied store is another matter
        with self._servers() as servers:
            uri = servers.uri(_NAME, timeout_ms=_TIMEOUT_MS)
            self.managers = self._managers(uri)
            for manager in self.managers:
                manager.spawn()
            for manager in self.managers:
                manager.wait_until_serving()
            self.set_up()
            self._back_up(servers)
            if self.random.random() < 0.6:
                self.register("c")
            self.work(5)
            if self.disk is not None:
                self._fill_disk(self.disk)
                return
            time.sleep(_OLD_SECONDS)
            owed = self.begin_damage()
            if self.random.random() < 0.3:
                self.damage_storage()
            readable = REDIS_DAMAGES[self.damage](self, servers, owed)
            self._go_on(owed, readable)
            for manager in self.managers:
                manager.kill()

    def _make_foreign(self) -> None:
        """Let another deployment have the same names and keys, and keep its dump."""
        with standalone(self.directory / "foreign") as made:
            settings = {"kvcm.registry_storage.uri": made.uri(_NAME)}
            other = manager_of(self.directory / "foreign-manager", settings)
            client = KnowingClient("theirs", GROUP, BLOCK_BYTES)
            try:
                other.start()
                plan = GroupPlan(GROUP, (), 1 << 30, self.directory / "foreign-kv", delay_ms=0)
                asyncio.run(Site(plan).set_up_at(other))
                for name in ("a", "b", "c"):
                    client.register(name, other.address())
                    client.write(name, range(1, 65), other.address())
            finally:
                client.close()
                other.kill()
            with made.server.admin() as admin:
                admin.save()
            shutil.copy(made.server.directory / "dump.rdb", self.directory / "foreign.rdb")
        self.step("another deployment has the same names")

    @contextlib.contextmanager
    def _servers(self) -> Iterator[Standalone | Sentinels]:
        home = self.directory / "redis"
        if self.damage == "lagging replica":
            with sentinel(home) as made:
                made.give_up_soon()
                yield made
        else:
            with standalone(home, appendonly=self.damage == "cut log") as made:
                yield made

    def _managers(self, uri: str) -> list[Manager]:
        settings = {"kvcm.registry_storage.uri": uri}
        return [manager_of(self.directory / f"manager-{number}", settings) for number in range(self.count)]

    def _back_up(self, servers: Standalone | Sentinels) -> None:
        self.then = dict(self.client.acknowledged)
        if isinstance(servers, Standalone):
            with servers.server.admin() as admin:
                admin.save()
            shutil.copy(servers.server.directory / "dump.rdb", self.directory / "old.rdb")
            self.step("the server saves a dump")
        if self.damage == "emptied, import":
            self.operate("index", "export", str(self.export), *self.managers[0].store_options)
        if isinstance(servers, Sentinels):
            self._stop_replication(servers)

    def _stop_replication(self, servers: Sentinels) -> None:
        master, replica = servers.servers
        with master.admin() as admin:
            admin.wait(1, 20_000)
            replica.pause()  # and not the sentinels, which would wait for half a minute afterwards (TILT)
            admin.execute_command("CLIENT", "KILL", "TYPE", "replica")
        self.step("the replica receives nothing from now on")

    def owed_then(self, owed: Mapping[Block, float]) -> set[Block]:
        """Return the blocks that the old dump has, and nothing happened to since."""
        return {block for block, at in owed.items() if self.then.get(block) == at}

    def _go_on(self, owed: Mapping[Block, float], readable: set[Block]) -> None:
        """Read at once, register and write at all managers, then be judged."""
        self.client.reconnect()
        for manager in self.managers:
            self.read_all(manager)
        if self.random.random() < 0.25:
            self.step("the managers are restarted")
            for manager in self.managers:
                self.forget_metrics(manager)
                manager.stop()
                if not self.try_start(manager):
                    self.blame("cannot be repaired", "a manager does not start")
                    return
        self._until_back()
        for number, manager in enumerate(self.managers):
            self.write_new(f"late{number}", 48, manager)
            self.read_all(self.managers[number - 1])
        self.judge(owed, readable, _BACK_SECONDS)

    def _until_back(self) -> None:
        """Wait until every manager takes a registration and a write, as engines try again and again."""
        begin = time.monotonic()
        for number, manager in enumerate(self.managers):
            if self._is_back(f"late{number}", manager):
                continue
            self.blame("stuck", f"{manager.directory.name} takes no registration and write")
            with contextlib.suppress(AssertionError):
                self.configure()
            self.step("the operator configures storage and group again, and restarts the manager")
            self.forget_metrics(manager)
            manager.stop()
            self.try_start(manager)
            if not self._is_back(f"late{number}", manager):
                self.blame("stuck for ever", f"{manager.directory.name} takes no write after a restart")
        self.step(f"all managers take registrations and writes after {time.monotonic() - begin:.1f} s")

    def _is_back(self, name: str, manager: Manager) -> bool:
        deadline = time.monotonic() + _BACK_SECONDS
        while not (self.goes_on_at(name, manager) and self.client.write(name, [0], manager.address())):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)
            self.client.reconnect()
        return True

    def _fill_disk(self, disk: Path) -> None:
        """Fill the disk of the blocks: writes fail, reads go on, and all is well when there is space."""
        self.report.damage[:] = ["disk: full"]
        self.begin_damage()
        junk = fill(disk, self.random.choice((0, 4096, 65_536)))
        for _ in range(6):
            self.write_new(self.random.choice(self.client.instances), 64)
        owed = dict(self.client.acknowledged)
        if missing := set(owed) - self.read_all(self.managers[0]).hits - self.evicted():
            self.blame("not answered", f"{len(missing)} blocks while the disk is full")
        junk.unlink()
        self.step("room is made")
        self._go_on(owed, set(owed))


# ── damage: each returns the blocks that have to be answered afterwards ──


def _old_dump(history: RedisHistory, servers: Standalone, owed: Mapping[Block, float]) -> set[Block]:
    _load_dump(history, servers.server, history.directory / "old.rdb")
    return history.owed_then(owed)


def _old_dump_while_stopped(history: RedisHistory, servers: Standalone, owed: Mapping[Block, float]) -> set[Block]:
    """No manager runs that could notice it."""
    for manager in history.managers:
        history.forget_metrics(manager)
        manager.stop()
    _load_dump(history, servers.server, history.directory / "old.rdb")
    for manager in history.managers:
        if not history.try_start(manager):
            history.blame("cannot be repaired", "a manager does not start")
    return history.owed_then(owed)


def _load_dump(history: RedisHistory, server: RedisServer, dump: Path) -> None:
    server.kill()
    shutil.copy(dump, server.directory / "dump.rdb")
    server.restart()
    history.step(f"the server is killed and starts with {dump.name}")


def _damaged_dump(history: RedisHistory, servers: Standalone, owed: Mapping[Block, float]) -> set[Block]:
    """A dump with a flipped bit, or cut: Redis does not start, and the operator has the older one only."""
    server = servers.server
    with server.admin() as admin:
        admin.save()
    server.kill()
    damage = history.random.choice((flip, cut))
    history.step(damage(server.directory / "dump.rdb", history.random))
    try:
        server.restart()
    except AssertionError:
        return _old_dump(history, servers, owed)
    history.step("the server starts with it")
    return set()


def _cut_log(history: RedisHistory, servers: Standalone, owed: Mapping[Block, float]) -> set[Block]:
    """An append-only file that lost its end, which Redis loads as far as it goes."""
    server = servers.server
    server.kill()
    (log,) = (server.directory / "appendonlydir").glob("*.incr.aof")
    size = log.stat().st_size
    left = history.random.randrange(size * 6 // 10, size)
    with log.open("r+b") as opened:
        opened.truncate(left)
    server.restart()
    history.step(f"the append-only file of {size} bytes is cut to {left}, and the server starts with it")
    return set()


def _lagging_replica(history: RedisHistory, servers: Sentinels, owed: Mapping[Block, float]) -> set[Block]:
    master, replica = servers.servers
    master.kill()
    replica.resume()
    deadline = time.monotonic() + 60
    while servers.master is not replica:
        assert time.monotonic() < deadline, "the replica is not promoted"
        time.sleep(0.05)
    history.step("the lagging replica is promoted")
    return history.owed_then(owed)


def _emptied(history: RedisHistory, servers: Standalone, _owed: Mapping[Block, float]) -> set[Block]:
    with servers.server.admin() as admin:
        if history.random.random() < 0.5:
            admin.flushall()
        else:
            keys = list(admin.scan_iter(f"{_NAME}:*", count=1000))
            admin.delete(*keys)
    history.step("the server is emptied")
    return set()


def _emptied_and_dumped(history: RedisHistory, servers: Standalone, owed: Mapping[Block, float]) -> set[Block]:
    _emptied(history, servers, owed)
    _observe(history)
    return _old_dump(history, servers, owed)


def _emptied_and_imported(history: RedisHistory, servers: Standalone, owed: Mapping[Block, float]) -> set[Block]:
    _emptied(history, servers, owed)
    _observe(history)
    if history.operate("index", "import", str(history.export), *history.managers[0].store_options):
        return set()
    return history.owed_then(owed)


def _observe(history: RedisHistory) -> None:
    """Engines go on while the store is not what it was."""
    time.sleep(history.random.choice((0.0, 1.0, 3.0)))
    history.client.reconnect()
    for number, manager in enumerate(history.managers):
        if history.goes_on_at(f"meanwhile{number}", manager):
            history.write_new(f"meanwhile{number}", 16, manager)
        history.read_all(manager)


def _evicting(history: RedisHistory, servers: Standalone, _owed: Mapping[Block, float]) -> set[Block]:
    """Somebody sets a policy and a limit, and others write until some of our keys are gone."""
    with servers.server.admin() as admin:
        before = admin.dbsize()
        admin.config_set("maxmemory-policy", history.random.choice(("allkeys-lru", "allkeys-random", "allkeys-lfu")))
        admin.config_set("maxmemory", admin.info("memory")["used_memory"] + 50_000)
        for number in range(4000):
            admin.set(f"others:{number}", bytes(400))
            if admin.info("stats")["evicted_keys"] > before // history.random.choice((3, 8)):
                break
        gone = before - sum(1 for _ in admin.scan_iter(f"{_NAME}:*", count=1000))
    history.step(f"the server evicts {gone} of {before} keys")
    _observe(history)
    with servers.server.admin() as admin:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", 0)
    history.step("the policy is noeviction again")
    history.account_seconds = _WATCH_SECONDS
    return set()


def _foreign(history: RedisHistory, servers: Standalone, owed: Mapping[Block, float]) -> set[Block]:
    """The dump of another deployment of the same name, with the same instances and keys; then our own again."""
    server = servers.server
    with server.admin() as admin:
        admin.save()
    own = history.directory / "own.rdb"
    shutil.copy(server.directory / "dump.rdb", own)
    _load_dump(history, server, history.directory / "foreign.rdb")
    _observe(history)
    late = dict(history.client.acknowledged)  # confirmed into the other deployment's store
    for block in late.keys() - owed.keys():
        history.client.acknowledged.pop(block)
        history.blame("written into another's store", f"{block} was acknowledged")
        break
    _load_dump(history, server, own)
    return set(owed)


def _full(history: RedisHistory, servers: Standalone, owed: Mapping[Block, float]) -> set[Block]:
    """The server is full, and forgets nothing."""
    with servers.server.admin() as admin:
        admin.config_set("maxmemory", 1 << 20)
        _observe(history)
        for _ in range(3):
            history.write_new("a", 16)
        admin.config_set("maxmemory", 0)
    history.step("the server was full for a while")
    return set(owed)


REDIS_DAMAGES = {
    "old dump": _old_dump,
    "old dump, managers stopped": _old_dump_while_stopped,
    "damaged dump": _damaged_dump,
    "cut log": _cut_log,
    "lagging replica": _lagging_replica,
    "emptied": _emptied,
    "emptied, dump": _emptied_and_dumped,
    "emptied, import": _emptied_and_imported,
    "evicting": _evicting,
    "foreign": _foreign,
    "full": _full,
}
"""What happens to a server, by name."""
