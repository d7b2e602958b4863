"""Hit rates of the LRU diff buffer on selections that exact attention makes on S1.

A hit rate belongs to a trace and to a way of counting: here items of a selection that were on the device, over items
selected, without the first steps, which start from a buffer that holds the prompt's last tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gpu_tier.eval.metrics import attention_weights
from gpu_tier.eval.synth import KVSample
from gpu_tier.eval.traces import simulate

__all__ = ["HitRate", "exact_selections", "hit_rates"]


@dataclass(frozen=True, slots=True)
class HitRate:
    """The hit rate of one buffer.

    Attributes:
        selected: items of a selection, k.
        capacity: items of the buffer, C.
        rate: hits over selected items.
    """

    selected: int
    capacity: int
    rate: float

    @property
    def ratio(self) -> float:
        """C / k."""
        return self.capacity / self.selected


def exact_selections(sample: KVSample, k: int) -> Tensor:
    """Return the true top k of each step by the weight summed over the group, ``int32 [T, k]`` in ascending order."""
    mass = attention_weights(sample.q, sample.k, sample.scale).sum(1)
    return mass.topk(k).indices.sort(-1).values.int()


def hit_rates(selections: Tensor, ratios: Sequence[float], *, loads_hottest: bool = False) -> list[HitRate]:
    """Return the hit rate of buffers of `ratios` times a selection of ``selections int32 [T, k]``."""
    k = selections.shape[1]
    capacities = [round(ratio * k) for ratio in ratios]
    return [HitRate(k, c, simulate(selections, c, loads_hottest=loads_hottest)) for c in capacities]
