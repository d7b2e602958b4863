"""`kvcm scorer`: the manager's scores in the gRPC interfaces that other gateways call."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcm.commands.options import key_in, serve_with, with_options
from kvcm.terminal.exit_codes import CANNOT_RUN, exit_cannot_run, exit_on_errors

if TYPE_CHECKING:
    from kvcm.scorer.settings import ScorerSecrets, ScorerSettings

__all__ = ["scorer"]

_FILE, _LISTEN = "FILE", "[HOST:]PORT"
_INDEXER, _PODS, _CLIENTS, _MANAGER = "KVIndexer of SGLang", "IndexerService of llm-d", "Clients", "Manager"


@dataclass(frozen=True, slots=True, kw_only=True)
class _IndexerOptions:
    """KVIndexer. Fields are named as options are."""

    kv_indexer: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-indexer",
            rich_help_panel=_INDEXER,
            metavar=f"{_LISTEN}=INSTANCE_ID",
            help="Serve KVIndexer for an instance at an address; repeatable. Without a host: loopback.",
        ),
    ] = None
    worker_prefix: Annotated[
        str | None,
        typer.Option(
            "--worker-prefix",
            rich_help_panel=_INDEXER,
            metavar="TEXT",
            help="What makes a router's URL of an engine's name; http:// by default.",
        ),
    ] = None
    worker: Annotated[
        list[str] | None,
        typer.Option(
            "--worker",
            rich_help_panel=_INDEXER,
            metavar="ENGINE=URL",
            help="URL of an engine, as the router has it byte for byte, where the prefix does not make it; repeatable.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PodOptions:
    """IndexerService."""

    pod_scores: Annotated[
        list[str] | None,
        typer.Option(
            "--pod-scores",
            rich_help_panel=_PODS,
            metavar=_LISTEN,
            help="Serve IndexerService at an address; repeatable. Without a host: loopback.",
        ),
    ] = None
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            rich_help_panel=_PODS,
            metavar="MODEL=INSTANCE_ID",
            help="A model of requests, and its instance; repeatable.",
        ),
    ] = None
    tokenizer: Annotated[
        list[str] | None,
        typer.Option(
            "--tokenizer",
            rich_help_panel=_PODS,
            metavar="MODEL=PATH",
            help="Its tokenizer.json, or the directory with it; repeatable.",
        ),
    ] = None
    pod: Annotated[
        list[str] | None,
        typer.Option(
            "--pod",
            rich_help_panel=_PODS,
            metavar="ENGINE=POD",
            help="Pod of an engine, where that is not the engine's name; repeatable.",
        ),
    ] = None
    weight: Annotated[
        list[str] | None,
        typer.Option(
            "--weight",
            rich_help_panel=_PODS,
            metavar="TIER=WEIGHT",
            help="Weight of a block: gpu=1, cpu=0.8, disk=0.6, storage=0.5 by default; repeatable.",
        ),
    ] = None
    no_special_tokens: Annotated[
        bool,
        typer.Option(
            "--no-special-tokens",
            rich_help_panel=_PODS,
            help="Add no special tokens to prompts, for such as a chat template has rendered.",
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClientOptions:
    """Clients: their key, metrics."""

    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file",
            rich_help_panel=_CLIENTS,
            metavar=_FILE,
            help="File with the API key that clients must show.",
        ),
    ] = None
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            rich_help_panel=_CLIENTS,
            help="Serve addresses that other hosts reach although clients show no key.",
        ),
    ] = False
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics", rich_help_panel=_CLIENTS, metavar=_LISTEN, help="Serve metrics over HTTP, at /metrics."
        ),
    ] = None
    drain_timeout_ms: Annotated[
        int | None,
        typer.Option(
            "--drain-timeout-ms",
            rich_help_panel=_CLIENTS,
            metavar="N",
            help="How long answers may go on after SIGTERM; 5000.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _ManagerOptions:
    """The managers that score prompts."""

    manager: Annotated[
        list[str] | None,
        typer.Option(
            "--manager",
            rich_help_panel=_MANAGER,
            metavar="HOST:PORT",
            help="gRPC address of its data port; repeatable: the next one is asked where one does not answer.",
        ),
    ] = None
    manager_key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file",
            rich_help_panel=_MANAGER,
            envvar="KVCM_KEY_FILE",
            metavar=_FILE,
            help="File with the key to show to it, readable by you only; it needs the verb score.",
        ),
    ] = None
    manager_ca_file: Annotated[
        Path | None,
        typer.Option(
            "--ca-file",
            rich_help_panel=_MANAGER,
            envvar="KVCM_CA_FILE",
            metavar=_FILE,
            help="Certificates (PEM) to trust for it; without them the connection is not encrypted.",
        ),
    ] = None
    score_timeout_ms: Annotated[
        int | None,
        typer.Option("--score-timeout-ms", rich_help_panel=_MANAGER, metavar="N", help="For its answer; 80."),
    ] = None
    max_blocks: Annotated[
        int | None,
        typer.Option(
            "--max-blocks",
            rich_help_panel=_MANAGER,
            metavar="N",
            help="Blocks of a prompt to ask for, the manager's kvcm.limits.max_keys_per_request at most; 65536.",
        ),
    ] = None


@with_options
def scorer(
    indexer_options: _IndexerOptions,
    pod_options: _PodOptions,
    client_options: _ClientOptions,
    manager_options: _ManagerOptions,
    log_level: Annotated[
        str | None, typer.Option("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARN or ERROR.")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option("--log-format", metavar="FORMAT", help="auto, json or console.")
    ] = None,
) -> None:
    """Answer other gateways over gRPC by the manager's scores, until SIGTERM or Ctrl-C, which end it with exit code 0.

    SGLang's router asks KVIndexer with the hashes of a prompt, clients of llm-d's indexer ask IndexerService with its
    text. Nothing is kept here; engines report to the manager.
    """
    # The services are imported here: other commands start faster without.
    from kvcm.scorer.settings import settings_of

    with exit_on_errors(CANNOT_RUN):
        parts = (indexer_options, pod_options, client_options, manager_options)
        given = {name: value for each in parts for name, value in dataclasses.asdict(each).items()}
        texts = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
        settings = settings_of({**texts, "log_level": log_level, "log_format": log_format})
        _run(settings, _secrets(settings))


def _secrets(settings: ScorerSettings) -> ScorerSecrets:
    from kvcm.scorer.settings import ScorerSecrets

    return ScorerSecrets(
        api_key=key_in(settings.api_key_file),
        manager_key=key_in(settings.manager_key_file),
        manager_ca=Path(settings.manager_ca_file).read_bytes() if settings.manager_ca_file else b"",
    )


def _run(settings: ScorerSettings, secrets: ScorerSecrets) -> None:
    try:
        from kvcm.scorer.scorer import Scorer

        serve_with(lambda: Scorer(settings, secrets).serve(), settings.log_level, settings.log_format)
    except ModuleNotFoundError as missing:  # also tokenizers, which are loaded for prompts as text
        exit_cannot_run(f"{missing.name} is not installed; the scorer needs: pip install 'kvcm[server,scorer]'")
