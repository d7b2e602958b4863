"""Which page comes before which, as far as it was seen.

SGLang saves the pages of one node of its tree at a time and says what comes before them only when
`hicache_storage_pass_prefix_keys` is set. A prompt that was looked up shows whole chains, though, and what is computed
of it is saved soon after. A page whose parent is not known is stored as the head of a chain: it is found all the same,
and only evicted in a less clever order.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from kvcm.model.keys import BlockKey

__all__ = ["ChainLinks"]


class ChainLinks:
    """Remembers the parents of the pages that were seen last; safe to use from several threads.

    Args:
        most: pages to remember.
    """

    def __init__(self, most: int = 65_536) -> None:
        self._most = most
        self._parents: OrderedDict[BlockKey, BlockKey] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, chain: Sequence[BlockKey]) -> None:
        """Remember consecutive pages."""
        chain = chain[-self._most :]
        with self._lock:
            for parent, child in pairwise(chain):
                self._parents[child] = parent
                self._parents.move_to_end(child)
            while len(self._parents) > self._most:
                self._parents.popitem(last=False)

    def parent(self, key: BlockKey) -> BlockKey | None:
        """Return the page before one, None when it was not seen."""
        with self._lock:
            return self._parents.get(key)
