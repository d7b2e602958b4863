"""Split-K decode attention in Triton, which `decode_attn_token` and `decode_attn_paged` share: no kernel of its own."""
