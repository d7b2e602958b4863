"""A backend that also notes what SGLang's own view of every page held, so that tests can compare bytes.

The bytes come from `get_data_page` of the host pool, which our backend does not use.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from kvcm.connectors.sglang.hicache_storage import KVCMStorage
from kvcm.connectors.transfer import file as file_mover


class RecordingStorage(KVCMStorage):  # type: ignore[misc]
    """Writes a line per page that was saved or loaded to the file that option `record` names, one file per rank.

    With option `hold`, saves stop for good once they have their leave to write, and write the keys to the file of that
    name. With option `other_pool`, the engine seems to have one more pool of that name. As long as there is a file of
    the name that option `hang` gives, reads and writes of pages do not come back; as long as there is one of the name
    that option `remove` gives, pages are removed from the manager just before they are loaded.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = storage_config.extra_config
        self._record = Path(extra.pop("record")).with_suffix(f".{storage_config.tp_rank}")
        self._hold = extra.pop("hold", None)
        self._other_pool = extra.pop("other_pool", None)
        self._remove = Path(extra.pop("remove", "/nothing"))
        if hang := extra.pop("hang", None):
            file_mover._LOAD = replace(file_mover._LOAD, once=_hanging(os.preadv, Path(hang)))
            file_mover._SAVE = replace(file_mover._SAVE, once=_hanging(os.pwritev, Path(hang)))
        super().__init__(storage_config, kwargs)

    def on_host_pools_registered(self) -> None:
        if self._other_pool is not None:
            self.register_mem_host_pool_v2(self.mem_pool_host, self._other_pool)
        super().on_host_pools_registered()
        if self._hold is not None:
            assert self._store is not None
            self._store._sessions.start = self._held(self._store._sessions.start)  # type: ignore[method-assign]

    def _held(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def held(keys: Any, *arguments: Any) -> None:
            assert begin(keys, *arguments) is not None
            Path(self._hold).write_text(" ".join(map(str, keys)))
            threading.Event().wait()

        return held

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        if self._remove.exists():
            assert self._store is not None
            self._store._link.client.remove(self._store.keys.keys(keys), timeout_seconds=10)
        flags = super().batch_get_v1(keys, host_indices, extra_info)
        self._note("load", keys, host_indices, flags)
        return flags

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        flags = super().batch_set_v1(keys, host_indices, extra_info)
        self._note("save", keys, host_indices, flags)
        return flags

    def _note(self, what: str, hashes: list[str], host_indices: Any, flags: list[bool]) -> None:
        assert self._store is not None
        first_tokens = host_indices[:: self.mem_pool_host.page_size].tolist()
        lines = [
            json.dumps({"what": what, "key": key, "ok": flag, "digest": self._digest(token)})
            for key, flag, token in zip(self._store.keys.keys(hashes), flags, first_tokens, strict=True)
        ]
        with self._record.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def _digest(self, token: int) -> str:
        return sha256(self.mem_pool_host.get_data_page(token).contiguous().numpy().tobytes()).hexdigest()


def _hanging(move: Callable[..., Any], hang: Path) -> Callable[..., Any]:
    def late(*arguments: Any) -> Any:
        while hang.exists():
            time.sleep(0.01)
        return move(*arguments)

    return late
