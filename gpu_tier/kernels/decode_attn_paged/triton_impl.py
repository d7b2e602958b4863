"""Decode attention over pages in Triton."""

from torch import Tensor

from kvcm.gpu_tier.kernels.split_decode import SlotTable
from kvcm.gpu_tier.kernels.split_decode.attend import attend
from kvcm.gpu_tier.types import LayerKV

__all__ = ["run"]


def run(
    q: Tensor, kv: LayerKV, page_table: Tensor, cache_seqlens: Tensor, page_tokens: int, sm_scale: float,
    out_o: Tensor, out_lse: Tensor,
) -> None:  # fmt: skip
    """See `decode_attn_paged`."""
    slots = SlotTable(page_table[:, None], cache_seqlens[:, None], page_tokens)
    attend(q, kv, slots, sm_scale, out_o, out_lse)
