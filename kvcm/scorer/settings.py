"""Settings of a scorer, made of the options of its command line.

Errors name the option, the value and the allowed values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, TypeVar

from kvcm.config import ConfigError

__all__ = [
    "KvIndexerAddress",
    "ListenAddress",
    "PodModel",
    "ScorerSecrets",
    "ScorerSettings",
    "TierWeights",
    "settings_of",
]

_LISTEN: Final = re.compile(r"(?:(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):)?(?P<port>[0-9]{1,5})")
_MANAGER: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
_INSTANCE: Final = re.compile(r"[!-~]{1,256}")
_MAX_PORT: Final = 65535
_LOOPBACK: Final = "127.0.0.1"
_LISTEN_FORM: Final = "PORT or HOST:PORT with an ip address or localhost"
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """An address to bind.

    Attributes:
        host: an ip address or localhost.
        port: 0 takes a free one.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether no other host reaches it."""
        return self.host == "localhost" or ip_address(self.host).is_loopback

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """Return the address of `PORT`, on loopback, or of `HOST:PORT`.

        Raises:
            ValueError: it is malformed; the text names the allowed forms.
        """
        found = _LISTEN.fullmatch(text)
        if found is None or int(found["port"]) > _MAX_PORT:
            raise ValueError(_LISTEN_FORM)
        host = (found["host"] or _LOOPBACK).strip("[]")
        if host != "localhost":
            try:
                ip_address(host)
            except ValueError:
                raise ValueError(_LISTEN_FORM) from None
        return cls(host, int(found["port"]))


@dataclass(frozen=True, slots=True)
class KvIndexerAddress:
    """Where KVIndexer is served for one instance: its requests name none.

    Attributes:
        listen: the address.
        instance: id of the instance in the manager.
    """

    listen: ListenAddress
    instance: str


@dataclass(frozen=True, slots=True)
class PodModel:
    """A model whose pods are scored.

    Attributes:
        instance: id of the instance in the manager.
        tokenizer: tokenizer.json, or the directory with it.
    """

    instance: str
    tokenizer: Path


@dataclass(frozen=True, slots=True)
class TierWeights:
    """The worth of a block by the fastest memory that it counts for; of one in GPU memory and host memory llm-d's."""

    gpu: float = 1.0
    cpu: float = 0.8
    disk: float = 0.6
    storage: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSettings:
    """All settings.

    Attributes:
        managers: `host:port` of gRPC calls; all have the same reporters.
        kv_indexers: addresses of KVIndexer.
        pod_scores: addresses of IndexerService.
        models: by the name that requests of IndexerService have.
        worker_prefix: makes a worker's URL of an engine's name.
        workers: URLs by name of the engine, where the prefix does not make them.
        pods: pods by name of the engine, where that is not the pod.
        weights: of IndexerService.
        has_special_tokens: whether tokenizers add special tokens, as engines do for prompts of /v1/completions.
        max_blocks: blocks of a prompt that are asked for; the manager's kvcm.limits.max_keys_per_request at most.
        score_timeout_ms: for a manager's answer.
        drain_timeout_ms: for answers after SIGTERM.
        metrics: address of the metrics, None for none.
        api_key_file: with the key that clients must show, "" for none.
        insecure: whether addresses that other hosts reach may be bound without a key.
        manager_key_file: with the key to show to managers.
        manager_ca_file: with the certificates (PEM) to trust for them; "" is plain text.
        log_level: as of a manager.
        log_format: as of a manager.
    """

    managers: tuple[str, ...] = ()
    kv_indexers: tuple[KvIndexerAddress, ...] = ()
    pod_scores: tuple[ListenAddress, ...] = ()
    models: Mapping[str, PodModel] = field(default_factory=dict)
    worker_prefix: str = "http://"
    workers: Mapping[str, str] = field(default_factory=dict)
    pods: Mapping[str, str] = field(default_factory=dict)
    weights: TierWeights = TierWeights()
    has_special_tokens: bool = True
    max_blocks: int = 65_536
    score_timeout_ms: int = 80
    drain_timeout_ms: int = 5000
    metrics: ListenAddress | None = None
    api_key_file: str = ""
    insecure: bool = False
    manager_key_file: str = ""
    manager_ca_file: str = ""
    log_level: str = "INFO"
    log_format: str = "auto"


@dataclass(frozen=True, slots=True)
class ScorerSecrets:
    """Keys, read from the files that the settings name; "" for none.

    Attributes:
        api_key: that clients must show to the scorer.
        manager_key: that it shows to managers.
        manager_ca: certificates (PEM) that it trusts for them; empty for plain text.
    """

    api_key: str = field(default="", repr=False)
    manager_key: str = field(default="", repr=False)
    manager_ca: bytes = field(default=b"", repr=False)


def settings_of(options: Mapping[str, object]) -> ScorerSettings:
    """Return the settings of a command line.

    Args:
        options: texts, numbers and lists of texts by the option's name without dashes; None, False and empty ones count
            as not given.

    Raises:
        ConfigError: a value is not allowed, or some contradict each other.
    """
    given = {name: value for name, value in options.items() if not _is_missing(value)}
    values = {_FIELDS[name][0]: _parsed(name, value) for name, value in given.items() if name not in _MODEL_OPTIONS}
    instances, tokenizers = (_parsed(name, given.get(name, [])) for name in _MODEL_OPTIONS)
    if unpaired := sorted(set(instances) ^ set(tokenizers)):
        missing = "--tokenizer" if unpaired[0] in instances else "--model"
        raise ConfigError(f"{missing} has no entry for model {unpaired[0]!r}, must have one for each model")
    models = {model: PodModel(instance, tokenizers[model]) for model, instance in instances.items()}
    settings = ScorerSettings(models=models, **values)
    if problem := _contradiction(settings):
        raise ConfigError(problem)
    return settings


def _is_missing(value: object) -> bool:
    return value is None or value is False or value in ("", [])  # a number 0 is given


def _parsed(name: str, value: object) -> Any:
    parse = _FIELDS[name][1]
    try:
        return parse(value)
    except ValueError as error:
        raise ConfigError(f"--{name.replace('_', '-')} is {value!r}, must be {error}") from None


# Parsers of values. Their errors say what is allowed.


def _each(parse: Callable[[str], _Value]) -> Callable[[Sequence[str]], tuple[_Value, ...]]:
    return lambda texts: tuple(map(parse, texts))


def _pairs(form: str, parse: Callable[[str], _Value]) -> Callable[[Sequence[str]], Mapping[str, _Value]]:
    """Return a parser of `NAME=VALUE` texts; no name may come twice."""

    def parsed(texts: Sequence[str]) -> Mapping[str, _Value]:
        pairs = [text.partition("=") for text in texts]
        if not all(name and value for name, _, value in pairs):
            raise ValueError(form)
        _check_once((name for name, _, _ in pairs), form)
        return {name: parse(value) for name, _, value in pairs}

    return parsed


def _check_once(names: Iterable[str], form: str) -> None:
    found = list(names)
    if len(set(found)) < len(found):
        raise ValueError(f"{form}, each once")


def _managers(texts: Sequence[str]) -> tuple[str, ...]:
    for text in texts:
        found = _MANAGER.fullmatch(text)
        if found is None or not 0 < int(found[2]) <= _MAX_PORT:
            raise ValueError("HOST:PORT of a manager's gRPC calls")
    _check_once(texts, "HOST:PORT of a manager's gRPC calls")
    return tuple(texts)


def _kv_indexer(text: str) -> KvIndexerAddress:
    listen, _, instance = text.partition("=")
    if not _INSTANCE.fullmatch(instance):
        raise ValueError(f"LISTEN=INSTANCE_ID, LISTEN as {_LISTEN_FORM}")
    return KvIndexerAddress(ListenAddress.parse(listen), instance)


def _instance(text: str) -> str:
    if not _INSTANCE.fullmatch(text):
        raise ValueError("MODEL=INSTANCE_ID")
    return text


def _weights(texts: Sequence[str]) -> TierWeights:
    form = "TIER=WEIGHT with gpu, cpu, disk or storage and a number from 0 to 1"
    given = _pairs(form, str)(texts)
    try:
        numbers = {name: float(text) for name, text in given.items()}
    except ValueError:
        raise ValueError(form) from None
    known = set(TierWeights.__dataclass_fields__)
    if not set(numbers) <= known or not all(math.isfinite(each) and 0 <= each <= 1 for each in numbers.values()):
        raise ValueError(form)
    weights = TierWeights(**numbers)
    # With a slower memory above a faster one, an engine that has to load would win against one that need not.
    if not weights.gpu >= weights.cpu >= max(weights.disk, weights.storage):
        raise ValueError(f"ordered: gpu >= cpu >= disk and storage, and not {weights}")
    return weights


def _number(least: int, most: int) -> Callable[[int], int]:
    def check(value: int) -> int:
        if not least <= value <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return value

    return check


def _one_of(*allowed: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in allowed:
            raise ValueError(", ".join(allowed))
        return value

    return check


_MODEL_OPTIONS: Final = ("model", "tokenizer")
_MS: Final = _number(1, 3_600_000)
_FIELDS: Final[Mapping[str, tuple[str, Callable[..., object]]]] = {
    "manager": ("managers", _managers),
    "kv_indexer": ("kv_indexers", _each(_kv_indexer)),
    "pod_scores": ("pod_scores", _each(ListenAddress.parse)),
    "model": ("models", _pairs("MODEL=INSTANCE_ID", _instance)),
    "tokenizer": ("models", _pairs("MODEL=PATH", Path)),
    "worker_prefix": ("worker_prefix", str),
    "worker": ("workers", _pairs("ENGINE=URL", str)),
    "pod": ("pods", _pairs("ENGINE=POD", str)),
    "weight": ("weights", _weights),
    "no_special_tokens": ("has_special_tokens", lambda without: not without),
    "max_blocks": ("max_blocks", _number(1, 1 << 24)),
    "score_timeout_ms": ("score_timeout_ms", _MS),
    "drain_timeout_ms": ("drain_timeout_ms", _MS),
    "metrics": ("metrics", ListenAddress.parse),
    "api_key_file": ("api_key_file", str),
    "insecure": ("insecure", bool),
    "manager_key_file": ("manager_key_file", str),
    "manager_ca_file": ("manager_ca_file", str),
    "log_level": ("log_level", _one_of("DEBUG", "INFO", "WARN", "ERROR")),
    "log_format": ("log_format", _one_of("auto", "json", "console")),
}
"""Field and parser of each option."""


def _contradiction(settings: ScorerSettings) -> str:
    """Return the contradiction between settings that are allowed one by one, "" for none."""
    if not settings.managers:
        return "--manager is missing, must be HOST:PORT of a manager's gRPC calls"
    listens = [*(each.listen for each in settings.kv_indexers), *settings.pod_scores]
    if not listens:
        return "neither --kv-indexer nor --pod-scores is given, must be one of them at least"
    if bool(settings.pod_scores) != bool(settings.models):
        return "--pod-scores and --model go together: with the first, there must be a model, and with it the first"
    bound = [each for each in (*listens, *([settings.metrics] if settings.metrics else [])) if each.port]
    if len(set(bound)) < len(bound):
        return f"addresses are {', '.join(map(str, bound))}, must be another one for each"
    urls = list(settings.workers.values())
    if len(set(urls)) < len(urls) or len(set(settings.pods.values())) < len(settings.pods):
        return "two engines have the same worker or pod, must be another one for each"
    return _exposed(settings, listens)


def _exposed(settings: ScorerSettings, listens: Iterable[ListenAddress]) -> str:
    is_keyed = bool(settings.api_key_file)
    exposed = [] if is_keyed or settings.insecure else [each for each in listens if not each.is_loopback]
    if settings.metrics is not None and not settings.insecure and not settings.metrics.is_loopback:
        return f"--metrics is {settings.metrics}, which other hosts reach without a key, must be loopback or --insecure"
    if exposed:
        return (
            f"{exposed[0]} is an address that other hosts reach, must be a loopback one unless there is "
            "--api-key-file or --insecure"
        )
    return ""
