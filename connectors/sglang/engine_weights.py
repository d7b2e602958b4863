"""Which weights an SGLang server computes with: every rank compares its own, and all ranks agree.

SGLang changes weights while it runs (`update_weights_from_disk` and its siblings) and flushes its cache afterwards,
unless the caller wants that otherwise. So the first change ends sharing, and the flush after the last one begins it
again, with the version that the weights have then. Changes past SGLang's own calls are seen by signs
(`reuse.model_weights`), which are compared before pages are looked up, loaded or saved. Invariants:

1. Between a change and a flush after it nothing is looked up, loaded or saved: the cache has pages of both weights.
2. Ranks have the same version, or none. They exchange digests where SGLang's own calls keep them in step: at a flush,
   and at the end of a session of updates (`begin_weight_update`), since tensors may be packed again there.
3. Equal versions have equal weights. The version is a given name, that of the files where all ranks have what was read
   from them, or a digest.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.layers.rotary_embedding.rope_variant import Phi3LongRoPEScaledRotaryEmbedding
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_parallel, get_serving

from kvcm.connectors.reuse.model_weights import ModelWeights, UnknownWeightsError
from kvcm.model.errors import InvalidArgumentError

__all__ = ["EngineWeights", "is_serving", "refuse_batch_dependent_kv"]

_log = logging.getLogger(__name__)


class EngineWeights:
    """The weights of one rank. To be made, and closed, in SGLang's main thread.

    Args:
        host_pool: of KV.
        name: that the user gave to the weights as they are now, "" for none.
        files: version of the files that they were just read from, "" where they may be others by now.
        takes_labels: engines whose SGLang gives weights the same `weight_version` share.
    """

    def __init__(self, host_pool: Any, name: str, files: str, *, takes_labels: bool = False) -> None:
        self._pool = host_pool
        self._name = name
        self._labelled: dict[str, tuple[str, ...]] | None = {} if takes_labels else None
        self._lock = threading.Lock()
        self._weights: ModelWeights | None = None
        self._model: Callable[[], object] = type(None)
        self._own_digest = ""
        self._is_flushed = True
        self._is_session_open = False
        self._was_updated = False
        self._reported = ""
        self._version = ""
        self._first_digests = _exchanged(self._digest())
        if files and all(self._first_digests):
            _versions_of_files[self._first_digests] = files
        self._version = self._version_of(self._first_digests)
        clear = host_pool.clear

        def cleared() -> None:  # SGLang clears the host pool at the end of a flush
            clear()
            self._on_flush()

        host_pool.clear = cleared
        _watching.add(self)

    @property
    def version(self) -> str:
        """Version of the weights, "" while nothing may be shared."""
        with self._lock:
            if self._version and _is_offloaded():
                return ""
            if self._version and self._has_changed():
                self._forget()
            if not self._is_flushed:
                self._report("the weights change: KV is not reused until SGLang's cache is flushed")
            return self._version

    def close(self) -> None:
        """Watch no longer."""
        _watching.discard(self)
        vars(self._pool).pop("clear", None)

    def on_update(self) -> None:
        """SGLang is about to change weights."""
        with self._lock:
            self._was_updated = True
            self._forget()

    def on_session_begin(self) -> None:
        """A session of updates begins."""
        self.on_update()
        self._is_session_open = True

    def on_session_end(self) -> None:
        """A session of updates has ended."""
        with self._lock:
            self._is_session_open = False
            self._agree()

    def _on_flush(self) -> None:
        with self._lock:
            self._is_flushed = True
            if not self._is_session_open:
                self._agree()

    def _has_changed(self) -> bool:
        if self._weights is not None and self._weights.is_unchanged(trusts_counters=False):
            return False
        before = self._own_digest  # SGLang adds modules to models of MLA while it serves; their elements are the same
        return self._digest() != before

    def _forget(self) -> None:
        self._is_flushed, self._version = False, ""

    def _agree(self) -> None:
        """Read the weights, exchange digests with the other ranks, and set the version."""
        self._version = self._version_of(_exchanged(self._digest() if self._is_flushed else ""))

    def _version_of(self, digests: tuple[str, ...]) -> str:
        if not all(digests):
            return ""
        label = str(get_serving().weight_version)
        if self._labelled is not None and label not in {"", "None", "default"}:
            if self._labelled.setdefault(label, digests) == digests:
                return f"label:{label}"
            self._report(f"KV is not reused: the weights changed, and weight_version is {label!r} as before")
            return ""
        is_first = digests == self._first_digests
        if get_parallel().pp_size > 1 and (self._was_updated or not is_first):
            self._report(
                "KV is not reused: weights changed, and a stage of a pipeline does not know those of the others"
            )
            return ""
        if self._name and is_first:
            return self._name
        content = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:32]
        return _versions_of_files.get(digests, f"content:{content}")

    def _digest(self) -> str:
        try:
            model = _served_model()
            if self._weights is None or self._model() is not model:
                self._weights = ModelWeights(model, compares_all=True, is_packed=True)
                self._model = weakref.ref(model)
            self._own_digest = self._weights.version()
        except UnknownWeightsError as error:
            self._report(f"KV is not reused: the weights are unknown ({error})")
            self._own_digest = ""
        return self._own_digest

    def _report(self, message: str) -> None:
        if message != self._reported:
            self._reported = message
            _log.error("%s", message)


def is_serving() -> bool:
    """Return whether this server takes updates already: what it computes with may not be what its files have."""
    return bool(_instances(SchedulerWeightUpdaterManager))


_versions_of_files: dict[tuple[str, ...], str] = {}
"""By the digests that ranks had right after files were read: servers of equal files share, whenever they attach."""


def _exchanged(digest: str) -> tuple[str, ...]:
    """Return the digests of all ranks that have parts of the same pages, in their order."""
    group = get_parallel().attn_tp_group
    digests = [digest] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(digests, digest, group=group.cpu_group)
    return tuple(digests)


def refuse_batch_dependent_kv() -> None:
    """Check that KV of a token depends on the tokens before it alone.

    Raises:
        InvalidArgumentError: with SGLang's LongRoPE one token far behind rotates all tokens of its batch differently.
    """
    for runner in _model_runners():
        context = runner.model_config.context_len
        for module in runner.model.modules():
            if isinstance(module, Phi3LongRoPEScaledRotaryEmbedding):
                most = module.original_max_position_embeddings
                if context > most:
                    raise InvalidArgumentError(
                        f"context_length is {context}, must be <= {most} with LongRoPE: when a request is longer, KV of"
                        " all requests in its batch is another"
                    )


def _served_model() -> torch.nn.Module:
    for runner in _model_runners():
        model: torch.nn.Module = runner.model
        return model
    raise UnknownWeightsError("the model is not found")


def _model_runners() -> list[Any]:
    """Return what runs the model of this rank: one. SGLang gives a backend its pool, and not the model."""
    return [runner for runner in _instances(ModelRunner) if not runner.is_draft_worker]


@functools.lru_cache(maxsize=1)
def _updater_managers() -> list[Any]:
    return _instances(SchedulerWeightUpdaterManager)


def _is_offloaded() -> bool:
    """Return whether the weights have no memory now (`release_memory_occupation`): nothing of them can be read."""
    return any(GPU_MEMORY_TYPE_WEIGHTS in manager.offload_tags for manager in _updater_managers())


def _instances(kind: type[Any]) -> list[Any]:
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


# ---- SGLang's updates, which no storage backend hears of ----


_watching: weakref.WeakSet[EngineWeights] = weakref.WeakSet()
_UPDATES = {
    "update_weights_from_disk": EngineWeights.on_update,
    "load_weights_from_distributed": EngineWeights.on_update,
    "update_weights_from_tensor": EngineWeights.on_update,
    "update_weights_from_ipc": EngineWeights.on_update,
    "begin_weight_update": EngineWeights.on_session_begin,
    "end_weight_update": EngineWeights.on_session_end,
}


def _notified(method: Callable[..., Any], notify: Callable[[EngineWeights], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for each in list(_watching):  # at the end also after an error: other ranks exchange digests, too
                stack.callback(notify, each) if notify is EngineWeights.on_session_end else notify(each)
            return method(*arguments, **named)

    return wrapped


for _name, _notify in _UPDATES.items():  # of the class: its instances have slots, and SGLang calls them by name
    setattr(WeightUpdater, _name, _notified(getattr(WeightUpdater, _name), _notify))
