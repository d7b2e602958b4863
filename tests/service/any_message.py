"""Any message of the contract, for property tests."""

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.floats(allow_nan=False),
    FieldDescriptor.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_FIXED64: st.integers(0, 2**64 - 1),
    FieldDescriptor.TYPE_STRING: st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
}


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.message_type:
        single = messages(field.message_type)
    elif field.enum_type:
        single = st.sampled_from([*field.enum_type.values_by_number, 4242])
    else:
        single = SCALARS[field.type]
    return st.lists(single, max_size=3) if field.is_repeated else single


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor) -> Message:
    """Any message of that type: each field set or not, at most one member of a oneof."""
    chosen: dict[str, Any] = {}
    oneofs: set[str] = set()
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if draw(st.booleans()) and not (oneof and oneof.name in oneofs):
            chosen[field.name] = draw(values(field))
            oneofs |= {oneof.name} if oneof else set()
    return GetMessageClass(descriptor)(**chosen)
