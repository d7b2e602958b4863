"""Every alert has a section that says what to do, and every section an alert."""

from __future__ import annotations

import re

import yaml
from doc_pages import DOCS, ROOT, document

PAGE = DOCS / "alerts.md"
RULES = ROOT / "deploy/prometheus/rules.yml"


def _alerts() -> dict[str, dict[str, dict[str, str]]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def _sections() -> dict[str, str]:
    return dict(re.findall(r"^### (\w+)\n\n(.*?)(?=^#|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def test_every_alert_has_a_section_and_every_section_an_alert() -> None:
    assert list(_sections()) == list(_alerts())


def test_the_runbook_of_an_alert_is_its_section() -> None:
    for name, rule in _alerts().items():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert ROOT / page == PAGE
        assert anchor == name.lower()
        assert anchor in document(PAGE).anchors


def test_a_section_begins_with_the_severity_of_its_alert() -> None:
    for name, text in _sections().items():
        assert text.startswith(f"**{_alerts()[name]['labels']['severity'].capitalize()}.** "), name
