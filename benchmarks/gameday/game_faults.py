"""Carries out a plan: each fault begins, lasts, and is over when the failed component is restored."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from game_network import HOSTS
from game_plan import Step, hosts_of, parts_of
from game_processes import GameProcess
from game_site import Site

__all__ = ["Done", "Faults"]

_SPOILED_FILES = 6
_End = Callable[[], None]


@dataclass(slots=True)
class Done:
    """The outcome of a step.

    Attributes:
        step: as planned.
        began: unix seconds.
        ended: unix seconds; when everything was there again.
        target: the component that failed, where the plan left that open.
        error: why it could not be carried out, "" when it was.
    """

    step: Step
    began: float
    ended: float = 0.0
    target: str = ""
    error: str = ""


class Faults:
    """Begins and ends faults.

    Args:
        site: that they happen to.

    Attributes:
        done: the outcome of each step that has ended.
        wrong: faults of managers and engines during a stop.
    """

    def __init__(self, site: Site) -> None:
        self.done: list[Done] = []
        self.wrong: list[str] = []
        self._site = site
        self._changed = threading.Condition()
        self._busy: dict[int, frozenset[str]] = {}
        self._beginnings: dict[str, Callable[[Step], tuple[str, _End]]] = {
            "manager killed": partial(self._manager_ends, how=self._kill),
            "leader killed": partial(self._manager_ends, how=self._kill),
            "manager stopped": partial(self._manager_ends, how=self._stop),
            "manager frozen": self._freeze_manager,
            "store killed": partial(self._store_ends, how=self._kill),
            "store stopped": partial(self._store_ends, how=self._stop),
            "store frozen": self._freeze_store,
            "engine killed": partial(self._engine_ends, how=self._kill),
            "engine stopped": partial(self._engine_ends, how=self._stop),
            "slow line": self._slow,
            "slow line of the store": self._slow,
            "lossy line": self._lose,
            "disk full": self._fill,
            "disk read-only": self._forbid_writes,
            "disk hangs": lambda step: self._fail(step, site.storages.hang),
            "disk fails": lambda step: self._fail(step, site.storages.fail),
            "disk slow": lambda step: self._fail(step, site.storages.delay),
            "disk's server killed": self._lose_server,
            "bytes flipped": partial(self._spoil, how="flip"),
            "files cut": partial(self._spoil, how="cut"),
            "files deleted": partial(self._spoil, how="delete"),
        }

    def play(self, steps: list[Step], began: float) -> None:
        """Carry out a plan; returns when everything is over.

        Args:
            steps: in the order in which they begin.
            began: unix seconds of the game's begin.
        """
        threads = []
        for step in steps:
            time.sleep(max(0.0, began + step.at - time.time()))
            self._enter(step)
            threads.append(threading.Thread(target=self._apply, args=(step,), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _enter(self, step: Step) -> None:
        """Wait until no fault lasts that is about the same thing: a process may take its time to be there again."""
        with self._changed:
            self._changed.wait_for(lambda: not any(parts_of(step.target) & parts for parts in self._busy.values()))
            self._busy[step.number] = parts_of(step.target)

    def _apply(self, step: Step) -> None:
        done = Done(step, time.time(), target=step.target)
        print(f"{step.number:3d}  {step.at:7.1f} s  {step.kind}: {step.target}, {step.seconds:g} s", flush=True)
        try:
            done.target, end = self._beginnings.get(step.kind, self._cut)(step)
            time.sleep(max(0.0, done.began + step.seconds - time.time()))
            end()
        except Exception as error:
            done.error = f"{type(error).__name__}: {error}"
        done.ended = time.time()
        with self._changed:
            self.done.append(done)
            del self._busy[step.number]
            self._changed.notify_all()

    def _kill(self, name: str) -> None:
        self._process(name).kill()

    def _stop(self, name: str) -> None:
        code = self._process(name).stop()
        if code:
            self.wrong.append(f"{name} was ordered to stop and ended with {code}")

    def _process(self, name: str) -> GameProcess:
        site = self._site
        processes: dict[str, GameProcess] = {"store": site.store, **site.managers, **site.engines}
        return processes[name]

    def _manager_ends(self, step: Step, how: Callable[[str], None]) -> tuple[str, _End]:
        name = self._named(step)
        how(name)

        def end() -> None:
            self._process(name).start()
            self._site.wait_for_manager(name)

        return name, end

    def _named(self, step: Step) -> str:
        return self._site.any_leader() if step.target == "leader" else step.target

    def _freeze_manager(self, step: Step) -> tuple[str, _End]:
        name = self._named(step)
        self._process(name).freeze()
        return name, self._process(name).thaw

    def _store_ends(self, step: Step, how: Callable[[str], None]) -> tuple[str, _End]:
        how("store")
        return step.target, self._site.start_store

    def _freeze_store(self, step: Step) -> tuple[str, _End]:
        self._site.store.freeze()
        return step.target, self._site.store.thaw

    def _engine_ends(self, step: Step, how: Callable[[str], None]) -> tuple[str, _End]:
        how(step.target)
        return step.target, self._process(step.target).start

    def _cut(self, step: Step) -> tuple[str, _End]:
        pairs = _pairs(step.target)
        self._site.network.cut(pairs)
        return step.target, lambda: self._site.network.mend(pairs)

    def _slow(self, step: Step) -> tuple[str, _End]:
        self._site.network.slow(step.target)
        return step.target, lambda: self._site.network.heal(step.target)

    def _lose(self, step: Step) -> tuple[str, _End]:
        self._site.network.abandon(step.target)
        return step.target, lambda: self._site.network.heal(step.target)

    def _fill(self, step: Step) -> tuple[str, _End]:
        self._site.storages.fill(step.target)
        return step.target, lambda: self._site.storages.make_space(step.target)

    def _forbid_writes(self, step: Step) -> tuple[str, _End]:
        self._site.storages.forbid_writes(step.target)
        return step.target, lambda: self._site.storages.allow_writes(step.target)

    def _fail(self, step: Step, begin: Callable[[], None]) -> tuple[str, _End]:
        begin()
        return step.target, self._site.storages.recover

    def _lose_server(self, step: Step) -> tuple[str, _End]:
        self._site.storages.lose_server()
        return step.target, self._site.storages.mount_again

    def _spoil(self, step: Step, how: str) -> tuple[str, _End]:
        chosen = random.Random(f"{self._site.seed} {step.number}")
        files = self._site.storages.spoil(step.target, how, chosen, _SPOILED_FILES)
        return f"{step.target}, {len(files)} files", lambda: None


def _pairs(target: str) -> list[tuple[str, str]]:
    """Return the broken connections."""
    is_mutual = "=" in target
    left, right = (hosts_of(side) for side in target.replace(">", "=").split("="))
    pairs = [(one, other) for one in left for other in right if one != other and not _is_between_managers(one, other)]
    assert all(name in HOSTS for pair in pairs for name in pair), target
    return [*pairs, *((other, one) for one, other in pairs)] if is_mutual else pairs


def _is_between_managers(one: str, other: str) -> bool:
    return one.startswith("m") and other.startswith("m")  # they do not talk to each other
