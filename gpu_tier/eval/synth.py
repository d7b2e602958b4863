"""S1: keys, values and decode queries of one KV head with the structure that attention has on long text, and S5.

Structure of S1, all seeded:

* 1024 topic directions, unit vectors in the low two thirds of the RoPE frequencies (the high third stays noise, which
  is what makes bounds of pages loose);
* text is runs of one topic, Exp(24) tokens long; each segment of 8192 tokens takes 80 % of its runs from a pool of 96
  topics and 20 % from all;
* ``k = 8·mean_dir + 6·topic + 0.45·N(0, I)``, then RoPE; ``v = 0.5·N(0, I) + 0.5·value_of_topic``;
* queries are ``amp·Σ w_j·topic_j + 0.6·N(0, I)`` over six topics, four of them common to the query heads of the group,
  with AR(1) weights (0.9) that sum to 1.2; the topics are any that occur in the context, and one common topic is
  replaced every four steps;
* the first four keys are sinks, pushed by 4 along the mean query.

`amp` sets how concentrated attention is: 110 sharp, 70 mid, 45 diffuse. The weights' sum was set once, by figures that
no method enters: the attention that a query head has in its top 1.8 % of 32K tokens (0.99, 0.86, 0.50), how much of the
tops stays from step to step, and what attention over the exact top costs (`kvcm.gpu_tier.eval.quality`).
Importance is scattered over single tokens of a topic's runs, which is hard for methods that choose pages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

__all__ = ["Adversarial", "KVSample", "Regime", "adversarial", "kv"]

_TOPICS, _POOL, _SEGMENT, _RUN = 1024, 96, 8192, 24.0
_FROM_POOL = 0.8
_GROUP_TOPICS, _HEAD_TOPICS, _REPLACE_EVERY = 4, 2, 4
_AR, _WAVERING, _WEIGHT_SUM = 0.9, 0.2, 1.2
_SINKS, _SINK_PUSH = 4, 4.0
_THETA = 5e5
_NEEDLE = 20.0


class Regime(StrEnum):
    """How concentrated attention is."""

    SHARP = "sharp"
    MID = "mid"
    DIFFUSE = "diffuse"

    @property
    def amplitude(self) -> float:
        """The length of the topic part of a query."""
        return {Regime.SHARP: 110.0, Regime.MID: 70.0, Regime.DIFFUSE: 45.0}[self]


class Adversarial(StrEnum):
    """Inputs without the structure that the methods hope for."""

    UNIFORM = "uniform"  # keys without any structure
    EQUAL = "equal"  # all keys the same: every selection is as good as another
    ONE_CLUSTER = "one_cluster"  # one giant cluster and a few strays
    NEEDLE = "needle"  # one key holds nearly all the attention
    OFFSET = "offset"  # a large vector added to all keys: attention is as without it


@dataclass(frozen=True, slots=True)
class KVSample:
    """One KV head of one request, and the queries of T decode steps, as f32.

    Attributes:
        k: ``[n, d]`` keys after RoPE.
        v: ``[n, d]`` values.
        q: ``[T, G, d]`` queries after RoPE, at the positions n, n+1, ...
        observed: ``[W, G, d]`` queries of the last W tokens of the context, for methods that look at them.
    """

    k: Tensor
    v: Tensor
    q: Tensor
    observed: Tensor

    @property
    def scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return float(self.k.shape[-1] ** -0.5)


def kv(n: int, d: int, steps: int, group: int, regime: Regime, seed: int, observed: int = 0) -> KVSample:
    """Return S1: a context of `n` tokens and the queries of `steps` decode steps of `group` query heads.

    The drift of the queries begins with the first of the `observed` last tokens of the context.
    """
    generator = torch.Generator().manual_seed(seed)
    topics = _unit_in_low_frequencies(_TOPICS, d, generator)
    mean_dir = _unit_in_low_frequencies(1, d, generator)
    values = torch.randn(_TOPICS, d, generator=generator)
    topic_of = _topics_of_tokens(n, generator)
    k = 8 * mean_dir + 6 * topics[topic_of] + 0.45 * torch.randn(n, d, generator=generator)
    v = 0.5 * torch.randn(n, d, generator=generator) + 0.5 * values[topic_of]
    queries = observed + steps
    mix = _topic_weights(topic_of, queries, group, generator)
    q = regime.amplitude * (mix @ topics) + 0.6 * torch.randn(queries, group, d, generator=generator)
    k = rotated(k, torch.arange(n))
    q = rotated(q, torch.arange(n - observed, n + steps)[:, None])
    k[:_SINKS] += _SINK_PUSH * torch.nn.functional.normalize(q.mean((0, 1)), dim=-1)
    return KVSample(k, v, q[observed:], q[:observed])


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Return ``x [..., d]`` after RoPE at ``positions [...]``; dims j and j + d/2 are a pair."""
    half = x.shape[-1] // 2
    angle = positions[..., None].double() * _frequencies(half)
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _frequencies(half: int) -> Tensor:
    return _THETA ** (-torch.arange(half, dtype=torch.float64) / half)


def _unit_in_low_frequencies(count: int, d: int, generator: torch.Generator) -> Tensor:
    """Return ``[count, d]`` unit vectors without the highest third of the frequencies."""
    half = d // 2
    x = torch.randn(count, 2, half, generator=generator)
    x[..., : half // 3] = 0
    return torch.nn.functional.normalize(x.flatten(1), dim=-1)


def _topics_of_tokens(n: int, generator: torch.Generator) -> Tensor:
    """Return ``int64 [n]`` topics: runs of Exp(24) tokens, most from the pool of their segment."""
    segments = []
    for begin in range(0, n, _SEGMENT):
        tokens = min(_SEGMENT, n - begin)
        pool = torch.randperm(_TOPICS, generator=generator)[:_POOL]
        runs = tokens  # as many as there can be; a run has at least one token
        lengths = torch.empty(runs).exponential_(1 / _RUN, generator=generator).ceil().long()
        of_pool = pool[torch.randint(_POOL, (runs,), generator=generator)]
        of_all = torch.randint(_TOPICS, (runs,), generator=generator)
        choice = torch.where(torch.rand(runs, generator=generator) < _FROM_POOL, of_pool, of_all)
        segments.append(choice.repeat_interleave(lengths)[:tokens])
    return torch.cat(segments)


def _topic_weights(topic_of: Tensor, steps: int, group: int, generator: torch.Generator) -> Tensor:
    """Return ``[steps, group, 1024]`` weights of the topics in each query."""
    occurring = topic_of.unique()

    def some_topic() -> int:
        return int(occurring[torch.randint(len(occurring), (1,), generator=generator)])

    common = [some_topic() for _ in range(_GROUP_TOPICS)]
    own = [[some_topic() for _ in range(_HEAD_TOPICS)] for _ in range(group)]
    weights = torch.randn(group, _GROUP_TOPICS + _HEAD_TOPICS, generator=generator)
    out = torch.zeros(steps, group, _TOPICS)
    for step in range(steps):
        if step and step % _REPLACE_EVERY == 0:
            common[step // _REPLACE_EVERY % _GROUP_TOPICS] = some_topic()
        fresh = torch.randn(weights.shape, generator=generator)
        weights = _AR * weights + math.sqrt(1 - _AR**2) * fresh
        positive = (1 + _WAVERING * weights).clamp_min(0.05)
        shares = _WEIGHT_SUM * positive / positive.sum(-1, keepdim=True)
        for head in range(group):
            out[step, head].index_add_(0, torch.tensor([*common, *own[head]]), shares[head])
    return out


def adversarial(case: Adversarial, n: int, d: int, steps: int, group: int, seed: int, observed: int = 0) -> KVSample:
    """Return S5: `n` keys and the queries of `steps` steps and `observed` tokens before, of one adversarial case."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(n, d, generator=generator)
    v = torch.randn(n, d, generator=generator)
    q = torch.randn(observed + steps, group, d, generator=generator)
    if case is Adversarial.EQUAL:
        k = k[:1].expand(n, -1).clone()
    elif case is Adversarial.ONE_CLUSTER:
        strays = torch.rand(n, 1, generator=generator) < 0.01
        k = torch.where(strays, 3 * k, 3 + 0.1 * k)
    elif case is Adversarial.NEEDLE:
        place = int(torch.randint(n // 4, n // 2, (1,), generator=generator))
        k[place] = _NEEDLE * torch.nn.functional.normalize(q.mean((0, 1)), dim=-1)
        q = q + k[place] / 2
    elif case is Adversarial.OFFSET:
        k = k + 10 * torch.randn(d, generator=generator)
    return KVSample(k, v, q[observed:], q[:observed])
