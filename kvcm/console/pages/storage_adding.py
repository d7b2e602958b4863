"""Adding a storage: first of which kind, then the fields of that kind, which are those of its document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from pydantic import BaseModel
from starlette.responses import Response

from kvcm.console.forms import Field, Kind, Sheet
from kvcm.console.resources import RefusedError
from kvcm.console.views.storages import KINDS
from kvcm.console.visits import Visit
from kvcm.service.rest.names import encoded_name
from kvcm.service.rest.storage_documents import StorageDocument

__all__ = ["ROUTES", "fields_of_kind"]

_LIST: Final = "/console/storages"
_ADD: Final = "/console/storages/+add"  # no storage has such a name

_NAME: Final = Field("name", "Name", "Letters, digits, dots, dashes and underscores; 128 at most.", is_required=True)
_CAPACITY: Final = Field(
    "capacity_bytes", "Capacity for all groups together", "As in 500 GiB. Empty: not limited here.", "size"
)
_KINDS: Final[Mapping[object, Kind]] = {bool: "check", str: "text"}


@lru_cache
def fields_of_kind(kind: str) -> Sequence[Field]:
    """Return the fields of a storage of a kind, as in `nfs`."""
    document = _document(kind)
    return (_NAME, *(_field(kind, name, document) for name in document.model_fields), _CAPACITY)


def _document(kind: str) -> type[BaseModel]:
    alternatives: Sequence[Any] = getattr(StorageDocument.model_fields[kind].annotation, "__args__", ())
    found: type[BaseModel] = alternatives[0]  # the other one is None
    return found


def _field(kind: str, name: str, document: type[BaseModel]) -> Field:
    info = document.model_fields[name]
    shown: Kind = _KINDS.get(info.annotation, "size" if name.endswith("_bytes") else "integer")
    label = name.removesuffix("_bytes").replace("_", " ").capitalize()
    hint = (info.description or "").replace("`", "")
    return Field(f"{kind}.{name}", label, hint, shown, is_required=info.is_required() and shown != "check")


async def _ask(visit: Visit) -> Response:
    kind = visit.query("kind")
    if kind not in KINDS:
        return visit.page("storage_kinds.html", kinds=KINDS)
    return _shown(visit, kind, Sheet.blank(fields_of_kind(kind)))


async def _add(visit: Visit) -> Response:
    form = await visit.form()
    kind = form.get("kind", "")
    if kind not in KINDS:
        return visit.fault(400, f"There is no kind of storage {kind[:40]!r}.")
    sheet = Sheet.filled(fields_of_kind(kind), form)
    try:
        document = {kind: {}, **sheet.document()}
        name = document.pop("name")
        await visit.send("PUT", f"/v1/storages/{encoded_name(name)}", document, {"if-none-match": "*"})
    except RefusedError as error:
        return _shown(visit, kind, sheet.refused(_taken(error)), error.status)
    return visit.back(f"{_LIST}/{encoded_name(name)}", f"Storage {name} was added. Groups use it that name it.")


def _taken(error: RefusedError) -> RefusedError:
    return RefusedError(409, {"detail": "There is a storage of this name already."}) if error.status == 412 else error


def _shown(visit: Visit, kind: str, sheet: Sheet, status: int = 200) -> Response:
    return visit.page("storage_add.html", status, kind=kind, label=KINDS[kind], sheet=sheet)


ROUTES: Final[Sequence[tuple[str, str, Callable[[Visit], Awaitable[Response]]]]] = (
    ("GET", _ADD, _ask),
    ("POST", _ADD, _add),
)
