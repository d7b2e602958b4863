"""How documents ended, in memory: what the stores of one manager alone keep of `Table.conclude`.

Invariants:

* What is over is not told any more, whether it was forgotten by then or not.
* An outcome stays as long as it may be asked for. What is over goes when others come, a few at a time, those first that
  came first; nothing sweeps.
"""

from __future__ import annotations

from itertools import islice, takewhile

__all__ = ["Outcomes"]

_MOST_FORGOTTEN = 4
"""More than come at a time, so that those which are over become fewer; few, so that no call pays for a long rest."""


class Outcomes:
    """Outcomes by name."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, bytes]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, name: str, outcome: bytes, until: float, now: float) -> list[str]:
        """Keep an outcome until a unix time; return the names of some that are over, which are forgotten."""
        self._kept.pop(name, None)  # it goes behind all others
        over = takewhile(lambda each: self._kept[each][0] <= now, self._kept)
        forgotten = list(islice(over, _MOST_FORGOTTEN))
        for each in forgotten:
            del self._kept[each]
        self._kept[name] = until, outcome
        return forgotten

    def get(self, name: str, now: float) -> bytes | None:
        """Return an outcome that is not over, None without one."""
        until, outcome = self._kept.get(name, (now, b""))
        return outcome if now < until else None
