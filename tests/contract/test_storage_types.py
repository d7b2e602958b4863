"""A storage type stands in every table of types: a forgotten line would be found by the first user."""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

import pytest

from kvcm.commands import storage as storage_commands
from kvcm.connectors import wire
from kvcm.connectors.transfer.engine import MOVERS
from kvcm.console.pages import groups, storages
from kvcm.model.storages import EventReportStorageSpec, LocalStorageSpec, StorageSpec, StorageType
from kvcm.registry import config_snapshots, document_cache, startup_document, validation
from kvcm.service import translate
from kvcm.service.rest import documents, storage_resource
from kvcm.storage import directory

DECLARED = set(StorageType) - {StorageType.ST_UNSPECIFIED}
REPORTS = {each for each in DECLARED if each.is_event_report}
TYPES = DECLARED - REPORTS - {StorageType.ST_TAIRMEMPOOL_SSD}
KINDS = {each.kind for each in TYPES}
SPECS = set(get_args(StorageSpec)) - {LocalStorageSpec}
WRITTEN = SPECS - {EventReportStorageSpec}
FIELDS = {translate._FIELD_OF_SPEC.get(spec, spec) for spec in SPECS}
TABLES: dict[str, tuple[Collection[object], Collection[object]]] = {
    "openers; pools are opened by their reports": ({*directory.OPENERS, StorageType.ST_TAIRMEMPOOL}, TYPES),
    "speed": (directory._SPEED_RANK, TYPES),
    "movers; a dummy has no bytes": ({*MOVERS, "dummy"}, {each.scheme for each in TYPES}),
    "keys of the startup document": (startup_document._SPEC_KEYS, WRITTEN),
    "kinds of the startup document": (startup_document._SPEC_OF_KIND, KINDS),
    "kinds of the client": (wire._SPECS, KINDS),
    "stored documents": (document_cache._SPECS.values(), SPECS),
    "messages": (translate._FIELD_OF_SPEC, SPECS),
    "validation": (validation._REQUIRED_TEXTS, SPECS),
    "snapshots": (config_snapshots._FIELDS, {spec.__name__ for spec in SPECS}),
    "kinds of commands": (storage_commands._SPECS, KINDS | {each.kind for each in REPORTS}),
    "fields of commands": (storage_commands._SPECS.values(), FIELDS),
    "types of the console": (groups._TYPES, FIELDS - {"event_report"}),
    "labels of the console": (storages._LABELS, FIELDS),
    "fields of resources": (storage_resource._SPEC_FIELDS, FIELDS),
    "names of resources": (get_args(documents.StorageTypeName), {each.name for each in DECLARED}),
}


@pytest.mark.parametrize("table", TABLES)
def test_every_storage_type_stands_in(table: str) -> None:
    found, wanted = TABLES[table]
    assert not set(wanted) - set(found)
