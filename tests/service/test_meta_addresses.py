"""The addresses that StartWriteCache hands out (wire.md 8, decisions 1 and 12): form, names, packing."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from test_transport_sites import Site, unique


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
