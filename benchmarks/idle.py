"""Claim: a deployment that does nothing costs its Redis, and its managers, almost nothing.

Managers without requests, over a Redis of their own: commands per second as the server counts them (`INFO
commandstats`, with those that scripts call), and the CPU of managers and server. With another commit beside it:

    git worktree add /tmp/before COMMIT
    python benchmarks/idle.py --before /tmp/before [--quick] [--json FILE]
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import redis
from report import Row, arguments, publish
from service_site import Manager, site

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))
from redis_servers import Standalone, standalone

MOST_COMMANDS = 50.0
"""Per second and manager."""
MEASURED_SECONDS = 30.0  # a whole number of the periods of all that managers do
SMOKE_SECONDS = 3.0
SHOWN_PER_SECOND = 0.05
OWN_COMMAND = "info"
"""With which the server is asked here; managers send it every five seconds."""


class Case(NamedTuple):
    """What idles: managers that share one Redis, and instances that they know."""

    managers: int
    instances: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.managers} idle manager{'s' * (self.managers > 1)}, {self.instances} instances"


class Idling(NamedTuple):
    """What one second costs.

    Attributes:
        commands: per manager, by name.
        manager_ms: CPU of a manager.
        redis_ms: CPU of the server, for all managers.
    """

    commands: Counter[str]
    manager_ms: float
    redis_ms: float


def idling(case: Case, seconds: float, code: Path | None) -> Idling:
    """Measure a case with the managers of a checkout, None for this one."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcm-idle-")))
        servers = stack.enter_context(standalone(directory / "redis"))
        settings = [f"kvcm.registry_storage.uri={servers.base_uri}?cluster_name=idle"]
        managers = [stack.enter_context(site(settings, code=code)).manager for _ in range(case.managers)]
        for number in range(case.instances):
            managers[0].register(f"idle-{number}", specs=1)
        time.sleep(seconds + SMOKE_SECONDS)  # once the leader goes through the blocks of instances that changed
        return _measured(servers, managers, seconds)


def _measured(servers: Standalone, managers: Sequence[Manager], seconds: float) -> Idling:
    with servers.server.admin() as admin:
        begin, calls, cpu, used = time.monotonic(), _calls(admin), _cpu(admin), _used(managers)
        time.sleep(seconds)
        passed = time.monotonic() - begin
        manager_ms = (_used(managers) - used) / passed * 1000 / len(managers)
        redis_ms = (_cpu(admin) - cpu) / passed * 1000
        grown = _calls(admin) - calls
        grown[OWN_COMMAND] -= 3  # asked since the first answer, that one included
    return Idling(Counter({name: n / passed / len(managers) for name, n in grown.items()}), manager_ms, redis_ms)


def _calls(admin: redis.Redis) -> Counter[str]:
    return Counter({name.removeprefix("cmdstat_"): each["calls"] for name, each in admin.info("commandstats").items()})


def _cpu(admin: redis.Redis) -> float:
    used = admin.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


def _used(managers: Sequence[Manager]) -> float:
    return sum(manager.cpu_seconds() for manager in managers)


def rows_of(case: Case, now: Idling, before: Idling | None, most: float | None) -> list[Row]:
    """Return the figures of a case, beside those of the other commit; `most` commands are wanted, None for any."""

    def row(metric: str, unit: str, value: float, other: float | None, most: float | None = None) -> Row:
        ratio = value / other if other else None
        target = "" if most is None else f"<= {most:g}"
        return Row(case.name, metric, value, unit, other, ratio, target, None if most is None else value <= most)

    total, total_before = now.commands.total(), None if before is None else before.commands.total()
    rows = [row("Redis commands per manager", "1/s", total, total_before, most)]
    for name, highest in sorted(_most_of_both(now, before).items(), key=lambda each: -each[1]):
        if highest >= SHOWN_PER_SECOND:
            rows.append(row(name, "1/s", now.commands[name], None if before is None else before.commands[name]))
    rows.append(row("CPU of a manager", "ms/s", now.manager_ms, None if before is None else before.manager_ms))
    rows.append(row("CPU of Redis", "ms/s", now.redis_ms, None if before is None else before.redis_ms))
    return rows


def _most_of_both(now: Idling, before: Idling | None) -> Counter[str]:
    return now.commands | (before.commands if before is not None else Counter())


def main() -> int:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--before", type=Path, help="a checkout of another commit, whose managers are measured, too")
    options = parser.parse_args()
    seconds = SMOKE_SECONDS if options.quick else MEASURED_SECONDS
    cases = [Case(1, 0), Case(1, 1), Case(1, 20), Case(2, 20)]
    most = None if options.quick else MOST_COMMANDS  # beside other work a manager is late, and asks for everything
    rows = []
    for case in [cases[2]] if options.quick else cases:
        before = idling(case, seconds, options.before.resolve()) if options.before else None
        rows += rows_of(case, idling(case, seconds, None), before, most)
    return 0 if publish("Idle deployments over Redis", rows, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
