"""Pools that refuse one allocation after the other, while requests decode that must not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
import torch
from layer_traffic import Shape, Traffic
from prefix_traffic import prefix_of, publishing

from gpu_tier.errors import PoolExhaustedError

__all__ = ["refuse_each_once"]

T = TypeVar("T")


class _Refusals:
    """Lets the n-th allocation from now on fail, whichever pool it asks; all others go through."""

    def __init__(self, traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.has_refused = False
        c = traffic.coordinator
        pools = [c.manager.tables, c.manager.device.allocator, c.manager.host.allocator]
        pools += [c.resident.pool.allocator] if c.resident is not None else []
        pools += [owner.pool.allocator for owner in (c.algorithm, c.manager.policy) if hasattr(owner, "pool")]
        if c.manager.blocks is not None and c.manager.blocks.store is not None:
            pools.append(c.manager.blocks.store.allocator)
        for pool in pools:
            monkeypatch.setattr(pool, "alloc", self._refusing(pool.alloc))
        self._in_use = [lambda pool=pool: pool.available for pool in pools]

    def _refusing(self, alloc: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(*args: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.has_refused = True
                raise PoolExhaustedError("refused by the test")
            return alloc(*args)

        return refusing

    @property
    def free(self) -> list[int]:
        """What each pool has left."""
        return [available() for available in self._in_use]

    def twice(self, run: Callable[[], T]) -> T:
        """Return what `run` returns, the second time if it was refused."""
        try:
            return run()
        except PoolExhaustedError:
            if not self.has_refused:
                raise
            return run()


def _steps_of(traffic: Traffic, refusals: _Refusals, other: int, *, has_prefix: bool) -> Iterator[torch.Tensor]:
    """Yield the outputs of a request's decode steps, beside which another one decodes."""
    prefix = prefix_of(traffic, 1, 40) if has_prefix else None
    c = traffic.coordinator
    refusals.left = yield torch.empty(0)
    before = refusals.free
    try:
        request = traffic.begin(61, 1, prefix)
    except PoolExhaustedError:
        if prefix is not None:  # it was released
            before[2] += len(prefix.pages)
        assert refusals.free == before
        request = traffic.begin(61, 1, prefix_of(traffic, 1, 40) if has_prefix else None)
    while (left := 61 - c.trackers[request].seq_len) > 0:
        refusals.twice(lambda left=left: traffic.prefill([request], [min(13, left)]))  # type: ignore[misc]
        yield refusals.twice(lambda: traffic.decode([other]))
    refusals.twice(lambda: c.prompt_finished(request))
    for _ in range(14):
        yield refusals.twice(lambda: traffic.decode([other, request]))
    refusals.left = -1
    traffic.end(request)


def _outputs_of(
    shape: Shape, config: dict[str, Any], refused: int, monkeypatch: pytest.MonkeyPatch, *, has_prefix: bool
) -> tuple[list[torch.Tensor], bool]:
    """Return what both requests attended to, and whether an allocation was refused."""
    traffic = publishing(shape, {**config, "min_sparse_prompt_len": 16})
    refusals = _Refusals(traffic, monkeypatch)
    other = traffic.begin(45, seed=2)
    traffic.prompt([other])
    steps = _steps_of(traffic, refusals, other, has_prefix=has_prefix)
    next(steps)
    out = [steps.send(refused), *steps]
    traffic.end(other)
    traffic.assert_empty()
    return out, refusals.has_refused


def refuse_each_once(
    shape: Shape, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, has_prefix: bool
) -> None:
    """Run two requests again and again, each time with another allocation refused: the same bits every time."""
    expected, _ = _outputs_of(shape, config, -1, monkeypatch, has_prefix=has_prefix)
    for refused in range(1, 100):
        found, was_refused = _outputs_of(shape, config, refused, monkeypatch, has_prefix=has_prefix)
        if not was_refused:
            break
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), refused
    assert 8 < refused < 99
