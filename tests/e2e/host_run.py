"""One manager and engines on hosts of their own, two of them with a memory pool: what they see while hosts fail.

`alone`: no load, one step after the other. Then engines of both hosts, and one that names no host, work on the same and
on other blocks: `steady`; `cut` while host a is unreachable, `mended`; `removed` when the memory of host a is deleted
under its engine; `booting` while host a is down, `booted` when it is there again with empty memory; `killed` when the
manager is killed and started again; `settled`. `audit`: every engine reads everything, twice, and nothing is written.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

from checked_engine import CHAIN_BLOCKS
from engine_figures import SHARED, EngineFigures, added, pool_of
from host_site import HOSTLESS, HOSTS, PATIENCE_SECONDS, HostSite

from kvcm.model.storages import extent_bytes

_FAILING = ("steady", "cut", "mended", "removed", "booting", "booted", "killed", "settled")
PHASES = ("alone", *_FAILING, "audit", "audit again")
_FIRST_KEY = 900_000_000  # of the steps without load


@dataclass(slots=True)
class HostsReport:
    """What came of it.

    Attributes:
        engines: by engine and phase.
        seconds: how long the manager or an engine took for what.
        evicted: blocks, from pools.
        wrong: violations.
    """

    engines: dict[str, dict[str, EngineFigures]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    evicted: int = 0
    wrong: list[str] = field(default_factory=list)

    def all(self, *engines: str) -> EngineFigures:
        """Return everything that these engines saw, or all of them."""
        names = engines or tuple(self.engines)
        return reduce(added, (seen for name in names for seen in self.engines[name].values()), EngineFigures())

    def of(self, engine: str, *phases: str) -> EngineFigures:
        """Return what an engine saw in some phases."""
        return reduce(added, (self.engines[engine].get(phase, EngineFigures()) for phase in phases), EngineFigures())


def run_hosts(directory: Path, seconds: float, seed: int = 1, slowness: float = 1.0) -> HostsReport:
    """Let hosts fail.

    Args:
        directory: for everything but the pools' memory.
        seconds: of each phase under load.
        seed: of what engines do.
        slowness: as of `HostSite`.
    """
    with contextlib.ExitStack() as stack:
        site = HostSite(directory, seed, slowness)
        stack.callback(site.close)
        site.set_up()
        course = _Course(site)
        course.alone()
        if course.is_right:  # else nothing could be waited for under load
            course.fail(seconds)
        return course.collected()


class _Course:
    """One run from its beginning to its end."""

    def __init__(self, site: HostSite) -> None:
        self._site = site
        self._report = HostsReport()
        self._reported: list[tuple[str, dict[str, Any]]] = []

    @property
    def is_right(self) -> bool:
        """Whether each step had its right outcome so far."""
        return not self._report.wrong

    def alone(self) -> None:
        """Go through what has one right outcome each."""
        a, b, hostless = (self._site.engines[name] for name in (*HOSTS, HOSTLESS))
        first, second = _FIRST_KEY, _FIRST_KEY + CHAIN_BLOCKS
        self._expect("each host maps its own pool", [[pool_of(name)] for name in HOSTS] + [[]], self._ask("pools"))
        self._expect("a writes to its pool", _wrote(pool_of("a")), a.ask("write", first=first))
        self._expect("only a finds it", [_all(pool_of("a")), _all(None), _all(None)], self._ask("read", first=first))
        self._expect("lengths say the same", [CHAIN_BLOCKS, 0, 0], self._ask("length", first=first))
        self._expect("b writes a copy", _wrote(pool_of("b")), b.ask("write", first=first))
        self._expect(
            "both read their own", [*map(_all, map(pool_of, HOSTS)), _all(None)], self._ask("read", first=first)
        )
        self._expect("an engine without a host writes for all", _wrote(SHARED), hostless.ask("write", first=first))
        self._expect(
            "each reads the nearest", [*map(_all, map(pool_of, HOSTS)), _all(SHARED)], self._ask("read", first=first)
        )
        self._expect("the engine without a host writes for all", _wrote(SHARED), hostless.ask("write", first=second))
        self._expect("what is for all is not written again", _MASKED, a.ask("write", first=second))
        self._expect("all read it", [_all(SHARED)] * 3, self._ask("read", first=second))
        self._lie(first)
        self._lose_the_agent(first)

    def _lie(self, first: int) -> None:
        """An engine that names another host gets its addresses, and no bytes by them."""
        liar = self._site.start_liar("b", "a")
        self._expect("a liar gets nothing", ["refused"] * 2 * CHAIN_BLOCKS, liar.ask("load_foreign", first=first))
        liar.kill()

    def _lose_the_agent(self, first: int) -> None:
        """Without its agent a pool is not used; with it, all is there as before."""
        site = self._site
        site.kill_agent("a")
        written, begin, key = [], time.monotonic(), first + 3 * CHAIN_BLOCKS
        while not site.is_in("a", "DOWN"):
            assert time.monotonic() < begin + PATIENCE_SECONDS, "pool a is not down"
            written.append(site.engines["a"].ask("write", first=key)[1])
            key += CHAIN_BLOCKS
            time.sleep(0.1 * site.slowness)  # the pool must not be filled, or the first blocks are evicted
        self._time("agent killed until its pool is down", time.monotonic() - begin)
        self._expect("no write fails for it", 0, written.count([]))
        read = [_all(SHARED), _all(pool_of("b")), _all(SHARED)]
        self._expect("without its agent a reads elsewhere", read, self._ask("read", first=first))
        third = first + 2 * CHAIN_BLOCKS
        self._expect("and writes elsewhere", _wrote(SHARED), site.engines["a"].ask("write", first=third))
        site.start_agent("a")
        self._time("agent started until its pool is up", site.until(lambda: site.is_in("a", "UP"), "pool a is up"))
        read = [_all(pool_of("a")), _all(pool_of("b")), _all(SHARED)]
        self._expect("with its agent all is back", read, self._ask("read", first=first))

    def fail(self, seconds: float) -> None:
        """Let things fail while engines work."""
        self._enter("steady")
        self._ask("begin")
        self._pass(seconds)
        self._site.until(lambda: self._site.ask("evicted") > 0, "pools are above their marks again and again")
        self._cut(seconds)
        self._remove(seconds)
        self._boot(seconds)
        self._kill_manager(seconds)
        self._ask("end")
        self._site.until(self._site.is_at_rest, "no pool is above its mark")  # else promised blocks go
        self._report.evicted += self._site.ask("evicted")
        for phase in PHASES[-2:]:
            self._enter(phase)
            self._audit()

    def _cut(self, seconds: float) -> None:
        site = self._site
        self._enter("cut")
        site.network.cut("a")
        self._time("cable cut until its pool is down", site.until(lambda: site.is_in("a", "DOWN"), "pool a is down"))
        self._pass(seconds, but="a")
        site.network.mend("a")
        begin = time.monotonic()
        site.until(lambda: site.is_in("a", "UP"), "pool a is up")
        self._enter("mended", is_whole=False)  # of host a some requests may still fail
        self._until_working("a", "cable mended until engine a reads and writes its pool", begin)
        self._until_sound()
        self._pass(seconds)

    def _remove(self, seconds: float) -> None:
        """Delete the memory under an engine; whether agent or engine makes it again first, the manager must notice."""
        self._enter("removed", is_whole=True)
        known = self._lost_memories()
        self._site.hosts["a"].run("rm /dev/shm/kvcm-*")
        noticed = self._site.until(lambda: self._lost_memories() > known, "the manager forgets what was in the memory")
        self._time("memory deleted until its blocks are forgotten", noticed)
        self._pass(seconds)

    def _boot(self, seconds: float) -> None:
        site = self._site
        self._say("a")
        self._enter("booting", without="a")
        site.boot("a")
        self._pass(seconds, but="a")
        held = site.ask("used")[pool_of("a")]
        self._expect("a pool whose host is away keeps its blocks", True, held > 0)
        site.start_agent("a")
        taken = site.until(lambda: site.ask("used").get(pool_of("a"), 0) == 0, "usage of pool a is back to nothing")
        self._time("agent of a booted host started until its usage is 0", taken)
        site.until(lambda: site.is_in("a", "UP"), "pool a is up")
        site.start_engine("a")
        self._enter("booted")
        site.engines["a"].ask("begin")
        self._until_working("a", "engine of a booted host started until it reads and writes its pool", time.monotonic())
        self._until_sound()
        self._pass(seconds)

    def _kill_manager(self, seconds: float) -> None:
        self._enter("killed")
        self._report.evicted += self._site.ask("evicted")
        self._site.manager.kill()
        begin = time.monotonic()
        self._site.start_manager()
        self._ask("turn")  # operations from before the kill do not count
        for name in HOSTS:
            self._until_working(name, f"manager killed until engine {name} reads and writes its pool", begin)
        self._until_sound()
        self._enter("settled", is_whole=True)
        self._pass(seconds)

    def _audit(self) -> None:
        """Read everything; no two parts of a pool have the same memory (invariant 5)."""
        for name, engine in self._site.engines.items():
            parts = [(start, size) for storage, start, size in engine.ask("audit") if storage == pool_of(name)]
            extents = sorted((int(start[1:]), extent_bytes(size)) for start, size in parts)
            overlaps = [(one, other) for one, other in pairwise(extents) if one[0] + one[1] > other[0]]
            self._report.wrong += [f"pool of {name}: {one} and {other} overlap" for one, other in overlaps]

    def collected(self) -> HostsReport:
        """Return what all engines saw."""
        report, site = self._report, self._site
        for name in site.engines:
            self._say(name)
        for name, phases in self._reported:
            known = report.engines.setdefault(name, {})
            for phase, figures in phases.items():
                known[phase] = added(known.get(phase, EngineFigures()), EngineFigures(**figures))
        report.wrong += [text[-1500:] for text in site.manager.failures()]
        report.wrong += [f"engine {name} ended" for name, each in site.engines.items() if each.popen.poll() is not None]
        report.wrong += [f"agent {name} ended" for name, each in site.agents.items() if each.poll() is not None]
        return report

    def _say(self, name: str) -> None:
        self._reported.append((name, self._site.engines[name].ask("report")))

    def _lost_memories(self) -> int:
        events = self._site.manager.events()
        return sum(each["event"] == "pool_memory_lost" and pool_of("a") in each["storages"] for each in events)

    def _ask(self, call: str, **arguments: Any) -> list[Any]:
        return [engine.ask(call, **arguments) for engine in self._site.engines.values()]

    def _enter(self, phase: str, *, is_whole: bool = True, without: str = "") -> None:
        engines = [engine for name, engine in self._site.engines.items() if name != without]
        for engine in engines:
            engine.ask("enter", phase=phase)
        for engine in engines if is_whole else []:
            engine.ask("finish_earlier")

    def _pass(self, seconds: float, but: str = "") -> None:
        """Let time pass, and more of it until every engine has read and written this long."""
        time.sleep(seconds)
        for name in self._site.engines:
            if name != but:
                self._until_working(name)

    def _until_sound(self) -> None:
        """Wait until all engines read and write, twice: by the second time everything has ended that met the fault, and
        no client takes the manager for dead."""
        for _ in range(2):
            self._ask("turn")
            for name in self._site.engines:
                self._until_working(name)

    def _until_working(self, name: str, what: str = "", begin: float = 0.0) -> None:
        storage = SHARED if name == HOSTLESS else pool_of(name)
        engine = self._site.engines[name]
        self._site.until(lambda: engine.ask("works_with", storage=storage), f"engine {name} works with {storage}")
        if what:
            self._time(what, time.monotonic() - begin)

    def _time(self, what: str, seconds: float) -> None:
        self._report.seconds[what] = seconds

    def _expect(self, what: str, expected: Any, found: Any) -> None:
        if expected != found:
            self._report.wrong.append(f"{what}: {found}, not {expected}")


def _all(storage: str | None) -> list[str | None]:
    return [storage] * CHAIN_BLOCKS


def _wrote(storage: str) -> list[Any]:
    """Return what the answer to a write is when nothing is masked and all goes to one storage."""
    return [[False] * CHAIN_BLOCKS, _all(storage)]


_MASKED = [[True] * CHAIN_BLOCKS, []]
