"""Writers that are killed or stopped at random points of a save, and a reader that checks everything that is served."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from block_writer import SPECS, WriterSettings, command_of, connected, content, registered
from stopping import stop_process
from waiting import until

from kvcm.connectors.results import Location, MatchMode
from kvcm.connectors.transfer import TransferItem

_PER_MATCH = 480
_KEYS_PER_ROUND = 1_000_000
_DEADLINE_SECONDS = 30.0
_LONGEST_RUN_SECONDS = 0.15  # of a writer between its first session and its end
_AIMED = 0.5  # of writers end at a point that was chosen: at random, nearly all end in the longest step
_AIM_SECONDS, _MOST_AIM_SECONDS = 0.0005, 1.0
_LONG_SESSION_SECONDS = 60
_SHORT_SESSION_SECONDS = 1

POINTS = ("no session", "first bytes", "later bytes", "before finish", "finish")
"""Where in a save a writer can end: no session is open, or one is that is at this step."""


@dataclass(slots=True)
class KillReport:
    """What a run saw.

    Attributes:
        kills: writers killed.
        inside: of them, inside a session that was not finished.
        points: where in a save they hit, see POINTS.
        comebacks: writers that were stopped past the end of a session, and went on.
        served_blocks: that were read and compared.
        differing_parts: parts of them with other bytes than were written.
        late_parts: that were served of sessions that were over before their writer came back.
        wrong: broken promises, with those.
    """

    kills: int = 0
    inside: int = 0
    points: dict[str, int] = field(default_factory=dict)
    comebacks: int = 0
    served_blocks: int = 0
    differing_parts: int = 0
    late_parts: int = 0
    wrong: list[str] = field(default_factory=list)


class Journal:
    """What a writer noted."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """Return the events of a name, or all, in order; a line that was cut off is none."""
        text = self._path.read_text() if self._path.exists() else ""
        events = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return [event for event in events if event["event"] == name or not name]

    @property
    def keys(self) -> list[int]:
        """Return the keys of all sessions that were begun."""
        return [key for event in self.events("begun") for key in event["keys"]]

    def finished(self, without: str = "") -> set[str]:
        """Return the uris that may be served: of blocks that were saved, and perhaps finished.

        Args:
            without: session that is left out.
        """
        return self._uris({event["session"] for event in self.events("finishing")} - {without})

    @property
    def confirmed(self) -> set[str]:
        """Return the uris that must be served."""
        return self._uris({event["session"] for event in self.events("ended") if event["confirmed"]})

    @property
    def point(self) -> str:
        """Return where in a save the writer is, as far as noted."""
        latest = (self.events() or [{"event": "ended"}])[-1]
        if latest["event"] == "saved":
            return "before finish" if latest["is_last"] else "later bytes"
        return {"begun": "first bytes", "finishing": "finish", "ended": "no session"}[latest["event"]]

    def finishing(self, session: str) -> set[str]:
        """Return the uris of a session that was finished, or about to be."""
        return self._uris({session})

    def _uris(self, sessions: Set[str]) -> set[str]:
        finishing = [event for event in self.events("finishing") if event["session"] in sessions]
        return {uri for event in finishing for block in event["uris"] for uri in block}

    @property
    def open_session(self) -> str | None:
        """Return the session that was begun and, as far as noted, not finished."""
        begun = [event["session"] for event in self.events("begun")]
        finishing = {event["session"] for event in self.events("finishing")}
        return begun[-1] if begun and begun[-1] not in finishing else None


class WriterRig:
    """Writers and a reader of one instance.

    Args:
        address: of the manager.
        group: of the instance.
        directory: for journals.
        seed: of where writers end.
    """

    def __init__(self, address: str, group: str, directory: Path, seed: int) -> None:
        self._address, self._group = address, group
        self._instance = f"{group}/writers"
        self._directory = directory
        self._random = Random(seed)
        self._client = connected(address, self._instance)
        self._engine = registered(self._client, group)
        self._rounds = 0
        self.report = KillReport()

    def close(self) -> None:
        """End the reader."""
        self._engine.close()
        self._client.close()

    def wait_until_open(self) -> None:
        """Return when the storage takes writes."""

        def is_open() -> bool:
            grant = self._client.start_write([0], session_seconds=_LONG_SESSION_SECONDS)
            return grant is not None and self._client.abort_write(grant.session_id)

        until(is_open, "the storage takes writes")

    def kill_a_writer(self) -> None:
        """Let a writer be killed somewhere, and check the served blocks at once."""
        with self._writer(_LONG_SESSION_SECONDS) as (writer, journal):
            self._let_run(journal)
            writer.kill()
            writer.wait()
        self.report.kills += 1
        self.report.inside += journal.open_session is not None
        self.report.points[journal.point] = self.report.points.get(journal.point, 0) + 1
        self._judge(journal)

    def stop_a_writer(self) -> None:
        """Stop a writer inside a session until others wrote the blocks of it; let it come back, and check."""
        while not self._stopped_inside_a_session():
            """It was between two sessions."""
        self.report.comebacks += 1

    def _stopped_inside_a_session(self) -> bool:
        with self._writer(_SHORT_SESSION_SECONDS) as (writer, journal):
            self._let_run(journal)
            stop_process(writer.pid)
            session = journal.open_session
            if session is None:
                return False
            (keys,) = (event["keys"] for event in journal.events("begun") if event["session"] == session)
            written = self._write_instead(keys)
            writer.send_signal(signal.SIGCONT)
            until(lambda: _outcome(journal, session) is not None, "the writer comes back")
        if _outcome(journal, session):
            self.report.wrong.append(f"{session} was over, and could be finished")
        self._judge(journal, written, refused=session)
        return True

    def _let_run(self, journal: Journal) -> None:
        # Some clients open their storage in the first session, which takes longer than all that follows.
        first = self._random.choice(("begun", "ended"))
        until(lambda: bool(journal.events(first)), "the writer begins")
        time.sleep(self._random.uniform(0.0, _LONGEST_RUN_SECONDS))  # the point at which it ends
        if self._random.random() < _AIMED:
            aim, deadline = self._random.choice(POINTS), time.monotonic() + _MOST_AIM_SECONDS
            while journal.point != aim and time.monotonic() < deadline:
                time.sleep(_AIM_SECONDS)

    @contextlib.contextmanager
    def _writer(self, session_seconds: int) -> Iterator[tuple[subprocess.Popen[bytes], Journal]]:
        self._rounds += 1
        path = self._directory / f"{self._group}-{self._rounds}.journal"
        settings = WriterSettings(
            self._address,
            self._group,
            self._instance,
            self._rounds * _KEYS_PER_ROUND,
            str(path),
            session_seconds,
            self._random.randrange(1 << 30),
        )
        writer = subprocess.Popen(command_of(settings))
        try:
            yield writer, Journal(path)
        finally:
            writer.kill()
            writer.wait()

    def _write_instead(self, keys: Sequence[int]) -> set[str]:
        """Write blocks as soon as the session that they belonged to is over; return their uris."""
        left, uris = set(keys), set[str]()

        def written() -> bool:
            grant = self._client.start_write(sorted(left), session_seconds=_LONG_SESSION_SECONDS)
            if grant is None or not grant.locations:
                return False
            places = [location.uris[spec.name] for location in grant.locations for spec in SPECS]
            items = [TransferItem(place, [memoryview(content(place))]) for place in places]
            assert all(result.ok for result in self._engine.save(items, _DEADLINE_SECONDS))
            assert self._client.finish_write(grant.session_id, [True] * len(grant.locations))
            uris.update(map(str, places))
            left.difference_update(
                key for key, is_masked in zip(sorted(left), grant.mask, strict=True) if not is_masked
            )
            return not left

        until(written, "the session of a stopped writer is over")
        return uris

    def _judge(self, journal: Journal, others: Set[str] = frozenset(), refused: str = "") -> None:
        """Read everything that is served of a writer's blocks, and remove it.

        Args:
            journal: of the writer.
            others: uris that the reader itself wrote for some of the blocks.
            refused: session whose blocks must not be served.
        """
        keys, served = journal.keys, set[str]()
        may, must = journal.finished(without=refused) | others, journal.confirmed | others
        for start in range(0, len(keys), _PER_MATCH):
            page = keys[start : start + _PER_MATCH]
            found = self._client.match(page, MatchMode.BATCH, timeout_seconds=20)
            assert not found.reason, found
            served |= self._read([location for location in found.locations if location is not None])
            assert self._client.remove(page, timeout_seconds=20)
        self.report.late_parts += len(served & journal.finishing(refused))
        self.report.wrong += [f"{uri} is served and was not finished" for uri in served - may]
        self.report.wrong += [f"{uri} was confirmed and is not served" for uri in must - served]

    def _read(self, locations: Sequence[Location]) -> set[str]:
        uris = [uri for location in locations for uri in location.uris.values()]
        if any(len(location.uris) != len(SPECS) for location in locations):
            self.report.wrong.append("a block is served without one of its parts")
        buffers = [bytearray(uri.size) for uri in uris]
        items = [TransferItem(uri, [memoryview(buffer)]) for uri, buffer in zip(uris, buffers, strict=True)]
        results = self._engine.load(items, _DEADLINE_SECONDS)
        for uri, buffer, result in zip(uris, buffers, results, strict=True):
            if not result.ok:
                self.report.wrong.append(f"{uri} is served and cannot be read: {result.reason}")
            elif buffer != content(uri):
                self.report.differing_parts += 1
                self.report.wrong.append(f"{uri} is served with other bytes than were written")
        self.report.served_blocks += len(locations)
        return set(map(str, uris))


def _outcome(journal: Journal, session: str) -> bool | None:
    """Return the writer's answer at the end of a session, None before."""
    return next((bool(event["confirmed"]) for event in journal.events("ended") if event["session"] == session), None)
