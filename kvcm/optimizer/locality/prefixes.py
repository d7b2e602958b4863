"""The most valuable prefixes, as a tree: which prompts a cache lives on.

Blocks that follow each other and are saved equally often are one node, so a system prompt of a hundred blocks is one
line. What a node saves are tokens that a cache without bound would not compute again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.locality.accesses import Accesses, accesses_of
from kvcm.optimizer.trace import Int32Column, Int64Column, Trace

__all__ = ["PrefixNode", "PrefixTree", "valuable_prefixes"]


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """Blocks that follow each other and are used again equally often.

    Attributes:
        parent: index into the tree's nodes of the nearest ancestor shown, -1 for none.
        level: how many ancestors are shown.
        instance: name of the instance.
        first_block: number of its first block in the trace.
        depth: of its first block, counted from 0.
        blocks: how many.
        reuses: how often each was read after its first access.
        saved_tokens: by its blocks.
        sessions: different sessions among its requests; 0 where the trace names none.
        first_seconds: first access, since the first request of the trace.
        last_seconds: last access.
    """

    parent: int
    level: int
    instance: str
    first_block: int
    depth: int
    blocks: int
    reuses: int
    saved_tokens: int
    sessions: int
    first_seconds: float
    last_seconds: float


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The nodes that save most, each behind its ancestors; siblings by what they save.

    Attributes:
        nodes: in the order of a walk from the roots.
        saved_tokens: by all nodes of the trace, shown or not.
        node_count: of the whole trace.
    """

    nodes: tuple[PrefixNode, ...]
    saved_tokens: int
    node_count: int


@dataclass(frozen=True, slots=True, eq=False)
class _Nodes:
    """All nodes of a trace, by number; the columns are as in `PrefixNode`."""

    of_block: Int64Column
    heads: Int64Column
    parents: Int64Column
    blocks: Int64Column
    reuses: Int64Column
    saved_tokens: Int64Column


def valuable_prefixes(trace: Trace, most: int = 40) -> PrefixTree:
    """Return the prefixes that save most.

    Args:
        trace: with one parent per block; where blocks have several, the first is taken.
        most: nodes to choose; their ancestors come on top.
    """
    accesses = accesses_of(trace)
    saved = np.bincount(trace.blocks[accesses.reuses], minlength=trace.unique_blocks)
    nodes = _nodes_of(trace, saved)
    ranked = np.argsort(-nodes.saved_tokens, kind="stable")[:most]
    shown = _with_ancestors(nodes, [int(node) for node in ranked if nodes.saved_tokens[node] > 0])
    walked = _walk(trace, accesses, nodes, shown) if shown else ()
    return PrefixTree(walked, int(nodes.saved_tokens.sum()), len(nodes.heads))


def _nodes_of(trace: Trace, saved: Int64Column) -> _Nodes:
    parents = trace.parents.astype(np.int64)
    is_head = (parents < 0) | (saved != saved[parents])
    head = np.where(is_head, np.arange(len(parents)), parents)
    while not np.array_equal(further := head[head], head):
        head = further
    heads, of_block, blocks = np.unique(head, return_inverse=True, return_counts=True)
    block_tokens = np.array(trace.instance_block_tokens, np.int64)[_instance_of_blocks(trace)[heads]]
    above = parents[heads]
    return _Nodes(
        of_block=of_block,
        heads=heads,
        parents=np.where(above < 0, -1, of_block[above]),
        blocks=blocks,
        reuses=saved[heads],
        saved_tokens=saved[heads] * blocks * block_tokens,
    )


def _instance_of_blocks(trace: Trace) -> Int32Column:
    instances = np.zeros(trace.unique_blocks, np.int32)
    instances[trace.blocks] = np.repeat(trace.instances, np.diff(trace.offsets))
    return instances


def _with_ancestors(nodes: _Nodes, chosen: list[int]) -> set[int]:
    shown: set[int] = set()
    for node in chosen:
        at = node
        while at >= 0 and at not in shown:
            shown.add(at)
            at = int(nodes.parents[at])
    return shown


def _walk(trace: Trace, accesses: Accesses, nodes: _Nodes, shown: set[int]) -> tuple[PrefixNode, ...]:
    depths, instances = _depths(trace.parents), _instance_of_blocks(trace)
    uses = _uses_of_heads(trace, nodes, shown)
    children: dict[int, list[int]] = {}
    for node in sorted(shown, key=lambda node: (-nodes.saved_tokens[node], node)):
        children.setdefault(int(nodes.parents[node]), []).append(node)
    found: list[PrefixNode] = []
    waiting = [(node, -1, 0) for node in reversed(children.get(-1, []))]
    while waiting:
        node, parent, level = waiting.pop()
        head = int(nodes.heads[node])
        requests = accesses.requests[uses[node]]
        seconds = (trace.times_us[requests[[0, -1]]] - trace.times_us[0]) / 1e6
        sessions = trace.sessions[requests]
        found.append(
            PrefixNode(
                parent=parent,
                level=level,
                instance=trace.instance_names[instances[head]],
                first_block=head,
                depth=int(depths[head]),
                blocks=int(nodes.blocks[node]),
                reuses=int(nodes.reuses[node]),
                saved_tokens=int(nodes.saved_tokens[node]),
                sessions=len(np.unique(sessions[sessions >= 0])),
                first_seconds=float(seconds[0]),
                last_seconds=float(seconds[1]),
            )
        )
        waiting += [(child, len(found) - 1, level + 1) for child in reversed(children.get(node, []))]
    return tuple(found)


def _uses_of_heads(trace: Trace, nodes: _Nodes, shown: set[int]) -> dict[int, Int64Column]:
    """Return the accesses of each shown node's first block."""
    wanted = np.zeros(trace.unique_blocks, np.bool_)
    wanted[nodes.heads[sorted(shown)]] = True
    places = np.flatnonzero(wanted[trace.blocks])
    order = np.argsort(trace.blocks[places], kind="stable")
    places = places[order]
    blocks, starts = np.unique(trace.blocks[places], return_index=True)
    parts = np.split(places, starts[1:])
    return {int(nodes.of_block[block]): part for block, part in zip(blocks, parts, strict=True)}


def _depths(parents: Int32Column) -> Int64Column:
    """Return [U] depths; each step looks twice as far up."""
    up = parents.astype(np.int64)
    depths = np.where(up >= 0, 1, 0)
    while (up >= 0).any():
        has_more = up >= 0
        depths = depths + np.where(has_more, depths[up], 0)
        up = np.where(has_more, up[up], -1)
    return depths
