"""Traffic like that of a small cluster, to try a manager with: five tenants; two of them get into trouble.

    python docs/examples/traffic.py [--managers HOST:HTTP_PORT,…] [--admin HOST:ADMIN_HTTP_PORT] [--seconds N]

Makes a storage and five groups, and asks for prefixes of conversations that come back as conversations do. No bytes
of KV are written: managers never see them. `chat` evicts all the time; `code` has free space; `pinned` is full of pins,
so that writes are refused; `batch` is full of blocks that wait for deletion; `idle` does nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import itertools
import json
import random
import threading
import time
from typing import Any

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
GROUPS: dict[str, dict[str, Any]] = {
    "chat": {"quota": {"capacity": 4096 * MIB}},
    "code": {"quota": {"capacity": 65536 * MIB, "quota_config": [{"storage_type": "ST_NFS", "capacity": 49152 * MIB}]}},
    "pinned": {"quota": {"capacity": 512 * MIB}, "pin_budget_bytes": 512 * MIB},
    "batch": {
        "quota": {"capacity": 1024 * MIB},
        "cache_config": {
            "reclaim_strategy": {
                "delay_before_delete_ms": 600_000,
                "trigger_strategy": {"used_percentage": 0.5, "hysteresis": 0.5},
            }
        },
    },
    "idle": {"quota": {"capacity": 10240 * MIB}},
}
CONVERSATIONS = {"chat": 400, "code": 60, "pinned": 200, "batch": 300}
FINISHED = 0.99  # of the writes; the others are left open, as by engines that die
PAUSE_SECONDS = {"chat": 0.02, "code": 0.05, "pinned": 0.4, "batch": 0.2}


class Port:
    """A connection to one HTTP port."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=30)

    def ask(self, method: str, path: str, body: Any) -> Any:
        """Send JSON and return the decoded answer.

        Raises:
            OSError: no manager answers.
            http.client.HTTPException: the server does not speak HTTP, or ended meanwhile.
        """
        self._connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
        text = self._connection.getresponse().read()
        return json.loads(text) if text else {}

    def call(self, name: str, **fields: Any) -> Any:
        """Make a call; return nothing, a second later, where no manager answers: managers may come and go."""
        try:
            return self.ask("POST", f"/api/{name}", {"trace_id": "traffic", **fields})
        except (OSError, http.client.HTTPException):
            self._connection.close()
            time.sleep(1)
            return {}


def set_up(admin: Port) -> None:
    """Make a storage, the groups and an instance of each."""
    admin.ask("PUT", "/v1/storages/traffic", {"nfs": {"root_path": "/tmp/kvcm-traffic/"}, "capacity_bytes": 80 << 30})
    for name, settings in GROUPS.items():
        fields = {"storage_candidates": ["traffic"], "global_quota_group_name": "traffic", "max_instance_count": 10}
        print(name, admin.ask("PUT", f"/v1/groups/{name}", {**fields, **settings}).get("detail", "is there"))


def talk(port: Port, group: str, stop: float, seed: int) -> None:
    """Go on with one conversation or another of a group until it is time."""
    random_of = random.Random(seed)
    instance = f"{group}-model"
    port.call(
        "registerInstance",
        instance_group=group,
        instance_id=instance,
        block_size=64,
        location_spec_infos=[{"name": "tp0", "size": BLOCK_BYTES}],
        model_deployment={"model_name": "Qwen/Qwen3-8B", "dtype": "bfloat16"},
    )
    lengths: dict[int, int] = {}
    for turn in itertools.count():
        which = int(random_of.paretovariate(1.1)) % CONVERSATIONS[group]
        length = lengths[which] = min(96, lengths.get(which, 8) + random_of.randrange(1, 5))
        keys = [key_of(f"{group} {which} {position}") for position in range(length)]
        found = port.call("getCacheLocation", instance_id=instance, query_type="QT_PREFIX_MATCH", block_keys=keys)
        if len(found.get("locations", ())) < length:
            write(port, instance, keys, is_finished=random_of.random() < FINISHED)
        if group == "pinned" and turn % 4 == 0:
            port.call("pinPrefix", instance_id=instance, block_keys=keys, owner="traffic", ttl_seconds=3600)
        if time.time() > stop:  # one turn is for sure, however slow the machine
            return
        time.sleep(random_of.expovariate(1 / PAUSE_SECONDS[group]))


def key_of(place: str) -> str:
    """Return the key of a block, the same in every run."""
    return str(int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], signed=True))


def write(port: Port, instance: str, keys: list[str], *, is_finished: bool) -> None:
    """Write the missing blocks of a conversation."""
    begun = port.call("startWriteCache", instance_id=instance, block_keys=keys, write_timeout_seconds=30)
    session = begun.get("write_session_id")
    if session and is_finished:
        blocks = {"offset": len(begun.get("locations", ()))}
        port.call("finishWriteCache", instance_id=instance, write_session_id=session, success_blocks=blocks)


def main() -> None:
    """Run it."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--managers", default="127.0.0.1:6382", help="HTTP ports of engines, separated by commas")
    options.add_argument("--admin", default="127.0.0.1:6492", help="HTTP port of operators of one of them")
    options.add_argument("--seconds", type=float, default=3600.0)
    asked = options.parse_args()
    try:
        set_up(Port(asked.admin))
    except (OSError, http.client.HTTPException) as error:
        raise SystemExit(f"--admin {asked.admin} does not answer: {error}") from None
    stop, managers = time.time() + asked.seconds, itertools.cycle(asked.managers.split(","))
    threads = [
        threading.Thread(target=talk, args=(Port(next(managers)), group, stop, seed))
        for group in CONVERSATIONS
        for seed in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
