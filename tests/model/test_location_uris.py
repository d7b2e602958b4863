"""Location uris: printed and read as wire.md 8 has them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.uri import LocationUri

FIXED = settings(max_examples=250, deadline=None, derandomize=True)
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
def test_what_is_printed_reads_back(uri: LocationUri) -> None:
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
        "file",
        "file://",
        "file://s",
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
        "file://s/f?size=1.5",
        "file://s/f?size=1_000",
        "file://s/f?size= 1",
        "file://s/f?size=0x10",
        "file://s/f?size=\u0661",
        "file://s/f?size=\u00b2",
        "file://s/f?size=abc",
        "file://s/f?blkid=&size=1",
        "file://s/f?blkid=-1&size=1",
        "file://s/f?blkid=x&size=1",
    ],
)
def test_what_is_no_uri_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match="uri"):
        LocationUri.parse(text)


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    """Python itself refuses to convert so many digits, with an error of another kind."""
    with pytest.raises(InvalidArgumentError, match="size"):
        LocationUri.parse(f"file://s/f?size={'9' * 5000}")


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
