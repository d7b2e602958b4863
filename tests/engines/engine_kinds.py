"""The engines that tests run: each in an environment of its own, since they cannot share one."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]

# One thread: for models this small, threads mostly wait for each other. Nothing is asked of the network.
_QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, slots=True)
class EngineKind:
    """How an engine is started.

    Attributes:
        name: of the engine.
        python: the interpreter of its environment.
        script: beside this file; it answers commands.
        paths: of modules that only this engine's processes need.
        environment: variables of its processes.
    """

    name: str
    python: Path
    script: str
    paths: tuple[Path, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> str:
        """Return why it cannot be started; "" when it can."""
        return "" if self.python.exists() else f"{self.python.parents[1].name} is missing: run `make engines`"


VLLM = EngineKind(
    "vllm",
    ROOT / ".venv-vllm" / "bin" / "python",
    "vllm_engine.py",
    environment=_QUIET
    | {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else a connector's threads inherit one core
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # "1": scheduler and workers in processes of their own, as in production
        "VLLM_NO_USAGE_STATS": "1",
    },
)
SGLANG = EngineKind(
    "sglang",
    ROOT / ".venv-sglang" / "bin" / "python",
    "sglang_engine.py",
    paths=(FOLDER / "sglang_cpu",),
    environment=_QUIET | {"SGLANG_USE_CPU_ENGINE": "1"},
)
TRANSFORMERS = EngineKind("transformers", Path(sys.executable), "transformers_engine.py", environment=_QUIET)
CONNECTED = tuple(kind for kind in (VLLM, SGLANG, TRANSFORMERS) if (ROOT / "connectors" / kind.name).is_dir())
