"""What authentication costs: CPU of the server per request, of a manager that asks for keys and of one that does not.

Two managers with the same blocks answer the same requests in turn, window by window; the key is that of an engine of
one group, so that its group is looked up, too. The figure is the median of the differences between neighbouring
windows, which are short and many: what neighbours do to the caches changes slowly. Of two equal processes one is some
microseconds faster for as long as it lives, so there are several pairs.

    python benchmarks/auth_cost.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from typing import NamedTuple

from report import Row, arguments, publish
from service import match_case
from service_site import Manager, Site, hash_keys, site

from kvcm.protocol.kvcm.v1 import access_service_pb2 as pb

MOST_US = 15.0
_KEYS = 64
_CLIENTS = (8, 64)


def engine_key(manager: Manager) -> str:
    """Make a key for the group of the benchmark."""
    request = pb.CreateKeyRequest(name="bench", role=pb.ROLE_ENGINE, instance_groups=["default"])
    made = manager.call("/kvcm.v1.AccessService/CreateKey", request, pb.CreateKeyResponse, "admin_grpc")
    return str(made.secret)


def filled(running: Site) -> Site:
    """Store the blocks that are asked for."""
    running.manager.register("one", 1)
    running.manager.store("one", hash_keys(0, _KEYS))
    return running


class Windows(NamedTuple):
    """CPU in us per request.

    Attributes:
        without: of the manager that asks for no key, in each window.
        more: that the other one used in the window beside it.
    """

    without: list[float]
    more: list[float]


class Case(NamedTuple):
    """The clients: a transport, and how many at a time."""

    transport: str
    clients: int


def measure(open_site: Site, keyed: Site, asked: Case, windows: int, count: int, seen: Windows) -> None:
    """Add windows of one case."""
    transport, clients = asked
    case = match_case("64 hits", "one", hash_keys(0, _KEYS), 2.2, _KEYS)
    unit = [case.measure(running, transport, 2 * clients, clients).sent for running in (open_site, keyed)][:1]
    for window in range(windows):
        sides = (open_site, keyed) if window % 2 else (keyed, open_site)
        cpu = {id(each): each.client.rush(each.manager, transport, unit, count, clients) for each in sides}
        seen.without.append(cpu[id(open_site)])
        seen.more.append(cpu[id(keyed)] - cpu[id(open_site)])


def row(asked: Case, seen: Windows) -> Row:
    """Return the figure of one case."""
    more, base = statistics.median(seen.more), statistics.median(seen.without)
    name = f"64 hits, {asked.transport}, {asked.clients} clients"
    metric = "server CPU that a key adds per request"
    return Row(name, metric, more, "us", base, more / base, f"<= {MOST_US:g} us", more <= MOST_US)


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    pairs, windows, count = (1, 5, 200) if options.quick else (5, 25, 500)
    required = ("kvcm.auth.mode=required", "kvcm.service.host=127.0.0.1")
    seen = {Case(transport, clients): Windows([], []) for transport in ("grpc", "http") for clients in _CLIENTS}
    for _ in range(pairs):
        with site() as open_site, site(required) as keyed:
            filled(open_site)
            filled(keyed)
            shown = keyed._replace(manager=replace(keyed.manager, key=engine_key(keyed.manager)))
            for asked, each in seen.items():
                measure(open_site, shown, asked, windows, count, each)
    rows = [row(asked, each) for asked, each in seen.items()]
    met = publish("authentication: a manager that asks for keys against one that does not", rows, options.json)
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
