"""Every call of ResidencyService: a good request and each documented refusal, and what routers make of it."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from command_runner import Commands
from rest_client import RestClient
from test_meta_cases import Fields, Refused
from test_transport_drivers import Api
from test_transport_process import ManagerProcess
from test_transport_sites import Site, unique

from kvcm.model.key_schemes import VLLM_SHA256, KeyScheme, block_keys, vllm_root

KEYS = [-(2**63), 0, 1, 2**63 - 1]
BLOCK_TOKENS = 4  # of Site.instance
GPU, HOST, DISK = "MEDIUM_GPU", "MEDIUM_HOST", "MEDIUM_DISK"
ROOT = vllm_root(VLLM_SHA256)


def packed(keys: Sequence[int]) -> bytes:
    """Return keys as reports hold them."""
    return struct.pack(f"<{len(keys)}q", *keys)


def change(medium: str = GPU, added: Sequence[int] = (), removed: Sequence[int] = (), **more: Any) -> Fields:
    """Return the fields of a change."""
    return {"medium": medium, "added_keys": packed(added), "removed_keys": packed(removed), **more}


def report(instance: str, engine: str = "10.0.0.1:8000", sequence: int = 1, **more: Any) -> Fields:
    """Return the fields of a report."""
    return {"instance_id": instance, "engine": engine, "stream": "run", "sequence": sequence, **more}


def _report(site: Site, **changes: Any) -> Fields:
    return report(changes.pop("instance_id", None) or site.instance(), **{"changes": [change(added=KEYS)], **changes})


def _score(site: Site, **changes: Any) -> Fields:
    return {"instance_id": site.instance(), "block_keys": KEYS, "engines": ["10.0.0.1:8000"], **changes}


def _list(site: Site, **changes: Any) -> Fields:
    return {"instance_id": site.instance(), **changes}


def _match(site: Site, **changes: Any) -> Fields:
    return {"model_name": site.instance(), "token_ids": [1, 2, 3, 4], **changes}


def _publisher(site: Site, **changes: Any) -> Fields:
    fields = {"engine": "e", "model_name": unique("model"), "block_size": 4, "endpoint": "tcp://10.0.0.1:5557"}
    return {"instance_group": site.group(), "publisher": fields | changes}


def _unregister(_site: Site, **changes: Any) -> Fields:
    return {"engine": unique("engine"), **changes}


GOOD: dict[str, Callable[[Site], Fields]] = {
    "ResidencyService.ReportResidency": _report,
    "ResidencyService.Score": _score,
    "ResidencyService.ListReporters": _list,
    "ResidencyService.MatchModel": _match,
    "ResidencyService.RegisterPublisher": _publisher,
    "ResidencyService.UnregisterPublisher": _unregister,
    "ResidencyService.DescribeIndex": lambda _site: {},
}


def _refused(make: Callable[..., Fields], rule: str, *texts: str, **changes: Any) -> Refused:
    return Refused(rule, lambda site: make(site, **changes), "INVALID_ARGUMENT", texts)


def _unknown(make: Callable[..., Fields]) -> Refused:
    return Refused("unknown instance", lambda s: make(s) | {"instance_id": "nobody"}, "INSTANCE_NOT_EXIST", ("nobody",))


def _bad_scheme(**changes: Any) -> Fields:
    return {"algorithm": VLLM_SHA256, "root": ROOT, "block_tokens": BLOCK_TOKENS, **changes}


def _bad_report(rule: str, *texts: str, **changes: Any) -> Refused:
    return _refused(_report, rule, *texts, **changes)


def _bad_match(rule: str, *texts: str, **changes: Any) -> Refused:
    return _refused(_match, rule, *texts, **changes)


def _bad_publisher(rule: str, *texts: str, **changes: Any) -> Refused:
    return _refused(_publisher, rule, *texts, **changes)


def _bad_score(rule: str, *texts: str, **changes: Any) -> Refused:
    return _refused(_score, rule, *texts, **changes)


REFUSED: dict[str, list[Refused]] = {
    "ResidencyService.ReportResidency": [
        _unknown(_report),
        _bad_report("no engine", "engine is ''", "host:port", engine=""),
        _bad_report("a separator in the engine", "engine is 'a#1'", "'#'", engine="a#1"),
        _bad_report("a control character in the engine", "engine", "control", engine="a\n:1"),
        _bad_report("a long engine", "engine", "1 to 256 bytes", engine="e" * 257),
        _bad_report("a negative rank", "rank is -1", "0 to 65535", rank=-1),
        _bad_report("a large rank", "rank is 65536", "0 to 65535", rank=65_536),
        _bad_report("no stream", "stream is ''", "1 to 64", stream=""),
        _bad_report("a long stream", "stream", "1 to 64", stream="s" * 65),
        _bad_report("a strange stream", "stream", "ASCII", stream="ü"),
        _bad_report("no sequence", "sequence", "at least 1", sequence=0),
        _bad_report("no medium", "changes[1].medium is 0", "MEDIUM_DISK", changes=[change(), {"medium": 0}]),
        _bad_report("an unknown spec", "changes[0].spec_name is 'tp9'", "kv", changes=[change(spec_name="tp9")]),
        _bad_report(
            "half a key", "changes[0].added_keys has 9 bytes", "8", changes=[change() | {"added_keys": b"123456789"}]
        ),
        _bad_report(
            "half a key that is gone", "removed_keys has 1 bytes", "8", changes=[change() | {"removed_keys": b"1"}]
        ),
        _bad_report("too many keys", "changes has 8193 keys", "8192", changes=[change(added=range(8193))]),
        _bad_report(
            "too many in all", "changes has 8193 keys", "8192", changes=[change(added=range(4097), removed=range(4096))]
        ),
        _bad_report("too many changes", "changes has 65 entries", "64", "join", changes=[change()] * 65),
        _bad_report("a removal in a snapshot", "only add", changes=[change(removed=KEYS)], snapshot={"first": True}),
        _bad_report("clearing in a snapshot", "only add", changes=[change(cleared=True)], snapshot={"first": True}),
        _bad_report("changes at the end", "stopped", "no changes", stopped=True),
        _bad_report("a snapshot at the end", "stopped", changes=[], snapshot={"first": True}, stopped=True),
        _bad_report("an unknown scheme", "key_scheme.algorithm is 'md5'", VLLM_SHA256, key_scheme={"algorithm": "md5"}),
        _bad_report("a short root", "key_scheme.root has 1 bytes", "32", key_scheme=_bad_scheme(root=b"1")),
        _bad_report("a long root", "key_scheme.root has 2000 bytes", key_scheme=_bad_scheme(root=b"1" * 2000)),
        _bad_report("other blocks", "block_tokens is 8", "must be 4", key_scheme=_bad_scheme(block_tokens=8)),
    ],
    "ResidencyService.Score": [
        _unknown(_score),
        _bad_score("no prompt", "block_keys and token_ids", "one of the two", block_keys=[]),
        _bad_score("too many blocks", "65537 blocks", "65536", block_keys=[], token_ids=[1] * (4 * 65_537)),
        _bad_score("too many engines", "engines has 1025 entries", "1024", engines=[f"e{n}" for n in range(1025)]),
        _bad_score("no engine", "engines[0] is ''", "host:port", engines=[""]),
        _bad_score("a negative rate", "costs.host_bytes_per_second is -1.0", costs={"host_bytes_per_second": -1.0}),
        _bad_score("no number", "compute_tokens_per_second is nan", costs={"compute_tokens_per_second": float("nan")}),
        _bad_score("infinity", "storage_bytes_per_second is inf", costs={"storage_bytes_per_second": float("inf")}),
        _bad_score("a negative prompt", "prompt_tokens is -1", "at least 0", prompt_tokens=-1),
        _bad_score(
            "a salt without a scheme", "cache_salt", "no salt", block_keys=[], token_ids=[1] * 4, cache_salt="s"
        ),
    ],
    "ResidencyService.ListReporters": [_unknown(_list)],
    "ResidencyService.MatchModel": [
        Refused("unknown model", lambda s: _match(s, model_name="nobody"), "INSTANCE_NOT_EXIST", ("nobody",)),
        Refused("other blocks", lambda s: _match(s, block_size=8), "INSTANCE_NOT_EXIST", ("block_size",)),
        Refused("an adapter", lambda s: _match(s, lora_name="l"), "INSTANCE_NOT_EXIST", ("adapter",)),
        Refused("an adapter's number", lambda s: _match(s, lora_id=0), "INSTANCE_NOT_EXIST", ("adapter",)),
        Refused("another group", lambda s: _match(s, instance_group=s.group()), "INSTANCE_NOT_EXIST", ("group",)),
        _bad_match("no model", "model_name", "required", model_name=""),
        _bad_match("a negative size", "block_size is -1", "at least 0", block_size=-1),
        _bad_match("too many blocks", "65537 blocks", "65536", token_ids=[1] * (4 * 65_537)),
        _bad_match("too many hashes", "block_hashes has 65537", "65536", token_ids=[], block_hashes=[1] * 65_537),
    ],
    "ResidencyService.RegisterPublisher": [
        Refused(
            "unknown group",
            lambda s: _publisher(s) | {"instance_group": "nobody"},
            "INVALID_ARGUMENT",
            ("'nobody' does not exist",),
        ),
        _bad_publisher("two groups", "publisher.instance_group is 'x'", "must be empty", instance_group="x"),
        _bad_publisher("no engine", "publisher.engine is ''", "1 to 256", engine=""),
        _bad_publisher("no model", "publisher.model_name is ''", "1 to 256", model_name=""),
        _bad_publisher("no block size", "publisher.block_size is 0", "from 1", block_size=0),
        _bad_publisher("a negative rank", "publisher.rank is -1", "from 0 to 65535", rank=-1),
        _bad_publisher("a file", "publisher.endpoint is 'ipc:///x'", "tcp://host:port", endpoint="ipc:///x"),
        _bad_publisher("an option", "publisher.endpoint is 'tcp://-x:1'", "tcp://host:port", endpoint="tcp://-x:1"),
        _bad_publisher("no port", "publisher.replay_endpoint", "tcp://host:port", replay_endpoint="tcp://a"),
        _bad_publisher("a profile", "hash_profile.strategy is ''", "vllm_v1", hash_profile={"algorithm": "sha256"}),
    ],
    "ResidencyService.DescribeIndex": [],
    "ResidencyService.UnregisterPublisher": [_refused(_unregister, "no engine", "engine", "required", engine="")],
}


# What routers make of it.


def _send(api: Api, **fields: Any) -> Any:
    return api.ok("ResidencyService.ReportResidency", **fields)


def _scores(api: Api, **fields: Any) -> list[tuple[str, int, int, int, int]]:
    answer = api.ok("ResidencyService.Score", **fields)
    return [(e.engine, e.gpu_tokens, e.host_tokens, e.disk_tokens, e.storage_tokens) for e in answer.engines]


def test_a_router_learns_what_each_engine_has_and_can_load(each_api: Api) -> None:
    site = Site(each_api)
    instance, keys = site.instance(), list(range(1, 9))
    site.write(instance, keys[:6])
    _send(each_api, **report(instance, "a:1", changes=[change(GPU, keys[:1]), change(HOST, keys[1:3])]))
    _send(each_api, **report(instance, "b:1", changes=[change(GPU, keys[:2]), change(DISK, [keys[2], keys[6]])]))
    found = each_api.ok("ResidencyService.Score", instance_id=instance, block_keys=keys, engines=["a:1", "b:1", "c:1"])
    assert found.storage_tokens == 6 * BLOCK_TOKENS
    assert found.prompt_tokens == 8 * BLOCK_TOKENS
    assert {(e.engine, e.gpu_tokens, e.host_tokens, e.disk_tokens, e.storage_tokens) for e in found.engines} == {
        ("a:1", 4, 12, 12, 24),
        ("b:1", 8, 8, 12, 28),  # its disk has the block that is in no storage
        ("c:1", 0, 0, 0, 24),
    }
    peers = {e.engine: (e.best_peer, e.best_peer_tokens) for e in found.engines}
    assert peers == {"a:1": ("b:1", 12), "b:1": ("a:1", 12), "c:1": ("a:1", 12)}
    scores = [e.score for e in found.engines]
    assert scores == sorted(scores, reverse=True)
    assert scores[-1] > 0
    assert not any(e.is_complete for e in found.engines)


def test_an_engine_that_knows_nothing_is_no_error(each_api: Api) -> None:
    instance = Site(each_api).instance()
    found = each_api.ok("ResidencyService.Score", instance_id=instance, block_keys=[1, 2])
    assert (list(found.engines), found.storage_tokens) == ([], 0)
    assert _scores(each_api, instance_id=instance, block_keys=[1], engines=["a:1"]) == [("a:1", 0, 0, 0, 0)]


def test_slow_storages_are_left_alone(each_api: Api) -> None:
    site = Site(each_api)
    instance, keys = site.instance(), [1, 2, 3, 4]
    site.write(instance, keys)

    def loads(bytes_per_second: float) -> tuple[float, float]:
        costs = {"storage_bytes_per_second": bytes_per_second, "compute_tokens_per_second": 16.0}
        answer = each_api.ok(
            "ResidencyService.Score", instance_id=instance, block_keys=keys, engines=["a:1"], costs=costs
        )
        engine = answer.engines[0]
        return engine.load_seconds, engine.compute_seconds

    assert loads(4 * 64 / 0.5) == (0.5, 0.0)
    assert loads(4 * 64 / 2.0) == (0.0, 1.0), "computing takes a second, loading two"


def test_prompts_are_scored_by_their_tokens_in_the_scheme_of_the_engine(each_api: Api) -> None:
    instance, tokens = Site(each_api).instance(), list(range(100, 117))
    scheme = KeyScheme(VLLM_SHA256, ROOT, 0x1234, BLOCK_TOKENS)
    salted = [*block_keys(scheme, tokens[:12], "tenant"), *block_keys(scheme, tokens[:8])]
    sent = {"algorithm": scheme.algorithm, "root": scheme.root, "mask": scheme.mask, "block_tokens": BLOCK_TOKENS}
    _send(each_api, **report(instance, "a:1", changes=[change(added=salted)], key_scheme=sent))
    asked = {"instance_id": instance, "token_ids": tokens}
    assert _scores(each_api, **asked) == [("a:1", 8, 8, 8, 8)]
    assert _scores(each_api, **asked, cache_salt="tenant") == [("a:1", 12, 12, 12, 12)]
    assert _scores(each_api, **asked, cache_salt="other") == [("a:1", 0, 0, 0, 0)]
    assert each_api.ok("ResidencyService.Score", **asked).prompt_tokens == 17


@pytest.mark.parametrize(
    ("lost", "left"), [(False, {"state": 1, "sequence": 4, "gaps": 0, "blocks": 3}), (True, {"state": 2, "gaps": 1})]
)
def test_reporters_are_listed_with_what_is_known_of_them(each_api: Api, lost: bool, left: dict[str, int]) -> None:
    instance = Site(each_api).instance()
    whole = {"first": True, "last": True}
    first = _send(each_api, **report(instance, sequence=1, changes=[change(added=[1, 2])]))
    assert (first.snapshot_required, first.applied_sequence, first.timeout_ms) == (True, 1, 30_000)
    second = _send(each_api, **report(instance, sequence=2, changes=[change(added=[1, 2, 3])], snapshot=whole))
    assert (second.snapshot_required, second.resident_blocks) == (False, 3)
    if lost:
        assert _send(each_api, **report(instance, sequence=4)).snapshot_required
    else:
        _send(each_api, **report(instance, sequence=3, changes=[change(removed=[2])]))
        _send(each_api, **report(instance, sequence=4, changes=[change(HOST, [2])]))
    (found,) = each_api.ok("ResidencyService.ListReporters", instance_id=instance).reporters
    known = {"state": found.state, "sequence": found.sequence, "gaps": found.gaps}
    known["blocks"] = sum(each.blocks for each in found.media)
    assert known == {"sequence": 4, "blocks": 0, **left}
    if not lost:
        _send(each_api, **report(instance, sequence=5, stopped=True))
        assert not each_api.ok("ResidencyService.ListReporters", instance_id=instance).reporters


def test_nothing_of_engines_is_in_answers_about_storages(each_api: Api) -> None:
    site = Site(each_api)
    instance = site.instance()
    _send(each_api, **report(instance, changes=[change(added=KEYS)], snapshot={"first": True, "last": True}))
    asked = {"instance_id": instance, "block_keys": KEYS, "query_type": "QT_PREFIX_MATCH"}
    assert not site.api.ok("MetaService.GetCacheLocation", **asked).locations
    assert site.api.ok("MetaService.GetCacheLocationLen", **asked).cache_location_len == 0


@pytest.mark.parametrize("port", ["http", "admin_http"])
def test_routers_get_scores_as_a_resource_of_both_ports(server: ManagerProcess, port: str) -> None:
    client = RestClient(getattr(server.address, port))
    with server.api("grpc") as calls:
        instance = Site(calls).instance()
        _send(calls, **report(instance, "a:1", changes=[change(added=KEYS[:2])]))
    keys = [str(key) for key in KEYS]
    found = client.ask("POST", "/v1/score", {"instance_id": instance, "block_keys": keys}).body
    assert [(each["engine"], each["gpu_tokens"], each["is_complete"]) for each in found["engines"]] == [
        ("a:1", 8, False)
    ]
    assert (found["prompt_tokens"], found["storage_tokens"]) == (16, 0)
    both = {"instance_id": instance, "block_keys": keys, "token_ids": [1]}
    for bad, field in (({"instance_id": instance}, "block_keys"), (both, "block_keys")):
        refused = client.ask("POST", "/v1/score", bad)
        assert (refused.status, field in refused.body["detail"]) == (400, True)
    client.connection.close()


def test_people_see_what_engines_hold(site: Site, commands: Commands) -> None:
    instance = site.instance()
    _send(site.api, **report(instance, "a:1", changes=[change(added=KEYS)], snapshot={"first": True, "last": True}))
    assert re.search(r"a:1 +0 +complete +4 +0 +0 ", commands.ok("residency", instance))
    scored = commands.ok("score", instance, "--keys", ",".join(map(str, KEYS)), "--engine", "a:1")
    assert re.search(r"a:1 +0 +16 +16 +16 +16 +0\.000 s +0\.000 s +0\.002 s +all", scored)


@pytest.mark.parametrize("turns", [1, 3, 20])
def test_storages_fill_the_gaps_of_an_engine_however_often_they_change(each_api: Api, turns: int) -> None:
    """Blocks come from storages and from the engine in turns; one that both have, and one that neither has."""
    site = Site(each_api)
    instance, keys = site.instance(), list(range(1000, 1000 + 4 * turns + 3))
    in_storage = [key for place, key in enumerate(keys[:-2]) if place % 4 < 2]
    on_engine = [key for place, key in enumerate(keys[:-2]) if place % 4 >= 1]
    site.write(instance, in_storage)
    _send(each_api, **report(instance, "a:1", changes=[change(added=[*on_engine, keys[-1]])]))
    _send(each_api, **report(instance, "b:1", changes=[change(added=on_engine[:2])]))
    found = {each[0]: each[1:] for each in _scores(each_api, instance_id=instance, block_keys=keys)}
    assert found["a:1"] == (0, 0, 0, (len(keys) - 2) * BLOCK_TOKENS)
    assert found["b:1"] == (0, 0, 0, 3 * BLOCK_TOKENS)


def test_a_prompt_shorter_than_a_block_has_nothing_to_reuse(each_api: Api) -> None:
    instance = Site(each_api).instance()
    asked = {"instance_id": instance, "token_ids": [1, 2, 3], "engines": ["a:1"]}
    assert _scores(each_api, **asked) == [("a:1", 0, 0, 0, 0)], "before anything is reported"
    _send(
        each_api,
        **report(instance, "a:1", changes=[change(added=KEYS)], key_scheme={"algorithm": "kvcm", "block_tokens": 4}),
    )
    assert _scores(each_api, **asked) == [("a:1", 0, 0, 0, 0)]
    assert each_api.ok("ResidencyService.Score", **asked).prompt_tokens == 3


def test_no_scheme_is_guessed_for_engines_that_may_have_another(each_api: Api) -> None:
    """As after a restart of the manager, until the first snapshot names it."""
    instance = Site(each_api).instance()
    _send(each_api, **report(instance, "a:1", changes=[change(added=KEYS)]))
    asked = {"instance_id": instance, "token_ids": [1, 2, 3, 4]}
    code, text = each_api.refused("ResidencyService.Score", **asked)
    assert (code, "key_scheme" in text) == ("SERVICE_NOT_READY", True)
    named = {"algorithm": "kvcm", "block_tokens": 4}
    whole = {"first": True, "last": True}
    _send(each_api, **report(instance, "a:1", 2, changes=[change(added=KEYS)], snapshot=whole, key_scheme=named))
    assert _scores(each_api, **asked) == [("a:1", 0, 0, 0, 0)]
