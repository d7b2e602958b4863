"""Polls every manager all the time: whether it is ready, and which leader it names."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from game_site import Manager

__all__ = ["Observation", "Watch", "whole_since"]

_PAUSE_SECONDS = 0.2
_MOST_SECONDS = 1.0


class Observation(NamedTuple):
    """Observations of a manager.

    Attributes:
        at: unix seconds, when it was asked.
        manager: name of it.
        is_ready: whether it says so.
        leader: that it names, "" for none.
    """

    at: float
    manager: str
    is_ready: bool
    leader: str


class Watch:
    """Polls managers until it is ended, each in a thread of its own.

    Args:
        managers: by name.
        addresses: `host:port` of their HTTP port, by name.

    Attributes:
        observations: observations.
    """

    def __init__(self, managers: Mapping[str, Manager], addresses: Mapping[str, str]) -> None:
        self.observations: list[Observation] = []
        self._managers = managers
        self._addresses = addresses
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=(name,), daemon=True) for name in managers]

    def begin(self) -> None:
        """Begin to observe."""
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Look no more."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _repeat(self, name: str) -> None:
        while not self._is_over.wait(_PAUSE_SECONDS):
            at = time.time()
            is_ready = self._managers[name].probe("readyz")
            self.observations.append(Observation(at, name, is_ready, self._leader(name) if is_ready else ""))

    def _leader(self, name: str) -> str:
        address = f"http://{self._addresses[name]}/api/getClusterInfo"
        request = urllib.request.Request(address, b"{}", {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=_MOST_SECONDS) as answer:
                return str(json.loads(answer.read()).get("leader_node_id", ""))
        except (OSError, http.client.HTTPException, ValueError):
            return ""


def whole_since(
    observations: Sequence[Observation], moment: float, names: Sequence[str], *, not_led_by: str = ""
) -> float | None:
    """Return when, from a moment on, all managers were first seen ready and agreeing on a leader; None if never.

    Args:
        observations: in any order.
        moment: unix seconds; observations that began earlier say nothing.
        names: of the managers; answers of others are ignored.
        not_led_by: a manager that does not count as a leader, since it is gone.
    """
    latest: dict[str, Observation] = {}
    for observation in sorted(each for each in observations if each.at >= moment and each.manager in names):
        latest[observation.manager] = observation
        leaders = {each.leader for each in latest.values()}
        is_whole = len(latest) == len(names) and all(each.is_ready for each in latest.values())
        if is_whole and len(leaders) == 1 and not leaders & {"", not_led_by}:
            return observation.at
    return None
