"""How an engine makes block keys, by the registration of its instance; where it publishes; and the options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from manager_process import ManagerProcess
from ports import free_port

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.credentials import ClientCredentials, CredentialFiles
from kvcm.connectors.events.discovery import (
    discover_ranks,
    fetch_block_tokens,
    fetch_instance,
    registered_scheme,
    weights_version,
)
from kvcm.connectors.events.engine_source import rank_endpoint
from kvcm.connectors.events.options import SubscriberOptions, parse_arguments
from kvcm.connectors.events.subscriber import RankPlan, find_ranks, rank_plans
from kvcm.connectors.keys import HashKeys
from kvcm.connectors.reuse.registration import KvIdentity
from kvcm.connectors.reuse.weight_files import weights_digest
from kvcm.connectors.sglang.page_store import PageKeys
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.instances import LocationSpecInfo, ModelDeployment
from kvcm.model.key_schemes import (
    KVCM,
    SGLANG_SHA256,
    VLLM_SHA256,
    VLLM_SHA256_CBOR,
    block_hashes,
    block_keys,
    vllm_root,
)
from kvcm.protocol import admin_service_pb2 as admin

VLLM = KvIdentity(
    "m",
    "vllm/1 cuda",
    "bfloat16",
    "sha256_cbor seed=7",
    {"all": "kvcm-block/2"},
    tp_size=2,
    extra={"quantization": "None", "max_model_len": "1024"},
)
SGLANG = KvIdentity("m", "sglang/1", "bfloat16", "sglang 77d735ce", {"kv": "page"}, use_mla=True)
NO_LOGIN = CredentialFiles(ClientCredentials())
NEEDED = ["--manager", "127.0.0.1:6381", "--engine-address", "10.0.0.9:8000", "--instance-id", "i"]
PLAIN = [*NEEDED, "--engine", "vllm", "--endpoint", "tcp://*:5557"]
TOKENS = list(range(1, 33))


def plans_of(options: SubscriberOptions) -> list[RankPlan]:
    """Return the plans of the ranks of the first engine."""
    engine = options.engines[0]
    return rank_plans(engine, options, NO_LOGIN, find_ranks(engine))


def info_of(identity: KvIdentity, **others: Any) -> admin.InstanceInfo:
    """Return the registration of an instance, as the manager returns it."""
    deployment = identity.deployment()
    fields = {name: getattr(deployment, name) for name in ("model_name", "dtype", "use_mla", "tp_size", "pp_size")}
    message = admin.ModelDeployment(**fields, dp_size=1, extra=deployment.extra, **others)
    return admin.InstanceInfo(instance_id="i", block_size=16, model_deployment=message)


@pytest.mark.parametrize("identity", [VLLM, SGLANG])
def test_an_identity_is_that_of_its_registration(identity: KvIdentity) -> None:
    assert KvIdentity.from_deployment(identity.deployment()) == identity


@pytest.mark.parametrize("extra", ["", "[]", "{}", '{"engine": "vllm/1"}', "1"])
def test_other_registrations_have_no_identity(extra: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"model_deployment\.extra"):
        KvIdentity.from_deployment(ModelDeployment("m", "float16", tp_size=1, pp_size=1, extra=extra))


def test_vllms_keys_are_those_of_the_connector() -> None:
    scheme = registered_scheme(info_of(VLLM), "weights")
    assert (scheme.algorithm, scheme.root) == (VLLM_SHA256_CBOR, vllm_root(VLLM_SHA256_CBOR, "7"))
    assert block_keys(scheme, TOKENS) == HashKeys(VLLM.namespace("weights")).keys(block_hashes(scheme, TOKENS))
    assert registered_scheme(info_of(VLLM), "others").mask != scheme.mask


def test_sglangs_keys_are_those_of_the_connector() -> None:
    scheme = registered_scheme(info_of(SGLANG), "weights")
    assert scheme.algorithm == SGLANG_SHA256
    pages = [digest.hex() for digest in block_hashes(scheme, TOKENS)]
    assert block_keys(scheme, TOKENS) == PageKeys(SGLANG.namespace("weights")).keys(pages)


def test_engines_with_other_hashes_are_refused() -> None:
    other = KvIdentity("m", "vllm/1 cuda", "float16", "xxhash seed=1", {"all": "x"})
    with pytest.raises(InvalidArgumentError, match="xxhash"):
        registered_scheme(info_of(other), "weights")


def test_a_registration_is_read_from_a_manager(manager: ManagerProcess, instance_id: str) -> None:
    address = f"127.0.0.1:{manager.ports['admin_rpc_port']}"
    with pytest.raises(StorageIOError, match="not registered yet"):
        fetch_instance(address, NO_LOGIN, instance_id)
    with ManagerClient(manager.address, instance_id) as client:
        parts = [LocationSpecInfo("tp0", 4096)]
        assert client.register_instance("default", 16, parts, VLLM.deployment(), timeout_seconds=20).ok
    options = parse_arguments([*PLAIN, "--weights", "w", "--admin", address, "--instance-id", instance_id])
    (plan,) = plans_of(options)
    assert plan.identity.scheme == registered_scheme(info_of(VLLM), "w")
    with pytest.raises(StorageIOError, match="does not answer"):
        fetch_instance(f"127.0.0.1:{free_port()}", NO_LOGIN, instance_id)


def test_the_tokens_of_a_block_are_read_from_a_manager_that_knows_the_instance(
    manager: ManagerProcess, instance_id: str
) -> None:
    away = f"127.0.0.1:{free_port()}"
    with pytest.raises(StorageIOError, match=f"(?s){away} does not answer.*'{instance_id}' is not registered yet"):
        fetch_block_tokens([away, manager.address], NO_LOGIN, instance_id)
    arguments = ["--manager", away, "--manager", manager.address, *PLAIN[2:], "--instance-id", instance_id]
    with pytest.raises(InvalidArgumentError, match=r"(?s)'block_tokens' is missing.*is not registered yet"):
        plans_of(parse_arguments(arguments))
    with ManagerClient(manager.address, instance_id) as client:
        parts = [LocationSpecInfo("tp0", 4096)]
        assert client.register_instance("default", 48, parts, VLLM.deployment(), timeout_seconds=20).ok
    (plan,) = plans_of(parse_arguments(arguments))
    assert plan.identity.scheme.block_tokens == 48
    (plan,) = plans_of(parse_arguments([*arguments, "--block-tokens", "16"]))
    assert plan.identity.scheme.block_tokens == 16


def test_weights_are_a_text_or_the_digest_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert weights_version("text", "") == "text"
    assert weights_version("", str(tmp_path)) == weights_digest(tmp_path)
    with pytest.raises(InvalidArgumentError, match="model_directory"):
        weights_version("", str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://host:5557"),
        ("tcp://0.0.0.0:5557", 2, "tcp://host:5559"),
        ("tcp://[::]:5557", 1, "tcp://host:5558"),
        ("tcp://10.0.0.1:5557", 1, "tcp://10.0.0.1:5558"),
        ("ipc:///tmp/events", 0, "ipc:///tmp/events"),
        ("inproc://events", 1, "inproc://events_dp1"),
        ("", 1, ""),
    ],
)
def test_ranks_count_up_from_the_first_port(endpoint: str, rank: int, expected: str) -> None:
    assert rank_endpoint(endpoint, rank, "host") == expected


def test_an_engine_that_does_not_answer_is_no_argument() -> None:
    with pytest.raises(StorageIOError, match="does not answer"):
        discover_ranks("vllm", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(InvalidArgumentError, match="http://"):
        discover_ranks("vllm", "file:///etc/passwd")


def test_the_command_line_suffices_for_one_engine() -> None:
    options = parse_arguments([*PLAIN, "--manager", "10.0.0.2:1", "--ranks", "2", "--block-tokens", "16"])
    assert options.managers == ("127.0.0.1:6381", "10.0.0.2:1")
    plans = plans_of(options)
    assert [plan.endpoints.endpoint for plan in plans] == ["tcp://10.0.0.9:5557", "tcp://10.0.0.9:5558"]
    assert [plan.identity.rank for plan in plans] == [0, 1]
    assert plans[0].identity.scheme.algorithm == VLLM_SHA256
    assert plans[0].identity.scheme.mask == 0
    assert not plans[0].stream.has_replay
    assert plans[0].mapping.counts_copies


def test_managers_are_followed_unless_that_is_forbidden(tmp_path: Path) -> None:
    file = tmp_path / "subscriber.toml"
    file.write_text("follow_managers = false")
    assert parse_arguments(PLAIN).follow_managers
    assert not parse_arguments([*PLAIN, "--no-follow-managers"]).follow_managers
    assert not parse_arguments([*PLAIN, "--config", str(file)]).follow_managers
    assert parse_arguments([*PLAIN, "--config", str(file), "--follow-managers"]).follow_managers


def test_options_say_how_keys_are_made() -> None:
    keys = ["--algorithm", KVCM, "--block-tokens", "8", "--mask", "-3", "--groups", "0=full,1=window"]
    others = ["--removes-at-once", "--batch-ms", "20", "--replay-endpoint", "tcp://*:5657"]
    options = parse_arguments([*PLAIN, *keys, *others])
    (plan,) = plans_of(options)
    assert (plan.identity.scheme.algorithm, plan.identity.scheme.mask) == (KVCM, -3)
    assert plan.mapping.group_specs == {0: "full", 1: "window"}
    assert not plan.mapping.counts_copies
    assert plan.reports.batch_seconds == 0.02
    assert plan.endpoints.replay_endpoint == "tcp://10.0.0.9:5657"


def test_a_file_has_several_engines_and_the_command_line_adds_one(tmp_path: Path) -> None:
    file = tmp_path / "subscriber.toml"
    file.write_text(
        """
        manager = ["a:1"]
        batch_keys = 7
        [[engine]]
        engine = "vllm"
        engine_address = "e:1"
        instance_id = "i"
        endpoint = "tcp://e:5557"
        [[engine]]
        engine = "sglang"
        engine_address = "e:2"
        instance_id = "j"
        engine_url = "http://e:2"
        replay_seconds = 3
        """
    )
    options = parse_arguments(["--config", str(file), *PLAIN, "--batch-keys", "8"])
    assert options.managers == ("a:1", "127.0.0.1:6381")
    assert [each.engine_address for each in options.engines] == ["e:1", "e:2", "10.0.0.9:8000"]
    assert options.engines[1].replay_seconds == 3.0
    assert options.batch_keys == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "manager"),
        (["--manager", "a:1"], "no engine"),
        (NEEDED, "'engine' is missing"),
        ([*NEEDED, "--engine", "other", "--endpoint", "tcp://*:1"], "must be one of vllm, sglang"),
        ([*NEEDED, "--engine", "vllm"], "'engine_url' and 'endpoint'"),
        ([*PLAIN, "--engine-url", "http://e:1"], "'engine_url' and 'endpoint'"),
        ([*PLAIN, "--engine-address", "nowhere"], "host:port"),
        ([*PLAIN, "--algorithm", "md5"], "'algorithm'"),
        ([*PLAIN, "--ranks", "0"], "'ranks'"),
        ([*PLAIN, "--weights", "w"], "'admin'"),
        ([*PLAIN, "--groups", "full"], "NUMBER=PART"),
        ([*PLAIN, "--block-tokens", "-1"], "'block_tokens'"),
        ([*PLAIN, "--engine-seconds", "0"], "'engine_seconds'"),
        ([*PLAIN, "--discovery-seconds", "0"], "'discovery_seconds'"),
        ([*PLAIN, "--batch-keys", "0"], "'batch_keys'"),
        ([*PLAIN, "--batch-ms", "-1"], "'batch_ms'"),
        ([*PLAIN, "--key-file", "/nowhere"], "key_file"),
        ([*PLAIN, "--config", "/nowhere"], "--config"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("engine = 1", "tables"), ("manager = 'a:1'", "list of texts"), ("batch_kays = 1", "did you mean 'batch_keys'")],
)
def test_a_wrong_file_is_named(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "subscriber.toml"
    file.write_text(text)
    with pytest.raises(SystemExit):
        parse_arguments(["--config", str(file)])
    assert message in capsys.readouterr().err


def test_without_the_tokens_of_a_block_an_engine_is_not_read() -> None:
    options = parse_arguments(PLAIN)
    with pytest.raises(InvalidArgumentError, match="block_tokens"):
        plans_of(options)
