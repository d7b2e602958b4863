"""SGLang with our storage backend, a manager, and the pages in between, for tests."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from engine_process import EngineProcess, Generated, until
from manager_process import ManagerProcess
from stored_parts import read_part

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.results import Location, MatchMode
from kvcm.model.uri import LocationUri

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Page:
    """What a rank's host pool held of one page when it was saved or loaded."""

    what: str
    key: int
    ok: bool
    digest: str


def storage_config(address: str, instance_id: str, record: Path, **options: Any) -> dict[str, Any]:
    """Return the extra config of a backend that also records pages."""
    return {
        "backend_name": "kvcm",
        "module_path": "sglang_recorder",
        "class_name": "RecordingStorage",
        "interface_v1": 1,
        "prefetch_threshold": PAGE_TOKENS,
        "hicache_storage_pass_prefix_keys": True,
        "manager": address,
        "instance_id": instance_id,
        "record": str(record),
    } | options


@dataclass
class Rig:
    """One engine.

    Attributes:
        engine: it.
        record: where its backend notes pages.
        manager: where it stores.
        instance_id: under which.
        ranks: that it has.
    """

    engine: EngineProcess
    record: Path
    manager: ManagerProcess
    instance_id: str
    ranks: int = 1
    _seen: dict[int, int] = field(default_factory=dict)

    def pages(self, what: str, rank: int = 0) -> list[Page]:
        """Return the pages that a rank saved or loaded since the last `forget`."""
        path = self.record.with_suffix(f".{rank}")
        lines = path.read_text().splitlines() if path.exists() else []
        pages = [Page(**json.loads(line)) for line in lines[self._seen.get(rank, 0) :]]
        return [page for page in pages if page.what == what]

    def forget(self) -> None:
        """Count from zero, with an empty cache: from now on, hits can only come from the storage."""
        until(lambda: self.engine.ask("flush_cache"))
        for rank in range(self.ranks):
            path = self.record.with_suffix(f".{rank}")
            self._seen[rank] = len(path.read_text().splitlines()) if path.exists() else 0

    def generate(self, prompt: list[int], tokens: int = 16, **sampling: Any) -> Generated:
        """Answer a prompt."""
        return self.engine.generate([prompt], tokens, **sampling)[0]

    def store(self, prompt: list[int], tokens: int = 16, **sampling: Any) -> Generated:
        """Answer a prompt and wait until all its full pages are saved, and those of the answer."""
        self.forget()
        answer = self.generate(prompt, tokens, **sampling)
        full = (len(prompt) + tokens - 1) // PAGE_TOKENS  # the last token's KV is never computed
        covered = answer.details.get("storage", 0) // PAGE_TOKENS
        for rank in range(self.ranks):
            until(lambda rank=rank: len(self.pages("save", rank)) >= full - covered)
        return answer

    def locations(self, keys: list[int]) -> list[Location | None]:
        """Return where blocks are, whatever parts they have."""
        with ManagerClient(self.manager.address, self.instance_id) as client:
            return list(client.match(keys, MatchMode.BATCH, timeout_seconds=20).locations)

    def uri(self, key: int, part: str = "tp0") -> LocationUri:
        """Return where a part of a block is."""
        location = self.locations([key])[0]
        assert location is not None
        return location.uris[part]

    def stored_digest(self, key: int, part: str = "tp0") -> str:
        """Return the digest of the stored bytes of a part of a block."""
        return sha256(read_part(self.uri(key, part))).hexdigest()
