"""Generation that loads the KV of known prefixes and stores the KV of new ones.

    reuse = KVReuse.connect(model, manager="127.0.0.1:6381", instance_group="default", instance_id="demo")
    output = reuse.generate(input_ids, max_new_tokens=16)

One call of generate: keys of the prompt's full blocks → match → load the longest prefix into the cache → prefill of the
rest → first token → publish the new blocks while further tokens are generated, and the blocks that those fill. At most
all but one token of a prompt are loaded, since the model needs one to compute.

Tokens are right in every case: whatever fails (manager, storage, a single block) is a miss, and what was not loaded is
computed. Blocks behind one that failed to load are computed too, from a cache without gaps, and may be published.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteriaList

from connectors.client import ManagerClient
from connectors.credentials import ClientCredentials
from connectors.exchanges import ClientSettings
from connectors.keys import KeyChain
from connectors.layout import BlockLayout
from connectors.layout.staging import Staging
from connectors.node import NodeSettings
from connectors.pool_reports import PoolReports, PoolTeller
from connectors.results import CallCounters, Location, MatchResult, Outcome, Registration
from connectors.transfer import TransferEngine
from connectors.transfer.pool import PRIORITY_SAVE, WorkerPool
from connectors.transformers.cache import PreallocatedLayer, cache_layers, filled_cache
from connectors.transformers.connection import SPEC, Connection
from connectors.transformers.identity import inspect_model, model_deployment
from connectors.transformers.loader import LoadedPrefix, load_prefix
from connectors.transformers.progress import Progress
from connectors.transformers.publisher import Publication, Published, Saver
from connectors.transformers.report import GenerationReport
from connectors.transformers.request import check_prompt, effective_config
from connectors.transformers.settings import ReuseSettings
from kvcm.model.errors import ErrorCode
from kvcm.model.keys import BlockKey

__all__ = ["KVReuse"]

# Room for new tokens that is allocated at once; longer answers make the cache grow.
_MAX_SPARE_TOKENS = 1024
# The manager refuses longer read leases.
_MAX_LEASE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class _Prefix:
    """What is known and loaded of a prompt when the prefill begins."""

    keys: Sequence[BlockKey]
    matched_blocks: int = 0
    loaded: LoadedPrefix = field(default_factory=LoadedPrefix)
    engine: TransferEngine | None = None  # None: publish nothing either
    reason: str = ""


class KVReuse:
    """A causal language model whose KV is shared through the manager; made with `connect`.

    One call at a time. Use as a context manager, or call `close`.

    Attributes:
        last_report: figures of the last call of `generate`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        client: ManagerClient,
        instance_group: str,
        *,
        block_tokens: int,
        publish: bool,
        model_name: str | None,
        settings: ReuseSettings,
        clock: Callable[[], float],
    ) -> None:
        self.last_report: GenerationReport | None = None
        self._model: Any = model  # generate is a mixin that type checkers do not see
        self._kv = inspect_model(model, block_tokens)
        deployment = model_deployment(model, self._kv.layout, model_name)
        self._chain = KeyChain(f"{deployment.model_name}\n{deployment.extra}".encode(), block_tokens)
        self._connection = Connection(client, instance_group, self._kv.layout, deployment, settings)
        # The thread that saves has a staging buffer of its own.
        self._load_staging = Staging(self._kv.layout, settings.staging_blocks)
        self._save_staging = Staging(self._kv.layout, settings.staging_blocks)
        self._background = WorkerPool(1, "kvcm-publish")
        # Making a pool takes long: what is published to other storages does not wait for it.
        self._pool_teller = PoolTeller(PoolReports(client), settings.call_seconds)
        self._publish = publish
        self._settings = settings
        self._clock = clock

    @classmethod
    def connect(
        cls,
        model: PreTrainedModel,
        manager: str | Sequence[str],
        instance_group: str,
        instance_id: str,
        *,
        block_tokens: int = 64,
        publish: bool = True,
        model_name: str | None = None,
        settings: ReuseSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> KVReuse:
        """Register the model's KV with the manager and return the model with reuse.

        Args:
            model: decoder-only, full attention in all layers.
            manager: `host:port` of each manager, a list or separated by commas. It need not be there yet.
            instance_group: existing group whose quota and storages are used.
            instance_id: shared by all engines that run this model with this block size.
            block_tokens: tokens per block.
            publish: store new KV; False only loads.
            model_name: for people; default is the model's class.
            settings: deadlines and sizes.
            clock: seconds of a clock that never runs backwards.

        Raises:
            InvalidArgumentError: the KV of this kind of model cannot be reused, or an argument, or a
                variable of `NodeSettings` or `ClientCredentials`, is malformed.

        A manager that refuses the registration (another model under this instance id) is no exception: it is logged as
        an error, `registration` tells, and generation goes on without reuse.
        """
        settings = settings or ReuseSettings()
        node_id = NodeSettings.from_environment().node_id
        credentials = ClientCredentials.from_environment()
        client = ManagerClient(
            manager,
            instance_id,
            ClientSettings(timeout_seconds=settings.call_seconds, node_id=node_id, credentials=credentials),
        )
        reuse = cls(
            model,
            client,
            instance_group,
            block_tokens=block_tokens,
            publish=publish,
            model_name=model_name,
            settings=settings,
            clock=clock,
        )
        reuse._engine(settings.register_seconds)
        return reuse

    @property
    def registration(self) -> Registration:
        """What the manager last said to the registration."""
        return self._connection.registration

    @property
    def counters(self) -> dict[str, CallCounters]:
        """Snapshot of how the calls to the manager ended."""
        return self._connection.client.counters()

    @property
    def layout(self) -> BlockLayout:
        """The stored format of this model's blocks."""
        return self._kv.layout

    def block_keys(self, token_ids: Sequence[int]) -> list[BlockKey]:
        """Return the keys under which the full blocks of these tokens are stored."""
        return self._chain.keys(token_ids)

    @torch.no_grad()
    def generate(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
        """Generate as `model.generate` does, with the same result.

        Args:
            input_ids: prompt of shape (1, tokens).
            **arguments: of `model.generate`: greedy search and sampling.

        Returns:
            What `model.generate` returns; `last_report` holds the figures.

        Raises:
            InvalidArgumentError: more than one sequence, padding, beams, or another cache.
        """
        started = self._clock()
        check_prompt(input_ids, arguments.get("attention_mask"))
        new_tokens = _new_tokens(effective_config(self._model, arguments), input_ids.shape[1])
        layers = self._layers(input_ids.shape[1] + min(new_tokens, _MAX_SPARE_TOKENS))
        prefix = self._load(input_ids[0].tolist(), layers)
        loaded_at = self._clock()
        if prefix.loaded.is_tainted:
            layers = self._untainted(layers, prefix.loaded.blocks)
        publication = self._publication(prefix)
        progress = Progress(layers, self._chain, prefix.keys, publication, self._clock)
        output = self._generate(input_ids, layers, prefix, progress, arguments)
        published = publication.finish(self._settings.flush_seconds) if publication else Published()
        self.last_report = GenerationReport(
            prompt_tokens=input_ids.shape[1],
            matched_tokens=prefix.matched_blocks * self._chain.block_tokens,
            loaded_tokens=prefix.loaded.blocks * self._chain.block_tokens,
            new_tokens=progress.new_tokens,
            first_token_seconds=(progress.first_token_at or self._clock()) - started,
            load_seconds=loaded_at - started,
            total_seconds=self._clock() - started,
            bytes_loaded=prefix.loaded.bytes_loaded,
            bytes_saved=published.bytes,
            blocks_saved=published.blocks,
            blocks_corrupt=len(prefix.loaded.corrupt),
            reason=prefix.reason or published.reason,
        )
        return output

    def close(self) -> None:
        """Finish what is being saved, within its deadlines, and close all connections."""
        self._background.close(self._settings.save_seconds)
        self._pool_teller.close()
        self._connection.close()

    def __enter__(self) -> KVReuse:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self,
        input_ids: torch.Tensor,
        layers: Sequence[PreallocatedLayer],
        prefix: _Prefix,
        progress: Progress,
        arguments: dict[str, Any],
    ) -> Any:
        criteria = StoppingCriteriaList([progress, *(arguments.pop("stopping_criteria", None) or [])])
        # Given explicitly: otherwise a pad token inside the prompt would be guessed to be padding.
        arguments["attention_mask"] = torch.ones_like(input_ids)
        cache = filled_cache(layers, prefix.loaded.blocks * self._chain.block_tokens)
        return self._model.generate(input_ids, past_key_values=cache, stopping_criteria=criteria, **arguments)

    def _load(self, tokens: list[int], layers: Sequence[PreallocatedLayer]) -> _Prefix:
        """Load the longest known prefix, all but the last token at most."""
        keys = self._chain.keys(tokens)
        engine = self._engine(self._settings.call_seconds)
        if engine is None:
            return _Prefix(keys, reason=f"not registered: {self.registration.message}")
        usable = keys[: (len(tokens) - 1) // self._chain.block_tokens]
        if not usable:
            return _Prefix(keys, engine=engine)
        timeout = self._settings.call_seconds
        # The lease begins in the manager, the load when the answer is here. Nothing is begun after the lease: the slots
        # of blocks that were deleted since then hold zeros.
        lease_seconds = min(self._settings.load_seconds + timeout, _MAX_LEASE_SECONDS)
        lease_ends = self._clock() + lease_seconds
        match = self._connection.client.match(
            usable, spec_names=[SPEC], read_lease_ms=int(lease_seconds * 1000), timeout_seconds=timeout
        )
        if match.outcome is not Outcome.OK:
            # A manager that cannot tell what is there will hardly take more: this prompt is not published either.
            return _Prefix(keys, reason=match.reason, engine=self._after_failed_match(match))
        locations = [location for location in match.locations if location is not None]
        load_seconds = min(self._settings.load_seconds, lease_ends - self._clock())
        loaded = self._load_blocks(engine, layers, locations, load_seconds)
        self._after_load(match, loaded, keys, locations)
        return _Prefix(keys, len(locations), loaded, engine, loaded.reason)

    def _load_blocks(
        self,
        engine: TransferEngine,
        layers: Sequence[PreallocatedLayer],
        locations: Sequence[Location],
        load_seconds: float,
    ) -> LoadedPrefix:
        buffers = [layer.buffers() for layer in layers]
        checksums = self._settings.checksums
        return load_prefix(
            engine, self._load_staging, buffers, locations, SPEC, load_seconds, self._clock, checksums=checksums
        )

    def _after_failed_match(self, match: MatchResult) -> TransferEngine | None:
        if match.code != ErrorCode.INSTANCE_NOT_EXIST:
            return None
        self._connection.forget()  # the manager lost its state: begin anew, and this prompt can be the first
        return self._engine(self._settings.call_seconds)

    def _engine(self, timeout_seconds: float) -> TransferEngine | None:
        """Return what moves bytes, None while there is no registration; the manager hears of its pools meanwhile."""
        engine = self._connection.engine(timeout_seconds)
        if engine is not None:
            self._pool_teller.look_after(engine)
        return engine

    def _after_load(
        self,
        match: MatchResult,
        loaded: LoadedPrefix,
        keys: Sequence[BlockKey],
        locations: Sequence[Location],
    ) -> None:
        """Tell the manager what was found out, in the background: the first token does not wait for it."""
        client = self._connection.client
        if match.lease_id:
            self._background.submit(PRIORITY_SAVE, partial(_call, client.release_lease, match.lease_id))
        if loaded.lost or loaded.corrupt:
            # Otherwise the manager would promise these blocks forever. They are computed now and published again.
            lost = [(keys[index], locations[index].uris[SPEC]) for index in loaded.lost]
            corrupt = [
                (keys[index], locations[index].uris[SPEC], locations[index].checksums[SPEC]) for index in loaded.corrupt
            ]
            self._background.submit(PRIORITY_SAVE, partial(_call, client.report_missing, lost, corrupt=corrupt))
        if loaded.refused:
            self._connection.forget()  # perhaps a storage was added since

    def _publication(self, prefix: _Prefix) -> Publication | None:
        if not self._publish or prefix.engine is None:
            return None
        saver = Saver(self._connection.client, prefix.engine, self._save_staging, self._settings, SPEC, self._clock)
        return Publication(saver, self._background, prefix.loaded.blocks)

    def _layers(self, capacity_tokens: int) -> list[PreallocatedLayer]:
        layout = self._kv.layout
        return cache_layers((layout.kv_heads, layout.head_dim), self._kv.dtype, self._kv.devices, capacity_tokens)

    def _untainted(self, layers: Sequence[PreallocatedLayer], blocks: int) -> list[PreallocatedLayer]:
        """Return layers with the good blocks in memory that no late read can reach."""
        tokens = blocks * self._chain.block_tokens
        fresh = self._layers(layers[0].buffers()[0].shape[1])
        for new, old in zip(fresh, layers, strict=True):
            for target, source in zip(new.buffers(), old.buffers(), strict=True):
                target[:, :tokens].copy_(source[:, :tokens])
        return fresh


def _call(method: Callable[..., object], *arguments: object, **options: object) -> None:
    method(*arguments, **options)


def _new_tokens(config: Any, prompt_tokens: int) -> int:
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    return max(0, int(config.max_length or 0) - prompt_tokens) or _MAX_SPARE_TOKENS
