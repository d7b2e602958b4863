"""Random histories of damage, judged by a client that knows all that was acknowledged.

A history writes, removes and registers on real managers, damages their store or storage one to three times, does what
an operator would do, goes on, and is judged:

1. Never a wrong block: what is answered has the bytes of its instance and key, or its load fails.
2. Never a silent loss: what is answered no more is counted in the log, in a metric and by `kvcm doctor`; or the log
   names the event, the store and the time.
3. What can still be read is answered again, after the documented command where the start was refused.
4. Every manager takes registrations and writes again, without a restart where only its store was away.

`RocksHistory` damages a data directory, `RedisHistory` (damaged_redis.py) a server that managers share.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from damage_accounts import (
    Claim,
    accounts_of,
    doctor_claims,
    evicted_blocks,
    kvcm,
    log_claims,
    metric_claims,
    metrics_of,
)
from damaged_files import FILE_DAMAGES, ROCKS_FILES, files_below, files_of, fill, put_back, readable_rows, rows_of
from knowing_client import Block, KnowingClient, Reading
from manager_site import GroupPlan, Manager, Site

__all__ = ["BLOCK_BYTES", "GROUP", "SETTINGS", "History", "HistoryReport", "RocksHistory", "Violation"]

_CAPACITY_BYTES: Final = 1 << 30
_START_SECONDS: Final = 60.0
_SETTLE_SECONDS: Final = 25.0
_ACCOUNT_SECONDS: Final = 10.0
BLOCK_BYTES: Final = 256
GROUP: Final = "team"
_EVENTS: Final = "events"
_REGISTRY: Final = b"t\x08registry"
SETTINGS: Final[Mapping[str, str]] = {
    "kvcm.cluster_id": "histories",
    "kvcm.store.fsync": "always",
    "kvcm.leader_elector.lease_ms": "2000",
    "kvcm.storage.slot_reuse_grace_ms": "1",
}


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise: its kind, and what was seen."""

    kind: str
    text: str


@dataclass(slots=True)
class HistoryReport:
    """What one history did and saw.

    Attributes:
        seed: that replays it.
        damage: names of its damages.
        steps: in words.
        violations: broken promises.
        acknowledged: blocks that were owed at the damage.
        missing: of these, blocks that were answered no more.
        readable: of these, blocks that are known to be undamaged.
        failed_loads: of these, blocks whose load failed and was reported.
        evicted: blocks that managers evicted.
        back_seconds: from the end of the damage until all that is readable was answered.
        seconds: of the whole history.
        claims: what the channels said of the loss.
    """

    seed: int
    damage: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)
    violations: list[Violation] = field(default_factory=list)
    acknowledged: int = 0
    missing: int = 0
    readable: int = 0
    failed_loads: int = 0
    evicted: int = 0
    back_seconds: float = 0.0
    seconds: float = 0.0
    claims: dict[str, list[str]] = field(default_factory=dict)


def manager_of(directory: Path, settings: Mapping[str, str]) -> Manager:
    """Return a manager as histories have them."""
    return Manager(directory, {**SETTINGS, "kvcm.event.log_file": str(directory / _EVENTS), **settings})


class History(ABC):
    """One history; `run` does all of it.

    Args:
        directory: of its own.
        seed: of everything that it does.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory, self.random = directory, Random(f"history {seed}")  # neighbours have little in common
        self.report = HistoryReport(seed)
        self.client = KnowingClient("ours", GROUP, BLOCK_BYTES)
        self.root = directory / "kv"
        self.managers: list[Manager] = []
        self._keys_per_file = self.random.choice((1, 4, 8))
        self._next_keys: dict[str, int] = {}
        self._removed: list[Block] = []
        self._offsets: dict[str, int] = {}
        self._metrics: dict[str, dict[str, float]] = {}
        self._outputs: list[str] = []
        self._damaged_files: set[Path] = set()
        self._evicted_before: set[Block] = set()
        self.account_seconds = _ACCOUNT_SECONDS

    def run(self) -> HistoryReport:
        """Do everything, and end every process."""
        begin = time.monotonic()
        try:
            self._run()
        except Exception as error:
            self.blame("broken", f"{type(error).__name__}: {error}"[:2000])
        finally:
            self.client.close()
            for manager in self.managers:
                manager.kill()
            self.report.seconds = round(time.monotonic() - begin, 2)
        return self.report

    @abstractmethod
    def _run(self) -> None: ...

    def step(self, text: str) -> None:
        """Note a step; one that is repeated is noted once."""
        if text not in self.report.steps[-2:]:
            self.report.steps.append(text)

    def blame(self, kind: str, text: str) -> None:
        """Note a violation."""
        self.report.violations.append(Violation(kind, text))

    # ── work of engines ──

    def set_up(self) -> None:
        """Configure storage and group, register the first instances and write blocks."""
        self.step(f"{len(self.managers)} managers, {self._keys_per_file} blocks a file")
        self.configure()
        for name in ("a", "b"):
            self.register(name)
        self.work(6)

    def configure(self) -> None:
        """Add the storage and the group, as an operator does."""
        plan = GroupPlan(GROUP, (), _CAPACITY_BYTES, self.root, delay_ms=0, keys_per_file=self._keys_per_file)
        asyncio.run(Site(plan).set_up_at(self.managers[0]))

    def register(self, name: str, manager: Manager | None = None) -> bool:
        """Register an instance at a manager, a random one if none is given."""
        at = manager or self.random.choice(self.managers)
        failure = self.client.register(name, at.address())
        self.step(f"register {name} at {at.directory.name}{f': {failure}' if failure else ''}")
        self._next_keys.setdefault(name, 1)
        return not failure

    def work(self, rounds: int) -> None:
        """Write chains, remove some, and write some of these again."""
        for _ in range(rounds):
            name = self.random.choice(self.client.instances)
            self.write_new(name, self.random.choice((16, 32, 64)))
            if self.random.random() < 0.4:
                self._remove_some()
            if self._removed and self.random.random() < 0.4:
                again = self._removed.pop()
                self.client.write(again[0], [again[1]], self._address())

    def write_new(self, name: str, count: int, manager: Manager | None = None) -> bool:
        """Write blocks that the instance did not have."""
        first = self._next_keys[name]
        self._next_keys[name] = first + count
        keys = range(first, first + count)
        is_written = self.client.write(name, keys, manager.address() if manager else self._address())
        self.step(f"write {name} {first}–{first + count - 1}{'' if is_written else ': failed'}")
        return is_written

    def _remove_some(self) -> None:
        owed = sorted(self.client.acknowledged)
        if not owed:
            return
        name, key = self.random.choice(owed)
        keys = [
            each for each in range(key, key + self.random.choice((1, 4, 9))) if (name, each) in self.client.acknowledged
        ]
        self.client.remove(name, keys, self._address())
        self._removed += [(name, each) for each in keys]
        self.step(f"remove {name} {keys[0]}–{keys[-1]}")

    def _address(self) -> str:
        return self.random.choice(self.managers).address()

    def read_all(self, manager: Manager) -> Reading:
        """Read every key of every instance at a manager."""
        last = max(self._next_keys.values(), default=1)
        return self.client.read_all(manager.address(), range(1, last))

    # ── damage ──

    def begin_damage(self) -> dict[Block, float]:
        """Note what is owed, what was logged and counted until now; returns what is owed."""
        self._offsets = {str(each.log): each.log.stat().st_size for each in self.managers}
        self._metrics = {each.address(): metrics_of(each) for each in self.managers}
        self._evicted_before = self.evicted()
        self._outputs.clear()
        owed = dict(self.client.acknowledged)
        self.report.acknowledged = len(owed)
        return owed

    def forget_metrics(self, manager: Manager) -> None:
        """A manager is about to end, whose counters begin at 0 then."""
        self._metrics.pop(manager.address(), None)

    def damage_storage(self) -> None:
        """Damage files of blocks, as those who load find out, or managers that verify the storage."""
        files = files_below(self.root, lambda path: not path.name.startswith(".") and path.suffix != ".deleted")
        for file in self.random.sample(files, min(len(files), self.random.choice((1, 2, 4)))):
            name = self.random.choice(("bit", "bit", "cut", "zeros", "gone"))
            self.report.damage.append(f"storage: {name}")
            self.step(f"storage: {FILE_DAMAGES[name](file, self.random)}")
            self._damaged_files.add(file)

    def damage_notes(self) -> None:
        """Damage a note of deleted slots."""
        notes = files_below(self.root, lambda path: path.suffix == ".deleted")
        if notes:
            name, note = self.random.choice(("bit", "cut", "gone")), self.random.choice(notes)
            self.report.damage.append(f"notes: {name}")
            self.step(f"notes: {FILE_DAMAGES[name](note, self.random)}")
            self._damaged_files.add(note.with_suffix(""))  # whose blocks nobody can vouch for

    # ── judgement ──

    def try_start(self, manager: Manager) -> bool:
        """Start a manager; returns whether it serves."""
        manager.spawn()
        deadline = time.monotonic() + _START_SECONDS
        while not any(event["event"] == "serving" for event in manager.events()):
            if not manager.is_running or time.monotonic() > deadline:
                lines = manager.new_log().strip().splitlines()
                self.step(f"{manager.directory.name} does not start: {(lines or ['without a word'])[-1][:400]}")
                manager.kill()
                return False
            time.sleep(0.02)
        self.client.reconnect()
        return True

    def operate(self, *words: str) -> int:
        """Run a command as an operator; returns its exit code."""
        done = kvcm(*words)
        self._outputs += [*done.stdout.splitlines(), *done.stderr.splitlines()]
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        self.step(f"kvcm {' '.join(words[:3])}: exit code {done.returncode}: {' | '.join(said[-3:])[:400]}")
        return done.returncode

    def note_output(self, text: str) -> None:
        """Keep what an operator was told."""
        self._outputs += text.splitlines()

    def goes_on_at(self, name: str, manager: Manager) -> bool:
        """Register an instance and those before it, as engines do that a manager has forgotten; whether it took all."""
        failures = [self.client.register(each, manager.address()) for each in (*self.client.instances, name)]
        self._next_keys.setdefault(name, 1)
        if failure := next(filter(None, failures), ""):
            self.step(f"register at {manager.directory.name}: {failure}")
        return not failure

    def judge(self, owed: Mapping[Block, float], readable: set[Block], limit_seconds: float = _SETTLE_SECONDS) -> None:
        """Wait until all readable blocks are answered everywhere, and note the faults.

        Args:
            owed: blocks that were acknowledged at the damage.
            readable: blocks that have to be answered.
            limit_seconds: how long they may take.
        """
        begin = time.monotonic()
        readable = {block for block in readable if self.client.files.get(block) not in self._damaged_files}
        readable = {block for block in readable if readable.issuperset(self.client.prefix_of(block))}
        found = self._settled(readable, begin + limit_seconds)
        self.report.back_seconds = round(time.monotonic() - begin, 2)
        self.report.readable = len(readable)
        due = {block for block in owed if block in self.client.acknowledged}
        failed = {block for block in due if block in self.client.lost_bytes}
        self.report.failed_loads = len(failed)
        self._judge_readings(found, readable - failed)
        self._judge_accounts({block: owed[block] for block in due})
        for text in self.client.wrong:
            self.blame("wrong block", text)
        for manager in self.managers:
            for text in manager.failures()[:2]:
                self.blame("defect in the log", text[-600:])

    def _judge_readings(self, found: Mapping[str, Reading], readable: set[Block]) -> None:
        for address, reading in found.items():
            if reading.unanswered:
                self.blame("not answered", f"{len(reading.unanswered)} blocks at {address}")
            elif silent := readable - reading.hits - self.evicted():
                self.blame("not salvaged", f"{len(silent)} of {len(readable)} readable blocks at {address}, "
                           f"{sorted(silent)[:3]}…")  # fmt: skip
            if reading.failed:
                self.blame("cannot be loaded", f"{address}: {sorted(reading.failed.items())[:3]}")

    def _settled(self, readable: set[Block], deadline: float) -> dict[str, Reading]:
        while True:
            found = {each.address(): self.read_all(each) for each in self.managers}
            wanted = readable - self.client.lost_bytes.keys() - self.evicted()
            is_calm = all(wanted <= each.hits and not each.unanswered and not each.failed for each in found.values())
            if is_calm or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def _judge_accounts(self, owed: Mapping[Block, float]) -> None:
        """Wait until all that is missing is accounted for: blocks of a storage that is verified come back meanwhile."""
        deadline = time.monotonic() + self.account_seconds
        while True:
            missing, claims = self._missing(owed), list(self._claims())
            accounts = accounts_of(claims)
            if all(accounts[name].accounts_for(missing) for name in ("log", "metric")) or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        if not missing:
            return
        accounts = accounts_of([*claims, *(claim for each in self.managers for claim in doctor_claims(each))])
        for name, account in accounts.items():
            self.report.claims[name] = list(account.claims)[:6]
            if not account.claims:
                self.blame(f"silent: {name}", f"{len(missing)} blocks are gone")
            elif not account.accounts_for(missing):
                kind = "other times" if account.windows else "too few"
                between = f"{min(missing):.1f} and {max(missing):.1f}"
                self.blame(
                    f"{kind}: {name}",
                    f"{len(missing)} blocks are gone, acknowledged between {between}; it has {account.count}, "
                    f"{sorted(account.windows)}: {' / '.join(account.claims)[:400]}",
                )

    def _missing(self, owed: Mapping[Block, float]) -> list[float]:
        """Return when the blocks were acknowledged that some manager does not answer, but for those evicted."""
        hits = [self.read_all(manager).hits for manager in self.managers]
        evicted = self.evicted()
        due = owed.keys() - self.client.lost_bytes.keys() - evicted
        gone = sorted(owed[block] for block in due if any(block not in each for each in hits))
        self.report.missing, self.report.evicted = len(gone), len(evicted)
        return gone

    def evicted(self) -> set[Block]:
        """Return the blocks that managers evicted since the damage."""
        found = [
            evicted_blocks(self.directory / name / _EVENTS) for name in {each.directory.name for each in self.managers}
        ]
        return set[Block]().union(*found) - self._evicted_before

    def _claims(self) -> Iterator[Claim]:
        lines = list(self._outputs)
        for manager in self.managers:
            with manager.log.open("rb") as log:
                log.seek(self._offsets[str(manager.log)])
                lines += log.read().decode(errors="replace").splitlines()
        yield from log_claims(lines)
        for manager in self.managers:
            yield from metric_claims(self._metrics.get(manager.address(), {}), metrics_of(manager))


class RocksHistory(History):
    """A manager alone, whose data directory is damaged."""

    def __init__(self, directory: Path, seed: int, disk: Path | None = None) -> None:
        super().__init__(directory, seed)
        self.disk = disk  # a small one, that is filled
        home = disk or directory
        self.root, self.data, self.copy = home / "kv", home / "data" / "metadata", directory / "copy"
        self.managers = [manager_of(directory / "manager", {"kvcm.data_dir": str(self.data.parent)})]

    @property
    def manager(self) -> Manager:
        """The only one."""
        return self.managers[0]

    def _run(self) -> None:
        self.manager.start()
        self.set_up()
        self._restart_with_copy()
        if self.random.random() < 0.6:
            self.register("c")
        self.work(5)
        if self.disk is not None:
            self._fill_disk(self.disk)
            return
        owed = self.begin_damage()
        self._end()
        rows = rows_of(self.data)
        self._damage()
        readable = self._readable(owed, rows)
        self._bring_up(readable)
        if not (self.goes_on_at("d", self.manager) and self.write_new("d", 32)):
            self.step("the operator configures storage and group again")  # documents that may be lost
            self.configure()
            self.goes_on_at("d", self.manager)
            self.write_new("d", 32)
        self.judge(owed, readable)
        if not self.write_new("d", 8):
            self.blame("stuck", "no write is taken")

    def _restart_with_copy(self) -> None:
        """Stop, keep a copy of the directory and a dump of the metadata, and start: what was a log becomes a table."""
        self.manager.stop()
        shutil.copytree(self.data.parent, self.copy)
        self.step("stop, copy the data directory, start")
        self.manager.start()
        self.client.reconnect()

    def _end(self) -> None:
        self.forget_metrics(self.manager)
        if self.random.random() < 0.5 and not self.evicted():  # whose last events a killed manager does not write
            self.manager.kill()
            self.step("kill")
        else:
            self.step(f"stop: exit code {self.manager.stop()}")

    def _damage(self) -> None:
        if self.random.random() < 0.15:
            name = self.random.choice(("metadata", "data directory"))
            self._put_back(whole=name == "data directory")
            self.report.damage.append(f"store: old copy of {name}")
            self.step(f"the older copy of the {name} is put back")
        for _ in range(self.random.choice((1, 1, 2, 3)) - len(self.report.damage)):
            self.random.choice((self._damage_rocks, self._damage_rocks, self._damage_rocks, self._damage_other))()

    def _put_back(self, *, whole: bool) -> None:
        """Put the older copy in place, with or without what lies beside the RocksDB."""
        if whole:
            put_back(self.copy, self.data.parent)
        else:
            put_back(self.copy / self.data.name, self.data)

    def _damage_other(self) -> None:
        self.random.choice((self.damage_storage, self.damage_notes))()

    def _damage_rocks(self) -> None:
        kind = self.random.choice(("log", "log", "log", "table", "table", "table", "manifest", "current", *ROCKS_FILES))
        files = files_of(self.data, kind)
        if not files:
            return
        name = self.random.choice(("bit", "bit", "bit", "cut", "zeros", "gone"))
        self.report.damage.append(f"{kind}: {name}")
        file = files[0] if self.random.random() < 0.7 else self.random.choice(files)  # the largest has most to lose
        self.step(f"{kind}: {FILE_DAMAGES[name](file, self.random)}")

    def _readable(self, owed: Mapping[Block, float], rows: Mapping[bytes, bytes]) -> set[Block]:
        """Return the owed blocks that RocksDB itself can still read, with the documents that they need."""
        readable = readable_rows(self.data, rows)
        shared = {
            _REGISTRY + name
            for name in (b"meta/schema", f"group/{GROUP}".encode(), f"storage/{GROUP}-storage".encode())
        }
        if not shared <= readable:
            return set()
        known = {name for name in self.client.instances if _REGISTRY + f"instance/{name}".encode() in readable}
        places = self._places(rows)
        return {block for block in owed if block[0] in known and places.get(block) in readable}

    def _places(self, rows: Mapping[bytes, bytes]) -> dict[Block, bytes]:
        """Return the row of each block; its value names the instance in the location's uri."""
        marks = {name: f"/{name}/kv/".encode() for name in self.client.instances}
        return {
            (name, int.from_bytes(key[-8:], signed=True)): key
            for key, value in rows.items()
            for name, mark in marks.items()
            if key[:1] == b"b" and mark in value
        }

    def _bring_up(self, readable: set[Block]) -> None:
        """Start the manager; where it refuses do what the documents say, and at last begin with the copy."""
        if self.try_start(self.manager):
            return
        self.note_output(self.manager.new_log())
        for words in REPAIRS:
            self.operate(*words, *self.manager.store_options)
            if self.try_start(self.manager):
                return
        self.blame("cannot be repaired", f"{len(readable)} blocks are readable; the copy is put in place")
        readable.clear()
        self._put_back(whole=False)
        assert self.try_start(self.manager), "the copy does not start"

    def _fill_disk(self, disk: Path) -> None:
        """Fill the disk of data and blocks, go on until writes fail, end, start while it is full, and make room."""
        self.report.damage.append("disk: full")
        owed = self.begin_damage()
        junk = fill(disk, self.random.choice((0, 4096, 65_536, 1 << 20)))
        self.step(f"another program fills the disk, {shutil.disk_usage(disk).free} bytes are left")
        failures = 0
        for _ in range(30):
            failures += not self.write_new(self.random.choice(self.client.instances), 64)
            if failures >= 4 or not self.manager.is_running:
                break
        owed |= self.client.acknowledged
        if not self.manager.is_running:
            self.blame("ended", f"the manager ended on a full disk: {self.manager.new_log()[-400:]}")
        elif missing := set(owed) - self.read_all(self.manager).hits - self.evicted():
            self.blame("not answered", f"{len(missing)} of {len(owed)} blocks while the disk is full")
        self._end_anyhow()
        if not self.try_start(self.manager):
            self.blame("shut", "the manager does not start while the disk is full")
            junk.unlink()
            if not self.try_start(self.manager):
                self._bring_up(set(owed))
        else:
            self.judge(owed, set(owed))
            junk.unlink()
        self.step("room is made")
        self.judge(owed, set(owed))
        self._wait_for_writes()

    def _end_anyhow(self) -> None:
        if self.manager.is_running:
            self._end()
        else:
            self.forget_metrics(self.manager)
            self.manager.kill()

    def _wait_for_writes(self) -> None:
        deadline = time.monotonic() + _SETTLE_SECONDS
        while not self.write_new("a", 8):
            if time.monotonic() > deadline:
                self.blame("stuck", "no write is taken after room was made")
                return
            time.sleep(0.3)


def _repairs() -> Sequence[tuple[str, ...]]:
    """Return the documented commands for a store that does not open, in the order of the documents."""
    has_repair = kvcm("index", "repair", "--help").returncode == 0
    return (("index", "repair"),) if has_repair else (("index", "verify", "--repair", "--drop-unreadable"),)


REPAIRS: Sequence[tuple[str, ...]] = _repairs()
Make = Callable[[Path, int], History]
