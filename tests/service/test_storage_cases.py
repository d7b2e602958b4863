"""Every call of StorageService: a good request and each documented refusal (decision 9)."""

from __future__ import annotations

from collections.abc import Callable

from test_meta_cases import Fields, Refused
from test_transport_sites import Site


def _drained(site: Site) -> Fields:
    fields = {"storage_unique_name": site.storage()}
    site.api.ok("StorageService.DrainStorage", **fields)
    return fields


GOOD: dict[str, Callable[[Site], Fields]] = {
    "StorageService.DrainStorage": _drained,  # for the second time
    "StorageService.CancelDrain": lambda site: {"storage_unique_name": site.storage()},  # there is none
    "StorageService.ListDrain": lambda _site: {},
}


def _refusals(name: str) -> list[Refused]:
    required = (f"{name}: {{storage_unique_name}}", "required")
    return [
        Refused("no name", lambda _site: {}, "INVALID_ARGUMENT", required),
        Refused("unknown name", lambda _site: {"storage_unique_name": "nowhere"}, "INVALID_ARGUMENT", ("'nowhere'",)),
    ]


REFUSED: dict[str, list[Refused]] = {
    "StorageService.DrainStorage": _refusals("DrainStorage"),
    "StorageService.CancelDrain": _refusals("CancelDrain"),
    "StorageService.ListDrain": [],
}
