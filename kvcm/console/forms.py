"""Forms: their fields, the values that were entered, their errors, and confirmation pages.

A field of a form is a field of a resource's document. The entered values become that document; an error of the
resource is shown beside the field that it names.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from starlette.responses import Response

from kvcm.console.resources import RefusedError
from kvcm.console.visits import Handler, Routes, Visit
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.units import parse_duration, parse_size

__all__ = [
    "Entry",
    "Field",
    "Kind",
    "Question",
    "Sheet",
    "confirmation_page",
    "confirmed",
    "confirmed_routes",
    "exact_size",
]

Kind = Literal["text", "password", "integer", "size", "span", "percent", "check", "choice", "several"]
"""The input of a field: `span` is a duration, `several` are choices of which any number may be selected."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a form.

    Attributes:
        name: path of the field in the document, as in `nfs.root_path`.
        label: its name for people.
        hint: its purpose and allowed values.
        kind: its input. An empty field is left out of the document.
        is_required: whether it must not be empty.
        choices: values with their labels.
        initial: its first value.
        completion: the attribute `autocomplete`.
    """

    name: str
    label: str
    hint: str = ""
    kind: Kind = "text"
    is_required: bool = False
    choices: Sequence[tuple[str, str]] = ()
    initial: str = ""
    completion: str = "off"


@dataclass(frozen=True, slots=True)
class Entry:
    """A field with its value and error.

    Attributes:
        field: the field.
        value: its value; one line per value if it has several.
        fault: its error, "" for none.
    """

    field: Field
    value: str
    fault: str

    @property
    def values(self) -> Sequence[str]:
        """The selected values of a field that may have several."""
        return self.value.split("\n") if self.value else ()


@dataclass(frozen=True, slots=True)
class Sheet:
    """A form with values.

    Attributes:
        fields: in order.
        values: by the name of the field.
        faults: errors by the name of the field.
        fault: error of no field.
    """

    fields: Sequence[Field]
    values: Mapping[str, str]
    faults: Mapping[str, str] = field(default_factory=dict)
    fault: str = ""

    @classmethod
    def blank(cls, fields: Sequence[Field]) -> Sheet:
        """Return a form with initial values."""
        return cls(fields, {each.name: each.initial for each in fields})

    @classmethod
    def filled(cls, fields: Sequence[Field], form: Mapping[str, str]) -> Sheet:
        """Return a form with the submitted values."""
        return cls(fields, {each.name: form.get(each.name, "") for each in fields})

    @property
    def entries(self) -> list[Entry]:
        """Its fields in order, without the values of passwords."""
        return [
            Entry(each, "" if each.kind == "password" else self.values[each.name], self.faults.get(each.name, ""))
            for each in self.fields
        ]

    def document(self) -> dict[str, Any]:
        """Return the values as a document.

        Raises:
            RefusedError: a required value is missing, or a number, size or duration is malformed.
        """
        made: dict[str, Any] = {}
        wrong: list[dict[str, str]] = []
        for each in self.fields:
            text = self.values[each.name] if each.kind == "password" else self.values[each.name].strip()
            if not text and each.is_required:
                wrong.append({"field": each.name, "allowed": "must not be empty"})
            if not text and each.kind not in {"check", "several"}:
                continue
            try:
                _put(made, each.name.split("."), _READ[each.kind](text))
            except (ValueError, InvalidArgumentError) as error:
                wrong.append({"field": each.name, "allowed": str(error)})
        if wrong:
            raise RefusedError(400, {"detail": f"{wrong[0]['field']}: {wrong[0]['allowed']}", "errors": wrong})
        return made

    def refused(self, error: RefusedError) -> Sheet:
        """Return the form with the errors of a resource.

        Raises:
            RefusedError: the same, if the credentials are not valid.
        """
        if error.status == 401:
            raise error
        names = [each.name for each in self.fields]
        found = {name: _plain(each.allowed) for each in error.faults if (name := _named(each.field, names))}
        if found:
            return replace(self, faults=found)
        text = _plain(error.detail)
        name = next(iter(_mentioned(text, names)), "")
        return replace(self, faults={name: text}) if name else replace(self, fault=text)


def exact_size(size_bytes: int) -> str:
    """Return a size that parses to the same value: `64 GiB`, or plain bytes; "" for a negative one."""
    if size_bytes < 0:
        return ""
    for base, suffix in ((1024, "iB"), (1000, "B")):
        for power, letter in reversed(list(enumerate("KMGTP", start=1))):
            if size_bytes and size_bytes % base**power == 0:
                return f"{size_bytes // base**power} {letter}{suffix}"
    return str(size_bytes)


def _integer(text: str) -> int:
    if re.fullmatch(r"-?[0-9]{1,19}", text, re.ASCII) is None:
        raise ValueError(f"{text[:40]!r} is no whole number")
    return int(text)


def _percent(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?) ?%?", text, re.ASCII)
    if found is None:
        raise ValueError(f"{text[:40]!r} is no percentage, as in 90")
    return float(found[1]) / 100


_READ: Final[Mapping[Kind, Callable[[str], Any]]] = {
    "text": str,
    "password": str,
    "integer": _integer,
    "size": parse_size,
    "span": parse_duration,
    "percent": _percent,
    "check": bool,
    "choice": str,
    "several": lambda text: text.split("\n") if text else [],
}


def _put(document: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for step in path[:-1]:
        document = document.setdefault(step, {})
    document[path[-1]] = value


def _named(path: str, names: Iterable[str]) -> str:
    """Return the field that contains the path of an error, "" for none."""
    inside = re.sub(r"\[[0-9]+\]", "", path.removeprefix("path."))
    return next((name for name in names if inside == name or inside.startswith(f"{name}.")), "")


def _mentioned(text: str, names: Iterable[str]) -> list[str]:
    """Return the fields that a sentence names, in the order of the sentence."""
    places = {name: re.search(rf"(?<![\w-]){re.escape(name.split('.')[-1])}(?![\w-])", text) for name in names}
    return sorted((name for name, found in places.items() if found), key=lambda name: places[name].start())  # type: ignore[union-attr]


_REWORDED: Final = {
    r"missing or invalid fields: .*?}: (.*)": r"\1",
    r"(?:String|List) should have at least 1 .*": "must not be empty",
    r"String should have at most (\d+) characters?": r"must have \1 characters at most",
    r"String should match pattern .*": "has characters that are not allowed, or too many of them",
    r"Input should be a valid integer.*": "must be a whole number",
    r"Input should be (greater|less) than (or equal to )?(.*)": r"must be \1 than \2\3",
}


def _plain(text: str) -> str:
    """Return an error without the phrases of pydantic and the transport."""
    for pattern, words in _REWORDED.items():
        if found := re.fullmatch(pattern, text, re.DOTALL):
            return found.expand(words)
    return text


# Confirmation of changes that lose something.


@dataclass(frozen=True, slots=True)
class Question:
    """A question before a change.

    Attributes:
        title: the change and its subject.
        consequences: one sentence each.
        button: label of the button.
        back: path of the page for "no".
        name: to be typed, against accidents; "" for nothing.
        is_grave: whether the change loses something.
    """

    title: str
    consequences: Sequence[str]
    button: str
    back: str
    name: str = ""
    is_grave: bool = True


async def confirmation_page(visit: Visit, question: Question, fault: str = "", status: int = 200) -> Response:
    """Return the page with a question. Its form is posted to the page's own path."""
    return visit.page("confirm.html", status, question=question, fault=fault)


async def confirmed(visit: Visit, question: Question, act: Callable[[], Awaitable[Response]]) -> Response:
    """Act if the name was typed; otherwise, or if the change is refused, show the question again with the error."""
    if question.name and (await visit.form()).get("name", "") != question.name:
        return await confirmation_page(
            visit=visit, question=question, fault=f"The name that was typed is not {question.name}.", status=400
        )
    try:
        return await act()
    except RefusedError as error:
        if error.status == 401:
            raise
        return await confirmation_page(visit, question, error.detail, error.status)


def confirmed_routes(path: str, question: Callable[[Visit], Awaitable[Question]], act: Handler) -> Routes:
    """Return the routes of a change that needs a confirmation.

    Args:
        path: of both routes.
        question: returns the question; raises RefusedError if the subject does not exist.
        act: makes the change.
    """

    async def ask(visit: Visit) -> Response:
        return await confirmation_page(visit, await question(visit))

    async def answer(visit: Visit) -> Response:
        return await confirmed(visit, await question(visit), lambda: act(visit))

    return [("GET", path, ask), ("POST", path, answer)]
