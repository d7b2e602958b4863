"""A client of one release, as a process: does what engines, programs and operators do, and prints the outcomes.

It runs on the code of whatever release is on its path, so it uses what all of them have. It reads a JSON object from
the command line: `rpc`, `http`, `admin_rpc`, `admin_http` (host:port), `name` (of what it makes), `folder` (for its
storage).
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from connectors.client import ManagerClient
from connectors.results import MatchMode
from connectors.transfer import TransferEngine, TransferItem
from kvcm.model.instances import LocationSpecInfo, ModelDeployment
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol import meta_service_pb2 as meta_pb
from kvcm.protocol.admin_service_pb2_grpc import AdminServiceStub
from kvcm.protocol.meta_service_pb2_grpc import MetaServiceStub

_SPEC = LocationSpecInfo("kv", 4096)
_SECONDS = 20.0
Place = Mapping[str, str]
Reported = dict[str, Any]


def _resources(place: Place) -> Reported:
    """Make a storage and a group through /v1, and change and read them."""
    name, reported = place["name"], {}
    group = {
        "storage_candidates": [name],
        "global_quota_group_name": "all",
        "quota": {"capacity": 1 << 30},
        "pin_budget_bytes": 1 << 20,
    }
    steps: list[tuple[str, str, Any]] = [
        ("PUT", f"storages/{name}", {"nfs": {"root_path": f"{place['folder']}/", "key_count_per_file": 8}}),
        ("PUT", f"groups/{name}", group),
        ("GET", f"groups/{name}", None),
        ("GET", f"storages/{name}", None),
        ("GET", f"usage?group={name}", None),
        ("GET", "tasks", None),
        ("GET", "instances", None),
        ("GET", "openapi.json", None),
        ("PUT", "groups/none", {"storage_candidates": ["no-such-storage"]}),
    ]
    for method, path, body in steps:
        status, answer = _rest(place, method, path, body)
        reported[f"{method} {path.replace(name, 'N')}"] = [status, sorted(answer)]
    return reported


def _engine(place: Place) -> Reported:
    """Be an engine: register, write, read back, keep, forget."""
    keys, reported = list(range(1, 25)), {}
    with ManagerClient(place["rpc"], place["name"]) as client:
        registered = client.register_instance(
            place["name"], 4, [_SPEC], ModelDeployment("m", "f"), timeout_seconds=_SECONDS
        )
        reported["register"] = registered.ok
        transfers = TransferEngine.for_storages(registered.storages, checksums=True)
        try:
            reported |= _blocks(client, transfers, keys)
        finally:
            transfers.close()
        pin = client.pin_prefix(keys[:6], "me", 600, timeout_seconds=_SECONDS)
        reported["pin"] = pin and [pin.blocks, pin.size_bytes]
        pins = client.list_pins(timeout_seconds=_SECONDS)
        reported["pins"] = None if pins is None else [[each.owner, each.blocks] for each in pins]
        reported["unpin"] = bool(pin and client.unpin(pin.id, timeout_seconds=_SECONDS))
        reported["remove"] = client.remove(keys[20:], timeout_seconds=_SECONDS)
        reported["left"] = client.match_length(keys, timeout_seconds=_SECONDS)
        info = client.cluster_info(timeout_seconds=_SECONDS)
        reported["cluster"] = bool(info and info.self_node_id)
    return reported


def _blocks(client: ManagerClient, transfers: TransferEngine, keys: list[int]) -> Reported:
    reported: Reported = {}
    grant = client.start_write(keys, session_seconds=60, timeout_seconds=_SECONDS)
    if grant is None:
        return {"start": None}
    reported["renew"] = client.renew_write(grant.session_id, 120, timeout_seconds=_SECONDS)
    items = [
        TransferItem(where.uris[_SPEC.name], [memoryview(_content(key))])
        for key, where in zip(keys, grant.locations, strict=True)
    ]
    saved = transfers.save(items, _SECONDS)
    reported["saved"] = all(each.ok for each in saved)
    reported["finish"] = client.finish_write(
        grant.session_id, [True] * len(keys), checksums=[{_SPEC.name: each.checksum} for each in saved],
        priority=1, ttl_seconds=3600, timeout_seconds=_SECONDS,
    )  # fmt: skip
    found = client.match([*keys, 99], read_lease_ms=60_000, timeout_seconds=_SECONDS)
    reported["prefix"] = len(found.locations)
    reported["released"] = client.release_lease(found.lease_id, timeout_seconds=_SECONDS)
    batch = client.match([99, *keys], MatchMode.BATCH, timeout_seconds=_SECONDS).locations
    reported["batch"] = [where is not None for where in batch]
    reported["loaded"] = [
        _loaded(transfers, where) == _content(key) for key, where in zip(keys, batch[1:], strict=True)
    ]
    reported["checksums"] = [bool(where and where.checksums.get(_SPEC.name)) for where in batch[1:]]
    again = client.start_write([*keys, 200, 201], timeout_seconds=_SECONDS)
    reported["again"] = again and [list(again.mask), len(again.locations)]
    reported["abort"] = bool(again and client.abort_write(again.session_id, timeout_seconds=_SECONDS))
    missing = client.report_missing([(keys[-1], batch[-1].uris[_SPEC.name])], timeout_seconds=_SECONDS)
    reported["missing"] = missing is not None
    return reported


def _loaded(transfers: TransferEngine, where: Any) -> bytes:
    buffer = bytearray(_SPEC.size)
    (result,) = transfers.load([TransferItem(where.uris[_SPEC.name], [memoryview(buffer)])], _SECONDS)
    return bytes(buffer) if result.ok else b""


def _content(key: int) -> bytes:
    return key.to_bytes(8, "little") * (_SPEC.size // 8)


def _calls(place: Place) -> Reported:
    """Ask with the messages themselves, as a client in another language does."""
    name, reported = place["name"], {}
    with grpc.insecure_channel(place["rpc"]) as data, grpc.insecure_channel(place["admin_rpc"]) as admin:
        meta: Any = MetaServiceStub(data)  # type: ignore[no-untyped-call]
        operator: Any = AdminServiceStub(admin)  # type: ignore[no-untyped-call]
        asked = [
            (meta.GetCacheLocation, meta_pb.GetCacheLocationRequest(
                instance_id=name, block_keys=[1, 2, 3, 99], query_type=meta_pb.QT_BATCH_GET)),
            (meta.GetCacheLocationLen, meta_pb.GetCacheLocationLenRequest(
                instance_id=name, block_keys=[1, 2, 3, 99], query_type=meta_pb.QT_PREFIX_MATCH)),
            (meta.GetCacheMeta, meta_pb.GetCacheMetaRequest(instance_id=name, block_keys=[1, 2, 99], detail_level=1)),
            (meta.StartWriteCache, meta_pb.StartWriteCacheRequest(
                instance_id=name, block_keys=[301, 302], write_timeout_seconds=5)),
            (meta.FinishWriteCache, meta_pb.FinishWriteCacheRequest(instance_id=name, write_session_id="unknown")),
            (meta.GetCacheLocation, meta_pb.GetCacheLocationRequest(instance_id="no-such-instance", block_keys=[1])),
            (operator.ListStorage, admin_pb.ListStorageRequest()),
            (operator.GetInstanceGroup, admin_pb.GetInstanceGroupRequest(name=name)),
            (operator.ListInstanceInfo, admin_pb.ListInstanceInfoRequest(instance_group_name=name)),
            (operator.GetManagerClusterInfo, admin_pb.GetManagerClusterInfoRequest()),
            (operator.CheckHealth, admin_pb.CheckHealthRequest()),
            (operator.GenConfigSnapshot, admin_pb.GenConfigSnapshotRequest()),
        ]  # fmt: skip
        for number, (call, request) in enumerate(asked):
            answer = call(request, timeout=_SECONDS)
            reported[f"{number} {type(request).__name__}"] = [
                answer.header.status.code, sorted(field.name for field, _ in answer.ListFields())
            ]  # fmt: skip
    return reported


def _commands(place: Place) -> Reported:
    """Run the command line of this release."""
    name, reported = place["name"], {}
    for words in (
        ["storage", "list", "--json"],
        ["group", "show", name, "--json"],
        ["group", "update", name, "--quota", "2GiB"],
        ["usage", "--json"],
        ["pin", "list", name, "--json"],
        ["snapshot", "save", "-"],
        ["get", name, "--keys", "1,2,3", "--json"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "kvcm", *words, "--manager", f"http://{place['admin_http']}"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        reported[" ".join(words).replace(name, "N")] = [done.returncode, done.stderr.replace(name, "N")]
    return reported


def _rest(place: Place, method: str, path: str, body: Any) -> tuple[int, Reported]:
    return _http(method, f"http://{place['admin_http']}/v1/{path}", body)


def _http(method: str, url: str, body: Any) -> tuple[int, Reported]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            status, text = answer.status, answer.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    return status, json.loads(text) if text.startswith(b"{") else {}


def main() -> None:
    """Do everything, and print the outcomes."""
    place: Place = json.loads(sys.argv[1])
    Path(place["folder"]).mkdir(parents=True, exist_ok=True)
    parts = (_resources, _engine, _calls, _commands)
    print(json.dumps({part.__name__.lstrip("_"): part(place) for part in parts}))


if __name__ == "__main__":
    main()
