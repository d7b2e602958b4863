"""The page of the gateway lists the settings and metrics that there are."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from kvcm.gateway.metrics import GatewayMetrics
from kvcm.gateway.settings import GatewaySettings

PAGE = (Path(__file__).parents[2] / "docs/gateway.md").read_text()
ROWS = re.findall(r"^\| (`[^|]*`) \|([^|]*)\| .* \|$", PAGE, re.MULTILINE)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    sizes = {1 << 30: "1 GiB", 32 << 20: "32 MiB"}
    if isinstance(value, int) and value in sizes:
        return sizes[value]
    return "empty" if value == "" else "–" if value == () else f"{value:g}" if isinstance(value, float) else str(value)


def test_settings_have_their_defaults() -> None:
    found: dict[str, str] = {}
    for names, defaults in ROWS:
        settings, values = re.findall(r"`(\w+)`", names), [each.strip("` ") for each in defaults.split(",")]
        if all(not name.startswith("kvcm") for name in settings):
            found.update(zip(settings, values * len(settings) if len(values) == 1 else values, strict=False))
    settings = GatewaySettings()
    expected = {each.name: _shown(getattr(settings, each.name)) for each in dataclasses.fields(settings)}
    assert {name: found.get(name) for name in expected} == expected


def test_metrics_have_their_labels() -> None:
    listed = {
        name: set(labels.replace(" ", "").split(",")) - {""}
        for names, labels in ROWS
        for name in re.findall(r"`(kvcm_gateway_\w+)`", names)
    }
    metrics = GatewayMetrics("kvcm", [], lambda: 0)
    made = [each for each in vars(metrics).values() if hasattr(each, "_labelnames")]
    for each in made:
        ending = "_total" if each._type == "counter" else ""
        assert listed[f"{each._name}{ending}"] == set(each._labelnames), each._name
    families = {f"{each.name}_total" if each.type == "counter" else each.name for each in metrics.registry.collect()}
    assert set(listed) == families
