"""What product quantisation finds on S1 at 8K tokens: the bars that each seed has to pass (all are in a benchmark)."""

from __future__ import annotations

import pytest

from gpu_tier.config import SparseConfig
from gpu_tier.eval.methods import PAGE, pq_top
from gpu_tier.eval.quality import QualityResult, evaluate
from gpu_tier.eval.synth import KVSample, Regime, kv

N = 8192
SAMPLES = {(regime, seed): kv(N, 128, 16, 4, regime, seed) for regime, seed in ((Regime.SHARP, 1), (Regime.MID, 0))}


def found(sample: KVSample, m: int, b: int, share: float) -> QualityResult:
    config = SparseConfig(algorithm="pqcache", page_size=PAGE, algo=pq_top(m, b, round(share * N)))
    return evaluate(config, sample, recall_k=32)


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_four_bytes_a_key_find_nearly_all_and_more_than_two_of_six_bits(case: tuple[Regime, int]) -> None:
    sample = SAMPLES[case]
    fine, coarse = ({share: found(sample, m, b, share) for share in (0.1, 0.2)} for m, b in ((4, 8), (2, 6)))
    assert fine[0.1].recall >= 0.88
    assert fine[0.2].recall >= 0.96
    assert coarse[0.2].recall >= 0.50
    assert all(fine[share].recall > coarse[share].recall for share in fine)
    assert fine[0.2].errors.normalised <= 0.085
    assert fine[0.2].tokens == round(0.2 * N) + 32 + 64
