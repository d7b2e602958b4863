"""The hand-written encoding of locations is that of protobuf."""

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvcm.model.chunks import encode_chunks
from kvcm.model.locations import (
    DecodedLocation,
    SpecUri,
    decode_chunk,
    encode_chunk,
    retag,
    retag_all,
    uris_of,
    with_checksums,
)
from kvcm.model.storages import StorageType
from kvcm.protocol import meta_service_pb2 as meta

FIXED = settings(max_examples=200, deadline=None, derandomize=True)
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(["", "a" * 127, "a" * 128, "鍵" * 43, "u" * 16384, "\x00"]),
)
CHECKSUMS = st.one_of(st.sampled_from([0, 0, 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
SPECS = st.lists(st.builds(SpecUri, TEXTS, TEXTS, CHECKSUMS), max_size=5)
TYPES = st.sampled_from(list(StorageType))
SIZES = st.one_of(st.integers(0, 300), st.just(2**31 - 1))

REPEATED_LOCATIONS: list[FieldDescriptor] = [
    field
    for message in meta.DESCRIPTOR.message_types_by_name.values()
    for field in message.fields
    if field.message_type is meta.CacheLocation.DESCRIPTOR and field.is_repeated
]


def location(storage_type: StorageType, spec_size: int, specs: list[SpecUri]) -> meta.CacheLocation:
    """The message that a chunk stands for; only a location with one part has a checksum of its own."""
    messages = [meta.LocationSpec(name=name, uri=uri, checksum=checksum) for name, uri, checksum in specs]
    checksum = specs[-1].checksum if specs and spec_size == 1 else 0
    signed = checksum - (1 << 64) if checksum >> 63 else checksum
    return meta.CacheLocation(type=int(storage_type), spec_size=spec_size, location_specs=messages, checksum=signed)


@FIXED
@given(storage_type=TYPES, spec_size=SIZES, specs=SPECS)
@example(storage_type=StorageType.ST_UNSPECIFIED, spec_size=0, specs=[])
def test_a_chunk_is_what_protobuf_writes(storage_type: StorageType, spec_size: int, specs: list[SpecUri]) -> None:
    answer = meta.GetCacheLocationResponse(locations=[location(storage_type, spec_size, specs)])
    assert encode_chunk(storage_type, spec_size, specs) == answer.SerializeToString()


@FIXED
@given(storage_type=TYPES, names=st.lists(TEXTS, min_size=1, max_size=3), data=st.data())
def test_many_chunks_at_once_are_what_each_is(storage_type: StorageType, names: list[str], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(*(TEXTS for _ in names)), max_size=4))
    columns = [[row[i] for row in rows] for i in range(len(names))]
    each = [encode_chunk(storage_type, len(names), list(map(SpecUri, names, row))) for row in rows]
    assert encode_chunks(storage_type, names, columns) == each


@FIXED
@given(storage_type=TYPES, spec_size=SIZES, specs=SPECS)
def test_decoding_gives_back_what_was_encoded(storage_type: StorageType, spec_size: int, specs: list[SpecUri]) -> None:
    decoded = decode_chunk(encode_chunk(storage_type, spec_size, iter(specs)))
    assert decoded == DecodedLocation(storage_type, spec_size, tuple(specs))
    assert isinstance(decoded.storage_type, StorageType)


@FIXED
@given(storage_type=TYPES, spec_size=SIZES, specs=SPECS)
def test_uris_are_those_of_the_specs(storage_type: StorageType, spec_size: int, specs: list[SpecUri]) -> None:
    assert uris_of(encode_chunk(storage_type, spec_size, specs)) == [spec.uri for spec in specs]


@FIXED
@given(storage_type=TYPES, spec_size=SIZES, specs=SPECS)
def test_decoding_reads_what_protobuf_wrote(storage_type: StorageType, spec_size: int, specs: list[SpecUri]) -> None:
    answer = meta.GetCacheLocationResponse(locations=[location(storage_type, spec_size, specs)])
    assert decode_chunk(answer.SerializeToString()) == DecodedLocation(storage_type, spec_size, tuple(specs))


@FIXED
@given(storage_type=TYPES, spec_size=st.one_of(st.just(1), SIZES), specs=SPECS, told=st.data())
def test_checksums_of_some_specs_are_put_into_a_chunk_that_has_none(
    storage_type: StorageType, spec_size: int, specs: list[SpecUri], told: st.DataObject
) -> None:
    names = [spec.name for spec in specs]
    checksums = told.draw(st.dictionaries(st.sampled_from([*names, "unknown"]), CHECKSUMS))
    without = encode_chunk(storage_type, spec_size, [spec._replace(checksum=0) for spec in specs])
    expected = [spec._replace(checksum=checksums.get(spec.name, 0)) for spec in specs]
    assert with_checksums(without, checksums) == encode_chunk(storage_type, spec_size, expected)


@FIXED
@given(chunks=st.lists(st.tuples(TYPES, SIZES, SPECS), max_size=5))
def test_joined_chunks_are_an_answer(chunks: list[tuple[StorageType, int, list[SpecUri]]]) -> None:
    answer = meta.GetCacheLocationResponse.FromString(b"".join(encode_chunk(*chunk) for chunk in chunks))
    assert list(answer.locations) == [location(*chunk) for chunk in chunks]


def test_several_answers_carry_locations() -> None:
    assert len(REPEATED_LOCATIONS) >= 3


@pytest.mark.parametrize("field", REPEATED_LOCATIONS, ids=lambda field: field.containing_type.name)
@FIXED
@given(storage_type=TYPES, spec_size=SIZES, specs=SPECS)
def test_retag_moves_a_chunk_to_the_field_of_another_answer(
    field: FieldDescriptor, storage_type: StorageType, spec_size: int, specs: list[SpecUri]
) -> None:
    answer = GetMessageClass(field.containing_type)(**{field.name: [location(storage_type, spec_size, specs)]})
    chunk = encode_chunk(storage_type, spec_size, specs)
    assert retag(chunk, field.number) == answer.SerializeToString()
    assert retag_all([chunk, chunk], field.number) == [answer.SerializeToString()] * 2
    assert decode_chunk(retag(chunk, field.number)) == decode_chunk(chunk)
