"""Names that users choose, and what they become in paths (design.md decision 12)."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.names import check_name, check_storage_name, path_component

FIXED = settings(max_examples=300, deadline=None, derandomize=True)
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
