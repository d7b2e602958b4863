"""The index API over HTTP: the documented examples in JSON and msgpack, permissions, and hostile requests."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rest_client import RestAnswer, RestClient
from secured import Tenants
from test_residency_cases import GPU, HOST, change, packed, report
from test_transport_drivers import Api
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site, unique
from thoroughness import examples

from kvcm.model.key_schemes import SGLANG_SHA256, VLLM_SHA256_CBOR, KeyScheme, block_hashes, block_keys, vllm_root
from kvcm.model.keys import block_keys_from_tokens
from kvcm.service.access import INDEX_PATHS

DISK = "MEDIUM_DISK"
TOKENS = list(range(1, 65))
BLOCK_TOKENS = 16
MSGPACK = "application/msgpack"
PROFILE = {"strategy": "vllm_v1", "algorithm": "sha256_cbor", "python_hash_seed": "0", "index_projection": "low64_be"}


class Index:
    """A client of the index API.

    Args:
        address: of an HTTP port.
        encoding: of bodies.
        authorization: of its requests, "" for none.
    """

    def __init__(self, address: str, encoding: str = "application/json", authorization: str = "") -> None:
        self.rest = RestClient(address)
        self.encoding = encoding
        self.authorization = authorization

    def ask(self, method: str, path: str, content: Any = None, **headers: str) -> tuple[int, Any]:
        """Return status and content of the answer, which has the encoding of the request."""
        sent = {"authorization": self.authorization} if self.authorization else {}
        body = None
        if content is not None:
            is_json = self.encoding == "application/json"
            body = json.dumps(content).encode() if is_json else msgspec.msgpack.encode(content)
            sent["content_type"] = self.encoding
        else:
            sent["accept"] = self.encoding
        answer = self.rest.ask(method, path, body, **sent | headers)
        assert answer.headers["content-type"] == self.encoding, answer
        return answer.status, decoded(answer)

    def post(self, path: str, **content: Any) -> tuple[int, Any]:
        """POST fields."""
        return self.ask("POST", path, content)

    def get(self, path: str) -> tuple[int, Any]:
        """GET a list."""
        return self.ask("GET", path)


def decoded(answer: RestAnswer) -> Any:
    """Return the content of an answer."""
    return msgspec.msgpack.decode(answer.raw) if answer.headers["content-type"] == MSGPACK else json.loads(answer.raw)


@pytest.fixture(params=["http", "admin_http"])
def port(request: pytest.FixtureRequest, server: ManagerProcess) -> str:
    """The address of each HTTP port."""
    found: str = getattr(server.address, request.param)
    return found


@pytest.fixture
def address(server: ManagerProcess) -> str:
    """The address of the data port."""
    return server.address.http


@pytest.fixture(params=["application/json", MSGPACK])
def index(request: pytest.FixtureRequest, address: str) -> Iterator[Index]:
    """A client with each encoding."""
    made = Index(address, request.param)
    with contextlib.closing(made.rest.connection):
        yield made


def deployment(model: str, **more: Any) -> dict[str, Any]:
    """Return the fields of a model."""
    return {"model_name": model, "dtype": "bf16", **more}


def worked_example(api: Api, **changes: Any) -> tuple[str, str, Site]:
    """Register a model of which rank 0 holds two blocks on the GPU, one in host memory and one on disk."""
    site, model = Site(api), unique("model")
    instance = site.instance(
        changes.pop("group", None), block_size=BLOCK_TOKENS, model_deployment=deployment(model, **changes)
    )
    keys = block_keys_from_tokens(TOKENS, BLOCK_TOKENS)
    media = [change(GPU, keys[:2]), change(HOST, keys[2:3]), change(DISK, keys[3:])]
    api.ok("ResidencyService.ReportResidency", **report(instance, "e:1", changes=media, key_scheme=kvcm_scheme()))
    return model, instance, site


def kvcm_scheme() -> dict[str, Any]:
    """Return our own scheme."""
    return {"algorithm": "kvcm", "block_tokens": BLOCK_TOKENS}


ENTRY = {
    "longest_matched": 64,
    "gpu": 32,
    "dp": {"0": 32},
    "cpu": 48,
    "disk": 64,
    "storage": 0,
    "rank_matches": {"0": {"gpu": 32, "cpu": 48, "disk": 64}},
}


def test_the_worked_example_in_every_dialect(api: Api, index: Index) -> None:
    model, _, _ = worked_example(api)
    query = {"model": model, "token_ids": TOKENS, "block_size": 16}
    assert index.post("/query", **query) == (200, {"instances": {"e:1": ENTRY}})
    rfc = {"longest_matched": 64, "GPU": 32, "DP": {"0": 32}, "CPU": 16, "DISK": 16, "STORAGE": 0}
    assert index.ask("POST", "/query?dialect=january", query) == (200, {"data": {"e:1": rfc}})
    assert index.ask("POST", "/query?dialect=spring", query) == (200, {"default": {"e:1": rfc}})
    status, found = index.post("/query", model_name=model, token_ids=TOKENS)
    (worker,) = found["instances"]
    assert status == 200
    assert found == {
        "scores": {worker: {"0": 32}},
        "frequencies": [1, 1],
        "instances": {worker: {name: value for name, value in ENTRY.items() if name != "rank_matches"}},
    }
    assert {w["name"]: str(w["instance_id"]) for w in index.get(f"/workers?model_name={model}")[1]} == {"e:1": worker}


def test_both_ports_answer(api: Api, port: str) -> None:
    model, _, _ = worked_example(api)
    with contextlib.closing((found := Index(port)).rest.connection):
        assert found.post("/query", model=model, token_ids=TOKENS, block_size=16)[1]["instances"]["e:1"] == ENTRY


def test_tokens_as_bytes(api: Api, address: str) -> None:
    model, _, _ = worked_example(api)
    with contextlib.closing((index := Index(address, MSGPACK)).rest.connection):
        body = struct.pack(f"<{len(TOKENS)}i", *TOKENS)
        status, found = index.post("/query", model=model, token_ids=body, block_size=16)
        assert (status, found["instances"]["e:1"]) == (200, ENTRY)


def test_what_storages_hold_counts_as_disk_and_by_itself(api: Api, index: Index) -> None:
    site, model = Site(api), unique("model")
    instance = site.instance(block_size=16, model_deployment=deployment(model))
    keys = block_keys_from_tokens(TOKENS, 16)
    site.write(instance, keys[:3])
    changes = [change(GPU, keys[:1])]
    api.ok("ResidencyService.ReportResidency", **report(instance, "e:1", changes=changes, key_scheme=kvcm_scheme()))
    _, found = index.post("/query", model=model, token_ids=TOKENS, block_size=16)
    entry = found["instances"]["e:1"]
    assert [entry[name] for name in ("gpu", "cpu", "disk", "storage", "longest_matched")] == [16, 16, 48, 48, 48]


def test_a_query_names_a_model_or_an_instance_and_may_narrow_it(api: Api, index: Index) -> None:
    model, instance, site = worked_example(api)
    other = site.instance(block_size=16, model_deployment=deployment(model))
    keys = block_keys_from_tokens(TOKENS, 16)
    api.ok(
        "ResidencyService.ReportResidency",
        **report(other, "f:1", rank=2, changes=[change(GPU, keys[:3])], key_scheme=kvcm_scheme()),
    )

    def matched(**more: Any) -> dict[str, int]:
        status, found = index.post("/query", **{"model": model, "token_ids": TOKENS, "block_size": 16} | more)
        assert status == 200, found
        return {engine: entry["longest_matched"] for engine, entry in found["instances"].items()}

    assert matched() == matched(tenant_id="default") == {"e:1": 64, "f:1": 48}
    assert matched(model=instance) == {"e:1": 64}
    assert matched(instance_id="f:1") == {"f:1": 48}
    assert matched(token_ids=[*TOKENS[:16], 99, *TOKENS[17:]]) == {"e:1": 16, "f:1": 16}
    assert matched(token_ids=[]) == matched(token_ids=TOKENS[:15]) == {"e:1": 0, "f:1": 0}
    for unknown in (
        {"block_size": 32}, {"tenant_id": "nobody"}, {"routing_group": "nobody"}, {"lora_name": "l"}, {"lora_id": 0},
        {"model": "nobody"}, {"instance_id": "nobody"},
    ):  # fmt: skip
        assert matched(**unknown) == {}, unknown
    assert matched(cache_salt="s") == {"e:1": 0, "f:1": 0}, "our own keys have no salt: nothing matches"


def test_a_tenant_is_an_instance_group(api: Api, index: Index) -> None:
    group = Site(api).group()
    model, _, _ = worked_example(api, group=group)
    for name in ("tenant_id", "routing_group"):
        query = {"model": model, "token_ids": TOKENS, "block_size": 16, name: group}
        assert index.post("/query", **query) == (200, {"instances": {"e:1": ENTRY}})
    assert group in index.ask("POST", "/query?dialect=spring", query)[1]


def test_an_adapter_is_that_of_the_registration(api: Api, index: Index) -> None:
    model, _, _ = worked_example(api, lora_name="sql")
    query = {"model": model, "token_ids": TOKENS, "block_size": 16}
    assert index.post("/query", **query)[1] == {"instances": {}}
    assert index.post("/query", **query, lora_name="sql")[1] == {"instances": {"e:1": ENTRY}}


def engine_of(api: Api, scheme: KeyScheme, keys: Sequence[int], model: str = "", engine: str = "e:1") -> str:
    """Register a model and report blocks of an engine's scheme; return the model."""
    model = model or unique("model")
    instance = Site(api).instance(block_size=4, model_deployment=deployment(model))
    sent = {"algorithm": scheme.algorithm, "root": scheme.root, "mask": scheme.mask, "block_tokens": 4}
    changes = [{"medium": GPU, "added_keys": packed(keys)}]
    api.ok("ResidencyService.ReportResidency", **report(instance, engine, changes=changes, key_scheme=sent))
    return model


def matched_of(index: Index, path: str = "/query", **query: Any) -> int:
    """Return the tokens that the only engine holds."""
    status, found = index.post(path, block_size=4, **query)
    assert status == 200, found
    count: int = found["instances"]["e:1"]["gpu"]
    return count


def test_blocks_of_vllm_match_by_tokens_and_salt(api: Api, index: Index) -> None:
    """The prompt of Conductor's golden vector: block size 4, tokens 1 to 8, seed "0", sha256_cbor."""
    scheme = KeyScheme(VLLM_SHA256_CBOR, vllm_root(VLLM_SHA256_CBOR, "0"), 0x77, 4)
    tokens = list(range(1, 9))
    ends = [int.from_bytes(each[-8:], "big") for each in block_hashes(scheme, tokens)]
    assert ends == [2164874634404590027, 17270480062156288726]
    model = engine_of(api, scheme, [*block_keys(scheme, tokens), *block_keys(scheme, tokens[:4], "s")])
    assert matched_of(index, model=model, token_ids=tokens) == 8
    assert matched_of(index, model=model, token_ids=tokens, cache_salt="s") == 4
    assert matched_of(index, model=model, token_ids=tokens, cache_salt="t") == 0
    assert matched_of(index, "/query_by_hash", model=model, seq_hashes=ends) == 0, "no bits join them (wire_later 5.3)"
    assert matched_of(index, "/query_by_hash", model=model, seq_hashes=block_keys(scheme, tokens)) == 8


def test_instances_of_one_model_with_keys_of_their_own_are_matched_each(api: Api, index: Index) -> None:
    tokens, root = list(range(1, 13)), vllm_root(VLLM_SHA256_CBOR, "0")
    schemes = [
        KeyScheme(VLLM_SHA256_CBOR, root, 0, 4),
        KeyScheme(VLLM_SHA256_CBOR, root, -(2**63), 4),
        KeyScheme(VLLM_SHA256_CBOR, vllm_root(VLLM_SHA256_CBOR, "1"), 5, 4),
        KeyScheme(SGLANG_SHA256, b"", 2**63 - 1, 4),
    ]
    model = unique("model")
    for number, scheme in enumerate(schemes):
        engine_of(api, scheme, block_keys(scheme, tokens)[: number % 3 + 1], model, f"e:{number}")
    _, found = index.post("/query", model=model, token_ids=tokens, block_size=4)
    assert {engine: entry["gpu"] for engine, entry in found["instances"].items()} == {
        "e:0": 4,
        "e:1": 8,
        "e:2": 12,
        "e:3": 4,
    }


def test_blocks_of_sglang_match_by_the_hashes_of_its_events(api: Api, index: Index) -> None:
    scheme, tokens = KeyScheme(SGLANG_SHA256, b"", -0x1234567, 4), list(range(1, 13))
    model = engine_of(api, scheme, block_keys(scheme, tokens[:8]))
    hashes = [int.from_bytes(each[:8], "big", signed=True) for each in block_hashes(scheme, tokens)]
    unsigned = [each % (1 << 64) for each in hashes]
    for seq_hashes in (hashes, unsigned, [str(each) for each in unsigned]):
        assert matched_of(index, "/query_by_hash", model=model, seq_hashes=seq_hashes) == 8
    assert matched_of(index, "/query_by_hash", model=model, block_hash=hashes) == 8
    assert matched_of(index, "/query_by_hash", model=model, seq_hashes=hashes, cache_salt="s") == 0
    assert matched_of(index, "/query_by_hash", model=model, seq_hashes=[]) == 0


def test_local_hashes_are_refused(index: Index) -> None:
    status, found = index.post("/query_by_hash", model_name="m", block_hashes=[1, 2])
    assert (status, found["field"]) == (400, "block_hashes")
    assert "seq_hashes" in found["error"]


def test_an_unknown_model_is_empty_for_conductor_and_404_for_dynamo(index: Index) -> None:
    assert index.post("/query", model="nobody", token_ids=[1], block_size=4) == (200, {"instances": {}})
    status, found = index.post("/query", model_name="nobody", token_ids=[1])
    assert (status, list(found)) == (404, ["error"])
    assert "nobody" in found["error"]


# Registrations.


def registration(group: str, **changes: Any) -> dict[str, Any]:
    """Return the fields of a registration of Conductor."""
    model = changes.pop("modelname", None) or unique("model")
    fields = {"endpoint": "tcp://10.0.0.1:5557", "type": "vLLM", "modelname": model, "tenant_id": group}
    return fields | {"instance_id": "engine-a", "block_size": 16, "dp_rank": 0, "hash_profile": PROFILE} | changes


def test_a_publisher_is_registered_listed_and_removed(api: Api, index: Index) -> None:
    group = Site(api).group()
    fields = registration(group)
    made = 200, {"status": "registered successfully", "instance_id": "engine-a"}
    assert index.post("/register", **fields) == made
    assert index.post("/register", **fields, unknown=1) == made, "the same again"
    status, found = index.get(f"/services?tenant_id={group}")
    assert (status, found["count"]) == (200, 1)
    (service,) = found["services"]
    root = vllm_root(VLLM_SHA256_CBOR, "0").hex()
    assert service["Problem"].startswith("no instance is registered")
    assert service | {"Problem": ""} == {
        "Endpoint": "tcp://10.0.0.1:5557",
        "ReplayEndpoint": "",
        "Type": "vLLM",
        "ModelName": fields["modelname"],
        "LoraName": "",
        "TenantID": group,
        "InstanceID": "engine-a",
        "BlockSize": 16,
        "DPRank": 0,
        "CacheGroup": None,
        "HashProfile": PROFILE | {"root_digest": root},
        "KvcmInstance": "",
        "State": "pending",
        "Problem": "",
    }
    zero = ENTRY | {"longest_matched": 0, "gpu": 0, "dp": {"0": 0}, "cpu": 0, "disk": 0}
    zero["rank_matches"] = {"0": {"gpu": 0, "cpu": 0, "disk": 0}}
    query = {"model": fields["modelname"], "token_ids": TOKENS, "block_size": 16}
    assert index.post("/query", **query) == (200, {"instances": {"engine-a": zero}}), "registered ranks are listed"
    _, view = index.get(f"/global_view?tenant_id={group}")
    assert view == {
        "context_count": 1,
        "contexts": [
            {
                "model_name": fields["modelname"],
                "lora_name": "",
                "block_size": 16,
                "tenant_id": group,
                "prefix_count": 0,
                "hash_profile": PROFILE | {"root_digest": root},
                "instances": {"engine-a": [0]},
            }
        ],
    }
    removed = {"status": "unregistered successfully", "removed_instances": [f"engine-a|{group}|0"]}
    leave = {"instance_id": "engine-a", "dp_rank": 0, "tenant_id": group}
    assert index.post("/unregister", **leave) == (200, removed)
    assert index.post("/unregister", **leave) == (200, removed | {"removed_instances": []})
    assert index.get(f"/services?tenant_id={group}")[1]["count"] == 0


def test_the_default_tenant_is_shown_as_such(index: Index) -> None:
    engine, port = unique("engine"), 5000 + len(index.encoding)
    fields = registration("default", instance_id=engine, endpoint=f"tcp://10.1.0.1:{port}")
    assert index.post("/register", **fields)[0] == 200
    removed = index.post("/unregister", instance_id=engine, dp_rank=0)
    assert removed == (200, {"status": "unregistered successfully", "removed_instances": [f"{engine}|default|0"]})


def test_a_removal_ends_registrations_of_one_group_alone(api: Api, index: Index) -> None:
    groups = [*(Site(api).group() for _ in range(2)), "default"]
    engine, model = unique("engine"), unique("model")
    for number, group in enumerate(groups):
        endpoint = f"tcp://10.3.{len(index.encoding)}.{number}:5557"
        fields = registration(group, instance_id=engine, modelname=model, endpoint=endpoint)
        assert index.post("/register", **fields)[0] == 200

    def left() -> list[str]:
        return [each["TenantID"] for each in index.get(f"/services?model_name={model}")[1]["services"]]

    assert sorted(left()) == sorted(groups)
    leave = {"instance_id": engine, "dp_rank": 0}
    _, found = index.post("/unregister", **leave, tenant_id="default")
    assert found["removed_instances"] == [f"{engine}|default|0"]
    assert index.post("/unregister", **leave)[1]["removed_instances"] == []
    _, found = index.post("/unregister", **leave, tenant_id=groups[0])
    assert found["removed_instances"] == [f"{engine}|{groups[0]}|0"]
    assert left() == [groups[1]]


def test_a_worker_of_dynamo(api: Api, index: Index) -> None:
    site, model = Site(api), unique("model")
    group = site.group()
    instance = site.instance(group, block_size=16, model_deployment=deployment(model))
    fields = {"instance_id": 7, "endpoint": "tcp://10.0.0.1:5557", "model_name": model, "block_size": 16}
    fields |= {"routing_group": group}
    assert index.post("/register", **fields) == (201, {"status": "ok"})
    assert index.post("/register", **fields, dp_rank=0) == (201, {"status": "ok"})
    second = fields | {"dp_rank": 1, "endpoint": "tcp://10.0.0.1:5558"}
    assert index.post("/register", **second) == (201, {"status": "ok"})
    for conflict in ({"endpoint": "tcp://10.0.0.1:1"}, {"instance_id": 8}, {"block_size": 32, "dp_rank": 2}):
        status, found = index.post("/register", **fields | conflict)
        assert (status, list(found)) == (409, ["error"]), conflict
    status, found = index.post("/register", **fields | {"endpoint": "ipc:///tmp/x", "dp_rank": 3})
    assert status == 400
    assert "tcp://host:port" in found["error"]

    def worker() -> Any:
        (found,) = index.get(f"/workers?routing_group={group}")[1]
        return found

    assert worker() == {
        "instance_id": 7,
        "name": "7",
        "source": "zmq",
        "status": "pending",
        "endpoints": {"0": fields["endpoint"], "1": second["endpoint"]},
        "listeners": {
            "0": {"endpoint": fields["endpoint"], "status": "pending"},
            "1": {"endpoint": second["endpoint"], "status": "pending"},
        },
    }
    keys = block_keys_from_tokens(TOKENS, 16)
    for rank in (0, 1):
        sent = report(instance, "7", rank=rank, changes=[change(GPU, keys[: rank + 1])], key_scheme=kvcm_scheme())
        api.ok("ResidencyService.ReportResidency", **sent)
    assert (worker()["status"], worker()["listeners"]["1"]["status"]) == ("active", "active")
    assert index.get(f"/services?tenant_id={group}")[1]["services"][0]["KvcmInstance"] == instance
    status, found = index.post("/query", model_name=model, token_ids=TOKENS, routing_group=group)
    assert (status, found["scores"], found["frequencies"]) == (200, {"7": {"0": 16, "1": 32}}, [2, 1])
    leave = {"instance_id": 7, "model_name": model, "routing_group": group}
    assert index.post("/unregister", **leave, dp_rank=1) == (200, {"status": "ok"})
    assert index.post("/unregister", **leave) == (200, {"status": "ok"})
    assert index.post("/unregister", **leave)[0] == 404
    assert worker()["source"] == "discovery", "it still reports"


def test_a_conflict_is_an_invalid_registration_for_conductor(api: Api, index: Index) -> None:
    group = Site(api).group()
    fields = registration(group)
    index.post("/register", **fields)
    for changes in ({"block_size": 32}, {"instance_id": "engine-b"}, {"tenant_id": "nobody"}, {"endpoint": "x"}):
        status, found = index.post("/register", **fields | changes)
        assert (status, found["reason"]) == (400, "invalid_registration"), changes
    assert index.get(f"/services?tenant_id={group}")[1]["count"] == 1


def test_a_setting_says_whose_answers_are_usual(tmp_path: Path) -> None:
    with manager(tmp_path / "manager", "kvcm.residency.query_dialect=spring") as process:
        index = Index(process.address.http)
        with process.api() as api:
            model, _, _ = worked_example(api)
        query = {"token_ids": TOKENS, "block_size": 16}
        assert list(index.post("/query", model=model, **query)[1]) == ["default"]
        assert "scores" in index.post("/query", model_name=model, **query)[1]
        assert "instances" in index.ask("POST", "/query?dialect=conductor", query | {"model": model})[1]
        index.rest.connection.close()


# Errors.


def test_errors_have_the_form_of_conductor(index: Index) -> None:
    status, found = index.post("/query", model="m", token_ids=[1, "2"], block_size=4)
    assert (status, found["reason"], found["field"], found["index"]) == (400, "invalid_type", "token_ids", 1)
    status, found = index.post("/query", model="m", block_size=4)
    assert (status, found["reason"], found["field"]) == (400, "missing", "token_ids")
    status, found = index.post("/register", endpoint="tcp://a:1")
    assert (status, found["reason"]) == (400, "missing")
    status, found = index.ask("POST", "/query?dialect=strange", {})
    assert (status, found["reason"], found["field"]) == (400, "out_of_range", "dialect")
    assert index.ask("PUT", "/query", {})[0] == 405
    assert index.get(f"/services?{'a=1&' * 17}")[0] == 400
    assert index.ask("POST", "/services", {})[0] == 405


@pytest.mark.parametrize("path", sorted(INDEX_PATHS - {"/services", "/workers", "/global_view"}))
def test_hostile_bodies(address: str, server: ManagerProcess, path: str) -> None:
    with contextlib.closing((rest := RestClient(address)).connection):
        deep = (b"[" * 200_000, b'{"a":' * 200_000, b'{"token_ids":[' + b"1," * 3_000_000)
        bodies = {
            "application/json": (b"", b"{", b"[]", b"\xff", *deep),
            MSGPACK: (b"", b"\xc1", b"\xdf\xff\xff\xff\xff", b"\x91" * 200_000, b"\xc6\xff\xff\xff\xff"),
        }
        for encoding, of_encoding in bodies.items():
            reason = "invalid_json" if encoding != MSGPACK else "invalid_msgpack"
            for body in of_encoding:
                answer = rest.ask("POST", path, body, content_type=encoding)
                assert (answer.status, decoded(answer)["reason"]) in {(400, reason), (400, "out_of_range")}, body[:20]
                assert len(answer.raw) < 1000
        for encoding in ("text/plain", ""):
            answer = rest.ask("POST", path, b"{}", content_type=encoding)
            assert (answer.status, answer.body["reason"]) == (400, "unsupported_content_type")
        large = rest.ask("POST", path, b" " * ((8 << 20) + 1))
        assert (large.status, list(large.body)) == (413, ["error"])
    assert server.events("failed") == []


def test_a_long_prompt_is_answered_and_a_longer_one_is_refused(api: Api, index: Index) -> None:
    model, _, _ = worked_example(api)
    query = {"model": model, "block_size": 16}
    status, found = index.post("/query", **query, token_ids=[*TOKENS, *range(100_000)])
    assert (status, found["instances"]["e:1"]["disk"]) == (200, 64)
    status, found = index.post("/query", **query, token_ids=[1] * ((1 << 20) + 1))
    assert (status, found["reason"]) == (400, "out_of_range")


@pytest.mark.parametrize(("method", "header"), [("GET", "accept_language"), ("POST", "origin"), ("GET", "origin")])
def test_requests_of_web_pages_are_refused(address: str, method: str, header: str) -> None:
    with contextlib.closing((index := Index(address)).rest.connection):
        path, content = ("/services", None) if method == "GET" else ("/register", {})
        assert index.ask(method, path, content, **{header: "de"})[0] == 403


_NAMES = (
    *("model", "model_name", "modelname", "token_ids", "seq_hashes", "block_hash", "block_hashes", "block_size"),
    *("lora_name", "lora_id", "cache_salt", "tenant_id", "routing_group", "instance_id", "dp_rank", "endpoint", "type"),
    *("replay_endpoint", "hash_profile", "cache_group", "additionalsalt", "strange"),
)
_LIKELY = ("", "m", "default", "vLLM", "tcp://a:1", "../x", "\0", "é" * 200, 0, 1, -1, 16, 2**31, 2**64 - 1, 0.5, None)
_values = st.recursive(
    st.sampled_from(_LIKELY) | st.text(max_size=8) | st.integers(-(2**63), 2**64 - 1) | st.booleans(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from(["/register", "/unregister", "/query", "/query_by_hash"]),
    dialect=st.sampled_from(["", "?dialect=january", "?dialect=spring", "?dialect=x", "?dialect=dynamo", "?a=b&&=%00"]),
    content=st.dictionaries(st.sampled_from(_NAMES), _values, max_size=12),
)
def test_any_fields_are_answered_or_refused(
    server: ManagerProcess, index: Index, path: str, dialect: str, content: dict[str, Any]
) -> None:
    status, found = index.ask("POST", path + dialect, content)
    assert status in {200, 201, 400, 404, 409, 507}, (content, found)
    assert status < 400 or found["error"]
    assert server.events("failed") == []


# Permissions.


@pytest.fixture
def clients(tenants: Tenants) -> Iterator[dict[str, Index]]:
    """A client for each key, and strangers."""
    address = tenants.server.process.address.http
    made = {name: Index(address, authorization=tenants.authorization(name)) for name in tenants.keys}
    made |= {"anonymous": Index(address), "malformed": Index(address, authorization="Bearer kvcm_x")}
    yield made
    for each in made.values():
        each.rest.connection.close()


_SCORING = {"score", "engine", "everywhere", "operator", "admin"}
_REPORTING = {"write", "engine", "everywhere", "operator", "admin"}


def test_only_keys_with_the_permission_open_a_path(tenants: Tenants, clients: dict[str, Index]) -> None:
    query = {"model": "m", "token_ids": [1, 2, 3, 4], "block_size": 4}
    leave = {"instance_id": "nobody", "dp_rank": 0}
    group = tenants.groups["a"]
    lists = _SCORING | _REPORTING | {"viewer"}
    table: dict[tuple[str, str], tuple[set[str], Any]] = {
        ("POST", "/query"): (_SCORING, query),
        ("POST", "/query_by_hash"): (_SCORING, query | {"seq_hashes": [1]}),
        ("POST", "/register"): (_REPORTING, registration(group)),
        ("POST", "/unregister"): (_REPORTING, leave | {"tenant_id": group}),
        ("GET", "/services"): (lists, None),
        ("GET", "/workers"): (lists, None),
        ("GET", "/global_view"): (lists, None),
    }
    assert {path for _, path in table} == INDEX_PATHS
    for (method, path), (may, content) in table.items():
        for name, client in clients.items():
            status, found = client.ask(method, path, content)
            # `foreign` has all verbs, in the group of b.
            is_own = name == "foreign" and "tenant_id" not in (content or {})
            expected = 401 if name in {"anonymous", "malformed", "expired"} else 200 if name in may or is_own else 403
            assert status == expected, (path, name, found)


@pytest.mark.parametrize(
    ("path", "name"), [("/query", "write"), ("/query_by_hash", "viewer"), ("/register", "score"), ("/unregister", "")]
)
def test_a_key_without_the_permission_is_refused_before_its_body_comes(tenants: Tenants, path: str, name: str) -> None:
    host, _, port = tenants.server.process.address.http.rpartition(":")
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {1 << 20}", "content-type: application/json"]
    lines += [f"authorization: {tenants.authorization(name)}"] if name else []
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        assert connection.recv(1 << 16).split()[1] == (b"403" if name else b"401")


def test_a_key_of_several_groups_names_the_one_of_a_removal(tenants: Tenants) -> None:
    key = tenants.server.engine(unique("engine-of-both"), *tenants.groups.values())
    address = tenants.server.process.address.http
    with contextlib.closing((index := Index(address, authorization=f"Bearer {key}")).rest.connection):
        model, engine = unique("model"), unique("engine")
        for number, group in enumerate(tenants.groups.values()):
            fields = registration(group, modelname=model, instance_id=engine, endpoint=f"tcp://10.4.0.{number}:1")
            assert index.post("/register", **fields)[0] == 200
        status, found = index.post("/unregister", instance_id=engine, dp_rank=0)
        assert (status, found["reason"]) == (400, "invalid_registration")
        assert "UnregisterPublisher.instance_group is empty" in found["error"]
        assert index.get(f"/services?model_name={model}")[1]["count"] == 2


def test_a_tenant_neither_asks_nor_registers_nor_lists_nor_removes_in_the_group_of_another(
    tenants: Tenants, clients: dict[str, Index]
) -> None:
    model = unique("model")
    keys = block_keys_from_tokens(TOKENS, 4)
    with tenants.server.api() as api:
        for name in ("a", "b"):
            instance = Site(api).instance(tenants.groups[name], model_deployment=deployment(model))
            changes = [change(GPU, keys)]
            scheme = {"algorithm": "kvcm", "block_tokens": 4}
            sent = report(instance, f"{name}:1", changes=changes, key_scheme=scheme)
            api.ok("ResidencyService.ReportResidency", **sent)
    query = {"model": model, "token_ids": TOKENS, "block_size": 4}
    own, foreign = clients["engine"], clients["foreign"]
    assert set(own.post("/query", **query)[1]["instances"]) == {"a:1"}
    assert set(foreign.post("/query", **query)[1]["instances"]) == {"b:1"}
    assert set(clients["everywhere"].post("/query", **query)[1]["instances"]) == {"a:1", "b:1"}
    assert own.post("/query", **query, tenant_id=tenants.groups["b"])[0] == 403

    fields = registration("default", modelname=model, endpoint="tcp://10.2.0.1:5557")
    assert own.post("/register", **fields)[0] == foreign.post("/register", **fields)[0] == 200, (
        "no tenant is in the way"
    )
    assert own.post("/register", **fields | {"tenant_id": tenants.groups["b"]})[0] == 403
    for client, group in ((own, tenants.groups["a"]), (foreign, tenants.groups["b"])):
        shown = client.get(f"/services?model_name={model}")[1]["services"]
        assert [each["TenantID"] for each in shown] == [group]
        view = client.get(f"/global_view?model_name={model}")[1]["contexts"]
        assert {each["tenant_id"] for each in view} == {group}
    names = {each["name"] for each in own.get(f"/workers?model_name={model}")[1]}
    assert names == {"a:1", "engine-a"}
    assert own.get(f"/services?tenant_id={tenants.groups['b']}")[0] == 403
    leave = {"instance_id": "engine-a", "dp_rank": 0, "modelname": model}
    assert own.post("/unregister", **leave)[1]["removed_instances"] == [f"engine-a|{tenants.groups['a']}|0"]
    assert foreign.get(f"/services?model_name={model}")[1]["count"] == 1
    assert own.post("/unregister", **leave, tenant_id=tenants.groups["b"])[0] == 403
    assert foreign.post("/unregister", **leave)[1]["removed_instances"] == [f"engine-a|{tenants.groups['b']}|0"]
