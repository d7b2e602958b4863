"""Formats: whatever the bytes of a block depend on changes the name of its sidecar."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from prefix_cases import MHA, MLA, format_of

from gpu_tier.connector import fingerprint8
from gpu_tier.geometry import Layout
from gpu_tier.rows import KVDtype

KV = format_of(MHA)
PARAMETERS = {"index_dim": 128, "scale_format": "f32"}


def test_the_name_of_a_sidecar() -> None:
    name = KV.sidecar_spec("dsa", PARAMETERS)
    assert name == f"index.dsa.{fingerprint8(KV, 'dsa', PARAMETERS)}"
    assert name == KV.sidecar_spec("dsa", dict(reversed(PARAMETERS.items())))
    assert len(name) == len("index.dsa.") + 8
    # Fixed for good: with another number every sidecar that is stored is lost.
    assert fingerprint8(KV, "dsa", PARAMETERS) == "85b43b0b"


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "mla"},
        {"model": "other"},
        {"weights": "1"},
        {"kv_dtype": "bf16"},
        {"layout": "page_head"},
        {"page_tokens": 8},
        {"shape": "other"},
        {"rope": {"theta": 500_000.0}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_format_has_another_fingerprint(change: dict[str, Any]) -> None:
    assert fingerprint8(replace(KV, **change), "dsa", PARAMETERS) != fingerprint8(KV, "dsa", PARAMETERS)


def test_another_algorithm_or_parameter_has_another_fingerprint() -> None:
    found = {
        fingerprint8(KV, "dsa", PARAMETERS),
        fingerprint8(KV, "quest", PARAMETERS),
        fingerprint8(KV, "dsa", {**PARAMETERS, "index_dim": 64}),
        fingerprint8(KV, "dsa", {}),
    }
    assert len(found) == 4


def test_geometry_and_layout_are_in_the_format() -> None:
    geometries = [MHA, MLA, replace(MHA, num_layers=3), replace(MHA, start_layer=2), replace(MHA, dtype=KVDtype.FP8)]
    geometries += [replace(MHA, num_kv_heads=4), replace(MHA, head_dim=8), replace(MHA, v_head_dim=8)]
    formats = [format_of(geometry) for geometry in geometries]
    formats += [format_of(MHA, layout) for layout in (Layout.LAYER_FIRST, Layout.PAGE_HEAD)]
    assert len({fingerprint8(kv, "dsa", {}) for kv in formats}) == len(formats)


def test_the_protocol_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import gpu_tier.connector"
    subprocess.run([sys.executable, "-c", code], check=True)
