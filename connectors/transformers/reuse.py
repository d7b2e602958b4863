"""Generation that loads the KV of known prefixes and stores the KV of new ones.

    reuse = KVReuse.connect(model, manager="127.0.0.1:6381", instance_group="default", instance_id="demo")
    output = reuse.generate(input_ids, max_new_tokens=16)

One call of generate: keys of the prompts' full blocks → match → load the longest prefixes into the cache → prefill of
the rest → first token → publish the new blocks while further tokens are generated, and the blocks that those fill. At
most all but one token of a prompt are loaded, since the model needs one to compute.

Tokens are right in every case: a failure (manager, storage, a single block) is a miss, and blocks that were not loaded
are computed. Blocks behind one that failed to load are computed too, from a cache without gaps, and may be published.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import GenerationMode

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.credentials import ClientCredentials
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.keys import KeyChain
from kvcm.connectors.layout.tensors import StagingBuffers
from kvcm.connectors.node import NodeSettings
from kvcm.connectors.results import CallCounters, Registration
from kvcm.connectors.reuse.model_weights import ModelWeights, UnknownWeightsError
from kvcm.connectors.reuse.registration import InstanceSpecs, ManagerLink
from kvcm.connectors.reuse.statistics import ReuseStatistics, Unsaved
from kvcm.connectors.reuse.write_sessions import SessionSettings, WriteSessions
from kvcm.connectors.transfer import TransferEngine
from kvcm.connectors.transfer.worker_pool import PRIORITY_SAVE, WorkerPool
from kvcm.connectors.transformers.cache import BatchCache, CallCache, Row
from kvcm.connectors.transformers.identity import model_identity
from kvcm.connectors.transformers.model_kv import (
    compute,
    empty_state,
    join_states,
    pack_state,
    probe_model,
    unpack_state,
)
from kvcm.connectors.transformers.paged_cache import BlockPool, PagedBatch
from kvcm.connectors.transformers.prefix_load import PrefixLookup, RowPrefix
from kvcm.connectors.transformers.publication import (
    BlockPublisher,
    GenerationProgress,
    Published,
    RowProgress,
    RowPublication,
)
from kvcm.connectors.transformers.settings import GenerationReport, ReuseSettings, RowReport
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.keys import BlockKey
from kvcm.model.storages import StorageConfig

__all__ = ["KVReuse", "Prefill", "end_tokens"]

_log = logging.getLogger(__name__)

# ---- checks of the arguments of `KVReuse.generate` ----

# Of the arguments that are no settings of generation these leave KV a function of the tokens before it. All others are
# given to the model: positions, embeddings, images, names of adapters.
_ALLOWED_ARGUMENTS = frozenset(
    {
        "attention_mask",
        "generation_config",
        "logits_processor",
        "prefix_allowed_tokens_fn",
        "stopping_criteria",
        "streamer",
        "synced_gpus",
    }
)
_REFUSED_SETTINGS = frozenset({"assistant_model", "cache_implementation", "prefill_chunk_size"})
_MODES = frozenset({GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE})


def _parse_rows(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, pad_token_id: int | None
) -> tuple[list[Row], torch.Tensor]:
    """Return the sequences of a batch, and its attention mask.

    Args:
        input_ids: of shape (rows, tokens).
        attention_mask: of the same shape, zeros for padding; None to take pad tokens for padding, as `generate` does.
        pad_token_id: without a mask, these tokens are padding; None for a batch without padding.

    Raises:
        InvalidArgumentError: names the argument and the allowed values.
    """
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        raise InvalidArgumentError(f"input_ids has shape {tuple(input_ids.shape)}, must be (rows, tokens)")
    is_given = attention_mask is not None
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids) if pad_token_id is None else input_ids.ne(pad_token_id).long()
    if attention_mask.shape != input_ids.shape:
        raise InvalidArgumentError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, must be {tuple(input_ids.shape)} as input_ids"
        )
    is_token = attention_mask.to(torch.bool)
    if not bool(is_token[:, -1].all()) or bool((is_token[:, 1:] < is_token[:, :-1]).any()):
        found = (
            "attention_mask"
            if is_given
            else f"attention_mask is missing, pad_token_id {pad_token_id} stands for it: it"
        )
        raise InvalidArgumentError(f"{found} must be zeros and then ones in every row: padding at the left only")
    paddings = (~is_token).sum(dim=1).tolist()
    rows = [Row(index, padding, input_ids[index, padding:].tolist()) for index, padding in enumerate(paddings)]
    return rows, attention_mask


def _effective_config(model: PreTrainedModel, arguments: Mapping[str, Any]) -> GenerationConfig:
    """Return the generation settings that hold for these arguments of generate.

    Raises:
        InvalidArgumentError: they ask for something that KV cannot be reused for.
    """
    config = copy.deepcopy(arguments.get("generation_config") or model.generation_config)
    assert config is not None
    for name, value in arguments.items():
        is_refused = name in _REFUSED_SETTINGS or not (name in _ALLOWED_ARGUMENTS or hasattr(config, name))
        if is_refused and value is not None:
            raise InvalidArgumentError(
                f"{name} is given, must be left out: KVReuse brings the cache, of plain sequences"
            )
    config.update(**{name: value for name, value in arguments.items() if hasattr(config, name)})
    mode = config.get_generation_mode()
    if mode not in _MODES:
        raise InvalidArgumentError(f"generation mode is {mode.value}, must be greedy search or sampling")
    for name, only in (("num_return_sequences", 1), ("use_cache", True), ("prefill_chunk_size", None)):
        value = getattr(config, name, None)
        if value is not None and value != only:
            raise InvalidArgumentError(f"{name} is {value}, must be {only}")
    return config


def _padding_token(config: GenerationConfig) -> int | None:
    """Return the token that `generate` takes for padding when no mask is given, None when it takes none."""
    pad = config.pad_token_id
    return None if pad is None or pad in end_tokens(config) else int(pad)


def end_tokens(config: GenerationConfig) -> frozenset[int]:
    """Return the ids that end a row."""
    ids = config.eos_token_id
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


# ---- prefill of prompts whose prefixes were loaded, so that generation can start in one column ----
#
# The rows of a batch have prefixes of different lengths. Each shorter row is computed by itself, in the batch's memory,
# up to the column where the longest prefix ends; from there on transformers computes all rows together. Never more is
# computed than without reuse: a row computed by itself has no padding.
#
# A model with state stores it only where a computation stops. So its rows stop at the last block boundary that another
# prompt can use, and where a longer prefix is stored than the model can continue from: there prompts diverge, and the
# next one can start.


@dataclass(frozen=True, slots=True)
class _RowStart:
    """Where a row begins to compute.

    Attributes:
        row: of the batch.
        blocks: that were loaded.
        known_blocks: whose KV is known, with or without a state.
        state: at the end of the loaded blocks, None when the model has none.
    """

    row: Row
    blocks: int = 0
    known_blocks: int = 0
    state: torch.Tensor | None = None


class Prefill:
    """Brings all rows to one column.

    Args:
        model: that computes.
        batch: its cache, with the loaded blocks.
        starts: of the rows, in order.
        keeps_states: whether rows stop where their state is worth saving.

    Attributes:
        column: where generation goes on.
        states: per row, at the end of which block which state, as stored bytes.
    """

    def __init__(self, model: Any, batch: CallCache, starts: Sequence[_RowStart], *, keeps_states: bool) -> None:
        self.states: list[dict[int, torch.Tensor]] = [{} for _ in starts]
        self._model = model
        self._batch = batch
        self._starts = starts
        self._block_tokens = batch.parts.block_tokens
        self._state = batch.parts.state
        self._stops = [self._stops_of(start) if self._state and keeps_states else () for start in starts]
        self.column = self._column()

    def run(self) -> Cache:
        """Compute, and return the cache to go on with."""
        states = [self._advance(start, stops) for start, stops in zip(self._starts, self._stops, strict=True)]
        cache = self._batch.joint_cache(self.column)
        if self._state is not None and self.column:
            join_states(self._state, [state for state in states if state is not None], cache.layers)
        return cache

    def _column(self) -> int:
        size = self._block_tokens
        if self._state is not None and len(self._starts) > 1:
            return self._batch.columns - 1  # a state has no columns: all rows must be at their ends
        ends = [max((start.blocks, *stops)) for start, stops in zip(self._starts, self._stops, strict=True)]
        return max(start.row.padding + end * size if end else 0 for start, end in zip(self._starts, ends, strict=True))

    def _stops_of(self, start: _RowStart) -> tuple[int, ...]:
        """Return the blocks behind which a row stops."""
        last = (len(start.row.tokens) - 1) // self._block_tokens
        return tuple(sorted({block for block in (start.known_blocks, last) if start.blocks < block <= last}))

    def _advance(self, start: _RowStart, stops: Sequence[int]) -> torch.Tensor | None:
        """Compute a row up to the common column; returns its state there, None when the model has none."""
        row, position = start.row, start.blocks * self._block_tokens
        target = self.column - row.padding
        if target <= position:
            return start.state if self._state is None or start.state is not None else empty_state(self._state)
        cache = self._batch.row_cache(row, position)
        if self._state is not None and start.state is not None:
            unpack_state(self._state, start.state, cache.layers)
        for end in sorted({*(stop * self._block_tokens for stop in stops), target}):
            compute(self._model, row.tokens[position:end], position, cache)
            position = end
            if self._state is not None and end // self._block_tokens in stops and end % self._block_tokens == 0:
                self.states[row.index][end // self._block_tokens - 1] = pack_state(self._state, cache.layers, 0)
        return None if self._state is None else pack_state(self._state, cache.layers, 0)


# Capacity for new tokens that is allocated at once; longer answers make the cache grow.
_MAX_SPARE_TOKENS = 1024
_POOL_FULL = "the pool had too few free blocks for this call"


class _Refusal(NamedTuple):
    """Why the KV of a call is not shared, in words and for the counters."""

    reason: str
    unsaved: Unsaved


class _Call(NamedTuple):
    """What became of one call of generate."""

    batch: CallCache
    found: Sequence[RowPrefix]
    publications: Sequence[RowPublication]
    progress: GenerationProgress
    loaded_at: float
    output: Any


class KVReuse:
    """A causal language model whose KV is shared through the manager; made with `connect`.

    One call at a time. Use as a context manager, or call `close`.

    Attributes:
        last_report: figures of the last call of `generate`.
        parts: what a stored block of this model consists of.
        weights: watches which version the model's weights have.
        statistics: counts over all calls.
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
        weights_version: str | None = None,
        settings: ReuseSettings,
        clock: Callable[[], float],
    ) -> None:
        self.last_report: GenerationReport | None = None
        self.statistics = ReuseStatistics()
        self._model: Any = model  # generate is a mixin that type checkers do not see
        self._kv = probe_model(model, block_tokens)
        self.parts = self._kv.parts
        self._identity = model_identity(model, self.parts, model_name)
        self.weights = ModelWeights(model, weights_version, compares_all=settings.compare_all_weights)
        self._chain: tuple[str, KeyChain] | None = None
        self._reported: set[str] = set()
        specs = InstanceSpecs(
            instance_group,
            block_tokens=block_tokens,
            parts=self.parts.spec_infos,
            deployment=self._identity.deployment(),
            part_groups=self.parts.spec_groups,
        )
        self._link = ManagerLink(
            client, specs=specs, call_seconds=settings.call_seconds, make_engine=partial(_engine, settings), clock=clock
        )
        session = SessionSettings(call_seconds=settings.call_seconds)
        self._sessions = WriteSessions(client, session, clock)
        self._background = WorkerPool(1, "kvcm-publish")
        self._lookup = PrefixLookup(
            self._link,
            parts=self.parts,
            settings=settings,
            background=self._background,
            statistics=self.statistics,
            clock=clock,
        )
        self._pool = BlockPool(self.parts, settings.pool_blocks) if settings.pool_blocks else None
        # The thread that saves has staging buffers of its own.
        self._save_staging = {part.name: StagingBuffers(part.layout, settings.staging_blocks) for part in self.parts.kv}
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
        weights_version: str | None = None,
        settings: ReuseSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> KVReuse:
        """Register the model's KV with the manager and return the model with reuse.

        Args:
            model: decoder-only, with attention in some layer: full or with a sliding window, and with or without
                linear attention in others.
            manager: `host:port` of each manager, a list or separated by commas. It need not be there yet.
            instance_group: existing group whose quota and storages are used.
            instance_id: shared by all engines that run this model with this block size.
            block_tokens: tokens per block.
            publish: store new KV; False only loads.
            model_name: for people; default is the model's class.
            weights_version: see `set_weights_version`; default is a digest of every element of the weights.
            settings: deadlines and sizes.
            clock: seconds of a clock that never runs backwards.

        Raises:
            InvalidArgumentError: the KV of this kind of model cannot be reused, or an argument, or a
                variable of `NodeSettings` or `ClientCredentials`, is malformed.

        A manager that refuses the registration (another model under this instance id) is no exception: it is logged as
        an error, `registration` has the reason, and generation goes on without reuse.
        """
        settings = settings or ReuseSettings()
        client_settings = ClientSettings(
            timeout_seconds=settings.call_seconds,
            node_id=NodeSettings.from_environment().node_id,
            credentials=ClientCredentials.from_environment(),
            follow_assignment=settings.follow_assignment,
        )
        reuse = cls(
            model,
            ManagerClient(manager, instance_id, client_settings),
            instance_group,
            block_tokens=block_tokens,
            publish=publish,
            model_name=model_name,
            weights_version=weights_version,
            settings=settings,
            clock=clock,
        )
        reuse._link.register(settings.register_seconds)
        return reuse

    @property
    def registration(self) -> Registration:
        """What the manager last said to the registration."""
        return self._link.registration

    @property
    def counters(self) -> dict[str, CallCounters]:
        """Snapshot of how the calls to the manager ended."""
        return self._link.client.counters()

    def block_keys(self, token_ids: Sequence[int]) -> list[BlockKey]:
        """Return the keys under which the full blocks of these tokens are stored.

        Raises:
            UnknownWeightsError: nothing says which weights the model has now.
        """
        return self._current_chain().keys(token_ids)

    def set_weights_version(self, name: str) -> None:
        """Name the weights as they are now, after they were changed, instead of having them read.

        Engines of this instance whose weights have equal names share KV. When the weights change afterwards without
        another name, their digest is used. The one thing to call after single elements were written through `.data`,
        NumPy or code in C, which PyTorch does not count.

        Args:
            name: 1 to 256 characters, such as a training step or a commit. Never one that other weights have had.

        Raises:
            InvalidArgumentError: the name is empty or too long.
        """
        self.weights.assign(name)

    @torch.no_grad()
    def generate(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
        """Generate as `model.generate` does, with the same result.

        Args:
            input_ids: prompts of shape (rows, tokens), the shorter ones padded at their left.
            **arguments: of `model.generate`: greedy search and sampling. `attention_mask` marks padding.

        Returns:
            What `model.generate` returns; `last_report` holds the figures.

        Raises:
            InvalidArgumentError: padding elsewhere, beams, several sequences per prompt, another cache, or other
                things that KV would depend on; or the model was moved or converted since it was connected.
        """
        started = self._clock()
        config = _effective_config(self._model, arguments)
        rows, mask = _parse_rows(input_ids, arguments.get("attention_mask"), _padding_token(config))
        self._kv.check_layout(self._model)
        chain, refusal = self._sharing(rows)
        keys = [chain.keys(row.tokens) if chain else [] for row in rows]
        batch, local = self._open_batch(rows, keys, config, uses_pool=chain is not None)
        paged = batch if isinstance(batch, PagedBatch) else None
        try:
            call = self._run(
                batch,
                chain=chain,
                refusal="" if refusal is None else refusal.reason,
                keys=keys,
                local=local,
                input_ids=input_ids,
                arguments={**arguments, "attention_mask": mask},
                ends=end_tokens(config),
            )
            if chain is not None and paged is not None and paged is call.batch and self.weights.is_unchanged():
                self._keep(paged, chain, call.progress)
        finally:
            closed = None if paged is None else self._background.submit(PRIORITY_SAVE, paged.close)
        if self._publish and not call.publications:
            self._count_unsaved(call, refusal)
        published = self._finish_publications(call.publications, closed)
        is_pool_full = self._pool is not None and chain and paged is None and not config.return_dict_in_generate
        self.last_report = self._report(call, published, started, _POOL_FULL if is_pool_full else "")
        return call.output

    def close(self) -> None:
        """Finish saves in flight, within their deadlines, and close all connections."""
        self._background.close(self._settings.save_seconds)
        self._sessions.close(self._settings.call_seconds)
        self._link.close()

    def __enter__(self) -> KVReuse:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _current_chain(self) -> KeyChain:
        """Return what computes the keys of blocks of the weights as they are now."""
        version = self.weights.version()
        if self._chain is None or self._chain[0] != version:
            self._chain = version, KeyChain(self._identity.namespace(version), self.parts.block_tokens)
        return self._chain[1]

    def _sharing(self, rows: Sequence[Row]) -> tuple[KeyChain | None, _Refusal | None]:
        """Return what computes the keys of a call, or why its KV is not shared."""
        longest, limit = max(len(row.tokens) for row in rows), self._kv.max_tokens
        if limit is not None and longest > limit:
            reason = f"prompt has {longest} tokens, whose KV depends on its length from {limit + 1} on"
            return None, _Refusal(reason, Unsaved.LENGTH)
        try:
            return self._current_chain(), None
        except UnknownWeightsError as error:
            if str(error) not in self._reported:
                self._reported.add(str(error))
                _log.error("KV is not reused: %s", error)
            return None, _Refusal(str(error), Unsaved.WEIGHTS)

    def _count_unsaved(self, call: _Call, refusal: _Refusal | None) -> None:
        """Count the blocks of a call that nothing was to publish."""
        blocks = call.progress.computed_blocks() - sum(prefix.stored_blocks for prefix in call.found)
        if refusal is not None:
            self.statistics.count_unsaved(refusal.unsaved, blocks)
        else:
            reason = Unsaved.NO_ANSWER if self.registration.ok else Unsaved.UNREGISTERED
            self.statistics.count_unsaved(reason, blocks, call.found[0].reason)

    def _open_batch(
        self, rows: Sequence[Row], keys: Sequence[Sequence[BlockKey]], config: Any, *, uses_pool: bool
    ) -> tuple[CallCache, Sequence[int]]:
        """Return the cache of a call, and how many leading blocks of each row it has already."""
        new_tokens = _new_tokens(config, rows[0].padding + len(rows[0].tokens))
        if (
            self._pool is not None and uses_pool and not config.return_dict_in_generate
        ):  # a cache that is returned must stay
            usable = [(len(row.tokens) - 1) // self.parts.block_tokens for row in rows]
            local = [self._pool.find(row_keys[:most]) for row_keys, most in zip(keys, usable, strict=True)]
            paged = PagedBatch.open(self._kv, self._pool, rows, local, new_tokens)
            if paged is not None:
                return paged, [len(blocks) for blocks in local]
        return BatchCache(self._kv, rows, min(new_tokens, _MAX_SPARE_TOKENS)), [0] * len(rows)

    def _keep(self, batch: PagedBatch, chain: KeyChain, progress: GenerationProgress) -> None:
        """Keep the blocks that were computed for the next calls."""
        for row, tokens in zip(batch.rows, progress.tokens(), strict=True):
            batch.keep(row, chain.keys(tokens))

    def _run(
        self,
        batch: CallCache,
        chain: KeyChain | None,
        refusal: str,
        keys: Sequence[Sequence[BlockKey]],
        local: Sequence[int],
        input_ids: torch.Tensor,
        arguments: dict[str, Any],
        ends: Collection[int],
    ) -> _Call:
        """Load, compute, and begin to publish."""
        if chain is None:
            found, publisher = [RowPrefix((), reason=refusal) for _ in batch.rows], None
        else:
            found, publisher = self._lookup.run(batch, keys, local)
        loaded_at = self._clock()
        if any(prefix.loaded.is_tainted for prefix in found):
            batch = batch.copy([(row, *prefix.tainted_blocks) for row, prefix in enumerate(found)])
        publications = self._publications(found, publisher)
        prefill = self._prefill(batch, found, keeps_states=bool(publications))
        watched = self._row_progress(batch.rows, chain, found, publications, prefill)
        progress = GenerationProgress(batch, watched, ends, self._clock, self._kv.max_tokens)
        output = self._generate(input_ids, prefill.run(), progress, arguments)
        progress.finish()
        return _Call(
            batch, found=found, publications=publications, progress=progress, loaded_at=loaded_at, output=output
        )

    def _generate(
        self, input_ids: torch.Tensor, cache: Cache, progress: GenerationProgress, arguments: dict[str, Any]
    ) -> Any:
        criteria = StoppingCriteriaList([progress, *(arguments.pop("stopping_criteria", None) or [])])
        return self._model.generate(input_ids, past_key_values=cache, stopping_criteria=criteria, **arguments)

    def _prefill(self, batch: CallCache, found: Sequence[RowPrefix], *, keeps_states: bool) -> Prefill:
        starts = [
            _RowStart(row, prefix.blocks, prefix.known_blocks, prefix.loaded.state)
            for row, prefix in zip(batch.rows, found, strict=True)
        ]
        return Prefill(self._model, batch, starts, keeps_states=keeps_states)

    def _row_progress(
        self,
        rows: Sequence[Row],
        chain: KeyChain | None,
        found: Sequence[RowPrefix],
        publications: Sequence[RowPublication],
        prefill: Prefill,
    ) -> list[RowProgress | None]:
        if not publications or chain is None:
            return [None] * len(rows)
        return [
            RowProgress(
                row,
                chain=chain,
                prompt_keys=prefix.keys,
                publication=publication,
                states=states,
                may_publish=self.weights.is_unchanged,
            )
            for row, prefix, publication, states in zip(rows, found, publications, prefill.states, strict=True)
        ]

    def _publications(self, found: Sequence[RowPrefix], engine: TransferEngine | None) -> list[RowPublication]:
        """Return what publishes each row; empty when nothing is published."""
        if not self._publish or engine is None:
            return []
        saver = BlockPublisher(
            self._sessions,
            engine=engine,
            staging=self._save_staging,
            parts=self.parts,
            settings=self._settings,
            statistics=self.statistics,
            clock=self._clock,
        )
        return [RowPublication(saver, self._background, prefix.stored_blocks) for prefix in found]

    def _finish_publications(self, publications: Sequence[RowPublication], closed: Future[None] | None) -> Published:
        deadline = self._clock() + self._settings.flush_seconds
        published = [publication.finish(max(0.0, deadline - self._clock())) for publication in publications]
        if closed is not None:
            wait([closed], max(0.0, deadline - self._clock()))  # so that the next call finds the blocks
        return sum(published, start=Published())

    def _report(self, call: _Call, published: Published, started: float, pool_reason: str) -> GenerationReport:
        finished, found = self._clock(), call.found
        rows = tuple(self._row_report(row, prefix) for row, prefix in zip(call.batch.rows, found, strict=True))
        return GenerationReport(
            prompt_tokens=sum(row.prompt_tokens for row in rows),
            matched_tokens=sum(row.matched_tokens for row in rows),
            loaded_tokens=sum(row.loaded_tokens for row in rows),
            local_tokens=sum(row.local_tokens for row in rows),
            new_tokens=call.progress.new_tokens,
            first_token_seconds=(call.progress.first_token_at or finished) - started,
            load_seconds=call.loaded_at - started,
            total_seconds=finished - started,
            bytes_loaded=sum(prefix.loaded.bytes_loaded for prefix in found),
            bytes_saved=published.bytes,
            blocks_saved=published.blocks,
            blocks_corrupt=sum(len({block for _, block in prefix.loaded.corrupt}) for prefix in found),
            reason=next((prefix.reason for prefix in found if prefix.reason), "") or published.reason or pool_reason,
            rows=rows,
        )

    def _row_report(self, row: Row, prefix: RowPrefix) -> RowReport:
        size = self.parts.block_tokens
        loaded = max(0, prefix.loaded.blocks - prefix.local_blocks)
        return RowReport(len(row.tokens), prefix.matched_blocks * size, loaded * size, prefix.local_blocks * size)


def _engine(settings: ReuseSettings, storages: Sequence[StorageConfig]) -> TransferEngine:
    return TransferEngine.for_storages(storages, settings.transfer_threads, checksums=settings.checksums)


def _new_tokens(config: Any, prompt_tokens: int) -> int:
    if config.max_new_tokens is not None:
        return int(config.max_new_tokens)
    return max(0, int(config.max_length or 0) - prompt_tokens) or _MAX_SPARE_TOKENS
