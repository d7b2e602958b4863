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


def _registration(site: Site, **changes: Any) -> Fields:
    return {**instance_fields(unique("instance"), site.group()), **changes}


def _blocks(site: Site) -> Fields:
    return {"instance_id": site.instance(), "block_keys": KEYS}


def _query(site: Site, **changes: Any) -> Fields:
    return {**_blocks(site), "query_type": "QT_PREFIX_MATCH", **changes}


def _finish(site: Site, **changes: Any) -> Fields:
    instance = site.instance()
    started = site.start(instance, KEYS)
    good = {"instance_id": instance, "write_session_id": started.write_session_id, "success_blocks": mask(3)}
    return {**good, **changes}


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


def _invalid(rule: str, fields: Callable[[Site], Fields], *texts: str) -> Refused:
    return Refused(rule, fields, "INVALID_ARGUMENT", texts)


def block_refusals(fields: Callable[[Site], Fields]) -> list[Refused]:
    """Return the cases that every call about blocks refuses.

    Args:
        fields: makes a good request.
    """
    return [
        _unknown_instance(fields),
        _unknown_instance(fields, ""),
        _invalid("no keys", lambda site: {**fields(site), "block_keys": []}, "block_keys and token_ids"),
        _invalid(
            "tokens without a block size",
            lambda site: {
                **fields(site),
                "instance_id": site.instance(block_size=0),
                "block_keys": [],
                "token_ids": [1, 2],
            },
            "block_size",
        ),
        _invalid(
            "too many keys", lambda site: {**fields(site), "block_keys": range(65537)}, "block_keys", "65537", "65536"
        ),
    ]


def registration_refusals() -> list[Refused]:
    """Return the cases that RegisterInstance of either package refuses; the registry's tests have its other rules."""
    unknown_kind = [{"name": "kv", "size": 1, "kind": 99}]
    return [
        _invalid(
            "unknown group", lambda site: _registration(site, instance_group="nowhere"), "'nowhere'", "does not exist"
        ),
        _invalid("no id", lambda site: _registration(site, instance_id=""), "instance_id"),
        _invalid(
            "no model",
            lambda site: {key: v for key, v in _registration(site).items() if key != "model_deployment"},
            "model_deployment",
        ),
        _invalid("unknown spec kind", lambda site: _registration(site, location_spec_infos=unknown_kind), "kind", "99"),
    ]


def _query_refusals() -> list[Refused]:
    return [
        *block_refusals(_query),
        _invalid("no query type", lambda site: _query(site, query_type="QT_UNSPECIFIED"), "query_type", "QT_BATCH_GET"),
        _invalid("unknown query type", lambda site: _query(site, query_type=99), "query_type", "99", "QT_BATCH_GET"),
        _invalid(
            "window of 4 over 3 keys",
            lambda site: _query(site, query_type="QT_REVERSE_ROLL_SW_MATCH", sw_size=4),
            "sw_size",
            "4",
            "3",
        ),
    ]


def _too_long_lease(fields: Callable[[Site], Fields]) -> Refused:
    return _invalid(
        "lease of 600,001 ms", lambda site: {**fields(site), "read_lease_ms": 600_001}, "read_lease_ms", "600000"
    )


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
        _invalid(
            "unknown spec group",
            lambda site: {**_blocks(site), "location_spec_group_names": ["a", "a", "a"]},
            "location_spec_group_names",
            "'a'",
        ),
    ],
    "MetaService.FinishWriteCache": [
        _unknown_instance(_finish),
        _invalid("no session", lambda site: _finish(site, write_session_id=""), "write_session_id"),
        _invalid("unknown session", lambda site: _finish(site, write_session_id="x" * 32), "write_session_id", "again"),
        _invalid(
            "no success_blocks",
            lambda site: {key: v for key, v in _finish(site).items() if key != "success_blocks"},
            "success_blocks",
        ),
        _invalid("success_blocks without a mask", lambda site: _finish(site, success_blocks={}), "success_blocks", "3"),
        _invalid("offset beyond the end", lambda site: _finish(site, success_blocks=mask(4)), "offset", "4", "3"),
    ],
    "MetaService.RemoveCache": block_refusals(_blocks),
    "MetaService.TrimCache": [
        _unknown_instance(lambda site: _trim(site, "TS_REMOVE_ALL_CACHE")),
        _invalid("no strategy", lambda site: _trim(site, "TS_UNSPECIFIED"), "strategy", "TS_REMOVE_ALL_CACHE"),
        _invalid("unknown strategy", lambda site: _trim(site, 99), "strategy", "99", "TS_TIMESTAMP"),
    ],
    "MetaService.GetClusterInfo": [],
    "LeaseService.RenewReadLease": [
        _unknown_instance(_renewal),
        _invalid("unknown lease", lambda site: {**_renewal(site), "read_lease_id": "x"}, "read_lease_id"),
        _too_long_lease(_renewal),
    ],
    "LeaseService.ReleaseReadLease": [
        _unknown_instance(_lease),
        _invalid("lease of another instance", lambda site: _lease(site, instance_id=site.instance()), "read_lease_id"),
    ],
    "LeaseService.RenewWriteSession": [
        _unknown_instance(_session),
        _invalid("unknown session", lambda site: _session(site, write_session_id="x"), "write_session_id", "again"),
        _invalid(
            "session of another instance", lambda site: _session(site, instance_id=site.instance()), "write_session_id"
        ),
    ],
}
