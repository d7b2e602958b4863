"""KV residency: blocks in engines' own memory as this manager knows them, and scores of engines for a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from kvcm.console.formats import ago, count, duration
from kvcm.console.pages.explorer import NumbersError, instance_names, numbers_in
from kvcm.console.resources import RefusedError
from kvcm.console.visits import Routes, Visit
from kvcm.service.rest.conversion import encode_name

__all__ = ["ROUTES", "EngineView", "Scores", "Share", "engine_views", "scores_of"]

# Engines that report.

_MEDIA: Final[Mapping[str, str]] = {"gpu": "GPU", "host": "Host", "disk": "Disk"}
_KINDS: Final = {"complete": "good", "partial": "warn", "quiet": "bad"}
_MAX_SHOWN: Final = 500


@dataclass(frozen=True, slots=True)
class EngineView:
    """A rank of an engine that reports.

    Attributes:
        engine: its address.
        rank: its data-parallel rank.
        state: complete, partial or quiet.
        kind: of its badge.
        media: name, label and blocks of each medium, with their share of the most that any rank has in one.
        last_report: when it came.
        gaps: in its reports.
    """

    engine: str
    rank: int
    state: str
    kind: str
    media: Sequence[tuple[str, str, int, float]]
    last_report: str
    gaps: int


def engine_views(reporters: Sequence[Any]) -> list[EngineView]:
    """Return the reporters of an instance, those that are quiet or known in part first.

    Args:
        reporters: of `/v1/instances/{name}/residency`.
    """
    most = max((each["blocks"] for reporter in reporters for each in reporter["media"]), default=0) or 1
    order = {state: place for place, state in enumerate(reversed(_KINDS))}
    found = [_engine_view(reporter, most) for reporter in reporters]
    return sorted(found, key=lambda view: order[view.state])


def _engine_view(reporter: Any, most: int) -> EngineView:
    blocks = {each["medium"]: each["blocks"] for each in reporter["media"]}
    return EngineView(
        engine=reporter["engine"],
        rank=reporter["rank"],
        state=reporter["state"],
        kind=_KINDS[reporter["state"]],
        media=[(name, label, held := blocks.get(name, 0), held / most) for name, label in _MEDIA.items()],
        last_report=ago(1, 1 + reporter["quiet_ms"]),
        gaps=reporter["gaps"],
    )


# Scores of a prompt.

_SHARES: Final = (
    ("gpu", "GPU memory", "gpu_tokens"),
    ("host", "host memory", "host_tokens"),
    ("disk", "disk", "disk_tokens"),
    ("storage", "storages", "storage_tokens"),
)


@dataclass(frozen=True, slots=True)
class Share:
    """Tokens of a prompt that lie in one memory and in none before it.

    Attributes:
        name: gpu, host, disk, storage or computed.
        label: the same in words.
        first: the first of them.
        tokens: how many.
    """

    name: str
    label: str
    first: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Score:
    """What an engine's rank has of a prompt.

    Attributes:
        name: its address, and its rank if it is not the first.
        shares: of the tokens, in the order of the prompt; together all of them.
        load, compute, saved: times, as text.
        note: why it computes more than no memory holds, "" if it does not.
        is_complete: whether everything that the engine holds is known.
    """

    name: str
    shares: Sequence[Share]
    load: str
    compute: str
    saved: str
    note: str
    is_complete: bool

    @property
    def summary(self) -> str:
        """The bar in words."""
        parts = ", ".join(f"{share.label} {count(share.tokens)}" for share in self.shares)
        return f"Tokens of the prompt for {self.name}: {parts}"


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a prompt.

    Attributes:
        headline: the best engine, in one sentence.
        prompt_tokens: tokens of the prompt.
        engines: the best first.
        left_out: how many are not shown.
    """

    headline: str
    prompt_tokens: int
    engines: Sequence[Score]
    left_out: int


def scores_of(document: Any) -> Scores:
    """Return the view of the scores of a prompt.

    Args:
        document: of `/v1/score`.
    """
    prompt, found = document["prompt_tokens"], document["engines"]
    engines = [_score(each, prompt) for each in found[:_MAX_SHOWN]]
    return Scores(_headline(document, engines), prompt, engines, len(found) - len(engines))


def _headline(document: Any, engines: Sequence[Score]) -> str:
    stored, prompt = document["storage_tokens"], document["prompt_tokens"]
    in_storages = f"{count(stored)} of {count(prompt)} tokens lie in storages"
    if not engines:
        return f"No engine reports, so there is none to choose; {in_storages}."
    if document["engines"][0]["score"] <= 0:
        return f"No engine saves anything: each computes the whole prompt; {in_storages}."
    return f"{engines[0].name} serves it best and saves {engines[0].saved}; {in_storages}."


def _score(engine: Any, prompt: int) -> Score:
    shares = list(_shares(engine, prompt))
    return Score(
        name=engine["engine"] + (f", rank {engine['rank']}" if engine["rank"] else ""),
        shares=shares,
        load=_time(engine["load_seconds"]),
        compute=_time(engine["compute_seconds"]),
        saved=_time(engine["score"]),
        note=_note(engine, prompt, shares[-1].tokens),
        is_complete=engine["is_complete"],
    )


def _shares(engine: Any, prompt: int) -> Iterator[Share]:
    first = 0
    for name, label, field in _SHARES:  # each count includes the memories before it
        yield Share(name, label, first, engine[field] - first)
        first = engine[field]
    yield Share("computed", "computed", first, max(0, prompt - first))


def _note(engine: Any, prompt: int, absent: int) -> str:
    """Return that an engine computes tokens rather than to load them, which the seconds of the estimate imply."""
    compute = engine["compute_seconds"]
    whole = compute + engine["load_seconds"] + engine["score"]  # seconds to compute the whole prompt
    more = round(prompt * compute / whole) - absent if whole > 0 else 0
    return f"It computes {count(more)} more of them, since loading them takes longer." if more > 0 else ""


def _time(seconds: float) -> str:
    return duration(seconds) if seconds else "0 s"


# The page. The instance is part of the address, also of the form's: so the table goes on with its updates.

_PATH: Final = "/console/residency"


async def _show(visit: Visit) -> Response:
    return await _page(visit, "tokens", "")


async def _ask(visit: Visit) -> Response:
    form, instance = await visit.form(), _instance(visit)
    text, kind = form.get("numbers", ""), "keys" if form.get("kind") == "keys" else "tokens"
    if not instance:
        return await _page(visit, kind, text, faults={"instance": "Name an instance."})
    try:
        numbers = await asyncio.to_thread(numbers_in, text, are_tokens=kind == "tokens")
    except NumbersError as error:
        return await _page(visit, kind, text, faults={"numbers": str(error)})
    prompt = {"token_ids": numbers} if kind == "tokens" else {"block_keys": list(map(str, numbers))}
    try:
        answer = await visit.send("POST", "/v1/score", {"instance_id": instance, **prompt})
    except RefusedError as error:
        if error.status not in {400, 404}:
            raise
        field = "instance" if error.status == 404 else "numbers"
        return await _page(visit, kind, text, faults={field: f"{error.detail}."})
    return await _page(visit, kind, text, scores=scores_of(answer.document))


def _instance(visit: Visit) -> str:
    return visit.query("instance").strip()


async def _page(visit: Visit, kind: str, text: str, **found: Any) -> Response:
    instance = _instance(visit)
    context = {"scores": None, "faults": {}, **found}
    residency = None
    if instance and "instance" not in context["faults"]:
        try:
            residency = await visit.get(f"/v1/instances/{encode_name(instance)}/residency")
        except RefusedError as error:
            if error.status != 404:
                raise
            context["faults"] = {"instance": f"{error.detail}."}
    engines = engine_views(residency["reporters"]) if residency is not None else []
    return visit.page(
        "residency.html",
        400 if context["faults"] else 200,
        instance=instance,
        instances=await instance_names(visit),
        query=urlencode({"instance": instance}),
        residency=residency,
        engines=engines[:_MAX_SHOWN],
        left_out=max(0, len(engines) - _MAX_SHOWN),
        kind=kind,
        numbers=text,
        **context,
    )


ROUTES: Final[Routes] = (
    ("GET", _PATH, _show),
    ("POST", _PATH, _ask),
)
