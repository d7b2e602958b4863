"""`python deploy/prometheus/copies.py [--check]`: the alert rules, as Kubernetes wants them.

Neither kustomize nor Helm reads files outside its own folder, so rules.yml is there twice more: as a PrometheusRule
and in the chart. Run this after a change of rules.yml; a test runs it with --check.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

__all__ = ["copies", "main"]

DEPLOY = Path(__file__).parents[1]
RULES = DEPLOY / "prometheus/rules.yml"
_HEAD = """\
# Made by deploy/prometheus/copies.py of deploy/prometheus/rules.yml.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: kvcm
  labels:
    app.kubernetes.io/name: kvcm
    app.kubernetes.io/instance: kvcm
    app.kubernetes.io/component: manager
spec:
"""


def copies(rules: str) -> Mapping[Path, str]:
    """Return what each copy has to hold."""
    return {
        DEPLOY / "k8s/components/monitoring/prometheus-rule.yaml": _HEAD + textwrap.indent(rules, "  "),
        DEPLOY / "helm/kvcm/files/rules.yml": rules,
    }


def main(arguments: list[str]) -> int:
    """Write the copies, or with --check compare them."""
    wanted = copies(RULES.read_text(encoding="utf-8"))
    if arguments == ["--check"]:
        stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
        for path in stale:
            sys.stderr.write(f"{path} differs from {RULES.name}: run python deploy/prometheus/copies.py\n")
        return 1 if stale else 0
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
