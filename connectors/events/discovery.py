"""Where an engine publishes its events, and how it makes block keys: what it and the managers say about it.

Block keys, and where their mask comes from
-------------------------------------------
An engine without a connector of ours joins with nothing else that has keys: its own hashes are the keys. The algorithm
and the seed are vLLM's settings (`--prefix-caching-hash-algo`, PYTHONHASHSEED), and the mask is 0. That is the default.

With our connector, the mask is a number of the KV's namespace: everything besides the tokens that KV depends on. All of
it but the version of the weights is registered with the manager, as is the algorithm with its seed, and the tokens of a
block. `GetInstanceInfo` therefore does not suffice, and on purpose: engines of one instance may compute with other
weights, for a while or for good. So `admin` names a manager's admin port, and the weights are named as the connector
names them:

* `weights` is the text of the connector's option of that name, where it is set.
* `model_directory` is the directory that the engine loads; its digest is the one that the connector computes.

That is exact while an engine computes with the weights that it was started with. When weights are changed in a running
engine, its connector changes to keys of another namespace, and the subscriber goes on with those of the first: its
reports still agree with scores by tokens, which use the mask that it reports, but not with the keys of storages.
Restart it then with the new `weights`, or with `mask`. `mask` is for everything else: SGLang with adapters from its
start.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from kvcm.connectors.calls import new_trace_id
from kvcm.connectors.client import open_channel
from kvcm.connectors.credentials import CredentialFiles
from kvcm.connectors.events.engine_source import RankEndpoints, rank_endpoint
from kvcm.connectors.keys import HashKeys
from kvcm.connectors.reuse.registration import KvIdentity
from kvcm.connectors.reuse.weight_files import weights_digest
from kvcm.connectors.sglang.page_store import PageKeys
from kvcm.model.errors import ErrorCode, InvalidArgumentError, StorageIOError
from kvcm.model.instances import ModelDeployment
from kvcm.model.key_schemes import SGLANG_SHA256, VLLM_SHA256, VLLM_SHA256_CBOR, KeyScheme, vllm_root
from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta

__all__ = ["discover_ranks", "fetch_block_tokens", "fetch_instance", "registered_scheme", "weights_version"]

_GET_INSTANCE: Final = "/kv_cache_manager.proto.admin.AdminService/GetInstanceInfo"
_GET_INSTANCE_OF_DATA: Final = "/kv_cache_manager.proto.meta.MetaService/GetInstanceInfo"
_ALGORITHMS: Final = {"sha256": VLLM_SHA256, "sha256_cbor": VLLM_SHA256_CBOR}
_DEFAULT_SEED: Final = "default"
_SECONDS: Final = 5.0
_OK: Final = int(ErrorCode.OK)


def fetch_instance(address: str, login: CredentialFiles, instance_id: str) -> admin.InstanceInfo:
    """Return the registration of an instance.

    Args:
        address: `host:port` of a manager's admin calls (gRPC).
        login: credentials.
        instance_id: of the instance.

    Raises:
        StorageIOError: the manager does not answer, or does not know the instance yet.
    """
    request = admin.GetInstanceInfoRequest(trace_id=new_trace_id(), instance_id=instance_id)
    answer = _registration(address, login, _GET_INSTANCE, request, admin.GetInstanceInfoResponse)
    found: admin.InstanceInfo = answer.instance_info
    return found


def fetch_block_tokens(managers: Iterable[str], login: CredentialFiles, instance_id: str) -> int:
    """Return the tokens of a block of an instance, as the first manager that knows it says.

    Args:
        managers: `host:port` of their data calls (gRPC).
        login: credentials.
        instance_id: of the instance.

    Raises:
        StorageIOError: no manager answers, or none knows the instance yet; has the reason of each.
    """
    reasons = []
    for address in managers:
        request = meta.GetInstanceInfoRequest(trace_id=new_trace_id(), instance_id=instance_id)
        try:
            answer = _registration(address, login, _GET_INSTANCE_OF_DATA, request, meta.GetInstanceInfoResponse)
        except StorageIOError as error:
            reasons.append(str(error))
        else:
            tokens: int = answer.instance_info.block_size
            return tokens
    raise StorageIOError("; ".join(reasons) or "there is no manager")


def _registration(address: str, login: CredentialFiles, path: str, request: Any, response_type: Any) -> Any:
    """Return what a manager says of the instance of a request.

    Raises:
        StorageIOError: the manager does not answer, or does not know the instance yet.
    """
    with open_channel(address, login) as channel:
        call = channel.unary_unary(
            path,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response_type.FromString,
        )
        try:
            answer = call(request, timeout=_SECONDS, metadata=login.presented.metadata)
        except Exception as error:  # both flavours of gRPC's errors, and a channel that cannot be made
            raise StorageIOError(f"manager {address} does not answer: {error!r}") from None
    if answer.header.status.code != _OK:
        why = answer.header.status.message
        raise StorageIOError(f"instance {request.instance_id!r} is not registered yet: {why}")
    return answer


def weights_version(weights: str, model_directory: str) -> str:
    """Return the version of the weights that a connector uses, "" where neither is given.

    Raises:
        InvalidArgumentError: the directory has no weights that can be read.
    """
    if weights or not model_directory:
        return weights
    try:
        return weights_digest(Path(model_directory))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"model_directory {model_directory!r} has no readable weights: {error}") from None


def registered_scheme(info: admin.InstanceInfo, weights: str) -> KeyScheme:
    """Return how an engine with our connector makes block keys.

    Args:
        info: registration of its instance.
        weights: version of its weights.

    Raises:
        InvalidArgumentError: no connector of ours for vLLM or SGLang registered the instance, or its hashes are random.
    """
    found = info.model_deployment
    identity = KvIdentity.from_deployment(
        ModelDeployment(
            model_name=found.model_name,
            dtype=found.dtype,
            use_mla=found.use_mla,
            tp_size=found.tp_size,
            dp_size=found.dp_size,
            pp_size=found.pp_size,
            extra=found.extra,
        )
    )
    namespace = identity.namespace(weights)
    if identity.engine.startswith("sglang/"):
        (mask,) = PageKeys(namespace).keys(["0"])
        return KeyScheme(SGLANG_SHA256, b"", mask, info.block_size)
    name, _, seed = identity.hashing.partition(" seed=")
    algorithm = _ALGORITHMS.get(name)
    if not identity.engine.startswith("vllm/") or algorithm is None:
        raise InvalidArgumentError(
            f"instance {info.instance_id!r} is of engine {identity.engine!r} with hashes {identity.hashing!r}, must be"
            " vLLM with sha256 or sha256_cbor, or SGLang"
        )
    (turn,) = HashKeys(namespace).keys([bytes(8)])
    return KeyScheme(algorithm, vllm_root(algorithm, None if seed == _DEFAULT_SEED else seed), turn, info.block_size)


def discover_ranks(engine: str, url: str) -> tuple[dict[int, RankEndpoints], int]:
    """Return where the ranks of an engine publish, and the tokens of a block, 0 where the engine does not say.

    Args:
        engine: `vllm` or `sglang`.
        url: of its HTTP server.

    Raises:
        StorageIOError: it does not answer, or publishes no events.
    """
    host = urlsplit(url).hostname or "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    if engine == "vllm":
        sources = _get(f"{url.rstrip('/')}/kv_event_sources")
        ranks = {int(rank): _vllm_rank(source, host) for rank, source in sources.items()}
        tokens = 0
    else:
        found = _get(f"{url.rstrip('/')}/server_info").get("kv_events")
        ranks = {} if found is None else {rank: _sglang_rank(found, rank, host) for rank in range(found["dp_size"])}
        tokens = 0 if found is None else found["block_size"]
    if not ranks:
        raise StorageIOError(f"engine {url} publishes no KV events: start it with --kv-events-config")
    return ranks, tokens


def _get(url: str) -> dict[str, Any]:
    if not url.startswith(("http://", "https://")):
        raise InvalidArgumentError(f"engine_url is {url!r}, must begin with http:// or https://")
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS) as page:  # noqa: S310 - the scheme is checked above
            found = json.load(page)
    except (OSError, ValueError) as error:
        raise StorageIOError(f"engine {url} does not answer: {error}") from None
    if not isinstance(found, dict):
        raise StorageIOError(f"engine {url} answers with {type(found).__name__}, must be an object")
    return found


def _vllm_rank(source: Mapping[str, Any], host: str) -> RankEndpoints:
    # The addresses are those of the rank already: nothing is counted up.
    return RankEndpoints(
        endpoint=rank_endpoint(source["endpoint"], 0, host),
        replay_endpoint=rank_endpoint(source.get("replay_endpoint") or "", 0, host),
        topic=source.get("topic") or "",
    )


def _sglang_rank(found: Mapping[str, Any], rank: int, host: str) -> RankEndpoints:
    shown = found.get("endpoint_host") or "*"
    address = host if shown in ("*", "0.0.0.0", "::", "[::]") else shown  # noqa: S104 - nothing is bound
    replay = found.get("replay_endpoint_port_base")
    return RankEndpoints(
        endpoint=f"tcp://{address}:{found['endpoint_port_base'] + rank}",
        replay_endpoint="" if replay is None else f"tcp://{host}:{replay + rank}",
        topic=found.get("topic") or "",
    )
