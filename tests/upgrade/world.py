"""A deployment with something of everything, and a look at all of it that no release should change."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from json_api import JsonApi
from manager_site import Manager
from mixed_load import bytes_of, bytes_stored, store_bytes

GROUP, INSTANCE, STORAGE, LEAVING = "team", "team-model", "disk", "old-disk"
_SPEC_BYTES = 512  # what `store_bytes` writes
_SECONDS = 600


@dataclass(slots=True)
class World:
    """The content that a test put into a deployment.

    Attributes:
        folder: for its storages.
        engine_key: secret of an engine's key.
        written: keys of blocks that were acknowledged.
        sessions: open write sessions, and their keys.
    """

    folder: Path
    engine_key: str = ""
    written: list[int] = field(default_factory=list)
    sessions: dict[str, list[int]] = field(default_factory=dict)

    def set_up(self, manager: Manager, *, is_draining: bool = True) -> None:
        """Configure everything that can be configured, and write blocks; one storage is being drained or not."""
        admin = self.admin(manager)
        for name in (STORAGE, LEAVING):
            spec = {"root_path": f"{self.folder / name}/", "key_count_per_file": 4}
            admin.rest("PUT", f"storages/{name}", {"nfs": spec, "capacity_bytes": 1 << 30})
        admin.rest("PUT", f"groups/{GROUP}", {
            "storage_candidates": [STORAGE, LEAVING], "global_quota_group_name": "teams", "user_data": "kept",
            "quota": {"capacity": 1 << 24, "quota_config": [{"storage_type": "ST_NFS", "capacity": 1 << 23}]},
            "pin_budget_bytes": 1 << 20,
        })  # fmt: skip
        admin.admin(
            "SetGlobalQuota", global_quota={"name": "teams", "capacity_bytes": str(1 << 25), "used_percentage": 0.9}
        )
        admin.rest("PUT", "accounts/ann", {"password": "correct horse battery", "role": "ROLE_OPERATOR"})
        key = admin.rest("POST", "keys", {"name": "engine", "role": "ROLE_ENGINE", "instance_groups": [GROUP]})
        self.engine_key = key["secret"]
        self.engine(manager).data(
            "RegisterInstance", instance_id=INSTANCE, instance_group=GROUP, block_size=4,
            location_spec_infos=[{"name": "kv", "size": str(_SPEC_BYTES)}],
            model_deployment={"model_name": "m", "dtype": "bf16"},
        )  # fmt: skip
        if is_draining:
            admin.rest("POST", f"storages/{LEAVING}/drain")
        self.write(manager, range(1, 41))
        self.pin(manager, list(range(1, 11)))

    def admin(self, manager: Manager) -> JsonApi:
        """Return the administrator's way to a manager."""
        return JsonApi(manager, Path(manager.settings["kvcm.auth.admin_key_file"]).read_text().strip())

    def engine(self, manager: Manager) -> JsonApi:
        """Return the engine's way to a manager, with the key that was made in the beginning."""
        return JsonApi(manager, self.engine_key)

    def begin(self, manager: Manager, keys: range) -> str:
        """Begin to write blocks behind block 40; returns the session."""
        answer = self.engine(manager).data(
            "StartWriteCache", instance_id=INSTANCE, block_keys=list(map(str, keys)), write_timeout_seconds=_SECONDS
        )
        for place in answer["locations"]:
            store_bytes(place["location_specs"][0]["uri"])
        assert len(answer["locations"]) == len(keys), answer
        session: str = answer["write_session_id"]
        self.sessions[session] = list(keys)
        return session

    def finish(self, manager: Manager, session: str) -> None:
        """Finish a session."""
        keys = self.sessions.pop(session)
        self.engine(manager).data(
            "FinishWriteCache", instance_id=INSTANCE, write_session_id=session, success_blocks={"offset": len(keys)}
        )
        self.written += keys

    def write(self, manager: Manager, keys: range) -> None:
        """Write blocks."""
        self.finish(manager, self.begin(manager, keys))

    def pin(self, manager: Manager, keys: list[int]) -> None:
        """Pin a prefix."""
        order = {"instance_id": INSTANCE, "block_keys": list(map(str, keys)), "owner": f"at {len(keys)}"}
        answer = self.admin(manager).rest("POST", "pins", {**order, "ttl_seconds": 86_400})
        assert answer["pinned_blocks"] == len(keys), answer

    def unpin(self, manager: Manager, blocks: int) -> None:
        """End the pins of so many blocks."""
        admin = self.admin(manager)
        for pin in admin.rest("GET", f"pins?instance={INSTANCE}")["items"]:
            if pin["blocks"] == blocks:
                admin.rest("DELETE", f"pins/{INSTANCE}/{pin['pin_id']}")

    def seen(self, manager: Manager) -> dict[str, Any]:
        """Return everything that there is to see, but times, and that the bytes are those that were written."""
        admin = self.admin(manager)
        places = self.places(manager)
        assert sorted(places) == sorted(self.written)
        assert all(_is_whole(uri) for uri in places.values())
        return {
            "places": places,
            "snapshot": _timeless(admin.admin("GenConfigSnapshot")["config_snapshot"]),
            "usage": [_kept(each, "name", "total", "types", "pinned_bytes", "pin_budget_bytes")
                      for each in admin.rest("GET", "usage")["groups"]],
            "pins": sorted((each["owner"], each["blocks"]) for each in
                           admin.rest("GET", f"pins?instance={INSTANCE}")["items"]),
            "keys": sorted((each["name"], each["role"]) for each in admin.rest("GET", "keys")["items"]),
            "tasks": sorted(each["id"] for each in admin.rest("GET", "tasks")["items"]),
            "accounts": sorted(each["user_name"] for each in admin.rest("GET", "accounts")["items"]),
        }  # fmt: skip

    def places(self, manager: Manager) -> dict[int, str]:
        """Return where the blocks lie that are served."""
        keys = [*self.written, *(key for keys in self.sessions.values() for key in keys)]
        answer = self.engine(manager).data(
            "GetCacheLocation", instance_id=INSTANCE, query_type="QT_BATCH_GET", block_keys=list(map(str, keys))
        )
        uris = [place["location_specs"][0]["uri"] for place in answer["locations"]]
        return {key: uri for key, uri in zip(keys, uris, strict=True) if uri}


def _is_whole(uri: str) -> bool:
    return bytes_stored(uri) == bytes_of(uri)


def _timeless(snapshot: str) -> dict[str, Any]:
    return {name: value for name, value in json.loads(snapshot).items() if name != "created_at_ms"}


def _kept(document: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: document.get(name) for name in names}
