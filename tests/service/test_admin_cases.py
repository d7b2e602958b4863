"""Every call of AdminService and GroupService: a good request and each documented refusal (wire.md 6, decision 9)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from test_meta_cases import Fields, Refused, block_refusals, registration_refusals
from test_transport_drivers import eventually
from test_transport_sites import Site, group_spec, instance_fields, unique

__all__ = ["GOOD", "REFUSED"]

MOONCAKE = {
    "local_hostname": "h:1",
    "metadata_connstring": "c",
    "protocol": "rdma",
    "rdma_device": "d",
    "master_service_entry": "m:1",
}
VCNS = {
    "mountpoint": "/m",
    "root_dir": "r",
    "remote_host": "h",
    "remote_port": 1,
    "meta_storage_uri": "u",
}


def _storage(name: str | None = None, **spec: Any) -> Fields:
    spec = spec or {"dummy": {"root_path": "d"}}
    return {"storage": {"global_unique_name": unique("storage") if name is None else name, **spec}}


def _group(*candidates: str, name: str | None = None, **changes: Any) -> Fields:
    return {"instance_group": group_spec(unique("group") if name is None else name, *(candidates or ("s",)), **changes)}


def _updated_group(site: Site, current: int = 1, version: int = 2, **changes: Any) -> Fields:
    return {**_group(name=site.group(), version=version, **changes), "current_version": current}


def _blocks(site: Site) -> Fields:
    return {"instance_id": site.instance(), "block_keys": [1]}


def _account(site: Site) -> Fields:
    name = unique("user")
    site.api.ok("AdminService.AddAccount", user_name=name, password="p")
    return {"user_name": name}


def _leading(site: Site) -> Fields:
    eventually(lambda: site.api.ok("AdminService.CheckHealth").is_leader)
    return {}


def _named(field: str, make: Callable[[Site], str]) -> Callable[[Site], Fields]:
    return lambda site: {field: make(site)}


def _snapshot(site: Site) -> Fields:
    return {"config_snapshot": site.api.ok("AdminService.GenConfigSnapshot").config_snapshot}


GOOD: dict[str, Callable[[Site], Fields]] = {
    "AdminService.AddStorage": lambda _site: _storage(),
    "AdminService.EnableStorage": _named("storage_unique_name", Site.storage),
    "AdminService.DisableStorage": _named("storage_unique_name", Site.storage),
    "AdminService.RemoveStorage": _named("storage_unique_name", Site.storage),
    "AdminService.UpdateStorage": lambda site: _storage(site.storage()),
    "AdminService.ListStorage": lambda _site: {},
    "AdminService.CreateInstanceGroup": lambda site: _group(site.storage()),
    "AdminService.UpdateInstanceGroup": _updated_group,
    "AdminService.RemoveInstanceGroup": _named("name", Site.group),
    "AdminService.GetInstanceGroup": _named("name", Site.group),
    "AdminService.GetCacheMeta": _blocks,
    "AdminService.RemoveCache": _blocks,
    "AdminService.RegisterInstance": lambda site: instance_fields(unique("instance"), site.group()),
    "AdminService.RemoveInstance": _named("instance_id", Site.instance),
    "AdminService.GetInstanceInfo": _named("instance_id", Site.instance),
    "AdminService.ListInstanceInfo": _named("instance_group_name", Site.group),
    "AdminService.AddAccount": lambda _site: {"user_name": unique("user"), "password": "p", "role": "ROLE_ADMIN"},
    "AdminService.DeleteAccount": _account,
    "AdminService.ListAccount": lambda _site: {},
    "AdminService.GenConfigSnapshot": lambda _site: {},
    "AdminService.LoadConfigSnapshot": _snapshot,
    "AdminService.GetMetrics": lambda _site: {},
    "AdminService.CheckHealth": lambda _site: {},
    "AdminService.GetManagerClusterInfo": lambda _site: {},
    "AdminService.LeaderDemote": _leading,
    "AdminService.GetLeaderElectorConfig": lambda _site: {},
    "AdminService.UpdateLeaderElectorConfig": lambda _site: {"campaign_delay_time_ms": 0},
    "AdminService.UpdateLogger": lambda _site: {"log_level": "info"},
    "GroupService.ListInstanceGroup": lambda _site: {},
}


def _refused(rule: str, code: str, fields: Callable[[Site], Fields], *texts: str) -> Refused:
    return Refused(rule, fields, code, texts)


def _invalid(rule: str, fields: Callable[[Site], Fields], *texts: str) -> Refused:
    return Refused(rule, fields, "INVALID_ARGUMENT", texts)


def _unknown(api: str, field: str) -> list[Refused]:
    return [
        _invalid("no name", lambda _site: {field: ""}, f"{api}: {{{field}}}", "required"),
        _invalid("unknown name", lambda _site: {field: "nowhere"}, "'nowhere'", "does not exist"),
    ]


def _unknown_instance(rule: str, instance: str) -> Refused:
    return _refused(rule, "INSTANCE_NOT_EXIST", lambda _site: {"instance_id": instance}, f"'{instance}'")


def _without(fields: Fields, name: str) -> Fields:
    return {key: value for key, value in fields.items() if key != name}


def _missing_spec_field(kind: str, message: str, whole: Fields, field: str) -> Refused:
    spec = _without(whole, field)
    return _invalid(f"{kind} without {field}", lambda _site: _storage(**{kind: spec}), message, field)


def _storage_refusals(name: Callable[[Site], str]) -> list[Refused]:
    """What AddStorage and UpdateStorage refuse; `name` makes a name that would be fine."""
    required = [
        ("nfs", "NfsStorageSpec", {"root_path": "/r"}),
        ("threefs", "ThreeFSStorageSpec", {"mountpoint": "/m", "root_dir": "r"}),
        ("mooncake", "MooncakeStorageSpec", MOONCAKE),
        ("tair_mem_pool", "TairMemPoolStorageSpec", {"domain": "d"}),
        ("vcnsthreefs", "VcnsThreeFSStorageSpec", VCNS),
    ]
    return [
        _invalid("no storage", lambda _site: {}, "storage"),
        _invalid("no name", lambda _site: _storage(""), "StorageConfig", "global_unique_name"),
        _invalid("a name that is no host", lambda _site: _storage("a b"), "global_unique_name", "'a b'"),
        _invalid("name of 129 characters", lambda _site: _storage("x" * 129), "global_unique_name", "128"),
        _invalid("no spec", lambda _site: {"storage": {"global_unique_name": "x"}}, "storage_spec", "nfs"),
        _refused("local", "UNSUPPORTED", lambda site: _storage(name(site), local={}), "local", "nfs"),
        *(_missing_spec_field(kind, cls, whole, field) for kind, cls, whole in required for field in whole),
        _refused(
            "a pool across hosts",
            "UNSUPPORTED",
            lambda site: _storage(name(site), tair_mem_pool={"domain": "d"}),
            "node_id",
            "capacity_bytes",
            "mooncake",
        ),
        _refused(
            "a 3FS that is not mounted",
            "IO_ERROR",
            lambda site: _storage(name(site), vcnsthreefs=VCNS | {"mountpoint": "/dev/null/x"}),
            "mountpoint",
            "/dev/null/x",
            "mounted on this host",
        ),
        _invalid(
            "a root_dir that leaves its mountpoint",
            lambda site: _storage(name(site), threefs={"mountpoint": "/tmp", "root_dir": "a/../b"}),
            "root_dir",
            "'a/../b'",
        ),
        _invalid("relative root", lambda site: _storage(name(site), nfs={"root_path": "a/b"}), "root_path", "'a/b'"),
        _refused(
            "a root that cannot be a directory",
            "IO_ERROR",
            lambda site: _storage(name(site), nfs={"root_path": "/dev/null/x"}),
            "root_path",
            "/dev/null/x",
        ),
    ]


def _group_refusals(request: Callable[[Site, Fields], Fields]) -> list[Refused]:
    """What CreateInstanceGroup and UpdateInstanceGroup refuse; `request` completes a group to a request."""

    def spec(rule: str, *texts: str, **changes: Any) -> Refused:
        return _invalid(rule, lambda site: request(site, group_spec("ignored", "s", **changes)), *texts)

    def nested(rule: str, text: str, *path: str) -> Refused:
        def fields(site: Site) -> Fields:
            whole = group_spec("ignored", "s")
            inner = whole
            for part in path[:-1]:
                inner = inner[part]
            del inner[path[-1]]
            return request(site, whole)

        return _invalid(rule, fields, text)

    indexer = ("cache_config", "meta_indexer_config")
    return [
        _invalid("no group", lambda _site: {}, "instance_group"),
        nested("no name", "name", "name"),
        nested("no candidates", "storage_candidates", "storage_candidates"),
        nested("no quota group", "global_quota_group_name", "global_quota_group_name"),
        nested("no cache_config", "cache_config", "cache_config"),
        nested("no reclaim_strategy", "reclaim_strategy", "cache_config", "reclaim_strategy"),
        nested("no reclaim storage", "storage_unique_name", "cache_config", "reclaim_strategy", "storage_unique_name"),
        nested("no meta storage type", "storage_type", *indexer, "meta_storage_backend_config"),
        nested("no cache policy type", "type", *indexer, "meta_cache_policy_config"),
        spec("no strategy", "data_storage_strategy", strategy="CPS_UNSPECIFIED"),
        spec("unknown strategy", "data_storage_strategy", "99", strategy=99),
        spec("negative capacity", "capacity", "-1", capacity=-1),
        spec("negative type capacity", "capacity", "-1", types={"ST_NFS": -1}),
        spec("a type limit without a type", "storage_type", types={"ST_UNSPECIFIED": 1}),
        spec("a type limit of an unknown type", "storage_type", "99", types={99: 1}),
        spec("negative instance count", "max_instance_count", "-1", max_instance_count=-1),
        spec("negative key count", "max_key_count", "-1", max_keys=-1),
        spec("negative delay", "delay_before_delete_ms", "-1", delay_ms=-1),
        spec("negative ratio", "used_percentage", "-0.5", ratio=-0.5),
        spec("ratio that is no number", "used_percentage", "nan", ratio=math.nan),
        spec("infinite ratio", "used_percentage", "inf", ratio=math.inf),
        *(
            spec(f"{shards} shards", "mutex_shard_num", f"{shards}", "power of two", shards=shards)
            for shards in (3, -1, 1 << 17)
        ),
        spec("more shards than keys", "mutex_shard_num", "16", shards=16, max_keys=8),
    ]


def _quota_twice(_site: Site) -> Fields:
    spec = group_spec(unique("group"), "s", types={"ST_NFS": 1})
    spec["quota"]["quota_config"] *= 2
    return {"instance_group": spec}


def _redis(_site: Site) -> Fields:
    spec = group_spec(unique("group"), "s")
    backend = {"storage_type": "redis", "storage_uri": "redis://h:1/"}
    spec["cache_config"]["meta_indexer_config"]["meta_storage_backend_config"] = backend
    return {"instance_group": spec}


def _create(_site: Site, spec: Fields) -> Fields:
    return {"instance_group": {**spec, "name": unique("group") if "name" in spec else ""}}


def _update(site: Site, spec: Fields) -> Fields:
    changed = {**spec, "name": site.group() if "name" in spec else "", "version": 2}
    return {"instance_group": changed, "current_version": 1}


REFUSED: dict[str, list[Refused]] = {rpc: [] for rpc in GOOD} | {
    "AdminService.AddStorage": [
        *_storage_refusals(lambda _site: unique("storage")),
        _refused("taken", "DUPLICATE_ENTITY", lambda s: _storage(s.storage()), "storage-", "UpdateStorage"),
    ],
    "AdminService.UpdateStorage": [
        *_storage_refusals(Site.storage),
        _invalid("unknown name", lambda _site: _storage("nowhere"), "'nowhere'", "does not exist"),
    ],
    "AdminService.EnableStorage": _unknown("EnableStorage", "storage_unique_name"),
    "AdminService.DisableStorage": _unknown("DisableStorage", "storage_unique_name"),
    "AdminService.RemoveStorage": _unknown("RemoveStorage", "storage_unique_name"),
    "AdminService.CreateInstanceGroup": [
        *_group_refusals(_create),
        _invalid("a name of 257 bytes", lambda _site: _group("s", name="x" * 257), "name", "257", "256"),
        _invalid("the name that stands for all", lambda _site: _group("s", name="*"), "name", "all groups in keys"),
        _refused("taken", "DUPLICATE_ENTITY", lambda s: _group("s", name=s.group()), "group-", "UpdateInstanceGroup"),
        _invalid("a type limit twice", _quota_twice, "quota_config", "file"),
        _invalid("metadata in a foreign store (decision 6)", _redis, "storage_type", "'redis'", "'local'"),
    ],
    "AdminService.UpdateInstanceGroup": [
        *_group_refusals(_update),
        _invalid("unknown name", lambda _site: _group("s", name="nowhere"), "'nowhere'", "does not exist"),
        _invalid("another current version", lambda s: _updated_group(s, current=7), "current_version", "7", "1"),
        _invalid("a version that does not grow", lambda s: _updated_group(s, version=1), "version", "above 1"),
    ],
    "AdminService.RemoveInstanceGroup": _unknown("RemoveInstanceGroup", "name"),
    "AdminService.GetInstanceGroup": _unknown("GetInstanceGroup", "name"),
    "AdminService.GetCacheMeta": block_refusals(_blocks),
    "AdminService.RemoveCache": block_refusals(_blocks),
    "AdminService.RegisterInstance": registration_refusals(),
    "AdminService.RemoveInstance": [
        _unknown_instance("unknown instance", "nobody"),
        _invalid("no instance", lambda _site: {}, "instance_id"),
    ],
    "AdminService.GetInstanceInfo": [_unknown_instance("unknown instance", "nobody")],
    "AdminService.AddAccount": [
        _invalid("no name", lambda _site: {"password": "p"}, "user_name", "required"),
        _invalid("no password", lambda _site: {"user_name": "u"}, "password", "required"),
        _invalid("control character", lambda _site: {"user_name": "a\tb", "password": "p"}, "user_name", "control"),
        _invalid("unknown role", lambda _site: {"user_name": "u", "password": "p", "role": 9}, "role", "ROLE_USER"),
        _refused("taken", "DUPLICATE_ENTITY", lambda site: {**_account(site), "password": "q"}, "user-", "exists"),
    ],
    "AdminService.DeleteAccount": _unknown("DeleteAccount", "user_name"),
    "AdminService.LoadConfigSnapshot": [
        _invalid("no text", lambda _site: {}, "config_snapshot", "empty"),
        _invalid("no JSON", lambda _site: {"config_snapshot": "{"}, "config_snapshot", "JSON"),
        _invalid("another format", lambda _site: {"config_snapshot": "{}"}, "format", "kvcm-config"),
    ],
    "AdminService.UpdateLogger": [
        _invalid("no level", lambda _site: {}, "log_level", "DEBUG"),
        _invalid("unknown level", lambda _site: {"log_level": "loud"}, "log_level", "'loud'", "DEBUG"),
    ],
}
