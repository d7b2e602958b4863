"""Metrics of the tier in the text format of Prometheus.

Reading figures waits for the device once, since counters of residency and transfers live there; a scrape every few
seconds is what they are for, not a step. A hit rate is never a figure here: it depends on the window one looks at, so
hits and selected items are counters, and queries divide their rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvcm.gpu_tier.coordinator import SparseCoordinator
from kvcm.gpu_tier.manager.prefixes import PrefixCounters
from kvcm.gpu_tier.manager.residency import LruDiffPolicy
from kvcm.gpu_tier.manager.token_blocks import TokenBlockPolicy
from kvcm.gpu_tier.manager.wave_buffer import WaveBuffer
from kvcm.gpu_tier.manager.wave_gpu import WaveGpuBuffer
from kvcm.gpu_tier.request_lifecycle import RequestState

__all__ = ["Figure", "figures", "prometheus_text"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One series.

    Attributes:
        name: in Prometheus' manner, with its unit.
        kind: counter or gauge.
        help: what it counts.
        value: now.
        labels: name and value of each label.
    """

    name: str
    kind: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


def figures(coordinator: SparseCoordinator, prefixes: PrefixCounters | None = None) -> list[Figure]:
    """Return all figures of a coordinator; every series exists from the start.

    Args:
        coordinator: of the engine.
        prefixes: what the engine's `PrefixStore` counted, if it has one.
    """
    own = [*_requests(coordinator), *_pages(coordinator), *_residency(coordinator), *_bytes(coordinator)]
    own += _indexes(coordinator)
    return own if prefixes is None else [*own, *_prefixes(prefixes)]


def _requests(coordinator: SparseCoordinator) -> Iterator[Figure]:
    states = Counter(tracker.state for tracker in coordinator.trackers)
    for state in RequestState:
        if state not in (RequestState.FINISHED, RequestState.ABORTED):
            labels = (("state", state.value),)
            yield Figure(
                name="kvcm_gpu_tier_requests",
                kind="gauge",
                help="Requests by state.",
                value=states[state],
                labels=labels,
            )
    text = "Tokens decoded, by whether their attention was sparse."
    for name, value in (("sparse", coordinator.sparse_tokens), ("dense", coordinator.dense_tokens)):
        yield Figure(
            name="kvcm_gpu_tier_decoded_tokens_total",
            kind="counter",
            help=text,
            value=value,
            labels=(("attention", name),),
        )


def _pages(coordinator: SparseCoordinator) -> Iterator[Figure]:
    manager = coordinator.manager
    store = manager.blocks.store if manager.blocks else None
    pools = {"device": manager.device.allocator, "host": manager.host.allocator}
    pages = {name: (allocator.in_use, allocator.num_pages) for name, allocator in pools.items()}
    pages["clusters"] = (store.allocator.in_use, store.allocator.num_pages) if store else (0, 0)
    text = "Pages of the pools: in use, and all. Those of clusters are extents of their store."
    for pool, (used, total) in pages.items():
        for state, value in (("used", used), ("total", total)):
            yield Figure(
                name="kvcm_gpu_tier_pages",
                kind="gauge",
                help=text,
                value=value,
                labels=(("pool", pool), ("state", state)),
            )
    text = "Host pages kept for prefixes although no request holds them."
    yield Figure(name="kvcm_gpu_tier_host_cached_pages", kind="gauge", help=text, value=manager.host.allocator.cached)


def _residency(coordinator: SparseCoordinator) -> Iterator[Figure]:
    counts = _items(coordinator)
    texts = {
        "selected": "Items that attention asked for, all layers and heads; of clusters their tokens.",
        "hits": "Those that were on the device.",
        "loads": "Those that were loaded from host memory.",
        "promotions": "Newest items that moved into the buffer.",
        "admitted": "Blocks (of clusters: clusters) that came into the block cache.",
        "evicted": "Those that it gave up.",
    }
    for (name, text), value in zip(texts.items(), counts, strict=True):
        yield Figure(name=f"kvcm_gpu_tier_{name}_items_total", kind="counter", help=text, value=value)
    text = "Clusters that were estimated because they did not fit into the execution buffer."
    overflow = coordinator.algorithm.exec_overflow
    yield Figure(name="kvcm_gpu_tier_overflowing_clusters_total", kind="counter", help=text, value=overflow)


def _items(coordinator: SparseCoordinator) -> tuple[int, int, int, int, int, int]:
    """Return selected, hits, loads, promotions, admitted and evicted items."""
    policy = coordinator.manager.policy
    if isinstance(policy, LruDiffPolicy):
        of_lru = policy.counters
        return of_lru.selected, of_lru.hits, of_lru.loads, of_lru.promotions, 0, 0
    if isinstance(policy, TokenBlockPolicy):
        c = policy.counters
        return c.selected, c.hits, c.selected - c.hits, 0, c.admissions, c.evictions
    if isinstance(policy, WaveBuffer | WaveGpuBuffer):
        w = policy.counters
        return w.tokens, w.token_hits, w.tokens - w.token_hits, 0, w.admissions, w.evictions
    return 0, 0, 0, 0, 0, 0


def _bytes(coordinator: SparseCoordinator) -> Iterator[Figure]:
    manager = coordinator.manager
    moved = manager.transfer.counters
    text = "Bytes moved between the pools."
    for way, value in (("h2d", moved.h2d_bytes), ("d2h", moved.d2h_bytes), ("d2d", moved.d2d_bytes)):
        yield Figure(
            name="kvcm_gpu_tier_transferred_bytes_total", kind="counter", help=text, value=value, labels=(("way", way),)
        )
    text = "Bytes of the pools."
    resident = coordinator.resident.pool.nbytes if coordinator.resident else 0
    blocks = manager.blocks
    sizes = {
        "device": manager.device.nbytes,
        "execution": blocks.execution.nbytes if blocks else 0,
        "resident_layers": resident,
        "host": manager.host.nbytes,
        "clusters": blocks.policy.host_bytes if blocks else 0,
    }
    for pool, size in sizes.items():
        yield Figure(name="kvcm_gpu_tier_pool_bytes", kind="gauge", help=text, value=size, labels=(("pool", pool),))
    text = "Bytes of what algorithms choose by, of the requests at hand."
    used = sum(coordinator.algorithm.representation_bytes(t.seq_len) for t in coordinator.trackers)
    yield Figure(name="kvcm_gpu_tier_representation_bytes", kind="gauge", help=text, value=used)


def _indexes(coordinator: SparseCoordinator) -> Iterator[Figure]:
    algorithm = coordinator.algorithm
    text = (
        "Indexes of a layer (segments of RetroInfer, codebooks of PQCache): made from KV, or taken over from sidecars."
    )
    for origin, value in (("built", algorithm.built), ("imported", algorithm.imported)):
        yield Figure(
            name="kvcm_gpu_tier_indexes_total", kind="counter", help=text, value=value, labels=(("origin", origin),)
        )


def _prefixes(counters: PrefixCounters) -> Iterator[Figure]:
    text = "Prompt tokens that were not computed, by where their KV was."
    for tier, value in (("host", counters.host_tokens), ("storage", counters.storage_tokens)):
        yield Figure(
            name="kvcm_gpu_tier_prefix_tokens_total", kind="counter", help=text, value=value, labels=(("tier", tier),)
        )
    text = "Loads of which fewer pages arrived than were promised."
    yield Figure(name="kvcm_gpu_tier_short_loads_total", kind="counter", help=text, value=counters.loads_short)
    text = "Attached tokens whose side data was not there and was computed."
    yield Figure(
        name="kvcm_gpu_tier_sidecar_miss_tokens_total", kind="counter", help=text, value=counters.sidecar_misses
    )
    text = "Pages offered to the storage: taken, refused, or not offered because too many were on their way."
    outcomes = (("written", counters.written_pages), ("failed", counters.failed_pages))
    for outcome, value in (*outcomes, ("dropped", counters.dropped_pages)):
        yield Figure(
            name="kvcm_gpu_tier_published_pages_total",
            kind="counter",
            help=text,
            value=value,
            labels=(("outcome", outcome),),
        )


def prometheus_text(coordinator: SparseCoordinator, prefixes: PrefixCounters | None = None) -> str:
    """Return the figures in Prometheus' text format; arguments as for `figures`."""
    lines: list[str] = []
    seen = ""
    for figure in figures(coordinator, prefixes):
        if figure.name != seen:
            seen = figure.name
            lines += [f"# HELP {figure.name} {figure.help}", f"# TYPE {figure.name} {figure.kind}"]
        labels = ",".join(f'{name}="{value}"' for name, value in figure.labels)
        lines.append(f"{figure.name}{{{labels}}} {figure.value:g}" if labels else f"{figure.name} {figure.value:g}")
    return "\n".join(lines) + "\n"
