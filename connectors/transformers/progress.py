"""Watches generation token by token.

A stopping criterion is the one public hook that transformers calls after every step with all tokens so far, whatever
the sampling is. It sees the moment of the first token, and a full block as soon as its last token's KV is computed. It
never stops anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import StoppingCriteria

from connectors.keys import KeyChain
from connectors.transformers.cache import PreallocatedLayer
from connectors.transformers.publisher import BlockRun, Publication
from kvcm.model.keys import BlockKey

__all__ = ["Progress"]


class Progress(StoppingCriteria):
    """Notes the time of the first token and hands full blocks to the publication.

    Args:
        layers: that the model fills.
        chain: computes keys.
        prompt_keys: keys of the prompt's full blocks.
        publication: where full blocks go, None to publish nothing.
        clock: seconds of a clock that never runs backwards.
    """

    def __init__(
        self,
        layers: Sequence[PreallocatedLayer],
        chain: KeyChain,
        prompt_keys: Sequence[BlockKey],
        publication: Publication | None,
        clock: Callable[[], float],
    ) -> None:
        self.first_token_at: float | None = None
        self.new_tokens = 0
        self._layers = layers
        self._chain = chain
        self._keys = list(prompt_keys)
        self._publication = publication
        self._clock = clock

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        """See one more token; returns that generation goes on."""
        self.new_tokens += 1
        if self.first_token_at is None:
            input_ids[0, -1].item()  # on an accelerator the token is chosen only when it can be read
            self.first_token_at = self._clock()
        if self._publication is not None:
            self._publish(input_ids, self._publication)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def _publish(self, input_ids: torch.Tensor, publication: Publication) -> None:
        size = self._chain.block_tokens
        first, full = publication.next_block, self._layers[0].get_seq_length() // size
        if full <= first:
            return
        known = len(self._keys)
        tokens = input_ids[0, known * size : full * size].tolist()
        self._keys += self._chain.keys(tokens, self._keys[-1] if self._keys else None)
        publication.add(
            BlockRun(
                first,
                self._keys[first:full],
                self._keys[first - 1] if first else None,
                [layer.buffers() for layer in self._layers],
            )
        )
