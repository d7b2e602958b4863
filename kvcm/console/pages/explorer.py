"""The prefix explorer: what has become of the blocks of a prompt, and where a match of it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from kvcm.cache.pages import pages
from kvcm.console.resources import RefusedError
from kvcm.console.views.chains import Chain, ChainFold
from kvcm.console.views.numbers import MOST_KEYS, NumbersError, numbers_in
from kvcm.console.visits import Visit
from kvcm.model.keys import block_keys_from_tokens
from kvcm.service.rest.names import encoded_name

__all__ = ["ROUTES"]

_PATH: Final = "/console/explorer"
_ASKED_AT_ONCE: Final = 1024


async def _show(visit: Visit) -> Response:
    return await _page(visit, visit.query("instance"), "tokens", visit.query("numbers"))


async def _explore(visit: Visit) -> Response:
    form = await visit.form()
    instance, text = form.get("instance", "").strip(), form.get("numbers", "")
    kind = "keys" if form.get("kind") == "keys" else "tokens"
    faults: dict[str, str] = {}
    if not instance:
        faults["instance"] = "Name an instance."
    numbers: Sequence[int] = ()
    try:
        numbers = await asyncio.to_thread(numbers_in, text, are_tokens=kind == "tokens")
    except NumbersError as error:
        faults["numbers"] = str(error)
    if faults:
        return await _page(visit, instance, kind, text, faults=faults)
    try:
        keys = await _keys_of(visit, instance, numbers) if kind == "tokens" else numbers
        chain = await _chain(visit, instance, keys)
    except NumbersError as error:
        return await _page(visit, instance, kind, text, faults={"numbers": str(error)})
    except RefusedError as error:
        if error.status not in {400, 404}:
            raise
        field = "instance" if error.status == 404 else "numbers"
        return await _page(visit, instance, kind, text, faults={field: f"{error.detail}."})
    return await _page(visit, instance, kind, text, chain=chain, given=len(numbers))


async def _keys_of(visit: Visit, instance: str, tokens: Sequence[int]) -> Sequence[int]:
    """Return the keys of the blocks that tokens fill.

    Raises:
        NumbersError: there are none, or too many.
    """
    size = (await visit.get(f"/v1/instances/{encoded_name(instance)}"))["block_size"]
    if size <= 0:
        raise NumbersError("The instance was registered without a block size: paste block keys.")
    count = len(tokens) // size
    if not 0 < count <= MOST_KEYS:
        allowed = f"1 to {MOST_KEYS:,} can be looked at"
        raise NumbersError(f"{len(tokens):,} tokens fill {count:,} blocks of {size:,}: {allowed}.")
    return await asyncio.to_thread(block_keys_from_tokens, tokens, size)


async def _chain(visit: Visit, instance: str, keys: Sequence[int]) -> Chain:
    """Return what is told of a chain. It is asked for in pieces, of which what is not shown is forgotten."""
    fold = ChainFold()
    for page in pages(keys, _ASKED_AT_ONCE):
        body = {"block_keys": [str(key) for key in page]}
        answer = await visit.send("POST", f"/v1/instances/{encoded_name(instance)}/explore", body)
        await asyncio.to_thread(fold.add, answer.document)
    return fold.chain()


async def _page(visit: Visit, instance: str, kind: str, text: str, **found: Any) -> Response:
    faults = found.get("faults", {})
    context = {"chain": None, "given": 0, "faults": {}, **found}
    names = await _instances(visit)
    status = 400 if faults else 200
    return visit.page("explorer.html", status, instance=instance, kind=kind, numbers=text, instances=names, **context)


async def _instances(visit: Visit) -> list[str]:
    """Return the instances that the visitor may see, for it to choose from; one that may not look names its own."""
    principal = visit.visitor.principal
    queries = [""] if principal.has_all_groups else ["?" + urlencode({"group": name}) for name in principal.groups]
    try:
        return sorted([each["instance_id"] for query in queries for each in await visit.items(f"/v1/instances{query}")])
    except RefusedError:
        return []


ROUTES: Final[Sequence[tuple[str, str, Callable[[Visit], Awaitable[Response]]]]] = (
    ("GET", _PATH, _show),
    ("POST", _PATH, _explore),
)
