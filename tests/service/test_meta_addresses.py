"""The addresses that StartWriteCache hands out (wire.md 8, decisions 1 and 12): form, names, packing."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

import pytest
from test_transport_sites import Site, specs, unique

BOTH_PARTS = [{"name": "tp0", "size": 16}, {"name": "tp1", "size": 16}]


class Uri(NamedTuple):
    """The parts of a location uri that tests look at."""

    text: str

    @property
    def path(self) -> str:
        return urlsplit(self.text).path

    @property
    def params(self) -> list[tuple[str, str]]:
        return parse_qsl(urlsplit(self.text).query)

    @property
    def blkid(self) -> int:
        return int(dict(self.params)["blkid"])


def _started(site: Site, keys: list[int], per_file: int, infos: list[dict[str, object]]) -> list[dict[str, Uri]]:
    storage = site.storage(dummy={"root_path": "root", "key_count_per_file": per_file})
    instance = site.instance(site.group(storage), location_spec_infos=infos)
    locations = site.start(instance, keys).locations
    return [{name: Uri(uri) for name, uri in specs(location).items()} for location in locations]


@pytest.mark.parametrize("per_file", [1, 0, -3])
def test_unpacked_parts_have_a_file_of_their_own_and_no_blkid(site: Site, per_file: int) -> None:
    found = _started(site, [1, -1], per_file, BOTH_PARTS)
    uris = [uri for location in found for uri in location.values()]
    assert len({uri.path for uri in uris}) == 4
    assert {tuple(uri.params) for uri in uris} == {(("size", "16"),)}
    assert "/tp1/ffffffffffffffff." in found[1]["tp1"].path


def test_parts_of_equal_size_are_packed_in_one_list_spec_by_spec(site: Site) -> None:
    """The example of wire.md 8: 6 keys × 2 specs, 8 parts per file."""
    found = _started(site, [1, 2, 3, 4, 5, 6], 8, BOTH_PARTS)
    assert [location["tp0"].blkid for location in found] == [0, 1, 2, 3, 4, 5]
    assert [location["tp1"].blkid for location in found] == [6, 7, 0, 1, 2, 3]
    first = found[0]["tp0"].path
    assert "/tp0/1_" in first
    assert {location["tp0"].path for location in found} == {first}
    second = found[2]["tp1"].path
    assert [location["tp1"].path for location in found] == [first, first, second, second, second, second]
    assert "/tp1/3_" in second


def test_parts_of_different_sizes_never_share_a_file(site: Site) -> None:
    infos: list[dict[str, object]] = [{"name": "large", "size": 16}, {"name": "small", "size": 4}]
    found = _started(site, [1, 2, 3], 8, infos)
    assert [location["large"].params for location in found] == [[("blkid", str(i)), ("size", "16")] for i in range(3)]
    assert [location["small"].params for location in found] == [[("blkid", str(i)), ("size", "4")] for i in range(3)]
    assert {location["large"].path for location in found}.isdisjoint(location["small"].path for location in found)


def test_a_packed_file_of_one_part_has_its_plain_name_and_blkid_0(site: Site) -> None:
    (found,) = _started(site, [0xAB], 8, [{"name": "kv", "size": 16}])
    assert found["kv"].params == [("blkid", "0"), ("size", "16")]
    assert "/kv/ab." in found["kv"].path


def test_files_never_span_two_writes_invariant_5(site: Site) -> None:
    storage = site.storage(dummy={"root_path": "root", "key_count_per_file": 8})
    instance = site.instance(site.group(storage))
    paths = [Uri(specs(site.start(instance, [key]).locations[0])["kv"]).path for key in range(5)]
    assert len(set(paths)) == 5


def test_every_location_of_a_block_has_a_name_of_its_own_decision_1(site: Site) -> None:
    instance = site.instance()
    names = {site.write(instance, [1], min_replica_count=count)[0]["kv"] for count in range(1, 6)}
    site.api.ok("RemoveCache", instance_id=instance, block_keys=[1])
    names.add(site.write(instance, [1])[0]["kv"])
    assert len(names) == 6


def test_the_uri_names_kind_storage_cluster_instance_spec_and_key(site: Site) -> None:
    storage = site.storage(dummy={"root_path": "/root/", "key_count_per_file": 1})
    instance = unique("a b")
    group = site.group(storage)
    fields = {"instance_id": instance, "instance_group": group, "model_deployment": {"model_name": "m", "dtype": "d"}}
    site.api.ok("RegisterInstance", location_spec_infos=[{"name": "k/v", "size": 2**40}], **fields)
    (uris,) = site.write(instance, [255])
    uri = Uri(uris["k/v"])
    assert uri.text.startswith(f"dummy://{storage}/root/")
    cluster, encoded, spec, name = uri.path.removeprefix("/root/").split("/")
    assert (bool(cluster), encoded, spec, name.partition(".")[0]) == (True, instance.replace(" ", "%20"), "k%2Fv", "ff")
    assert uri.params == [("size", str(2**40))]


def test_a_part_of_0_bytes_has_an_address_too(site: Site) -> None:
    (found,) = _started(site, [1], 1, [{"name": "kv", "size": 0}])
    assert found["kv"].params == [("size", "0")]
