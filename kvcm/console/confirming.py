"""Asking again before something is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from starlette.responses import Response

from kvcm.console.resources import RefusedError
from kvcm.console.visits import Visit

__all__ = ["Question", "answered", "asked", "confirmed_routes"]

_Handler = Callable[[Visit], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked before something is done.

    Attributes:
        title: what is to be done, to what.
        consequences: what will happen, a sentence each.
        button: what doing it is called.
        back: path of the page to go back to.
        name: to be typed, so that nobody does it by accident; "" for nothing.
        is_grave: whether something is lost by it.
    """

    title: str
    consequences: Sequence[str]
    button: str
    back: str
    name: str = ""
    is_grave: bool = True


async def asked(visit: Visit, question: Question, fault: str = "", status: int = 200) -> Response:
    """Return the page that asks. Its form goes to the path that it was asked at."""
    return visit.page("confirm.html", status, question=question, fault=fault)


async def answered(visit: Visit, question: Question, act: Callable[[], Awaitable[Response]]) -> Response:
    """Do what was asked, if the name was typed; otherwise, or where it is refused, ask again and say why."""
    if question.name and (await visit.form()).get("name", "") != question.name:
        return await asked(visit, question, f"What was typed is not the name {question.name}.", 400)
    try:
        return await act()
    except RefusedError as error:
        if error.status == 401:
            raise
        return await asked(visit, question, error.detail, error.status)


def confirmed_routes(
    path: str, question: Callable[[Visit], Awaitable[Question]], act: _Handler
) -> list[tuple[str, str, _Handler]]:
    """Return the routes of something that is done only when it was confirmed.

    Args:
        path: of both.
        question: what is asked first; raises RefusedError where there is nothing to do it to.
        act: does it.
    """

    async def ask(visit: Visit) -> Response:
        return await asked(visit, await question(visit))

    async def answer(visit: Visit) -> Response:
        return await answered(visit, await question(visit), lambda: act(visit))

    return [("GET", path, ask), ("POST", path, answer)]
