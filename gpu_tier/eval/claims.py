"""What the published systems claim, and what can be said of it without their models, data and machines.

A claim is *reproduced* when the same quantity is measured on the same kind of thing, a *proxy* when it is measured on
synthetic keys, on the recall transformer or on some of a model's layers, and *not possible* otherwise. A proxy shows
that the mechanism behaves as claimed; it is never quoted as the claim's own number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpu_tier.eval.report import ResultTable

__all__ = ["CLAIMS", "Claim", "Status", "claims_table"]


class Status(StrEnum):
    """How far a claim can be checked here."""

    REPRODUCED = "R"
    PROXY = "P"
    NOT_POSSIBLE = "N"


@dataclass(frozen=True, slots=True)
class Claim:
    """One published figure.

    Attributes:
        key: name under which our figure is handed in.
        source: who published it.
        claim: the figure.
        conditions: under which it was measured.
        status: how far it can be checked here.
        ours: where our side comes from, or why there is none.
    """

    key: str
    source: str
    claim: str
    conditions: str
    status: Status
    ours: str


_SGLANG = "SGLang, hierarchical sparse attention"
_PQ = "PQCache, SIGMOD 2025"
_R, _P, _N = Status.REPRODUCED, Status.PROXY, Status.NOT_POSSIBLE

CLAIMS = (
    Claim("step_overlap", _SGLANG, "adjacent steps share 80–90 % of the top k", "DeepSeek-V3.2, k=2048", _P,
          "S1, top 100 of 32K tokens: sharp, mid, diffuse"),
    Claim("hit_rate", _SGLANG, "hit rate of at least 80 % with a buffer of 4K–8K tokens, clearly lower at 2K",
          "DeepSeek-V3.2, k=2048", _P, "S1 mid, exact top 512, buffer of 1, 2 and 4 times that"),
    Claim("buffer_ratio", _SGLANG, "a buffer of 2–4 times the top k", "the same", _P,
          "4 times, half of what left returns, and none: a larger buffer gains only what returns"),
    Claim("io_bandwidth", _SGLANG, "about 40 GB/s per GPU in the IO kernel", "8×H20, PCIe, NUMA bound", _R,
          "benchmarks/gpu/k1_io_transfer.py"),
    Claim("device_memory", _SGLANG, "8 GB of latents per request move to the host; memory grows with k, not n",
          "128K tokens, 61 layers", _R, "the plan command; index keys of 1.06 GB stay on the GPU and are counted"),
    Claim("quest_bytes", _SGLANG, "Quest's representation is about 1 % of the keys", "page size not given", _N,
          "minimum and maximum are 2/page of the keys: 3.1 % at 64 tokens, 12.5 % at 16"),
    Claim("throughput", _SGLANG, "more tokens/s at 16K, 32K and 64K input as batches grow",
          "DeepSeek-V3.2, 8×H200, 1 TB host", _P, "benchmarks/gpu K6: some of the layers, extrapolated"),
    Claim("low_batch", "SGLang, later threads", "slower at batch 1–4 (0.92–0.94×), 3.0× at batch 54",
          "8×RTX PRO 6000", _P, "K6 prints the losing points too"),
    Claim("quest_quality", "Quest, ICML 2024", "full accuracy at a small page budget", "LLaMA-class models", _P,
          "S1 needs 20 % of the tokens: importance is scattered over single tokens there"),
    Claim("streaming_quality", "StreamingLLM, ICLR 2024", "stable language modelling; not a claim about recall",
          "sinks and window", _P, "recall task at 10 %: what is outside the window is lost"),
    Claim("snapkv_question", _PQ, "+7.10 % over the best baseline when the question comes first",
          "LongBench, Llama-3.1-8B", _P, "recall task: SnapKV at 10 %, questions first, and last, in the prompt"),
)  # fmt: skip


def claims_table(figures: Mapping[str, str], claims: Sequence[Claim] = CLAIMS) -> ResultTable:
    """Return the table of claims.

    Args:
        figures: our figure of each claim that there is one of, by key.
        claims: that the table lists.
    """
    rows = tuple((c.source, c.claim, c.conditions, c.status.value, figures.get(c.key), c.ours) for c in claims)
    return ResultTable(
        "Published claims",
        ("source", "claim", "conditions", "status", "ours", "from"),
        rows,
        "R reproduced in kind, P proxy only, N not possible without their models, data or machines.",
    )
