"""The radix tree of an instance as the original exports it.

A node holds blocks that follow each other and were first written by one request, up to where chains branch. Nodes are
numbered by first appearance from 0; those at the beginning of chains have the parent -1. Blocks that were evicted stay
in the tree, and are not counted as cached.
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np

from kvcm.optimizer.groups.original.cache import OriginalCache
from kvcm.optimizer.groups.original.replay import OriginalReplay

__all__ = ["Tree", "TreeEdge", "TreeNode", "export_tree"]


class TreeNode(TypedDict):
    """A node. Its times and counts are those of its first block, which every access of the node passes."""

    node_id: int
    parent_id: int
    access_count: int
    last_access_time: int
    total_blocks: int
    cached_blocks: int
    is_leaf: bool


TreeEdge = TypedDict("TreeEdge", {"from": int, "to": int})


class Tree(TypedDict):
    """A tree; each edge goes from a parent to a child."""

    instance_id: str
    nodes: list[TreeNode]
    edges: list[TreeEdge]


def export_tree(replay: OriginalReplay, instance_id: str) -> Tree:
    """Return the tree of an instance as it is now, ready to be written as JSON.

    Raises:
        OptionError: the instance is not configured.
    """
    cache = replay.cache(instance_id)
    nodes: list[TreeNode] = []
    node_of: dict[int, int] = {}
    begins = _begins(cache)
    for block in np.flatnonzero(cache.written_by >= 0).tolist():
        parent = int(cache.parents[block])
        above = node_of.get(parent, -1)
        if begins[block]:
            node_of[block] = len(nodes)
            nodes.append(_node(cache, block, len(nodes), above))
            if above >= 0:
                nodes[above]["is_leaf"] = False
        else:
            node_of[block] = above
        node = nodes[node_of[block]]
        node["total_blocks"] += 1
        node["cached_blocks"] += cache.here[block]
    edges: list[TreeEdge] = [
        {"from": node["parent_id"], "to": node["node_id"]} for node in nodes if node["parent_id"] >= 0
    ]
    return {"instance_id": instance_id, "nodes": nodes, "edges": edges}


def _begins(cache: OriginalCache) -> list[bool]:
    """Return for each block whether a node begins with it."""
    is_written = cache.written_by >= 0
    has_parent = cache.parents >= 0
    children = np.bincount(cache.parents[is_written & has_parent], minlength=len(cache.parents))
    begins = ~has_parent | (children[cache.parents] > 1) | (cache.written_by != cache.written_by[cache.parents])
    result: list[bool] = begins.tolist()
    return result


def _node(cache: OriginalCache, block: int, node_id: int, parent_id: int) -> TreeNode:
    return {
        "node_id": node_id,
        "parent_id": parent_id,
        "access_count": int(cache.accesses[block]),
        "last_access_time": int(cache.accessed_us[block]),
        "total_blocks": 0,
        "cached_blocks": 0,
        "is_leaf": True,
    }
