"""Decode attention over single tokens in Triton."""

from torch import Tensor

from kvcm.gpu_tier.kernels.split_decode import SlotTable
from kvcm.gpu_tier.kernels.split_decode.attend import attend
from kvcm.gpu_tier.types import LayerKV

__all__ = ["run"]


def run(
    q: Tensor, kv: LayerKV, token_table: Tensor, lens: Tensor, sm_scale: float, out_o: Tensor, out_lse: Tensor
) -> None:
    """See `decode_attn_token`."""
    attend(q, kv, SlotTable(token_table, lens), sm_scale, out_o, out_lse)
