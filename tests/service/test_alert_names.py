"""Names of alerts: those of the rules for Prometheus, or told in the documents."""

from __future__ import annotations

import re
from pathlib import Path

import kvcm.service.alerts
from kvcm.service.alerts import watch

ROOT = Path(__file__).parents[2]
NAME = re.compile(r'"(Kvcm[A-Za-z]+)"')


def _told() -> set[str]:
    folder = Path(kvcm.service.alerts.__file__).parent
    return {name for path in folder.glob("*.py") for name in NAME.findall(path.read_text())}


def test_every_name_has_a_rule_or_stands_among_those_that_have_none() -> None:
    rules = set(re.findall(r"alert: (\w+)", (ROOT / "deploy/prometheus/rules.yml").read_text()))
    (listed,) = re.findall(r"Names without a rule: (.*?)\.", (ROOT / "docs/rest.md").read_text(), re.DOTALL)
    without = set(re.findall(r"`(\w+)`", listed))
    assert _told() - rules == without
    assert len(_told() & rules) >= 10


def test_what_needs_patience_is_told_at_all() -> None:
    assert watch._PATIENCE_SECONDS.keys() <= _told()
