"""Traffic on a device with vector clocks: what was ordered before what can be asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from clock_runtime import ClockRuntime
from layer_traffic import Shape, Traffic

import gpu_tier.assembly

__all__ = ["MarkedTraffic"]


class MarkedTraffic(Traffic):
    """Traffic whose copies and attention leave marks on the streams they run on."""

    def __init__(
        self, runtime: ClockRuntime, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, shape: Shape | None = None
    ) -> None:
        monkeypatch.setattr(gpu_tier.assembly, "runtime_for", lambda _: runtime)
        super().__init__(shape or Shape(), config)
        self.runtime = runtime
        self.step = self.layer = 0
        manager, attend, write = self.coordinator.manager, self.coordinator.attend, self.coordinator.write_kv
        for name in ("load", "store", "gather"):
            monkeypatch.setattr(manager.transfer, name, self._marking(name, getattr(manager.transfer, name)))
        commit = manager.commit

        def marked_attend(q: torch.Tensor, meta: Any, *args: Any) -> torch.Tensor:
            self.runtime.mark("attend", self.step, self.layer)
            return attend(q, meta, *args)

        def marked_write(layer_id: int, *args: Any) -> None:
            self.layer = layer_id
            self.runtime.mark("write", self.step, layer_id)
            write(layer_id, *args)

        def marked_commit(layer_id: int, plan: Any) -> None:
            self.runtime.mark("commit", self.step, layer_id)
            commit(layer_id, plan)

        monkeypatch.setattr(self.coordinator, "attend", marked_attend)
        monkeypatch.setattr(self.coordinator, "write_kv", marked_write)
        monkeypatch.setattr(manager, "commit", marked_commit)

    def _marking(self, name: str, run: Any) -> Any:
        def marked(*args: Any, **kwargs: Any) -> None:
            layers = kwargs.get("layers")
            self.runtime.mark(name, self.step, self.layer if layers is None else layers[0])
            run(*args, **kwargs)

        return marked

    def decode(self, requests: Any, pad_to: int = 0) -> torch.Tensor:
        self.step += 1
        return super().decode(requests, pad_to)
