"""Locations: how they are encoded, their uris, and names in their paths."""

from __future__ import annotations

from itertools import product

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.model import locations
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.storages import StorageType
from kvcm.model.uri import LocationUri, check_name, check_storage_name, path_component
from kvcm.protocol import meta_service_pb2 as meta

# ── Location encoding ──


FIXED = settings(max_examples=examples(200))
TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
    st.sampled_from(["", "a" * 127, "a" * 128, "鍵" * 43, "u" * 16384, "\x00"]),
)
CHECKSUMS = st.one_of(st.sampled_from([0, 0, 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
SPECS = st.lists(st.builds(locations.SpecUri, TEXTS, TEXTS, CHECKSUMS), max_size=5)
TYPES = st.sampled_from(list(StorageType))
KINDS = st.sampled_from([each for each in StorageType if each])  # of locations that are no placeholders
HASHES = st.one_of(st.sampled_from([0, 0, 1, -1, 127, 128, -(2**63), 2**63 - 1]), st.integers(-(2**63), 2**63 - 1))
SIZES = st.one_of(st.integers(0, 300), st.just(2**31 - 1))

REPEATED_LOCATIONS: list[FieldDescriptor] = [
    field
    for message in meta.DESCRIPTOR.message_types_by_name.values()
    for field in message.fields
    if field.message_type is meta.CacheLocation.DESCRIPTOR and field.is_repeated
]


def location(storage_type: StorageType, spec_size: int, specs: list[locations.SpecUri]) -> meta.CacheLocation:
    """The message that a chunk stands for; only a location with one part has a checksum of its own."""
    messages = [meta.LocationSpec(name=name, uri=uri, checksum=checksum) for name, uri, checksum in specs]
    checksum = specs[-1].checksum if specs and spec_size == 1 else 0
    signed = checksum - (1 << 64) if checksum >> 63 else checksum
    return meta.CacheLocation(type=int(storage_type), spec_size=spec_size, location_specs=messages, checksum=signed)


@FIXED
@given(storage_type=TYPES, spec_size=SIZES, specs=SPECS)
@example(storage_type=StorageType.ST_UNSPECIFIED, spec_size=0, specs=[])
def test_a_chunk_equals_protobuf_and_reads_back(
    storage_type: StorageType, spec_size: int, specs: list[locations.SpecUri]
) -> None:
    answer = meta.GetCacheLocationResponse(locations=[location(storage_type, spec_size, specs)])
    chunk = locations.encode_chunk(storage_type, spec_size, iter(specs))
    assert chunk == answer.SerializeToString()
    decoded = locations.decode_chunk(chunk)
    assert decoded == locations.DecodedLocation(storage_type, spec_size, tuple(specs))
    assert isinstance(decoded.storage_type, StorageType)
    assert locations.uris_of(chunk) == [spec.uri for spec in specs]


@FIXED
@given(storage_type=TYPES, names=st.lists(TEXTS, min_size=1, max_size=3), data=st.data())
def test_many_chunks_equal_single_ones(storage_type: StorageType, names: list[str], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(*(TEXTS for _ in names)), max_size=4))
    columns = [[row[i] for row in rows] for i in range(len(names))]
    each = [locations.encode_chunk(storage_type, len(names), list(map(locations.SpecUri, names, row))) for row in rows]
    assert locations.encode_chunks(storage_type, names, columns) == each


@FIXED
@given(storage_type=TYPES, spec_size=st.one_of(st.just(1), SIZES), specs=SPECS, reported=st.data())
def test_checksums_of_some_specs_are_put_into_a_chunk_that_has_none(
    storage_type: StorageType, spec_size: int, specs: list[locations.SpecUri], reported: st.DataObject
) -> None:
    names = [spec.name for spec in specs]
    checksums = reported.draw(st.dictionaries(st.sampled_from([*names, "unknown"]), CHECKSUMS))
    without = locations.encode_chunk(storage_type, spec_size, [spec._replace(checksum=0) for spec in specs])
    expected = [spec._replace(checksum=checksums.get(spec.name, 0)) for spec in specs]
    assert locations.with_checksums(without, checksums) == locations.encode_chunk(storage_type, spec_size, expected)


# ── Event hashes ──


def parsed(chunk: bytes) -> meta.CacheLocation:
    (message,) = meta.GetCacheLocationResponse.FromString(chunk).locations
    return message


def as_one_byte_tags(chunk: bytes) -> dict[int, list[int | bytes]]:
    """The fields as the release before reads them: every tag is one byte, and behind it is a spec or a varint."""
    found: dict[int, list[int | bytes]] = {}
    _, position = locations.read_varint(chunk, 1)
    while position < len(chunk):
        tag = chunk[position]
        value, position = locations.read_varint(chunk, position + 1)
        if tag == 0x1A:
            found.setdefault(tag, []).append(chunk[position : position + value])
            position += value
        else:
            found.setdefault(tag, []).append(value)
    assert position == len(chunk)
    return found


@FIXED
@given(kind=KINDS, spec_size=SIZES, specs=SPECS, event_hash=HASHES)
def test_a_chunk_with_an_event_hash_is_the_message_of_protobuf_and_reads_back(
    kind: StorageType, spec_size: int, specs: list[locations.SpecUri], event_hash: int
) -> None:
    chunk = locations.encode_chunk(kind, spec_size, iter(specs), event_hash)
    expected = location(kind, spec_size, specs)
    expected.event_hash = event_hash
    assert parsed(chunk) == expected
    assert locations.decode_chunk(chunk) == locations.DecodedLocation(kind, spec_size, tuple(specs), event_hash)
    assert locations.event_hash_of(chunk) == event_hash
    assert locations.uris_of(chunk) == [spec.uri for spec in specs]
    # In the protobuf's own order, as another program may write it, it reads the same.
    own = meta.GetCacheLocationResponse(locations=[expected]).SerializeToString()
    assert locations.decode_chunk(own) == locations.decode_chunk(chunk)


@FIXED
@given(kind=KINDS, spec_size=SIZES, specs=SPECS, event_hash=HASHES)
def test_the_release_before_skips_event_hashes(
    kind: StorageType, spec_size: int, specs: list[locations.SpecUri], event_hash: int
) -> None:
    """It may work on the same store: its scanners find the same type, number and specs, and it goes on behind them."""
    without = as_one_byte_tags(locations.encode_chunk(kind, spec_size, specs))
    chunk = locations.encode_chunk(kind, spec_size, specs, event_hash)
    found = as_one_byte_tags(chunk)
    assert {tag: found[tag] for tag in without} == without
    assert not found.keys() & {0x10, 0x1A, 0x20} - without.keys()
    _, begin = locations.read_varint(chunk, 1)
    assert chunk[begin : begin + 2] == bytes((8, kind)), "connectors take the second byte for the type"


@FIXED
@given(kind=KINDS, spec_size=st.one_of(st.just(1), SIZES), specs=SPECS, event_hash=HASHES, reported=st.data())
def test_checksums_are_put_into_a_chunk_with_an_event_hash(
    kind: StorageType,
    spec_size: int,
    specs: list[locations.SpecUri],
    event_hash: int,
    reported: st.DataObject,
) -> None:
    names = [spec.name for spec in specs]
    checksums = reported.draw(st.dictionaries(st.sampled_from([*names, "unknown"]), CHECKSUMS))
    without = locations.encode_chunk(kind, spec_size, [spec._replace(checksum=0) for spec in specs], event_hash)
    expected = [spec._replace(checksum=checksums.get(spec.name, 0)) for spec in specs]
    whole = locations.encode_chunk(kind, spec_size, expected, event_hash)
    assert locations.with_checksums(without, checksums) == whole


LONG_TEXTS = st.one_of(TEXTS, st.integers(90, 140).map(lambda length: "u" * length))  # lengths of one, two, three bytes


@FIXED
@given(
    kind=KINDS,
    names=st.lists(TEXTS, min_size=1, max_size=3, unique=True),
    copies=st.sampled_from([1, 1, 20]),
    data=st.data(),
)
def test_event_hashes_of_many_chunks_are_those_of_single_ones(
    kind: StorageType, names: list[str], copies: int, data: st.DataObject
) -> None:
    """Few and many, of any lengths, with and without hashes among them."""
    rows = copies * data.draw(st.lists(st.tuples(HASHES, *(LONG_TEXTS for _ in names)), max_size=4))
    hashes, columns = [row[0] for row in rows], [[row[i + 1] for row in rows] for i in range(len(names))]
    specs = [list(map(locations.SpecUri, names, row[1:])) for row in rows]
    single = [
        locations.encode_chunk(kind, len(names), each, event_hash)
        for each, event_hash in zip(specs, hashes, strict=True)
    ]
    fresh = locations.encode_chunks(kind, names, columns)
    assert locations.with_event_hashes(fresh, hashes) == single
    assert locations.event_hashes_of(single) == hashes
    assert locations.event_hashes_of(fresh) == [0] * len(rows)
    assert locations.event_hashes_of([*fresh, *single]) == [*([0] * len(rows)), *hashes]
    assert locations.event_hashes_of(locations.retag_all(single, 4)) == hashes


@given(storage_type=TYPES, spec_size=SIZES, specs=SPECS)
def test_any_location_without_an_event_hash_has_none(
    storage_type: StorageType, spec_size: int, specs: list[locations.SpecUri]
) -> None:
    chunk = locations.encode_chunk(storage_type, spec_size, specs)
    assert locations.event_hashes_of([chunk] * 20) == [locations.event_hash_of(chunk)] * 20 == [0] * 20


def test_bytes_of_a_uri_are_not_taken_for_an_event_hash() -> None:
    """Nor a length, nor a number: they stand elsewhere, or behind another byte."""
    for chunk in (
        b"\x12\x12" + b"\x08\x04" + b"\x1a\x0e\x0a\x0c" + b"\xc0\x3e" + bytes(10),
        b"\x12\x12" + b"\x10\xc0\x3e" + b"\x1a\x0d" + b"\x0a\x0b" + bytes(11),
        b"\x12\x80\x01" + b"\x08\x04" + b"\x1a\x7c" + b"\x0a\x7a" + bytes(122),
    ):
        assert locations.event_hash_of(chunk) == 0
        assert locations.event_hashes_of([chunk] * 20) == [0] * 20


def test_several_answers_carry_locations() -> None:
    assert len(REPEATED_LOCATIONS) >= 3


@pytest.mark.parametrize("field", REPEATED_LOCATIONS, ids=lambda field: field.containing_type.name)
@FIXED
@given(storage_type=TYPES, spec_size=SIZES, specs=SPECS)
def test_retag_moves_a_chunk_to_the_field_of_another_answer(
    field: FieldDescriptor, storage_type: StorageType, spec_size: int, specs: list[locations.SpecUri]
) -> None:
    answer = GetMessageClass(field.containing_type)(**{field.name: [location(storage_type, spec_size, specs)]})
    chunk = locations.encode_chunk(storage_type, spec_size, specs)
    assert locations.retag(chunk, field.number) == answer.SerializeToString()
    assert locations.retag_all([chunk, chunk], field.number) == [answer.SerializeToString()] * 2
    assert locations.decode_chunk(locations.retag(chunk, field.number)) == locations.decode_chunk(chunk)


# ── Location uris ──


NAMES = st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True)
PATHS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="?"), max_size=30).map(
    lambda path: f"/{path}"
)
OBJECT_KEYS = st.from_regex(r"[A-Za-z0-9%._/=~-]{1,30}", fullmatch=True)
URIS = st.builds(
    LocationUri,
    scheme=st.sampled_from(["file", "hf3fs", "mooncake", "pace", "dummy"]),
    storage=NAMES,
    path=PATHS,
    size=st.integers(0, 2**64),
    blkid=st.one_of(st.none(), st.integers(0, 10_000)),
    key=st.one_of(st.none(), OBJECT_KEYS),
    node_id=st.none(),
    range_id=st.none(),
    location_id=st.one_of(st.none(), st.from_regex(r"[0-9A-Za-z]{1,16}", fullmatch=True)),
) | st.builds(
    LocationUri,
    scheme=st.just("pace"),
    storage=NAMES,
    path=st.integers(0, 2**50).map(lambda offset: f"/{offset}"),
    size=st.integers(0, 2**64),
    blkid=st.none(),
    key=st.none(),
    node_id=NAMES,
    range_id=st.integers(0, 2**64 - 1),
    location_id=st.none(),
)


@FIXED
@given(uri=URIS)
def test_printed_uris_read_back(uri: LocationUri) -> None:
    assert LocationUri.parse(str(uri)) == uri


@FIXED
@given(uri=URIS)
def test_params_are_sorted_by_name(uri: LocationUri) -> None:
    names = [param.partition("=")[0] for param in str(uri).rpartition("?")[2].split("&")]
    assert names == sorted(names)
    assert "size" in names
    assert ("blkid" in names, "key" in names) == (uri.blkid is not None, uri.key is not None)


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("mooncake://mc/?key=i/tp0/1&size=1024", LocationUri("mooncake", "mc", "/", 1024, key="i/tp0/1")),
        ("file://nfs_01/r/i/tp0/1_ab?blkid=7&size=512", LocationUri("file", "nfs_01", "/r/i/tp0/1_ab", 512, blkid=7)),
        ("hf3fs://fs/m/r/f.aa?size=0", LocationUri("hf3fs", "fs", "/m/r/f.aa", 0)),
        ("file://s//double//slash?size=1", LocationUri("file", "s", "//double//slash", 1)),
    ],
)
def test_uris_as_the_manager_prints_them(text: str, uri: LocationUri) -> None:
    assert LocationUri.parse(text) == uri
    assert str(uri) == text


@pytest.mark.parametrize(("blkid", "offset"), [(None, 0), (0, 0), (1, 100), (7, 700)])
def test_the_offset_is_that_of_the_slot(blkid: int | None, offset: int) -> None:
    assert LocationUri("file", "s", "/f", 100, blkid).offset == offset


@pytest.mark.parametrize(
    "text",
    [
        "",
        "file://s/f",
        "://s/f?size=1",
        "file:///f?size=1",
        "file://s?size=1",
        "file:/s/f?size=1",
        "file://s/f?",
        "file://s/f?blkid=1",
        "file://s/f?size",
        "file://s/f?size=",
        "file://s/f?size=-1",
        "file://s/f?size=+1",
        "file://s/f?size=1_000",
        "file://s/f?size= 1",
        "file://s/f?size=\u0661",
        "file://s/f?size=\u00b2",
        "file://s/f?blkid=&size=1",
        "file://s/f?blkid=-1&size=1",
        f"file://s/f?size={'9' * 5000}",  # Python itself does not convert so many digits
    ],
    ids=range(19),
)
def test_text_that_is_no_uri_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="uri"):
        LocationUri.parse(text)


@FIXED
@given(text=st.text(max_size=40))
def test_any_text_is_a_uri_or_is_refused(text: str) -> None:
    for candidate in (text, f"file://{text}", f"file://s/{text}?size=1", f"file://s/f?{text}"):
        try:
            uri = LocationUri.parse(candidate)
        except InvalidArgumentError:
            continue
        assert uri.size >= 0
        assert uri.path.startswith("/")


@FIXED
@given(uri=URIS, objects=st.lists(st.tuples(st.sampled_from(["a", "b/c_2", "%3F"]), st.integers(0, 20)), max_size=4))
def test_uris_of_objects_differ_in_name_and_slot_only(uri: LocationUri, objects: list[tuple[str, int]]) -> None:
    directory = LocationUri(uri.scheme, uri.storage, uri.path, uri.size)
    names, counts = [name for name, _ in objects], [count for _, count in objects]
    slots = [directory._replace(path=uri.path + name, blkid=slot) for name, count in objects for slot in range(count)]
    assert directory.below(names, counts) == list(map(str, slots))
    assert directory.below(names) == [str(directory._replace(path=uri.path + name)) for name in names]


# ── Names in paths ──


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300)
ALPHABET = "./%~aA2e_- \\é鍵"


def big_sample() -> list[str]:
    """Every short name over an ugly alphabet, and long ones that differ at their start, middle, end and length."""
    short = ["".join(letters) for length in (1, 2, 3, 4) for letters in product(ALPHABET, repeat=length)]
    long = [
        f"{'x' * before}{letter}{'x' * after}"
        for letter in "ay/%."
        for before, after in ((0, 240), (120, 120), (240, 0))
    ]
    return [*short, *long, *("n" * length for length in range(1, 257)), *("鍵" * length for length in range(1, 86))]


def test_distinct_names_have_distinct_components() -> None:
    names = set(big_sample())
    assert len(names) > 40_000
    components = {path_component(name) for name in names}
    assert len(components) == len(names)


@pytest.mark.parametrize("long", ["model/" * 40, "model-" * 40])
def test_a_component_is_never_taken_for_that_of_a_longer_name(long: str) -> None:
    """The component of a long name is itself an allowed name; it must not share a directory with the long one."""
    component = path_component(long)
    check_name("instance_id", component)
    assert path_component(component) != component


@FIXED
@given(name=ANY_TEXT)
def test_a_component_never_leaves_its_directory(name: str) -> None:
    component = path_component(name)
    assert component not in {"", ".", ".."}
    assert not set("/\\?#&=\x00 ") & set(component)
    assert component.isascii()
    assert component.isprintable()
    assert len(component) <= 200


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("chat", "chat"),
        ("Qwen/Qwen3-8B", "Qwen%2FQwen3-8B"),
        (".", "%2E"),
        ("..", "%2E%2E"),
        ("...", "..."),
        (".hidden", ".hidden"),
        ("%2E", "%252E"),
        ("a b", "a%20b"),
        ("é", "%C3%A9"),
        ("x" * 200, "x" * 200),
    ],
)
def test_components_by_example(name: str, component: str) -> None:
    assert path_component(name) == component


@pytest.mark.parametrize("name", ["x" * 201, "鍵" * 85, "/" * 67])
def test_a_long_name_is_cut_and_ends_in_a_hash(name: str) -> None:
    component = path_component(name)
    assert len(component) == 200
    _, tilde, digest = component.rpartition("~")
    assert tilde
    assert len(digest) == 16
    assert int(digest, 16) >= 0
    assert path_component(name + "y") != component


@pytest.mark.parametrize("name", ["a", "x" * 256, "鍵" * 85, "Qwen/Qwen3-8B", "..", " ", "\u2028", "🙂" * 64])
def test_good_names_pass(name: str) -> None:
    check_name("field", name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "0 bytes"),
        ("x" * 257, "257 bytes"),
        ("鍵" * 86, "258 bytes"),
        ("a\nb", "control"),
        ("\x00", "control"),
        ("\x7f", "control"),
        ("\x85", "control"),
        ("\ud800", "UTF-8"),
    ],
)
def test_bad_names_are_refused_with_their_field_and_reason(name: str, why: str) -> None:
    with pytest.raises(InvalidArgumentError, match=why) as refusal:
        check_name("instance_id", name)
    assert "instance_id" in str(refusal.value)


@pytest.mark.parametrize("name", ["a", "nfs_01", "A.b-C_9", "x" * 128, "..", "-"])
def test_good_storage_names_pass(name: str) -> None:
    check_storage_name("field", name)


@pytest.mark.parametrize("name", ["", "x" * 129, "a b", "a/b", "a:1", "a@b", "é", "a?", "a\n", "\n", "a%20"])
def test_storage_names_that_cannot_be_the_host_of_a_uri_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="global_unique_name"):
        check_storage_name("global_unique_name", name)
