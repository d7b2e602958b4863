"""What a deployment says of what it lost: in the logs of its managers and commands, in metrics, and in `kvcm doctor`.

A loss is accounted for in a channel that has a number that is as large as the loss; or that names the event, the
store and the time that it is about, where a number is impossible (a replica never received the blocks).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from manager_site import Manager
from typer.testing import CliRunner

from kvcm.cli import add_commands

CHANNELS = ("log", "metric", "doctor")

_SECONDS = 120
_LOSS = re.compile(
    r"\blost\b|_lost|lost_|\bgone\b|damag|corrupt|unreadable|dropped|rolled.?back|rollback|went.?back|back in time"
    r"|older|emptied|\bempty\b|evict|foreign|another deployment|other deployment|replaced|missing|not of the same"
    r"|salvag|rebuilt|incarnation|schema|loss(es)?\b|losses_|unsound|restored|restoration"
)
"""Words of events, metrics and findings that are about a loss or its cause."""
_NO_LOSS = re.compile(
    r"kvcm_evict(ed|ion|_reuse)_|kvcm_reclaim|kvcm_store_dropped|kvcm_rpc|kvcm_lookup|kvcm_write|_created"
)
_COUNTS = re.compile(r"lost|gone|damag|dropped|missing|unreadable|evicted|blocks|records|rows|keys|count")
"""Names of fields that hold a number of the losses."""
_STORES = re.compile(r"store|server|redis|rocksdb|directory|data_dir|path|uri|/")
_ELSE = {"bytes_missing", "bytes_corrupt", "deletion_failed", "settings"}
"""Events that are about other things: reports of failed loads, which are judged by themselves, and retries."""
_NUMBER = re.compile(r"\b(\d[\d,]*)\b")
_TIME_TEXT = re.compile(
    r"\b(?:19|20)\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)?|\b1[5-9]\d{8}(?:\.\d+)?\b"
)
_SLACK_SECONDS = 1.0  # times are printed in seconds
_ALL = re.compile(r"emptied|its blocks are lost")  # whenever they were acknowledged

_COMMANDS = typer.Typer(name="kvcm", pretty_exceptions_enable=False)
add_commands(_COMMANDS)
_COMMANDS.callback()(lambda: None)


Window = tuple[float, float]
"""Unix seconds from when to when something was lost."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One statement that something is gone.

    Attributes:
        channel: of `CHANNELS`.
        text: of the statement.
        count: of the loss, 0 where it has none.
        window: that it names, of a store that it names, too.
    """

    channel: str
    text: str
    count: int
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """What one channel says of a loss.

    Attributes:
        channel: of `CHANNELS`.
        count: the sum of its numbers.
        windows: of its statements.
        claims: its statements.
    """

    channel: str
    count: int
    windows: tuple[Window, ...]
    claims: tuple[str, ...]

    def accounts_for(self, missing: Sequence[float]) -> bool:
        """Whether it accounts for blocks that were acknowledged at these unix seconds."""
        return len(missing) <= self.count or any(
            all(begin - _SLACK_SECONDS <= at <= end + _SLACK_SECONDS for at in missing) for begin, end in self.windows
        )


def accounts_of(claims: Sequence[Claim]) -> dict[str, Account]:
    """Return what each channel says. A window that the log has is one of the metric, too, where that counts events."""
    found = {}
    for channel in CHANNELS:
        own = [claim for claim in claims if claim.channel == channel]
        windows = tuple({claim.window for claim in own if claim.window is not None})
        texts = tuple(claim.text[:300] for claim in own)
        found[channel] = Account(channel, sum(claim.count for claim in own), windows, texts)
    log, metric = found["log"], found["metric"]
    if log.windows and metric.claims:
        found["metric"] = Account("metric", metric.count, log.windows, metric.claims)
    return found


def log_claims(lines: Sequence[str]) -> Iterator[Claim]:
    """Yield the claims of log lines; those that are no JSON are the output of commands."""
    for line in lines:
        fields = _fields(line)
        if fields is None:
            if _LOSS.search(_plain(line)):
                yield Claim("log", line, _largest_number(line), _window([line]))
        elif _is_about_loss(fields):
            yield Claim("log", line, _count_of(fields), _window_of(fields))


def metric_claims(before: Mapping[str, float], now: Mapping[str, float]) -> Iterator[Claim]:
    """Yield the metrics of losses that grew."""
    for name, value in now.items():
        grown = value - before.get(name, 0.0)
        if grown > 0 and _LOSS.search(name) and not _NO_LOSS.search(name):
            yield Claim("metric", f"{name} {value:g}", int(grown))


def doctor_claims(manager: Manager) -> Iterator[Claim]:
    """Yield the claims of `kvcm doctor`, run as on the manager's host."""
    done = CliRunner().invoke(
        _COMMANDS, ["doctor", "--json", *manager.options]
    )  # a process of its own would be two seconds
    found = json.loads(done.stdout)["findings"]
    for each in found:
        text = f"{each['check']}: {each['found']}"
        if each["level"] != "ok" and _LOSS.search(_plain(text)):
            yield Claim("doctor", text, _largest_number(text), _window([f"store {text}"]))


def evicted_blocks(events: Path) -> set[tuple[str, int]]:
    """Return instance and key of the blocks that a manager's file of events says that it evicted: they are no loss."""
    lines = events.read_text().splitlines() if events.exists() else []
    evictions = (event for event in map(_fields, lines) if event is not None and event["type"] == "evicted")
    return {(event["source"], key) for event in evictions for key in event["keys"]}


def metrics_of(manager: Manager) -> dict[str, float]:
    """Return the samples of a manager's metrics page; nothing where it does not answer."""
    url = f"http://{manager.address('admin_http_port')}/metrics"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, OSError):
        return {}
    samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def kvcm(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    return subprocess.run(
        [sys.executable, "-m", "kvcm", *words], capture_output=True, text=True, timeout=_SECONDS, check=False
    )


def _fields(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _is_about_loss(fields: Mapping[str, Any]) -> bool:
    """Whether a log event says that something is wrong with what is stored: a warning, or an event named for it."""
    event = str(fields.get("event", ""))
    if event in _ELSE:
        return False
    is_loud = fields.get("level") in {"warning", "error", "critical"} or _LOSS.search(event) is not None
    return (is_loud and _LOSS.search(_said(fields)) is not None) or event == "storage_verified"


def _said(fields: Mapping[str, Any]) -> str:
    """Return an event's name, the names of its fields, and its sentences."""
    texts = (str(value) for name, value in fields.items() if isinstance(value, str) and name not in {"timestamp"})
    return _plain(" ".join((*fields, *texts)))


def _plain(text: str) -> str:
    """Return a text without paths and uris, whose words say nothing."""
    return re.sub(r"[a-z+]*:?//?\S*", " ", text.lower())


def _count_of(fields: Mapping[str, Any]) -> int:
    if "lost" in fields and isinstance(fields["lost"], int):
        return fields["lost"]
    numbers = [
        int(value)
        for name, value in fields.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and _COUNTS.search(name)
    ]
    return max(numbers, default=0) or max(
        (_largest_number(str(fields.get(name, ""))) for name in _SENTENCES), default=0
    )


_SENTENCES = ("reason", "error", "message", "lost", "what")


def _window_of(fields: Mapping[str, Any]) -> Window | None:
    """Return the window that an event names beside its own time."""
    return _window([f"{name} {value}" for name, value in fields.items() if name not in {"timestamp", "level"}])


def _window(texts: Sequence[str]) -> Window | None:
    """Return from when to when, by all times in some texts, if they name a store."""
    times = [_seconds_of(each) for text in texts for each in _TIME_TEXT.findall(text)]
    if len(times) < 2 or not any(map(_names_store, texts)):
        return None
    return 0.0 if any(map(_ALL.search, texts)) else min(times), max(times)


def _seconds_of(text: str) -> float:
    if "-" in text:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    return float(text)


def _names_store(text: str) -> bool:
    return bool(_STORES.search(text.lower()))


def _largest_number(text: str) -> int:
    """Return the largest number of a sentence that can be one of blocks."""
    plain = _TIME_TEXT.sub(" ", re.sub(r"/\S+|\d+\.\d+\.\d+\.\d+(:\d+)?|:\d+", " ", text))
    return max((int(each.replace(",", "")) for each in _NUMBER.findall(plain)), default=0)
