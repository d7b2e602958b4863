"""What authentication costs: CPU of the server per request, of a manager that asks for keys and of one that does not.

Two managers with the same blocks answer the same requests in turn, window by window; the key is that of an engine of
one group, so that its group is looked up, too. The figure is the median of the differences between neighbouring
windows, which are short and many: what neighbours do to the caches changes slowly.

    python benchmarks/auth_cost.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace

from report import Row, arguments, publish
from service import match_case
from service_site import Manager, Site, hash_keys, site

from kvcm.protocol.kvcm.v1 import access_service_pb2 as pb

MOST_US = 15.0
_KEYS = 64
_CLIENTS = 8


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


def cost(open_site: Site, keyed: Site, transport: str, windows: int, count: int) -> Row:
    """Measure one transport."""
    case = match_case("64 hits", "one", hash_keys(0, _KEYS), 2.2, _KEYS)
    unit = [case.measure(running, transport, 2 * _CLIENTS, _CLIENTS).sent for running in (open_site, keyed)][:1]
    without, differences = [], []
    for window in range(windows):
        sides = (open_site, keyed) if window % 2 else (keyed, open_site)
        cpu = {id(each): each.client.rush(each.manager, transport, unit, count, _CLIENTS) for each in sides}
        without.append(cpu[id(open_site)])
        differences.append(cpu[id(keyed)] - cpu[id(open_site)])
    more, base = statistics.median(differences), statistics.median(without)
    name = f"64 hits, {transport}, {_CLIENTS} clients"
    metric = "server CPU that a key adds per request"
    return Row(name, metric, more, "us", base, more / base, f"<= {MOST_US:g} us", more <= MOST_US)


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    windows, count = (5, 200) if options.quick else (150, 500)
    required = ("kvcm.auth.mode=required", "kvcm.service.host=127.0.0.1")
    with site() as open_site, site(required) as keyed:
        filled(open_site)
        filled(keyed)
        keyed = keyed._replace(manager=replace(keyed.manager, key=engine_key(keyed.manager)))
        rows = [cost(open_site, keyed, transport, windows, count) for transport in ("grpc", "http")]
    met = publish("authentication: a manager that asks for keys against one that does not", rows, options.json)
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
