"""Values of the classes of the model, all fields at random."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

__all__ = ["model_values"]


def model_values(kind: Any, plain: Mapping[object, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Draw values of a class of the model.

    Args:
        plain: what numbers and texts are drawn from, by type.
    """
    if kind is NoneType:
        return st.none()
    if kind in plain:
        return plain[kind]
    if isinstance(kind, UnionType):
        return st.one_of(*(model_values(each, plain) for each in get_args(kind)))
    if get_origin(kind) is tuple:
        return st.lists(model_values(get_args(kind)[0], plain), max_size=2).map(tuple)
    if issubclass(kind, IntEnum):
        return st.sampled_from(list(kind))
    return st.builds(kind, **{name: model_values(hint, plain) for name, hint in get_type_hints(kind).items()})
