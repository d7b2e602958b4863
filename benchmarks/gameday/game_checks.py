"""Checks everything after a game's last fault: nothing may be stuck, lost, counted wrongly, or left behind."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "e2e"))
from game_processes import waited_for
from game_site import MANAGERS, Site
from store_audit import StoreAudit, audit_store, verified

__all__ = ["EndState", "check_end", "judge_end", "judge_prompts", "settle"]

_LEADER = re.compile(r"^kvcm_leader(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_ORPHAN_AGE_SECONDS = 2
_LED_SECONDS = 60.0


@dataclass(slots=True)
class EndState:
    """The findings at the end.

    Attributes:
        settled_seconds: from the end of traffic until nothing was open or unfinished any more; None: never, in time.
        unsettled: the blocks that were, then.
        ready: managers that say that they are ready.
        leaders: managers that lead, by their metrics.
        agreed: the leader that all managers name; "" when they do not agree.
        tasks: of the REST resources, that are not done.
        usage: bytes used by group, by the REST resource.
        instances: bytes used by group, as the sum of its instances there.
        recounted: bytes used by group, counted from the records.
        verify: the findings of `kvcm index verify`.
        doctor: the failures that `kvcm doctor` reports.
        orphans: bytes without metadata that are left after a scrub, by storage, in words.
        scrubbed: objects that the scrubs deleted.
        failures: defects in logs of managers.
        stopped: faults of engines and managers during a stop, and processes that ended by themselves.
        faults: that could not be carried out.
    """

    settled_seconds: float | None = None
    unsettled: list[str] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)
    leaders: list[str] = field(default_factory=list)
    agreed: str = ""
    tasks: list[str] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    instances: dict[str, int] = field(default_factory=dict)
    recounted: dict[str, int] = field(default_factory=dict)
    verify: list[str] = field(default_factory=list)
    doctor: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    scrubbed: int = 0
    failures: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def judge_end(end: EndState) -> dict[str, list[str]]:
    """Return the violations, in words, by check; every check is in it, also one without violations."""
    is_led = end.leaders == [end.agreed]
    instances, recounted = end.instances, end.recounted
    usage = [
        f"group {name}: {used} bytes used, {instances.get(name, 0)} in instances, {recounted.get(name, 0)} in records"
        for name in sorted({*end.usage, *recounted})
        if not (used := end.usage.get(name, 0)) == instances.get(name, 0) == recounted.get(name, 0)
    ]
    return {
        "sessions, locations or counters that do not settle": end.unsettled if end.settled_seconds is None else [],
        "managers that are not ready": [name for name in MANAGERS if name not in end.ready],
        "other than one leader": [] if is_led else [f"{end.leaders} lead, {end.agreed!r} is agreed"],
        "tasks that are not done": end.tasks,
        "groups whose usage is not that of their records": usage if end.usage else ["no usage was reported"],
        "findings of kvcm index verify": end.verify,
        "failures that kvcm doctor sees": end.doctor,
        "bytes without metadata after a scrub": end.orphans,
        "defects in logs of managers": end.failures,
        "processes that ended by themselves, or not well": end.stopped,
        "faults that could not be carried out": end.faults,
    }


def judge_prompts(results: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return prompts with other tokens, and those that raised, in words."""
    wrong, raised = [], []
    for result in results:
        where = f"{result['engine']}, prompt {result['prompt']} at {result['at']:.3f}"
        if "raised" in result:
            raised.append(f"{where}: {result['raised']}")
        elif not result["is_right"]:
            wrong.append(f"{where}: {result['loaded_tokens']} tokens loaded")
    return {"prompts with wrong tokens": wrong, "prompts that raised": raised}


def settle(site: Site, end: EndState, most_seconds: float) -> None:
    """Wait until no session is open, nothing is being written or deleted, and all counters agree with the records."""
    began = time.monotonic()
    while True:
        audit = _audited(site)
        end.unsettled = _unsettled(audit)
        seconds = time.monotonic() - began
        if not end.unsettled:
            end.settled_seconds = seconds
            return
        if seconds > most_seconds:
            return
        time.sleep(0.5)


def _unsettled(audit: StoreAudit) -> list[str]:
    open_sessions = [f"{audit.sessions} sessions are open"] if audit.sessions else []
    unfinished = [f"{audit.unfinished} locations are writing or deleting"] if audit.unfinished else []
    return [*open_sessions, *unfinished, *audit.wrong, *audit.groups_off]


def _audited(site: Site) -> StoreAudit:
    return asyncio.run(audit_store(site.settings))


def check_end(site: Site, end: EndState) -> None:
    """Fill in all figures that are checked after the last request."""
    audit = _audited(site)
    end.recounted = {name: audit.used_bytes[name] for name in audit.used_bytes}
    waited_for(lambda: _is_led(site, end), _LED_SECONDS)
    try:
        _check_resources(site, end)
    except (OSError, KeyError, ValueError) as error:
        end.tasks.append(f"the REST resources cannot be asked: {error!r}")
    end.verify = verified(_options(site))
    with ThreadPoolExecutor() as pool:  # most of it is starting commands
        end.doctor = [text for found in pool.map(lambda name: _doctor(site, name), MANAGERS) for text in found]
        list(pool.map(lambda name: _scrub(site, end, name), site.storages.roots))
    end.failures = [f"{name}: {line[:500]}" for name in MANAGERS for line in site.managers[name].failures()]


def _is_led(site: Site, end: EndState) -> bool:
    """Look for the leader; return whether all managers are ready and agree on it."""
    end.ready = [name for name in MANAGERS if site.managers[name].probe("readyz")]
    end.leaders = [name for name in end.ready if _leads(site.managers[name].page("metrics"))]
    end.agreed = site.leader()
    return len(end.ready) == len(MANAGERS) and end.leaders == [end.agreed]


def _leads(metrics: str) -> bool:
    return any(float(value) for value in _LEADER.findall(metrics))


def _check_resources(site: Site, end: EndState) -> None:
    manager = site.managers[MANAGERS[0]]
    tasks = json.loads(manager.page("v1/tasks"))["items"]
    end.tasks = [json.dumps(task) for task in tasks if task.get("state") != "done"]
    for group in json.loads(manager.page("v1/usage"))["groups"]:
        end.usage[group["name"]] = int(group["total"]["used_bytes"])
        end.instances[group["name"]] = sum(int(each["used_bytes"]) for each in group.get("instances", ()))


def _options(site: Site) -> list[str]:
    return [part for key, value in site.settings.items() for part in ("-e", f"{key}={value}")]


def _kvcm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvcm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def _doctor(site: Site, name: str) -> list[str]:
    done = _kvcm("doctor", "--json", "--manager", site.managers[name].address, *_options(site))
    findings: Sequence[Mapping[str, str]] = json.loads(done.stdout)["findings"]
    return [f"{name}: {json.dumps(each)}" for each in findings if each["level"] == "fail"]


def _scrub(site: Site, end: EndState, name: str) -> None:
    """Delete orphans, and check again whether any are left: by a scrub, and past the managers."""
    common = ("storage", "scrub", name, "--json", "--min-age", str(_ORPHAN_AGE_SECONDS), "--manager")
    address = site.managers[MANAGERS[0]].address
    time.sleep(_ORPHAN_AGE_SECONDS)
    first, second = _kvcm(*common, address, "--delete"), _kvcm(*common, address)
    for done in (first, second):
        if done.returncode:
            end.orphans.append(f"{name}: the scrub ends with {done.returncode}: {done.stdout}{done.stderr}")
            return
    end.scrubbed += int(json.loads(first.stdout)["deleted"])
    left = int(json.loads(second.stdout)["orphans"])
    if left:
        end.orphans.append(f"{name}: {left} objects")
    known = _audited(site).paths
    unknown = [path for path in site.storages.files(name) if str(path).removesuffix(".deleted") not in known]
    end.orphans += [f"{name}: {path}" for path in unknown]
