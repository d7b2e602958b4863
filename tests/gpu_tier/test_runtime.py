"""Devices: which are refused, and how tensors get there."""

from __future__ import annotations

import pytest
import torch

from gpu_tier.errors import ConfigError
from gpu_tier.runtime import CudaRuntime, upload


def test_a_gpu_that_is_not_the_current_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(ConfigError, match=r"device='cuda:1': must be the current one, cuda:0; call .*set_device.1"):
        CudaRuntime(torch.device("cuda:1"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_expanded_and_strided_tensors_are_uploaded() -> None:
    device = torch.device("cuda")
    for tensor in (torch.arange(4).expand(3, 4), torch.arange(12).view(3, 4).T):
        assert torch.equal(upload(tensor, device).cpu(), tensor)
