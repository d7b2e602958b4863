"""An engine of a game: it answers turns of conversations with reuse until the stop, and compares every token.

    python game_engine.py <settings as JSON>

Acknowledged blocks go to a ledger after the manager's answer; the outcome of each prompt goes to another file.
Under every fault a prompt is answered with the tokens of an engine without reuse.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from game_lines import Lines
from game_prompts import BLOCK_TOKENS, NEW_TOKENS, TURNS, make_model, prompt

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.results import WriteGrant
from kvcm.connectors.transformers import KVReuse, ReuseSettings

__all__ = ["EngineSettings", "LedgerClient", "command_of"]

_CALL_SECONDS = 1.0
_SETTINGS = ReuseSettings(
    call_seconds=_CALL_SECONDS, register_seconds=1.0, load_seconds=1.0, save_seconds=2.0, flush_seconds=2.0
)
_TALKING = 12  # conversations that go on at a time
_OLD = 0.25  # of the turns belong to a conversation of before


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of an engine.

    Attributes:
        name: of the engine.
        managers: their addresses, separated by commas; each engine begins with another one.
        group: instance group.
        instance: of the engine.
        ledger: file for acknowledged blocks.
        results: file for the outcomes of prompts.
        expected: file of the tokens.
        conversations: how many there are.
        began: unix seconds of the game's begin.
        seconds: that the game lasts; conversations begin evenly over them.
        pause_seconds: between two prompts.
        seed: of its prompts.
    """

    name: str
    managers: str
    group: str
    instance: str
    ledger: str
    results: str
    expected: str
    conversations: int
    began: float
    seconds: float
    pause_seconds: float
    seed: int


class LedgerClient(ManagerClient):
    """A client that records blocks after the manager acknowledged them.

    Args:
        addresses: of managers.
        instance_id: of the engine.
        settings: deadlines.
        ledger: where to write it.
    """

    def __init__(self, addresses: str, instance_id: str, settings: ClientSettings, ledger: Lines) -> None:
        super().__init__(addresses, instance_id, settings)
        self._instance = instance_id
        self._ledger = ledger
        self._granted: dict[str, tuple[Sequence[int], WriteGrant]] = {}
        self._own = threading.Lock()

    def start_write(self, keys: Sequence[int], **arguments: Any) -> WriteGrant | None:
        """As `ManagerClient.start_write`."""
        grant = super().start_write(keys, **arguments)
        if grant is not None:
            with self._own:
                self._granted[grant.session_id] = (list(keys), grant)
        return grant

    def finish_write(self, session_id: str, succeeded: Sequence[bool], **arguments: Any) -> bool:
        """As `ManagerClient.finish_write`; a confirmed one is written down."""
        at = time.time()  # of all that happens to the blocks, nothing is earlier
        is_confirmed = super().finish_write(session_id, succeeded, **arguments)
        with self._own:
            keys, grant = self._granted.pop(session_id)
        if is_confirmed:
            self._record(keys, grant, succeeded, arguments.get("checksums") or [{}] * len(succeeded), at)
        return is_confirmed

    def abort_write(self, session_id: str, **arguments: Any) -> bool:
        """As `ManagerClient.abort_write`."""
        with self._own:
            self._granted.pop(session_id, None)
        return super().abort_write(session_id, **arguments)

    def _record(
        self,
        keys: Sequence[int],
        grant: WriteGrant,
        succeeded: Sequence[bool],
        checksums: Sequence[Mapping[str, int]],
        at: float,
    ) -> None:
        fresh = [key for key, is_masked in zip(keys, grant.mask, strict=True) if not is_masked]
        for key, place, is_written, sums in zip(fresh, grant.locations, succeeded, checksums, strict=True):
            if is_written:
                parts = {spec: [str(uri), sums.get(spec, 0)] for spec, uri in place.uris.items()}
                self._ledger.add({"instance": self._instance, "key": key, "parts": parts, "at": at})


class Engine:
    """Answers prompts, one after the other."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._model = make_model()
        self._expected: dict[str, list[int]] = json.loads(Path(settings.expected).read_text())["tokens"]
        self._results = Lines(Path(settings.results))
        client = LedgerClient(
            settings.managers, settings.instance, ClientSettings(_CALL_SECONDS), Lines(Path(settings.ledger))
        )
        self._reuse = KVReuse(
            self._model,
            client,
            settings.group,
            block_tokens=BLOCK_TOKENS,
            publish=True,
            model_name="game",
            settings=_SETTINGS,
            clock=time.monotonic,
        )
        self._random = random.Random(settings.seed)
        self._reported_to_end = threading.Event()

    def run(self) -> None:
        """Answer until the stop."""
        signal.signal(signal.SIGTERM, lambda *_: self._reported_to_end.set())
        while not self._reported_to_end.wait(self._settings.pause_seconds):
            self._answer(*self._next())
        self._reuse.close()

    def _next(self) -> tuple[int, int]:
        """Return conversation and turn: mostly of those that go on now, whose later turns come later."""
        settings = self._settings
        share = min(1.0, max(0.0, (time.time() - settings.began) / settings.seconds))
        newest = _TALKING - 1 + int(share * (settings.conversations - _TALKING))
        oldest = newest - _TALKING + 1
        if oldest and self._random.random() < _OLD:
            return self._random.randrange(oldest), self._random.randrange(TURNS)
        chosen = self._random.randrange(oldest, newest + 1)
        said = (newest - chosen) * TURNS // _TALKING  # turns that the conversation has had by now
        return chosen, self._random.randrange(said + 1)

    def _answer(self, conversation: int, turn: int) -> None:
        import torch

        tokens, name = prompt(conversation, turn), f"{conversation}/{turn}"
        result: dict[str, Any] = {"at": time.time(), "engine": self._settings.name, "prompt": name}
        began = time.monotonic()
        try:
            ids = torch.tensor([tokens])
            mask = torch.ones_like(ids)
            output = self._reuse.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False)
            said, report = [int(token) for token in output[0, len(tokens) :]], self._reuse.last_report
            assert report is not None
            result |= {
                "is_right": said == self._expected[name],
                "prompt_tokens": report.prompt_tokens,
                "loaded_tokens": report.loaded_tokens,
                "blocks_saved": report.blocks_saved,
                "blocks_corrupt": report.blocks_corrupt,
                "reason": report.reason,
            }
        except Exception as error:
            result["raised"] = repr(error)
        self._results.add(result | {"seconds": time.monotonic() - began})


def command_of(settings: EngineSettings) -> list[str]:
    """Return the command line of an engine."""
    return [sys.executable, __file__, json.dumps(asdict(settings))]


if __name__ == "__main__":
    Engine(EngineSettings(**json.loads(sys.argv[1]))).run()
