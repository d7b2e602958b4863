"""Expands selected clusters to their blocks, with what has to be known of each of these.

The blocks of a request, layer and head are numbered through, cluster after cluster, so a cluster is a first block and a
number of tokens; only its last block may be partly filled.

Implementations: the reference in torch, and Triton, in one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.operands import check_contiguous, check_last_contiguous

__all__ = ["ClusterPages", "SelectedBlocks", "cluster_expand"]

# Pages of clusters, and the blocks that some of them are expanded to.


@dataclass(frozen=True, slots=True)
class ClusterPages:
    """The clusters and blocks of a layer, in pages: number n is place ``n % E`` of page ``table[request, n // E]``.

    Attributes:
        table: ``int32 [R, P]`` pages of each request, -1 where it has none.
        firsts: ``int32 [pages, H, E]`` first block of each cluster.
        sizes: ``int32 [pages, H, E]`` its tokens.
        hosts: ``int32 [pages, H, E']`` where each block is on the host, in blocks.
        block_tokens: tokens of a block.
    """

    table: Tensor
    firsts: Tensor
    sizes: Tensor
    hosts: Tensor
    block_tokens: int


@dataclass(frozen=True, slots=True)
class SelectedBlocks:
    """The blocks of the selected clusters of each row and head, in the order of the clusters, ``int32 [B, H, W]`` each.

    Attributes:
        ids: number of the block in its request, layer and head; -1 behind the last.
        tokens: tokens in it, 0 behind the last.
        hosts: where it is on the host, in blocks; 0 behind the last.
        offsets: selected tokens before its first one, 0 behind the last.
        lengths: ``int32 [B, H]`` blocks.
        totals: ``int32 [B, H]`` their tokens.
    """

    ids: Tensor
    tokens: Tensor
    hosts: Tensor
    offsets: Tensor
    lengths: Tensor
    totals: Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, width: int, device: torch.device) -> SelectedBlocks:
        """Allocate so many blocks of each row and head."""
        wide = torch.empty(4, rows, heads, width, dtype=torch.int32, device=device)
        counts = torch.empty(2, rows, heads, dtype=torch.int32, device=device)
        return cls(*wide, *counts)


def cluster_expand(
    ids: Tensor, requests: Tensor, active: Tensor, pages: ClusterPages, out: SelectedBlocks, *, impl: str = "auto"
) -> None:
    """Expand the clusters of each row and head, in the order of the selection.

    Args:
        ids: ``int32 [B, H, K]`` clusters, left-aligned, -1 behind them.
        requests: ``int64 [B]`` row of each request in the table; of rows that are not active anything.
        active: ``bool [B]`` rows that have clusters.
        pages: pages of clusters and blocks.
        out: the blocks; W of them fit, and further ones are left out.
        impl: auto, reference or triton.

    Raises:
        ConfigError: shapes do not fit.
    """
    rows, heads, _ = ids.shape
    if requests.shape != (rows,) or active.shape != (rows,) or active.dtype is not torch.bool:
        shapes = tuple(requests.shape), (active.dtype, *active.shape)
        raise ConfigError("requests, active", shapes, f"must be [{rows}], the second one bool")
    if out.ids.shape[:2] != (rows, heads) or out.lengths.shape != (rows, heads):
        raise ConfigError("out", (*out.ids.shape, *out.lengths.shape), f"must be of {rows} rows and {heads} heads")
    if pages.sizes.shape[1] != heads or pages.hosts.shape[1] != heads:
        raise ConfigError("pages", pages.sizes.shape[1], f"must have {heads} heads")
    if pages.sizes.stride() != pages.firsts.stride():
        raise ConfigError("pages", pages.firsts.stride(), "first blocks and sizes must have the same strides")
    check_contiguous(ids=ids, requests=requests, active=active, table=pages.table, out=out.ids, lengths=out.lengths)
    check_last_contiguous(firsts=pages.firsts, sizes=pages.sizes, hosts=pages.hosts)
    registry.get("cluster_expand", ids.device, impl)(ids, requests, active, pages, out)
