"""Fingerprints of weights: equal for equal files, wherever they lie, and different for whatever was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from connectors.reuse.weights import weights_fingerprint
from connectors.sglang.model_identity import weights_of
from connectors.sglang.options import SglangOptions


def write(directory: Path, *, scaled: str = "", file: str = "model.safetensors", **settings: object) -> Path:
    """Write a model of twenty tensors, of which one is scaled a little."""
    directory.mkdir(exist_ok=True)
    random = torch.Generator().manual_seed(0)
    tensors = {f"layer{number}": torch.randn(64, 48, generator=random) for number in range(20)}
    if scaled:
        tensors[scaled] *= 1.001
    save_file(tensors, directory / file)
    (directory / "config.json").write_text(json.dumps({"hidden_size": 48} | settings))
    return directory


def test_equal_files_are_equal_wherever_they_lie(tmp_path: Path) -> None:
    one, other = (
        write(tmp_path / "one"),
        write(tmp_path / "other", _name_or_path="/somewhere", transformers_version="9"),
    )
    assert weights_fingerprint(one) == weights_fingerprint(other)


@pytest.mark.parametrize("number", [0, 7, 19])
def test_one_tensor_that_was_trained_is_found(tmp_path: Path, number: int) -> None:
    before = weights_fingerprint(write(tmp_path / "model"))
    assert weights_fingerprint(write(tmp_path / "model", scaled=f"layer{number}")) != before


def test_settings_count(tmp_path: Path) -> None:
    before = weights_fingerprint(write(tmp_path / "model"))
    assert weights_fingerprint(write(tmp_path / "model", rope_theta=1e6)) != before


def test_other_formats_of_the_same_weights_do_not_count(tmp_path: Path) -> None:
    before = weights_fingerprint(write(tmp_path / "model"))
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(bytes(100))
    assert weights_fingerprint(tmp_path / "model") == before


def test_files_of_other_formats_are_told_apart(tmp_path: Path) -> None:
    prints = set()
    for fill in (b"a", b"b"):
        (tmp_path / "model.gguf").write_bytes(bytes(5_000) + fill * 5_000)
        prints.add(weights_fingerprint(tmp_path))
    assert len(prints) == 2


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no weights in"):
        weights_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="a safetensors file has a header of"):
        weights_fingerprint(tmp_path)


def test_what_the_operator_says_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write(tmp_path / "model")
    options = SglangOptions(manager="localhost:1", instance_id="x")
    assert weights_of(options, str(model), None) == weights_fingerprint(model)
    assert weights_of(SglangOptions("localhost:1", "x", weights="v2"), str(model), None) == "v2"
    assert weights_of(options, str(tmp_path), "abc") == f"{tmp_path}@abc"
    assert "set option 'weights'" in caplog.text
