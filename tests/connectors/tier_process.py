"""Serves or attaches in a process of its own: `tier_process.py ADDRESS INSTANCE KIND LAYOUT serve|attach`."""

from __future__ import annotations

import json
import sys

from prefix_cases import MHA, MLA
from tier_cases import TierEngine, dsa_spec, tokens_of

from kvcm.gpu_tier.geometry import Layout

TOKENS = tokens_of(6)


def main(address: str, instance: str, kind: str, layout_name: str, what: str) -> None:
    layout = Layout(layout_name)
    geometry, sidecar = (MLA, dsa_spec(MLA, layout)) if kind == "dsa" else (MHA, "")
    with TierEngine(address, instance, geometry=geometry, layout=layout, sidecar=sidecar) as engine:
        if what == "serve":
            engine.serve(TOKENS)
        prefix = engine.attach(TOKENS)
        counters = engine.store.counters
        answer = {
            "tokens": prefix.n_tokens,
            "digest": engine.digest(prefix),
            "loaded": counters.storage_tokens,
            "written": counters.written_pages,
        }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
