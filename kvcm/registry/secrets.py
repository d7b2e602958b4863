"""Secrets in configured values: left out where a value leaves the manager, put back where it returns.

What may hold one: every text of a storage's spec, the store's uri of a group, and the free texts of groups and models.
In these a login before an `@` of an address, and the value of anything that is called a password, a secret, a token or
a key, become `HIDDEN`. A login goes as a whole: the user's name alone may be a token. Too much may be left out, never
too little of an address. Names and paths hold no secrets and are left as they are: values are known by them.

Engines set free texts and everybody reads them, so every pattern takes time in proportion to the text: a repeated part
is never tried again with less of it (`*+`), or is found from where the text or a word begins.

A value that comes back gets its secrets from the one of its name that is configured, if the texts agree otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Instance
from kvcm.model.storages import StorageConfig

__all__ = ["HIDDEN", "redacted", "redacted_text", "restored"]

HIDDEN = "<redacted>"

Value = TypeVar("Value")

# A login may itself hold slashes and blanks, and more of what else it is made of; in a free text it ends where the word
# does. Without a scheme it begins with the text, or the word: data sources are named user:password@host.
_LOGIN = re.compile(r"(?s)\A((?:[\w+.-]*+:?//)?+).*@")
_LOGIN_IN_TEXT = re.compile(r"""(?<![^\s"'])(?:([^\s"':@/]*+:?//)|(?=[^\s"']*?(?::|//)))[^\s"']*@""")
_NAMED = re.compile(
    r"""(?isx) (?<![\w-])
    ( (?= [\w-]*? (?: passw | passphrase | (?<![^\W_]) pass (?![^\W_]) | pwd | secret | token | credential | signature
                    | (?:api|access|account|private) [_-]? key ) )
      [\w-]++ [\\"']*+ \s*+ (?: [=:] | %3[ad] ) \s*+
    | bearer \s++ )
    (?: \\++["'] .*? (?: \\["'] | \Z )
      | "(?:\\.|[^"\\])*+"? | '(?:\\.|[^'\\])*+'? | \[[^\]]*+\]? | \{[^}]*+\}?
      | [^\s&;,"'{}]++ )"""
)
_ADDRESS = "cache_config.meta_indexer_config.meta_storage_backend_config.storage_uri"
_PLACES: Mapping[type[Any], tuple[str, ...]] = {
    InstanceGroup: (_ADDRESS, "user_data"),
    Instance: ("model_deployment.extra", "model_deployment.user_data"),
}
_PLAIN = {"root_path", "mountpoint", "root_dir", "node_id"}  # of specs
_FREE_TEXTS = {"user_data", "extra"}


def redacted(value: Value) -> Value:
    """Return a configured value without its secrets; doing so twice changes nothing."""
    for place in _places(value):
        text = _text(value, place)
        hidden = _hidden(place, text)
        if hidden != text:  # nearly never
            value = _with(value, place, hidden)
    return value


def redacted_text(text: str) -> str:
    """Return a text of any kind without the secrets that it names."""
    return _without(_LOGIN_IN_TEXT, text)


def restored(value: Value, known: Value | None) -> Value:
    """Return a value with the secrets that were left out of it.

    Args:
        value: as somebody sent it.
        known: the configured value of that name, None for none.

    Raises:
        InvalidArgumentError: a text lacks a secret, and the configured value has none that fits.
    """
    for place in _places(value):
        text = _text(value, place)
        if HIDDEN in text:
            present = _text(known, place) if known is not None and place in _places(known) else ""
            if _hidden(place, present) != text:
                raise _missing(value, place)
            value = _with(value, place, present)
    return value


def _missing(value: object, place: str) -> InvalidArgumentError:
    if isinstance(value, StorageConfig):
        place = place.replace("spec", type(value.spec).__name__, 1)
    reason = (
        f"lacks a secret, {HIDDEN} stands in its place, and the configured value has no text equal but for that: "
        "write the secret there"
    )
    return InvalidArgumentError(f"{place} {reason}", f"{type(value).__name__}.{place}", reason)


def _places(value: object) -> tuple[str, ...]:
    if isinstance(value, StorageConfig):
        spec = value.spec
        names = (each.name for each in fields(spec) if each.name not in _PLAIN)
        return tuple(f"spec.{name}" for name in names if isinstance(getattr(spec, name), str))
    return _PLACES.get(type(value), ())


def _hidden(place: str, text: str) -> str:
    return _without(_LOGIN_IN_TEXT if place.rpartition(".")[2] in _FREE_TEXTS else _LOGIN, text)


def _without(login: re.Pattern[str], text: str) -> str:
    """Hide logins and named values, both as they are in the text: either may look like a part of the other."""
    spans = [(max(found.end(1), found.start()), found.end() - 1) for found in login.finditer(text)]
    spans += [(found.end(1), found.end()) for found in _NAMED.finditer(text)]
    left, done = "", 0
    for start, end in sorted(spans):
        if start >= done:
            left += text[done:start] + HIDDEN
        done = max(done, end)
    left += text[done:]
    return left if left == text else _without(login, left)  # the rest may look like a login only now


def _text(value: Any, place: str) -> str:
    for name in place.split("."):
        value = getattr(value, name)
    return str(value)


def _with(value: Any, place: str, text: str) -> Any:
    name, _, below = place.partition(".")
    return replace(value, **{name: _with(getattr(value, name), below, text) if below else text})
