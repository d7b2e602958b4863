"""An engine that generates tokens all the time, as a process of its own, and compares them with those without KVCM.

    python outage_generator.py <address of the manager>

Known prompts come again and again, so that their KV is loaded; between them come new ones, whose KV is stored.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
sys.path.insert(0, str(Path(__file__).parents[1] / "connectors"))

import torch
from asked_process import serve
from engine_figures import GROUPS, TokenFigures, added
from reuse_cases import BLOCK, MODEL, plain, prompt

from kvcm.connectors.transformers import KVReuse, ReuseSettings

_PROMPT_TOKENS = 200
_NEW_TOKENS = 20
_KNOWN_PROMPTS = 6
_NEW_EVERY = 2
_PAUSE_SECONDS = 0.05
_SETTINGS = ReuseSettings(
    call_seconds=20.0, register_seconds=60.0, load_seconds=1.0, save_seconds=2.0, flush_seconds=2.0
)


class Generator:
    """Each method without an underscore is a call from outside."""

    def __init__(self, address: str) -> None:
        group = next(iter(GROUPS))
        self._reuse = KVReuse.connect(MODEL, address, group, f"{group}/tokens", block_tokens=BLOCK, settings=_SETTINGS)
        assert self._reuse.registration.ok, self._reuse.registration
        self._expected: dict[int, torch.Tensor] = {}
        self._seeds = count()
        self._phase = "seed"
        self._phases: defaultdict[str, TokenFigures] = defaultdict(TokenFigures)
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def seed(self) -> None:
        """Answer every known prompt, so that their KV is stored."""
        for _ in range(_KNOWN_PROMPTS):
            self._operate(next(self._seeds))

    def begin(self) -> None:
        """Generate until the end."""
        self._thread.start()

    def enter(self, phase: str) -> None:
        """Count what begins from now on in this phase."""
        self._phase = phase

    def has_worked(self) -> bool:
        """Return whether a known and a new prompt were answered in this phase."""
        return self._phases[self._phase].generations > 2

    def end(self) -> None:
        """Stop generating."""
        self._has_ended.set()
        self._thread.join(30)
        assert not self._thread.is_alive(), "a generation does not come back"

    def report(self) -> dict[str, Any]:
        """Return the figures of every phase, and how requests to the manager ended over all phases."""
        failed = {name: call.miss_on_error + call.timeout for name, call in self._reuse.counters.items()}
        return {"phases": {phase: asdict(seen) for phase, seen in self._phases.items()}, "failed_requests": failed}

    def _repeat(self) -> None:
        for turn in count():
            if self._has_ended.wait(_PAUSE_SECONDS):
                return
            self._operate(next(self._seeds) if turn % _NEW_EVERY == 0 else turn % _KNOWN_PROMPTS)

    def _operate(self, number: int) -> None:
        phase, seen = self._phase, TokenFigures()
        try:
            self._generate(seen, number)
        except Exception as error:
            seen.errors.append(f"{type(error).__name__}: {error}")
        self._phases[phase] = added(self._phases[phase], seen)

    def _generate(self, seen: TokenFigures, number: int) -> None:
        input_ids = prompt(_PROMPT_TOKENS, seed=number)
        if number not in self._expected:
            self._expected[number] = plain(input_ids, max_new_tokens=_NEW_TOKENS)
        begin = time.monotonic()
        mask = torch.ones_like(input_ids)
        output = self._reuse.generate(input_ids, attention_mask=mask, max_new_tokens=_NEW_TOKENS, do_sample=False)
        seen.slowest_seconds = time.monotonic() - begin
        report = self._reuse.last_report
        assert report is not None
        seen.generations, seen.loaded_tokens, seen.blocks_saved = 1, report.loaded_tokens, report.blocks_saved
        if not torch.equal(output, self._expected[number]):
            seen.wrong.append(f"prompt {number}")


if __name__ == "__main__":
    serve(Generator(sys.argv[1]))
