"""Which weights an engine computes with: every rank compares its own, and the scheduler knows when all agree.

Weights of a running vLLM change through calls to its workers (`reload_weights`, `collective_rpc`, `apply_model`, weight
transfer) without a hook for connectors. But vLLM itself answers wrongly afterwards until its prefix cache is reset.
So a reset begins a new *generation*: every rank reads all of its weights and reports a digest, and until all have done
so nothing is looked up or saved. Without a reset, signs (`reuse.model_weights`) are compared before each step that
loads or saves, and a change begins a generation, too; then nothing is shared until the cache is reset, since blocks of
the old weights are in it. Invariants:

1. A job of another generation than that of the rank is refused: its load fails, its save is not written.
2. Equal versions have equal weights on all ranks. The version is the one that the engine started with, or a digest.
"""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from kvcm.connectors.reuse.model_weights import ModelWeights, UnknownWeightsError
from kvcm.connectors.reuse.weight_files import weights_digest
from kvcm.connectors.vllm.connector_metadata import WeightsReport

__all__ = ["AdapterVersions", "EngineWeights", "RankWeights"]

_log = logging.getLogger(__name__)


class EngineWeights:
    """What the scheduler knows.

    Args:
        initial: version of the weights that the engine was started with.
        ranks: that report.

    Attributes:
        generation: of the weights; jobs carry it.
    """

    def __init__(self, initial: str, ranks: int) -> None:
        self.generation = 1
        self._initial = initial
        self._ranks = ranks
        self._reports: dict[int, WeightsReport] = {}
        self._is_cache_stale = False
        self._reported = ""

    @property
    def is_pending(self) -> bool:
        """Whether a rank has not reported yet."""
        return len(self._reports) < self._ranks

    @property
    def version(self) -> str | None:
        """Version of the weights, None while nothing may be shared."""
        reports = [self._reports[rank] for rank in sorted(self._reports)]
        if self.is_pending or self._is_cache_stale or not all(report.digest for report in reports):
            return None
        if all(report.digest == report.initial for report in reports):
            return self._initial
        return "content:" + hashlib.sha256(" ".join(report.digest for report in reports).encode()).hexdigest()[:32]

    def begin_generation(self) -> None:
        """Have all ranks read their weights: they may be others, and vLLM's prefix cache is empty."""
        self.generation += 1
        self._reports.clear()
        self._is_cache_stale = False

    def on_reports(self, reports: Mapping[int, WeightsReport]) -> bool:
        """Note what ranks report, and return whether the weights of one were changed without a reset."""
        is_changed = False
        for rank, report in reports.items():
            if report.generation > self.generation:
                self.generation = report.generation
                self._reports.clear()
                self._is_cache_stale = is_changed = True
                self._report("the weights were changed; KV is not reused until vLLM's prefix cache is reset")
            if report.generation == self.generation:
                self._reports[rank] = report
                if not report.digest:
                    self._report(f"KV is not reused: the weights of rank {rank} are unknown ({report.reason})")
        return is_changed

    def _report(self, message: str) -> None:
        if message != self._reported:
            self._reported = message
            _log.error("%s", message)


class AdapterVersions:
    """Contents of the adapters (LoRA) that requests name.

    vLLM's hashes have name and path of an adapter, which may be trained again. The content is that of its files when a
    request first names it, since vLLM loads it then and keeps it: where files change later without `load_inplace`,
    it is not known which ones are in use, and nothing is shared with that adapter any more.
    """

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._reported: set[int] = set()

    def of(self, adapter: Any) -> str | None:
        """Return the version of an adapter, "" for none, and None where it is not known.

        Args:
            adapter: vLLM's `LoRARequest`, or None.
        """
        if adapter is None:
            return ""
        number = adapter.lora_int_id
        try:
            found = weights_digest(Path(adapter.lora_path))
        except (OSError, ValueError) as error:
            self._report(adapter, f"its files cannot be read ({error})")
            return None
        if getattr(adapter, "load_inplace", False):
            self._known[number] = found
        if self._known.setdefault(number, found) != found:
            self._report(
                adapter, "its files changed after vLLM loaded it: load it with load_inplace, or under another id"
            )
            return None
        return found

    def _report(self, adapter: Any, reason: str) -> None:
        if adapter.lora_int_id not in self._reported:
            self._reported.add(adapter.lora_int_id)
            _log.error("KV of adapter %r is not reused: %s", adapter.lora_name, reason)


class RankWeights:
    """The weights of one rank.

    Args:
        layers: attention layers of the model, by name, as vLLM registers them.
    """

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self._layers = layers
        self._weights: ModelWeights | None = None
        self._generation = 0
        self._is_named = False
        self._report = self._read(0)
        self._initial = self._report.digest

    def report(self, generation: int, *, has_jobs: bool) -> WeightsReport | None:
        """Return what the scheduler has to know before a step, None for nothing.

        Args:
            generation: of the scheduler.
            has_jobs: whether the step loads or saves.
        """
        if generation <= self._generation and not self._is_named and not (has_jobs and self._has_changed()):
            return None
        self._generation = max(generation, self._generation + 1)
        self._is_named = False
        self._report = self._read(self._generation)
        return self._report

    def admits(self, generation: int) -> bool:
        """Return whether jobs of a generation are of the weights as they are now."""
        return generation == self._generation and bool(self._report.digest)

    def set_version(self, name: str) -> None:
        """See `KVCMConnector.set_weights_version`."""
        if self._weights is None:
            self._weights = self._new_weights()
        self._weights.assign(name)
        self._is_named = True

    def _has_changed(self) -> bool:
        # A reset has all elements compared. Between resets, tensors of `torch.inference_mode` have no counters.
        if self._weights is None or self._weights.is_unchanged(trusts_counters=False):
            return False
        return self._read(self._generation).digest != self._report.digest  # a module may only have been added

    def _read(self, generation: int) -> WeightsReport:
        try:
            if self._weights is None:
                self._weights = self._new_weights()
            digest, reason = self._weights.version(), ""
        except UnknownWeightsError as error:
            digest, reason = "", str(error)
        return WeightsReport(generation, digest, self._initial if generation else digest, reason)

    def _new_weights(self) -> ModelWeights:
        return ModelWeights(nn.ModuleList(_models_with(self._layers)), compares_all=True, is_packed=True)


def _models_with(layers: Mapping[str, Any]) -> list[nn.Module]:
    """Return the models that have these layers. vLLM gives a connector its layers, and not their model.

    Raises:
        UnknownWeightsError: there is none.
    """
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    inner = {id(child) for module in modules for child in module._modules.values()}
    wanted = {id(layer) for layer in layers.values()}
    outer = [module for module in modules if id(module) not in inner]
    found = [module for module in outer if any(id(each) in wanted for each in module.modules() if each is not module)]
    if not found:
        raise UnknownWeightsError("the model is not found")
    return found
