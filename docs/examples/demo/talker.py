"""An engine of the demo that goes on: answers the turns of the conversation in a circle, and prints what each one cost.

    python docs/examples/demo/talker.py --manager 127.0.0.1:6381 --instance demo --rounds 1

Every round begins with another first line, so that there is something to compute and to store; behind that, the turns
of a round share their history. The first round is the same in every process: later ones load it.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from conversation import SHARED, prompts
from model import BLOCK_TOKENS, NEW_TOKENS, make_model, to_tokens

from kvcm.connectors.transformers import KVReuse

_ANSWERED = Path("/tmp/answered")
_MOST_BYTES = 4096  # of a prompt; short turns show more of the cache on a small machine


def main() -> int:
    """Talk until SIGTERM or the last round; 1 when the manager does not let it in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manager", default="127.0.0.1:6381", help="host:port of each manager, separated by commas")
    parser.add_argument("--group", default="default")
    parser.add_argument("--instance", default="demo")
    parser.add_argument("--rounds", type=int, default=0, help="how often to go through the conversation; 0 = for ever")
    parser.add_argument("--pause", type=float, default=0.5, metavar="SECONDS", help="between two turns")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    torch.set_num_threads(2)
    model = make_model()
    with KVReuse.connect(
        model, arguments.manager, arguments.group, arguments.instance, block_tokens=BLOCK_TOKENS
    ) as reuse:
        if not reuse.registration.ok:
            print(f"not let in: {reuse.registration.message}", flush=True)
            return 1
        talk(reuse, arguments.rounds, arguments.pause)
    return 0


def talk(reuse: KVReuse, rounds: int, pause_seconds: float) -> None:
    """Answer the turns again and again."""
    for number in itertools.count(1) if rounds == 0 else range(1, rounds + 1):
        for turn, text in enumerate(turns(number), 1):
            started = time.monotonic()
            reuse.generate(to_tokens(text), max_new_tokens=NEW_TOKENS, do_sample=False)
            print(turn_line(number, turn, reuse.last_report, time.monotonic() - started), flush=True)
            _ANSWERED.touch()
            time.sleep(pause_seconds)


def turns(number: int) -> list[bytes]:
    """Return the prompts of a round, in order."""
    return [each for text in prompts(SHARED) if len(each := f"<round {number}>\n".encode() + text) <= _MOST_BYTES]


def turn_line(number: int, turn: int, report: Any, seconds: float) -> str:
    """Return the line about a turn."""
    reason = f" ({report.reason})" if report.reason else ""
    return (
        f"round {number}, turn {turn}: loaded {report.loaded_tokens:,} of {report.prompt_tokens:,} tokens, first token "
        f"after {report.first_token_seconds:.2f} s of {seconds:.2f} s, stored {report.blocks_saved} blocks{reason}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
