"""Every call of MetaService and LeaseService: a good request and each documented refusal (wire.md 5, decision 9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from test_transport_sites import Site, instance_fields, mask, unique

Fields = dict[str, Any]
KEYS = [1, 2, 3]


class Refused(NamedTuple):
    """A request that is refused: the rule, how it is made, the code, and texts that the message must hold."""

    rule: str
    fields: Callable[[Site], Fields]
    code: str
    texts: tuple[str, ...]


def _registration(site: Site) -> Fields:
    return instance_fields(unique("instance"), site.group())


def _blocks(site: Site) -> Fields:
    return {"instance_id": site.instance(), "block_keys": KEYS}


def _query(site: Site) -> Fields:
    return {**_blocks(site), "query_type": "QT_PREFIX_MATCH"}


def _finish(site: Site) -> Fields:
    instance = site.instance()
    started = site.start(instance, KEYS)
    return {"instance_id": instance, "write_session_id": started.write_session_id, "success_blocks": mask(3)}


def _trim(site: Site, strategy: str | int, **changes: Any) -> Fields:
    return {"instance_id": site.instance(), "strategy": strategy, **changes}


def _lease(site: Site, **changes: Any) -> Fields:
    instance = site.instance()
    site.write(instance, KEYS)
    query = {"instance_id": instance, "block_keys": KEYS, "query_type": "QT_PREFIX_MATCH", "read_lease_ms": 60_000}
    return {"instance_id": instance, "read_lease_id": site.api.ok("GetCacheLocation", **query).read_lease_id, **changes}


def _session(site: Site, **changes: Any) -> Fields:
    instance = site.instance()
    return {"instance_id": instance, "write_session_id": site.start(instance, KEYS).write_session_id, **changes}


GOOD: dict[str, Callable[[Site], Fields]] = {
    "MetaService.RegisterInstance": _registration,
    "MetaService.GetInstanceInfo": lambda site: {"instance_id": site.instance()},
    "MetaService.GetCacheMeta": _blocks,
    "MetaService.GetCacheLocation": _query,
    "MetaService.GetCacheLocationLen": _query,
    "MetaService.StartWriteCache": _blocks,
    "MetaService.FinishWriteCache": _finish,
    "MetaService.RemoveCache": _blocks,
    "MetaService.TrimCache": lambda site: _trim(site, "TS_REMOVE_ALL_CACHE"),
    "MetaService.GetClusterInfo": lambda _site: {},
    "LeaseService.RenewReadLease": lambda site: _lease(site, read_lease_ms=1000),
    "LeaseService.ReleaseReadLease": _lease,
    "LeaseService.RenewWriteSession": lambda site: _session(site, write_timeout_seconds=5),
}


def _unknown_instance(fields: Callable[[Site], Fields], instance: str = "nobody") -> Refused:
    return Refused(
        f"unknown instance {instance!r}",
        lambda site: {**fields(site), "instance_id": instance},
        "INSTANCE_NOT_EXIST",
        (repr(instance), "RegisterInstance"),
    )


def invalid(rule: str, fields: Callable[[Site], Fields], *texts: str) -> Refused:
    """Return the case of a request that is an invalid argument."""
    return Refused(rule, fields, "INVALID_ARGUMENT", texts)


def changed(rule: str, fields: Callable[[Site], Fields], *texts: str, **changes: Any) -> Refused:
    """Return the case of a good request with other values in some of its fields."""
    return invalid(rule, lambda site: {**fields(site), **changes}, *texts)


def _without(field: str, rule: str, fields: Callable[[Site], Fields]) -> Refused:
    return invalid(rule, lambda site: {key: v for key, v in fields(site).items() if key != field}, field)


def block_refusals(fields: Callable[[Site], Fields]) -> list[Refused]:
    """Return the cases that every call about blocks refuses.

    Args:
        fields: makes a good request.
    """

    def of_unknown_size(site: Site) -> Fields:
        return {**fields(site), "instance_id": site.instance(block_size=0), "block_keys": [], "token_ids": [1, 2]}

    return [
        _unknown_instance(fields),
        _unknown_instance(fields, ""),
        changed("no keys", fields, "block_keys and token_ids", block_keys=[]),
        invalid("tokens without a block size", of_unknown_size, "block_size"),
        changed("too many keys", fields, "block_keys", "65537", "65536", block_keys=range(65537)),
    ]


def registration_refusals() -> list[Refused]:
    """Return the cases that RegisterInstance of either package refuses; the registry's tests have its other rules."""
    unknown_kind = [{"name": "kv", "size": 1, "kind": 99}]
    return [
        changed("unknown group", _registration, "'nowhere'", "does not exist", instance_group="nowhere"),
        changed("no id", _registration, "instance_id", instance_id=""),
        _without("model_deployment", "no model", _registration),
        changed("unknown spec kind", _registration, "kind", "99", location_spec_infos=unknown_kind),
    ]


def _query_refusals() -> list[Refused]:
    return [
        *block_refusals(_query),
        changed("no query type", _query, "query_type", "QT_BATCH_GET", query_type="QT_UNSPECIFIED"),
        changed("unknown query type", _query, "query_type", "99", "QT_BATCH_GET", query_type=99),
        changed(
            "window of 4 over 3 keys", _query, "sw_size", "4", "3", query_type="QT_REVERSE_ROLL_SW_MATCH", sw_size=4
        ),
    ]


def _too_long_lease(fields: Callable[[Site], Fields]) -> Refused:
    return changed("lease of 600,001 ms", fields, "read_lease_ms", "600000", read_lease_ms=600_001)


def _renewal(site: Site) -> Fields:
    return _lease(site, read_lease_ms=1000)


REFUSED: dict[str, list[Refused]] = {
    "MetaService.RegisterInstance": registration_refusals(),
    "MetaService.GetInstanceInfo": [_unknown_instance(lambda _site: {}), _unknown_instance(lambda _site: {}, "")],
    "MetaService.GetCacheMeta": block_refusals(_blocks),
    "MetaService.GetCacheLocation": [*_query_refusals(), _too_long_lease(_query)],
    "MetaService.GetCacheLocationLen": _query_refusals(),
    "MetaService.StartWriteCache": [
        *block_refusals(_blocks),
        changed("2 event hashes for 3 keys", _blocks, "event_hashes", "2", "3", event_hashes=[1, 2]),
        changed("unknown spec group", _blocks, "location_spec_group_names", "'a'", location_spec_group_names=["a"] * 3),
    ],
    "MetaService.FinishWriteCache": [
        _unknown_instance(_finish),
        changed("no session", _finish, "write_session_id", write_session_id=""),
        changed("unknown session", _finish, "write_session_id", "again", write_session_id="x" * 32),
        _without("success_blocks", "no success_blocks", _finish),
        changed("success_blocks without a mask", _finish, "success_blocks", "3", success_blocks={}),
        changed("offset beyond the end", _finish, "offset", "4", "3", success_blocks=mask(4)),
    ],
    "MetaService.RemoveCache": block_refusals(_blocks),
    "MetaService.TrimCache": [
        _unknown_instance(lambda site: _trim(site, "TS_REMOVE_ALL_CACHE")),
        invalid("no strategy", lambda site: _trim(site, "TS_UNSPECIFIED"), "strategy", "TS_REMOVE_ALL_CACHE"),
        invalid("unknown strategy", lambda site: _trim(site, 99), "strategy", "99", "TS_TIMESTAMP"),
    ],
    "MetaService.GetClusterInfo": [],
    "LeaseService.RenewReadLease": [
        _unknown_instance(_renewal),
        changed("unknown lease", _renewal, "read_lease_id", read_lease_id="x"),
        _too_long_lease(_renewal),
    ],
    "LeaseService.ReleaseReadLease": [
        _unknown_instance(_lease),
        invalid("lease of another instance", lambda site: _lease(site, instance_id=site.instance()), "read_lease_id"),
    ],
    "LeaseService.RenewWriteSession": [
        _unknown_instance(_session),
        changed("unknown session", _session, "write_session_id", "again", write_session_id="x"),
        invalid(
            "session of another instance", lambda site: _session(site, instance_id=site.instance()), "write_session_id"
        ),
    ],
}
