"""Every call of PinService: a good request and each documented refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from test_meta_cases import Fields, Refused, block_refusals
from test_transport_sites import Site

KEYS = [1, 2, 3]
BLOCK = 64  # bytes of a block of Site.instance


def _instance(site: Site) -> str:
    instance = site.instance(site.group(pin_budget_bytes=10 * BLOCK))
    site.write(instance, KEYS)
    return instance


def _pin(site: Site, **changes: Any) -> Fields:
    return {"instance_id": _instance(site), "block_keys": KEYS, "owner": "me", "ttl_seconds": 60, **changes}


def _without_budget(site: Site) -> Fields:
    instance = site.instance()
    site.write(instance, KEYS)
    return _pin(site, instance_id=instance)


def _unpin(site: Site, **changes: Any) -> Fields:
    fields = _pin(site)
    pin_id = site.api.ok("PinService.PinPrefix", **fields).pin_id
    return {"instance_id": fields["instance_id"], "pin_id": pin_id, **changes}


def _list(site: Site) -> Fields:
    return {"instance_id": _instance(site)}


def _report(site: Site, **changes: Any) -> Fields:
    return {"instance_id": _instance(site), "parts": [{"block_key": 1, "uri": "file://s/p?size=1"}], **changes}


GOOD: dict[str, Callable[[Site], Fields]] = {
    "PinService.PinPrefix": _pin,
    "PinService.UnpinPrefix": _unpin,
    "PinService.ListPins": _list,
    "PinService.ReportMissing": _report,
}


def _refused(rule: str, fields: Callable[[Site], Fields], *texts: str, code: str = "INVALID_ARGUMENT") -> Refused:
    return Refused(rule, fields, code, texts)


def _unknown_instance(fields: Callable[[Site], Fields]) -> Refused:
    return _refused(
        "unknown instance", lambda s: {**fields(s), "instance_id": "nobody"}, "'nobody'", code="INSTANCE_NOT_EXIST"
    )


REFUSED: dict[str, list[Refused]] = {
    "PinService.PinPrefix": [
        *block_refusals(_pin),
        _refused("no owner", lambda site: _pin(site, owner=""), "owner", "is required"),
        _refused("no budget", _without_budget, "pin_budget_bytes", "is 0", code="REACH_MAX_ENTITY_CAPACITY"),
    ],
    "PinService.UnpinPrefix": [
        _unknown_instance(_unpin),
        _refused("no pin", lambda site: _unpin(site, pin_id=""), "pin_id", "is required"),
        _refused("pin of another instance", lambda site: _unpin(site, instance_id=site.instance()), "another instance"),
    ],
    "PinService.ListPins": [_unknown_instance(_list)],
    "PinService.ReportMissing": [
        _unknown_instance(_report),
        _refused("no parts", lambda site: _report(site, parts=[]), "parts", "is required"),
        _refused("too many parts", lambda site: _report(site, parts=[{}] * 65537), "parts has 65537", "65536"),
    ],
}
