"""The options of `kvcm-subscriber`: a command line that suffices for one engine, and a TOML file for several.

The file has the options of the process, and a table `[[engine]]` for each engine, with the names of the command line
and underscores for its dashes:

    manager = ["10.0.0.5:6381", "10.0.0.6:6381"]

    [[engine]]
    engine = "vllm"
    engine_address = "10.0.0.9:8000"
    engine_url = "http://127.0.0.1:8000"
    instance_id = "qwen"
    block_tokens = 16

Options of the command line add to the file: those of an engine are a further engine.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any, Final

from kvcm.connectors.addresses import parse_addresses
from kvcm.connectors.credentials import ClientCredentials, add_options, credentials_of
from kvcm.connectors.reuse.options import parse_options
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.key_schemes import ALGORITHMS, SGLANG_SHA256, VLLM_SHA256

__all__ = ["AllowedHosts", "EngineOptions", "SubscriberOptions", "parse_arguments"]

_ENGINES: Final = ("vllm", "sglang")
_GROUP: Final = re.compile(r"([0-9]{1,3})=([A-Za-z0-9_.-]{1,128})")
_HOST: Final = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")
_MOST_KEYS: Final = 8192  # that a manager takes in one report
_MAX_RANKS: Final = 1024


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """One engine.

    Attributes:
        engine: `vllm` or `sglang`.
        engine_address: `host:port`, as routers call it.
        instance_id: instance whose blocks it holds.
        engine_url: its HTTP server, which says where it publishes; "" for `endpoint`.
        endpoint: where its first rank publishes.
        replay_endpoint: where its first rank replays; "" for nowhere.
        topic: beginning of the topics.
        ranks: data-parallel ranks; each has the next port.
        binds: the engine connects to `endpoint`, which is this host's.
        algorithm: of block keys; "" for that of the engine.
        hash_seed: PYTHONHASHSEED of vLLM; "" where it is not set.
        block_tokens: tokens of a block; 0 as the engine or the registration of its instance says.
        mask: that keys are XORed with.
        weights: version of the weights, where the engine has our connector.
        model_directory: of the weights instead.
        admin: `host:port` of a manager's admin calls, with `weights` or `model_directory`.
        groups: parts of a block by group of layers, `0=full,1=window`; "" for the first group of full attention alone.
        counts_copies: vLLM: a block is gone when all its copies are; false where requests may set
            `kv_cache_report_mode` to `full`.
        replay_seconds: for a replay that says nothing.
        engine_seconds: for an engine whose connection broke; then its blocks count as gone.
        discovery_seconds: between two questions at `engine_url`; one that is not connected is asked more often.

    Raises:
        InvalidArgumentError: a value is not allowed; names it.
    """

    engine: str
    engine_address: str
    instance_id: str
    engine_url: str = ""
    endpoint: str = ""
    replay_endpoint: str = ""
    topic: str = ""
    ranks: int = 1
    binds: bool = False
    algorithm: str = ""
    hash_seed: str = ""
    block_tokens: int = 0
    mask: int = 0
    weights: str = ""
    model_directory: str = ""
    admin: str = ""
    groups: str = ""
    counts_copies: bool = True
    replay_seconds: float = 10.0
    engine_seconds: float = 5.0
    discovery_seconds: float = 30.0

    def __post_init__(self) -> None:
        if self.engine not in _ENGINES:
            raise InvalidArgumentError(f"option 'engine' is {self.engine!r}, must be one of {', '.join(_ENGINES)}")
        parse_addresses(self.engine_address)
        if not self.instance_id:
            raise InvalidArgumentError("option 'instance_id' is empty")
        if bool(self.engine_url) == bool(self.endpoint):
            raise InvalidArgumentError("give one of the options 'engine_url' and 'endpoint'")
        if self.algorithm and self.algorithm not in ALGORITHMS:
            raise InvalidArgumentError(f"option 'algorithm' is {self.algorithm!r}, must be one of {ALGORITHMS}")
        if not 1 <= self.ranks <= _MAX_RANKS:
            raise InvalidArgumentError(f"option 'ranks' is {self.ranks}, must be 1 to {_MAX_RANKS}")
        if self.is_registered != bool(self.admin):
            raise InvalidArgumentError(
                "option 'admin' belongs to 'weights' or 'model_directory': one of them is missing"
            )
        for name in ("replay_seconds", "engine_seconds", "discovery_seconds"):
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(f"option {name!r} is {getattr(self, name)}, must be > 0")
        if self.block_tokens < 0:
            raise InvalidArgumentError(f"option 'block_tokens' is {self.block_tokens}, must be >= 0")
        _ = self.group_specs

    @property
    def is_registered(self) -> bool:
        """Whether the registration of the instance says how block keys are made."""
        return bool(self.weights or self.model_directory)

    @property
    def key_algorithm(self) -> str:
        """The algorithm of block keys."""
        return self.algorithm or (VLLM_SHA256 if self.engine == "vllm" else SGLANG_SHA256)

    @property
    def group_specs(self) -> Mapping[int, str]:
        """The names of parts, by group of layers."""
        found: dict[int, str] = {}
        for part in filter(None, self.groups.split(",")):
            match = _GROUP.fullmatch(part.strip())
            if match is None:
                raise InvalidArgumentError(f"option 'groups' holds {part!r}, must be NUMBER=PART")
            found[int(match[1])] = match[2]
        return found


@dataclass(frozen=True, slots=True)
class SubscriberOptions:
    """The process.

    Attributes:
        managers: `host:port` of each; every one gets reports of its own.
        engines: at least one.
        listen: `host:port` of health and metrics; port 0 for any.
        batch_keys: changes that are sent at once.
        batch_ms: how long fewer changes wait for more.
        snapshot_keys: blocks of one part of a snapshot.
        most_pending: changes that are kept for a manager that does not answer.
        registrations: whether the publishers are read, too, that clients registered at the managers.
        registration_hosts: the hosts that these may name: names, addresses and networks, separated by commas; "" for
            any.
        follow_managers: whether further managers that answers name get reports, too.
        credentials: for authentication and TLS.

    Raises:
        InvalidArgumentError: a value is not allowed; names it.
    """

    managers: tuple[str, ...]
    engines: tuple[EngineOptions, ...]
    listen: str = "127.0.0.1:9466"
    batch_keys: int = 4096
    batch_ms: int = 50
    snapshot_keys: int = 8192
    most_pending: int = 262_144
    registrations: bool = False
    registration_hosts: str = ""
    follow_managers: bool = True
    credentials: ClientCredentials = field(default_factory=ClientCredentials)

    def __post_init__(self) -> None:
        if not self.managers:
            raise InvalidArgumentError("option 'manager' is missing: host:port of each manager")
        parse_addresses(self.managers)
        if not self.engines and not self.registrations:
            raise InvalidArgumentError(
                "there is no engine: give its options, a file with a table [[engine]], or 'registrations'"
            )
        _ = self.allowed_hosts
        names = [(each.instance_id, each.engine_address) for each in self.engines]
        if len(set(names)) < len(names):
            raise InvalidArgumentError("two engines have the same engine_address and instance_id")
        for name, most in (("batch_keys", _MOST_KEYS), ("snapshot_keys", _MOST_KEYS), ("most_pending", 1 << 24)):
            if not 1 <= getattr(self, name) <= most:
                raise InvalidArgumentError(f"option {name!r} is {getattr(self, name)}, must be 1 to {most}")
        if not 0 <= self.batch_ms <= 60_000:
            raise InvalidArgumentError(f"option 'batch_ms' is {self.batch_ms}, must be 0 to 60000")

    @property
    def allowed_hosts(self) -> AllowedHosts:
        """The hosts that registrations may name."""
        return AllowedHosts(self.registration_hosts)


class AllowedHosts:
    """Hosts that may be connected to because a client named them.

    Args:
        text: names, addresses and networks (`10.0.0.0/8`), separated by commas; "" for any.

    Raises:
        InvalidArgumentError: an entry is none of these.
    """

    def __init__(self, text: str) -> None:
        entries = [each.strip().lower() for each in text.split(",") if each.strip()]
        self._is_any = not entries
        self._names = {each for each in entries if _HOST.fullmatch(each)}
        self._networks = []
        for each in entries:
            try:
                self._networks.append(ip_network(each))
            except ValueError:
                if each not in self._names or "/" in each:
                    raise InvalidArgumentError(
                        f"option 'registration_hosts' holds {each!r}, must be a host, an address or a network"
                    ) from None

    def allows(self, host: str) -> bool:
        """Return whether a host is one of them. A name is compared as it is: it is not resolved."""
        if self._is_any or host.lower() in self._names:
            return True
        try:
            address = ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


_HELP: Final[Mapping[str, str]] = {
    "engine": "vllm or sglang",
    "engine_address": "the engine, as routers call it: host:port",
    "instance_id": "instance whose blocks it holds",
    "engine_url": "its HTTP server, which says where its ranks publish",
    "endpoint": "or: where its first rank publishes, such as tcp://127.0.0.1:5557",
    "replay_endpoint": "where its first rank replays",
    "topic": "beginning of the topics to read",
    "ranks": "data-parallel ranks; each has the next port, default 1",
    "binds": "the engine connects to --endpoint, which is this host's",
    "algorithm": f"of block keys: {', '.join(ALGORITHMS)}; default: that of the engine",
    "hash_seed": "PYTHONHASHSEED of vLLM, if it is set",
    "block_tokens": "tokens of a block",
    "mask": "that keys are XORed with, default 0",
    "weights": "with our connector in the engine: version of the weights, its option of that name",
    "model_directory": "or: directory of the weights that the engine loads",
    "admin": "with one of these: host:port of a manager's admin calls",
    "groups": "parts of a block by group of layers: 0=full,1=window",
    "replay_seconds": "for a replay that says nothing, default 10",
    "engine_seconds": "for an engine whose connection broke, default 5",
    "discovery_seconds": "between two questions at --engine-url where its ranks publish, default 30",
    "listen": "host:port of health and metrics, default 127.0.0.1:9466",
    "batch_keys": "changes that are sent at once, default 4096",
    "batch_ms": "how long fewer changes wait for more, default 50",
    "snapshot_keys": "blocks of one part of a snapshot, default 8192",
    "most_pending": "changes that are kept for a manager that does not answer, default 262144",
    "registrations": "read the publishers, too, that clients registered at the managers (POST /register)",
    "registration_hosts": "hosts that these may name: names, addresses, networks, separated by commas; default: any",
}
_TYPES: Final[Mapping[str, type]] = {"int": int, "float": float, "str": str}
_OWN: Final = (
    *("listen", "batch_keys", "batch_ms", "snapshot_keys", "most_pending"),
    *("registrations", "registration_hosts", "follow_managers"),
)


def parse_arguments(arguments: Sequence[str]) -> SubscriberOptions:
    """Return what the command line, its file and the environment say.

    Raises:
        SystemExit: an argument is missing or malformed; says which.
    """
    parser = _parser()
    found = parser.parse_args(arguments)
    try:
        return _options(found)
    except InvalidArgumentError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcm-subscriber", description="Read the KV events of engines, and report their blocks to managers."
    )
    parser.add_argument("--config", type=Path, help="TOML file: the options below, and tables [[engine]]")
    parser.add_argument("--manager", action="append", default=[], help="host:port; repeat it for each manager")
    parser.add_argument(
        "--follow-managers",
        action=argparse.BooleanOptionalAction,
        help="report to further managers that answers name, as soon as they answer there; the default",
    )
    kinds = {each.name: str(each.type) for kind in (EngineOptions, SubscriberOptions) for each in fields(kind)}
    for name, about in _HELP.items():
        flag = f"--{name.replace('_', '-')}"
        if kinds[name] == "bool":
            parser.add_argument(flag, action="store_true", default=None, help=about)
        else:
            parser.add_argument(flag, type=_TYPES[kinds[name]], help=about)
    parser.add_argument(
        "--removes-at-once",
        dest="counts_copies",
        action="store_false",
        default=None,
        help="a block is gone with the first removal: where requests set vLLM's kv_cache_report_mode to full",
    )
    add_options(parser)
    return parser


def _options(found: argparse.Namespace) -> SubscriberOptions:
    file = {} if found.config is None else _file(found.config)
    own = file | {name: value for name in _OWN if (value := getattr(found, name)) is not None}
    engines = own.pop("engine", [])
    managers = own.pop("manager", [])
    if not isinstance(engines, list) or not all(isinstance(each, dict) for each in engines):
        raise InvalidArgumentError("option 'engine' of the file must be tables [[engine]]")
    if not isinstance(managers, list) or not all(isinstance(each, str) for each in managers):
        raise InvalidArgumentError("option 'manager' of the file must be a list of texts")
    names = {each.name for each in fields(EngineOptions)}
    given = {name: value for name in names if (value := getattr(found, name)) is not None}
    parsed = parse_options(_ProcessOptions, own)
    return SubscriberOptions(
        managers=tuple(dict.fromkeys([*managers, *found.manager])),
        engines=tuple([parse_options(EngineOptions, each) for each in [*engines, *([given] if given else [])]]),
        credentials=credentials_of(found),
        **{name: getattr(parsed, name) for name in _OWN},
    )


@dataclass(frozen=True, slots=True)
class _ProcessOptions:
    """The options of the process that are of a simple type."""

    listen: str = "127.0.0.1:9466"
    batch_keys: int = 4096
    batch_ms: int = 50
    snapshot_keys: int = 8192
    most_pending: int = 262_144
    registrations: bool = False
    registration_hosts: str = ""
    follow_managers: bool = True


def _file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"--config {str(path)!r} cannot be read: {error}") from None
