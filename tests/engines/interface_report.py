"""Reports the interface of an installed engine; runs in the engine's environment.

    interface_report.py REQUEST ANSWER

REQUEST is a JSON file with names of `classes`, `module:object.attribute`, and pairs `overrides` of a class of ours and
the one that it extends. ANSWER gets, by name, the attributes, and for each pair the parameters of the methods that both
have. What cannot be found is null.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any


def report(request: dict[str, Any]) -> dict[str, Any]:
    """Answer a request."""
    return {
        "classes": {name: _found(name) for name in request["classes"]},
        "overrides": {f"{ours} {theirs}": overrides(ours, theirs) for ours, theirs in request["overrides"]},
    }


def parameters(function: Any) -> str:
    """Return the parameters without types; a default is `=…`."""
    signature = inspect.signature(function)
    plain = [
        parameter.replace(
            annotation=parameter.empty, default=parameter.default if _is_required(parameter) else _DEFAULT
        )
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty)).replace(" = ", "=")


def attributes(owner: type) -> list[str]:
    """Return fields, annotations, members and whatever methods of the class assign to itself."""
    found = set(dir(owner))
    for base in owner.__mro__:
        found |= set(inspect.get_annotations(base))
        if base is not object:
            found |= set(re.findall(r"\bself\.(\w+)\b[^=\n(]*=[^=]", _source(base)))
    if dataclasses.is_dataclass(owner):
        found |= {field.name for field in dataclasses.fields(owner)}
    return sorted(name for name in found if not name.startswith("__"))


def overrides(ours: str, theirs: str) -> dict[str, list[str]] | None:
    """Return the parameters of each method of ours that the engine calls through its own class, and those of that."""
    try:
        our_class, their_class = _resolved(ours), _resolved(theirs)
    except (ImportError, AttributeError):
        return None
    both = {name: (getattr(our_class, name), getattr(their_class, name, None)) for name in vars(our_class)}
    return {
        name: [parameters(own), parameters(inherited)]
        for name, (own, inherited) in both.items()
        if inspect.isroutine(own) and inspect.isroutine(inherited) and name not in vars(object)
    }


class _Default:
    def __repr__(self) -> str:
        return "…"


_DEFAULT = _Default()


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty


def _source(owner: type) -> str:
    try:
        return inspect.getsource(owner)
    except (OSError, TypeError):
        return ""


def _found(name: str) -> list[str] | None:
    try:
        return attributes(_resolved(name))
    except (ImportError, AttributeError):
        return None


def _resolved(name: str) -> Any:
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(report(json.loads(Path(sys.argv[1]).read_text()))))
