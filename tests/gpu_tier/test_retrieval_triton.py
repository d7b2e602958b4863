"""RetroInfer and PQCache with every kernel in Triton: the same tokens, and attention that differs by rounding alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer_traffic import Shape, Traffic
from retrieval_cases import CASES


def decoded(config: dict[str, Any], kernels: str) -> torch.Tensor:
    traffic = Traffic(Shape(layers=2), {**config, "kernels": kernels})
    requests = [traffic.begin(n, seed=n) for n in (60, 9)]
    traffic.prompt(requests)
    return torch.stack([traffic.decode(requests, pad_to=3) for _ in range(2)])


@pytest.mark.parametrize("name", CASES)
def test_triton_decodes_what_the_reference_does(name: str) -> None:
    torch.testing.assert_close(decoded(CASES[name], "triton"), decoded(CASES[name], "reference"), rtol=1e-3, atol=1e-3)
