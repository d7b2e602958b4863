"""Every call of AdminService and GroupService: a good request and each documented refusal (wire.md 6, decision 9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from test_meta_cases import Fields, Refused, block_refusals, invalid, registration_refusals
from test_transport_drivers import eventually
from test_transport_sites import Site, group_spec, instance_fields, unique

FILE = "/dev/null/x"


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
    "AdminService.UpdateInstanceGroup": lambda site: _updated_group(site, version=100),  # it may jump
    "AdminService.RemoveInstanceGroup": _named("name", Site.group),
    "AdminService.GetInstanceGroup": _named("name", Site.group),
    "AdminService.ListInstanceGroup": lambda _site: {},
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
    "GroupService.MoveInstanceGroup": lambda site: {"name": site.group(), "store": "registry"},
    "GroupService.ListGroupStore": lambda _site: {},
}


def _refused(rule: str, code: str, fields: Callable[[Site], Fields], *texts: str) -> Refused:
    return Refused(rule, fields, code, texts)


def _unknown(api: str, field: str) -> list[Refused]:
    return [
        invalid("no name", lambda _site: {field: ""}, f"{api}: {{{field}}}", "required"),
        invalid("unknown name", lambda _site: {field: "nowhere"}, "'nowhere'", "does not exist"),
    ]


def _unknown_instance(rule: str, instance: str) -> Refused:
    return _refused(rule, "INSTANCE_NOT_EXIST", lambda _site: {"instance_id": instance}, f"'{instance}'")


def _storage_refusals(name: Callable[[Site], str]) -> list[Refused]:
    """The cases that AddStorage and UpdateStorage refuse; `name` makes a valid name.

    The rules of fields are tested where they are kept: here are one of them and what the messages have to hold.
    """
    return [
        invalid("no storage", lambda _site: {}, "storage"),
        invalid("no spec", lambda _site: {"storage": {"global_unique_name": "x"}}, "storage_spec", "nfs"),
        _refused("local", "UNSUPPORTED", lambda site: _storage(name(site), local={}), "local", "nfs"),
        invalid("no root", lambda site: _storage(name(site), nfs={}), "NfsStorageSpec", "root_path"),
        _refused("no directory", "IO_ERROR", lambda s: _storage(name(s), nfs={"root_path": FILE}), "root_path", FILE),
    ]


def _group_refusals() -> list[Refused]:
    """What a group lacks that only calls have to give, enums without a meaning, and one rule of a field."""

    def nested(text: str, *path: str) -> Refused:
        def fields(_site: Site) -> Fields:
            request = _group()
            inner = request["instance_group"]
            for part in path[:-1]:
                inner = inner[part]
            del inner[path[-1]]
            return request

        return invalid(f"no {path[-1]}", fields, text)

    indexer = ("cache_config", "meta_indexer_config")
    return [
        *(nested(name, name) for name in ("name", "storage_candidates", "global_quota_group_name", "cache_config")),
        nested("reclaim_strategy", "cache_config", "reclaim_strategy"),
        nested("storage_unique_name", "cache_config", "reclaim_strategy", "storage_unique_name"),
        nested("storage_type", *indexer, "meta_storage_backend_config"),
        nested("type", *indexer, "meta_cache_policy_config"),
        invalid("no strategy", lambda _site: _group(strategy="CPS_UNSPECIFIED"), "data_storage_strategy"),
        invalid("unknown strategy", lambda _site: _group(strategy=99), "data_storage_strategy", "99"),
        invalid("a type limit of an unknown type", lambda _site: _group(types={99: 1}), "storage_type", "99"),
        invalid("negative capacity", lambda _site: _group(capacity=-1), "capacity", "-1"),
    ]


REFUSED: dict[str, list[Refused]] = {rpc: [] for rpc in GOOD} | {
    "AdminService.AddStorage": [
        *_storage_refusals(lambda _site: unique("storage")),
        _refused("taken", "DUPLICATE_ENTITY", lambda s: _storage(s.storage()), "storage-", "UpdateStorage"),
    ],
    "AdminService.UpdateStorage": [
        *_storage_refusals(Site.storage),
        invalid("unknown name", lambda _site: _storage("nowhere"), "'nowhere'", "does not exist"),
    ],
    "AdminService.EnableStorage": _unknown("EnableStorage", "storage_unique_name"),
    "AdminService.DisableStorage": _unknown("DisableStorage", "storage_unique_name"),
    "AdminService.RemoveStorage": _unknown("RemoveStorage", "storage_unique_name"),
    "AdminService.CreateInstanceGroup": [
        invalid("no group", lambda _site: {}, "instance_group"),
        *_group_refusals(),
        _refused("taken", "DUPLICATE_ENTITY", lambda s: _group("s", name=s.group()), "group-", "UpdateInstanceGroup"),
    ],
    "AdminService.UpdateInstanceGroup": [
        invalid("no group", lambda _site: {}, "instance_group"),
        invalid("negative capacity", lambda s: _updated_group(s, capacity=-1), "capacity", "-1"),
        invalid("unknown name", lambda _site: _group("s", name="nowhere"), "'nowhere'", "does not exist"),
        invalid("another current version", lambda s: _updated_group(s, current=7), "current_version", "7", "1"),
        invalid("a version that does not grow", lambda s: _updated_group(s, version=1), "version", "above 1"),
    ],
    "AdminService.RemoveInstanceGroup": _unknown("RemoveInstanceGroup", "name"),
    "AdminService.GetInstanceGroup": _unknown("GetInstanceGroup", "name"),
    "GroupService.MoveInstanceGroup": [
        invalid("no name", lambda _site: {"store": "registry"}, "MoveInstanceGroup: {name}", "required"),
        invalid("no store", lambda site: {"name": site.group()}, "MoveInstanceGroup: {store}", "required"),
        invalid("unknown name", lambda _site: {"name": "nowhere", "store": "registry"}, "'nowhere'", "does not exist"),
        invalid("unknown store", lambda site: {"name": site.group(), "store": "b"}, "'b'", "names none", "'registry'"),
    ],
    "AdminService.GetCacheMeta": block_refusals(_blocks),
    "AdminService.RemoveCache": block_refusals(_blocks),
    "AdminService.RegisterInstance": registration_refusals(),
    "AdminService.RemoveInstance": [
        _unknown_instance("unknown instance", "nobody"),
        invalid("no instance", lambda _site: {}, "instance_id"),
    ],
    "AdminService.GetInstanceInfo": [_unknown_instance("unknown instance", "nobody")],
    "AdminService.AddAccount": [
        invalid("no name", lambda _site: {"password": "p"}, "user_name", "required"),
        invalid("no password", lambda _site: {"user_name": "u"}, "password", "required"),
        invalid("control character", lambda _site: {"user_name": "a\tb", "password": "p"}, "user_name", "control"),
        invalid("unknown role", lambda _site: {"user_name": "u", "password": "p", "role": 9}, "role", "ROLE_USER"),
        _refused("taken", "DUPLICATE_ENTITY", lambda site: {**_account(site), "password": "q"}, "user-", "exists"),
    ],
    "AdminService.DeleteAccount": _unknown("DeleteAccount", "user_name"),
    "AdminService.LoadConfigSnapshot": [
        invalid("no text", lambda _site: {}, "config_snapshot", "empty"),
        invalid("no JSON", lambda _site: {"config_snapshot": "{"}, "config_snapshot", "JSON"),
        invalid("another format", lambda _site: {"config_snapshot": "{}"}, "format", "kvcm-config"),
    ],
    "AdminService.UpdateLogger": [
        invalid("no level", lambda _site: {}, "log_level", "DEBUG"),
        invalid("unknown level", lambda _site: {"log_level": "loud"}, "log_level", "'loud'", "DEBUG"),
    ],
}
