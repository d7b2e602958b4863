"""The process that holds the manager's Mooncake client: `python -m kvcm.storage.mooncake_worker`.

Questions come as lines of JSON on standard input, the storage's spec first, and each is answered by one line on
standard output: `{"codes": [...]}`, or `{"error": text, "kind": name of the class, "errno": of the operating system's
error behind it, or 0}`. It ends with its standard input.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import sys
from typing import Any, TextIO

from kvcm.model.errors import KvcmError, StorageIOError
from kvcm.model.mooncake import MooncakeClient, MooncakeCode, explain, load_mooncake, open_client
from kvcm.model.storages import MooncakeStorageSpec

__all__ = ["main"]

_BUFFER_BYTES = 16 << 20  # the least that the client takes without complaint; probes go through it
_PROBE_BYTES = 4096


class _Worker:
    """Answers questions about one storage, with a client that is opened when it is first needed."""

    def __init__(self, spec: MooncakeStorageSpec) -> None:
        self._spec = spec
        self._client: MooncakeClient | None = None

    def answer(self, question: dict[str, Any]) -> dict[str, object]:
        try:
            return {"codes": self._codes(question["call"], question.get("keys", []))}
        except KvcmError as error:
            return {"error": str(error), "kind": type(error).__name__, "errno": _errno_of(error)}

    def _codes(self, call: str, keys: list[str]) -> list[int]:
        if call == "load":
            load_mooncake()
            return []
        client = self._open()
        if call == "exists":
            return client.batch_is_exist(keys)
        if call == "remove":
            # Without force: a reader that holds a lease may be copying, and its bytes would change under it.
            return client.batch_remove(keys, False)
        assert call == "probe", call
        _probe(client, keys[0])
        return []

    def _open(self) -> MooncakeClient:
        if self._client is None:
            self._client = open_client(self._spec, segment_bytes=0, buffer_bytes=_BUFFER_BYTES)
        return self._client


def _probe(client: MooncakeClient, directory: str) -> None:
    # Of a name whose put was cut off, every further put says that it succeeded and stores nothing.
    key = f"{directory}.kvcm-probe-{secrets.token_hex(8)}"
    content = secrets.token_bytes(_PROBE_BYTES)
    code = client.put(key, content)
    if code == MooncakeCode.NO_SPACE:  # stored objects can still be read: the medium is full, not away
        raise StorageIOError(f"a small object cannot be stored: {explain(code)}") from OSError(errno.ENOSPC, "full")
    if code != MooncakeCode.OK:
        raise StorageIOError(f"a small object cannot be stored: {explain(code)}")
    found = client.get(key)
    # Only the probe reads it, so the lease of that read disturbs no client.
    [removed] = client.batch_remove([key], True)
    if found != content:
        raise StorageIOError(
            "a small object was stored and does not come back" if not found else "other bytes come back"
        )
    if removed not in (MooncakeCode.OK, MooncakeCode.MISSING):
        raise StorageIOError(f"a small object cannot be removed: {explain(removed)}")


def _errno_of(error: KvcmError) -> int:
    cause = error.__cause__
    return (cause.errno or 0) if isinstance(cause, OSError) else 0


def _private_standard_output() -> TextIO:
    """Keep standard output for answers alone: what the client prints goes where its errors go."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


def main() -> None:
    """Answer until the standard input ends."""
    answers = _private_standard_output()
    worker = _Worker(MooncakeStorageSpec(**json.loads(sys.stdin.readline())))
    for line in sys.stdin:
        print(json.dumps(worker.answer(json.loads(line))), file=answers, flush=True)
    os._exit(0)  # the client's own end may block or crash, and there is nothing that it would have to save


if __name__ == "__main__":
    main()
