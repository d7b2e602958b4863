"""What RetroInfer and PQCache claim, and the systems that they compare themselves with and that are not here."""

from __future__ import annotations

from gpu_tier.eval.claims import Claim, Status
from gpu_tier.eval.report import ResultTable

__all__ = ["RETRIEVAL_CLAIMS", "left_out_table"]

_RETRO = "RetroInfer, PVLDB 19(5)"
_PQ = "PQCache, SIGMOD 2025"
_R, _P, _N = Status.REPRODUCED, Status.PROXY, Status.NOT_POSSIBLE
_LLAMA = "Llama3-8B-1048K, A100-80GB, PCIe4, 1.7 TB host"
_GPU = "a figure needs a GPU"

_RETRO_CLAIMS = (
    Claim("retro_throughput", _RETRO, "4.1/4.4/4.4× decode throughput over full attention at 30/60/120K",
          f"{_LLAMA}, largest batch each", _P,
          "roofline: 25 requests of 120K against 7, nothing overlapped to all; measured by K4, on a GPU"),
    Claim("retro_sparse", _RETRO, "3.3–22.8× over sparse systems; at 1M tokens 10.5× MagicPIG, 12.2× PQCache",
          _LLAMA, _P, f"K5, against our own PQCache at a million tokens; {_GPU}"),
    Claim("retro_tasks", _RETRO, "3.4–4.6× across tasks, 2.6–3.5× over Quest, 2.4–24.4× on four models", _LLAMA, _N,
          "depends on the hit rates of tasks that cannot be run here"),
    Claim("retro_end_to_end", _RETRO, "2.2–3.3× over vLLM; long input 1.8–7.8×, with XAttention 2.1–10.5×; "
          "long output 2.7–70.8×", _LLAMA, _N, "no serving system with real models here"),
    Claim("retro_prefill", _RETRO, "prefill +6 % (120K), +3 % (1M); clustering below 5 %, offload +0.4 %", "A100", _R,
          f"K8, clustering against the prefill of a layer; {_GPU}"),
    Claim("retro_accuracy", _RETRO, "RULER at 128K loses 0.66/1.50/1.97/0.73 points; needles found up to 1M; AIME24 "
          "76.7 of 73.3, GPQA 68 of 68; −1.52 % with sparse prefill", "four models", _P,
          "recall transformer instead, wave 1.8 % + 23.2 % against full attention, same questions: 2K, 4K"),
    Claim("retro_hit_rate", _RETRO, "hit rate 0.79–0.94 with a cache of 5 %", "tasks", _P,
          "S1 mid, 32K tokens, clusters selected, caches of 2.5, 5 and 10 %"),
    Claim("retro_traffic", _RETRO, "PCIe traffic below 2 % of what full attention reads", "1.8 % retrieved", _R,
          "S1 mid: bytes from the host that the wave buffer counted in a step, over the KV's; cache of 5 %"),
    Claim("retro_overlap", _RETRO, "31 % of the top 100 are shared by three steps", "Llama3-8B", _P,
          "S1 sharp, mid, diffuse: in the top 100 of three steps in a row"),
    Claim("retro_sparsity", _RETRO, "sparsity above 98 % hides the link (60:1)", "A100, PCIe4", _P,
          "the same arithmetic at 4.3 TB/s and 55 GB/s"),
    Claim("retro_copy", _RETRO, "copies of a layer 1.3 ms → 100 µs; a naive cache +1.5 ms; a layer takes 720 µs",
          "A100, 128K", _R, f"K10; {_GPU}"),
    Claim("retro_segments", _RETRO, "8K segments: less than 1 % of recall lost, build time −80 %", "128K, layer 10", _R,
          "benchmarks/gpu/index_build.py, 8K segments against one: time, recall@100 sharp, mid, diffuse"),
    Claim("retro_update", _RETRO, "index updates take 0.2 % of decode", "A100", _R,
          f"K4, half an update segment decoded; {_GPU}"),
    Claim("retro_estimation", _RETRO, "estimation gains up to 20 % of accuracy", "RULER", _P,
          "relative error without over with estimation: S1 sharp, mid, diffuse"),
    Claim("retro_batch", _RETRO, "full attention: at most 4 requests of 128K, 512K tokens of context", "A100-80GB", _R,
          "plan: requests of 128K in 80 GB beside 16 GB of weights; longest single request"),
)  # fmt: skip

_PQ_CLAIMS = (
    Claim("pq_baselines", _PQ, "InfiniteBench +4.60 % (1/10), +1.50 % (1/5), LongBench +3.90 %, +1.74 % over the best "
          "baseline", "Llama-3.1-8B", _N, "no models and no data here"),
    Claim("pq_oracle", _PQ, "LongBench: full 47.37, oracle 47.40, PQ 47.29 (1/5), 47.19 (1/10); InfiniteBench 47.63, "
          "47.31, 46.80; within 0.70 % and 1.71 % of the oracle", "Llama-3.1-8B", _P,
          "recall transformer, 4K, m4b8 at 10 % and the oracle at 10 %"),
    Claim("pq_question", _PQ, "+7.10 % over the best baseline when the question comes first", "LongBench", _P,
          "recall transformer, questions first, m4b8 at 10 % of tokens; SnapKV is in the report of the other methods"),
    Claim("pq_cache", _PQ, "TPOT −26.3 % / −32.8 % with a cache of 4K / 8K tokens; hit rates about 0.5 and 0.6",
          "RTX 4090, PCIe 1.0 x16, 1/5 of the tokens, k_cache=32", _P,
          f"S1 mid, 32K tokens, 1/5 of the tokens: hit rates with 4K and 8K tokens; for times {_GPU}"),
    Claim("pq_traffic", _PQ, "extra traffic at most 1/128 (m2b6) or 1/64 (m4b8) of the keys' bytes", "d=128", _R,
          "bytes of codes over bytes of bf16 keys: m2b6 and m4b8, a byte for each code"),
    Claim("pq_latency", _PQ, "time per token nearly flat in n; clustering hidden behind prefill; second token soonest",
          "2×Xeon 6330, 48 threads", _P, f"with few cores the least number of iterations binds; {_GPU}"),
    Claim("pq_70b", _PQ, "70B: 52.89 full, 52.88/52.86; with MInference 47.31 → 40.18 (MInference alone 41.04)",
          "Llama-3.1-70B", _N, "no models here"),
)  # fmt: skip

RETRIEVAL_CLAIMS = (*_RETRO_CLAIMS, *_PQ_CLAIMS)

_LEFT_OUT = (
    ("MagicPIG", "RetroInfer", "samples by locality-sensitive hashing on the CPU, which also attends there: another "
     "system, not a policy of this one"),
    ("vLLM", "RetroInfer", "a serving system; full attention in the same framework is the baseline here"),
    ("XAttention, MInference", "RetroInfer, PQCache", "sparse prefill; prefill is exact here"),
    ("PQCache", "RetroInfer", "here: compared in the same framework"),
    ("Quest, SnapKV, StreamingLLM", "both", "here: in the quality report of the other methods"),
    ("other baselines of the papers' tables", "both", "not built: the papers' figures need their models and data"),
)  # fmt: skip


def left_out_table() -> ResultTable:
    """Return what the two systems are compared with by their authors, and whether it is here."""
    return ResultTable("Baselines of the papers", ("system", "compared by", "here"), _LEFT_OUT)
