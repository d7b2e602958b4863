"""vLLM with our connector, a manager, and the blocks in between, for tests."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, Self

from engine_process import EngineProcess, Generated, until
from manager_process import ManagerProcess
from stored_parts import read_part
from tiny_models import prompt_tokens

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.results import Location, MatchMode
from kvcm.model.uri import LocationUri

BLOCK_TOKENS = 32
PART = "layers0-4.heads0-4"  # of the small Llama, on one rank


def connected(
    address: str, instance_id: str, *, policy: str = "recompute", package: str = "kvcm.connectors", **options: Any
) -> dict[str, Any]:
    """Return the options of an engine that make it use our connector; patient ones, since the machine is busy."""
    extra = {"manager": address, "instance_group": "default", "instance_id": instance_id, "lookup_seconds": 10.0}
    return {
        "kv_transfer_config": {
            "kv_connector": "KVCMConnector",
            "kv_connector_module_path": f"{package}.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": extra | options,
        }
    }


def manager_metric(manager: ManagerProcess, name: str, **labels: str) -> float:
    """Return a metric of a manager, summed over the labels that are not given."""
    url = f"http://127.0.0.1:{manager.ports['admin_http_port']}/metrics"
    with urllib.request.urlopen(url, timeout=30) as page:  # our own manager
        text = page.read().decode()
    found = re.findall(rf"^{re.escape(name)}((?:{{.*}})?) (\S+)$", text, re.MULTILINE)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(value) for shown, value in found if all(each in shown for each in wanted))


def sessions_open(manager: ManagerProcess) -> int:
    """Return how many write sessions are open."""
    return int(manager_metric(manager, "kvcm_write_sessions_open"))


def forget(engine: EngineProcess) -> None:
    """Empty an engine's own cache: it computed or loaded all blocks that it has from now on."""
    settle(engine)
    until(lambda: engine.ask("reset_prefix_cache"))


def settle(engine: EngineProcess) -> None:
    """Wait until nothing is being saved any more; an engine in several processes goes on by itself."""
    if not _is_in_several_processes(engine):
        engine.ask("settle")


def _is_in_several_processes(engine: EngineProcess) -> bool:
    return not engine.started["in_one_process"]


@dataclass
class Rig:
    """One engine.

    Attributes:
        engine: it.
        manager: where it stores.
        instance_id: under which.
    """

    engine: EngineProcess
    manager: ManagerProcess
    instance_id: str

    def generate(self, prompt: list[int], tokens: int = 16, **sampling: Any) -> Generated:
        """Answer a prompt."""
        return self.engine.generate([prompt], tokens, **sampling)[0]

    def fresh(self, prompt: list[int], tokens: int = 16, **sampling: Any) -> Generated:
        """Answer a prompt of which the engine itself knows nothing any more."""
        forget(self.engine)
        return self.generate(prompt, tokens, **sampling)

    def store(self, prompt: list[int], tokens: int = 16) -> Generated:
        """Answer a prompt, and wait until all its full blocks are stored, those of the answer too."""
        answer = self.fresh(prompt, tokens)
        self.until_stored([*prompt, *answer.tokens[:-1]])  # the last token's KV is never computed
        return answer

    def until_ready(self) -> Self:
        """Wait until the engine is registered: before that, the connector neither looks up nor stores blocks."""
        until(lambda: self.fresh([5] * (BLOCK_TOKENS + 1), 1) and self.count("lookups"))
        return self

    def until_stored(self, tokens: list[int]) -> None:
        """Wait until all full blocks are stored."""
        settle(self.engine)
        keys = self.keys(tokens)
        until(lambda: self.stored_blocks(keys) == len(keys))

    def keys(self, tokens: list[int]) -> list[int]:
        """Return the keys of the full blocks of a prompt."""
        return list(self.engine.ask("block_keys", tokens=tokens))

    def stored_blocks(self, keys: Sequence[int]) -> int:
        """Return how many blocks of a prefix can be read."""
        with ManagerClient(self.manager.address, self.instance_id) as client:
            return client.match_length(keys, timeout_seconds=20)

    def locations(self, keys: Sequence[int]) -> list[Location | None]:
        """Return where blocks are, whatever parts they have."""
        with ManagerClient(self.manager.address, self.instance_id) as client:
            return list(client.match(keys, MatchMode.BATCH, timeout_seconds=20).locations)

    def uris(self, keys: Sequence[int], part: str = PART) -> list[LocationUri]:
        """Return where a part of each block is."""
        locations = self.locations(keys)
        assert all(locations)
        return [location.uris[part] for location in locations if location]

    def stored_digests(self, keys: Sequence[int], part: str = PART) -> list[str]:
        """Return the digest of the stored bytes of a part of each block."""
        return [sha256(read_part(uri)).hexdigest() for uri in self.uris(keys, part)]

    def engine_digests(self, tokens: list[int], folder: Path, group: int = 0) -> list[str]:
        """Return the digest of what the engine has of each full block of a group of layers."""
        folder.mkdir(exist_ok=True)
        blocks = self.engine.ask("cached_blocks", prompt=tokens, directory=str(folder))[group]
        return [
            sha256((folder / f"{group}-{index}").read_bytes()).hexdigest() if block else ""
            for index, block in enumerate(blocks)
        ]

    def counts(self) -> dict[str, int]:
        """Return the counters of the connector since the start; in several processes, up to the last step."""
        if not _is_in_several_processes(self.engine):
            return dict(self.engine.ask("kvcm_counts"))
        metrics = self.engine.ask("metrics").items()
        return {name.removeprefix("vllm:kvcm_"): value for name, value in metrics if name.startswith("vllm:kvcm_")}

    def count(self, name: str) -> int:
        """Return one of them."""
        return self.counts().get(name, 0)


_seeds = count(1000)


def new_prompt(tokens: int = 170) -> list[int]:
    """Return a prompt that no other call returns."""
    return prompt_tokens(tokens, seed=next(_seeds))


@dataclass
class FaultySite:
    """An engine around which something fails, and one without us, whose answers are right."""

    rig: Rig
    plain: EngineProcess

    def is_right(self, prompt: list[int], answer: Generated) -> bool:
        """Whether an answer is that of the engine without us."""
        truth = self.plain.generate([prompt], 16)[0]
        return (answer.tokens, answer.finish_reason) == (truth.tokens, "length")

    def known_prompt(self) -> list[int]:
        """Return a prompt that is stored, which may take several attempts after a fault."""
        prompt = new_prompt()
        keys = self.rig.keys(prompt)
        until(lambda: self.rig.fresh(prompt) and self.rig.stored_blocks(keys) == len(keys), 60)
        return prompt

    def recovers(self, known: list[int]) -> None:
        """The engine loads blocks stored before again and stores new ones; no session is left open."""
        until(lambda: self.rig.fresh(known).cached_tokens == len(known) // BLOCK_TOKENS * BLOCK_TOKENS, 60)
        assert self.is_right(known, self.rig.fresh(known))
        self.known_prompt()
        settle(self.rig.engine)
        until(lambda: sessions_open(self.rig.manager) == 0, 60)
