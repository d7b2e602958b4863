"""Claim: clustering a prompt in segments of 8192 tokens takes a fraction of the time of clustering it as a whole, and
the wave index finds as much.

Assigning n tokens to n/16 centroids costs n²; in segments it costs n times the segment. Keys are S1's of one KV head
(`kvcm.gpu_tier.eval.synth`), with as many tokens per centroid and as many iterations on both sides, built in turn,
in one process. Recall is of the 100 heaviest tokens in the clusters of the highest ranks, as many as RetroInfer attends
to exactly: 1.8 % of them. It differs by several hundredths from prompt to prompt, either way, so many prompts are
needed to see a difference of one; the standard error is printed. Behind the sinks the keys of S1 are the same in its
three regimes, so one index serves all. A machine without a GPU suffices; a GPU would be faster on both sides.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, stdev

import checkout  # noqa: F401 - first: it makes the rest importable
import torch
from report import Row, arguments, publish
from torch import Tensor
from wave_build import Built, build_prompt

from kvcm.gpu_tier.config import RetroInferConfig
from kvcm.gpu_tier.eval.quality import attention_weights, recall_at, steady_tokens
from kvcm.gpu_tier.eval.synth import KVSample, Regime, kv

DIMS, GROUP = 128, 4
MOST_APART = 0.02


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        tokens: of the prompt.
        segment: that is compared with one segment.
        most_time: of one segment's time that building in segments may take.
        others: segments that only report.
        seeds: prompts.
        repeats: builds of each side, for each prompt.
        steps: queries.
    """

    tokens: int
    segment: int
    most_time: float
    seeds: int
    repeats: int
    others: tuple[int, ...] = ()
    steps: int = 16


FULL = Size(32768, 8192, 0.4, seeds=16, repeats=3, others=(1024, 2048, 4096, 16384))
LONG = Size(131072, 8192, 0.2, seeds=4, repeats=1)
LONG_OTHERS = (1024, 2048, 4096, 16384, 32768, 65536)
QUICK = Size(4096, 1024, 0.6, seeds=2, repeats=2, others=(2048,), steps=4)


@dataclass(frozen=True, slots=True)
class Index:
    """The clusters of a prompt.

    Attributes:
        centroids: ``f32 [m, d]``.
        sizes: ``int32 [m]``.
        cluster_of: ``int64 [n]`` the cluster of each token, -1 for the steady ones.
    """

    centroids: Tensor
    sizes: Tensor
    cluster_of: Tensor


@dataclass(slots=True)
class Side:
    """The measurements of one length of segments.

    Attributes:
        seconds: of every build.
        recall: of every prompt, by regime.
        share: of the tokens that are in the chosen clusters, of every prompt and regime.
    """

    seconds: list[float] = field(default_factory=list)
    recall: dict[Regime, list[float]] = field(default_factory=lambda: {regime: [] for regime in Regime})
    share: list[float] = field(default_factory=list)


def index_of(tokens: int, built: Built) -> Index:
    """Return the clusters of all segments of a prompt with one KV head as one list."""
    cluster_of, first = torch.full((tokens,), -1), 0
    for segments, clusters in built:
        for segment, sizes, members in zip(segments, clusters.sizes[:, 0], clusters.members[:, 0], strict=True):
            ids = torch.arange(first, first + len(sizes)).repeat_interleave(sizes.long())
            cluster_of[segment.start + members.long()] = ids
            first += len(sizes)
    centroids, sizes = zip(*((x.centroids[:, 0].flatten(0, 1), x.sizes[:, 0].flatten()) for _, x in built), strict=True)
    return Index(torch.cat(centroids), torch.cat(sizes), cluster_of)


def selected(index: Index, sample: KVSample, share: float) -> Tensor:
    """Return the tokens ``bool [T, n]`` of the clusters with the highest ranks, such a share of all clusters."""
    scores = sample.q @ index.centroids.T * sample.scale
    rank = torch.softmax(scores.masked_fill(index.sizes == 0, -torch.inf), -1).sum(1)
    best = rank.topk(max(1, round(share * len(index.sizes)))).indices
    # One column more, for tokens without a cluster.
    chosen = torch.zeros(len(rank), len(index.sizes) + 1, dtype=torch.bool).scatter_(1, best, True)
    return chosen[:, index.cluster_of]


def measure(size: Size) -> dict[int, Side]:
    """Return the measurements, by tokens of a segment; one segment is as long as the prompt."""
    lengths = sorted({*size.others, size.segment, size.tokens})
    sides = {length: Side() for length in lengths}
    for seed in range(size.seeds):
        samples = {regime: kv(size.tokens, DIMS, size.steps, GROUP, regime, seed) for regime in Regime}
        indexes = _timed(samples[Regime.MID], sides, size)
        for regime, sample in samples.items():
            weights, steady = attention_weights(sample.q, sample.k, sample.scale), steady_tokens(size.tokens)
            for length, index in indexes.items():
                found = selected(index, sample, RetroInferConfig().retrieval)
                sides[length].recall[regime].append(recall_at(100, weights, found, steady))
                sides[length].share.append(float(found.float().mean()))
    return sides


def _timed(sample: KVSample, sides: dict[int, Side], size: Size) -> dict[int, Index]:
    """Build all sides in turn, as often as asked for."""
    indexes = {}
    for repeat in range(size.repeats):
        # Back and forth, so that no side always comes after the same one.
        for length in sorted(sides, reverse=repeat % 2 == 1):
            settings = RetroInferConfig(segment=length)
            start = time.perf_counter()
            built = build_prompt(sample.k[:, None], sample.v[:, None], settings)
            sides[length].seconds.append(time.perf_counter() - start)
            indexes[length] = index_of(size.tokens, built)
    return indexes


def claim_rows(size: Size, sides: dict[int, Side], is_quick: bool) -> Iterator[Row]:
    """Yield the rows with a bar."""
    case = f"{size.tokens} tokens, segments of {size.segment} against one"
    mine, whole = sides[size.segment], sides[size.tokens]
    value, baseline = median(mine.seconds), median(whole.seconds)
    ok = None if is_quick else value <= size.most_time * baseline
    yield Row(case, "build, median", value, "s", baseline, value / baseline, f"<= {size.most_time} of one segment", ok)
    worst = max(a / b for a, b in zip(mine.seconds, whole.seconds, strict=True))
    yield Row(case, f"build, slowest of {len(mine.seconds)} pairs", worst, "of one segment")
    for regime in Regime:
        one, other = mine.recall[regime], whole.recall[regime]
        apart = [a - b for a, b in zip(one, other, strict=True)]
        ok = None if is_quick else abs(fmean(apart)) <= MOST_APART
        ratio = fmean(one) / fmean(other)
        yield Row(f"{case}, {regime}", "recall@100", fmean(one), "", fmean(other), ratio, f"within {MOST_APART}", ok)
        yield Row(f"{case}, {regime}", f"difference, mean of {len(apart)} seeds", fmean(apart), "")
        yield Row(f"{case}, {regime}", "difference, standard error", stdev(apart) / len(apart) ** 0.5, "")
        yield Row(f"{case}, {regime}", "difference, largest", max(apart, key=abs), "")


def ablation_rows(size: Size, sides: dict[int, Side]) -> Iterator[Row]:
    """Yield time and recall of each length of segments beside those of one segment."""
    whole = sides[size.tokens]
    for length, side in sides.items():
        case = f"{size.tokens} tokens, segments of {length}"
        value, baseline = median(side.seconds), median(whole.seconds)
        yield Row(case, "build, median", value, "s", baseline, value / baseline)
        for regime in Regime:
            value, baseline = fmean(side.recall[regime]), fmean(whole.recall[regime])
            yield Row(case, f"recall@100, {regime}", value, "", baseline, value / baseline)
        yield Row(case, "tokens in the chosen clusters", fmean(side.share), "share", fmean(whole.share))


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--threads", type=int, default=1, help="that build; with others at work, more are no faster")
    parser.add_argument("--full-ablation", action="store_true", help="all lengths at 128K too: four minutes more")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    sizes = [QUICK] if args.quick else [FULL, replace(LONG, others=LONG_OTHERS if args.full_ablation else ())]
    rows: list[Row] = []
    for size in sizes:
        sides = measure(size)
        rows += [*claim_rows(size, sides, args.quick), *ablation_rows(size, sides)]
    rows.append(Row("this process", "threads", args.threads, ""))
    return 0 if publish("Building the wave index", rows, args.json) else 1


if __name__ == "__main__":
    raise SystemExit(main())
