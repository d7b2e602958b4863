"""What Prometheus knows of the composed managers, asked from inside of their network."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import urlencode

from composed import ROOT
from composition import Composition

__all__ = ["missing_series", "scraped_managers"]

_ASK = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
_VARIABLES = {"__rate_interval": "1m", "__range": "1h"}


def scraped_managers(composition: Composition) -> dict[str, str]:
    """Return whether each manager is up for Prometheus, "1" or "0"."""
    found = _result(composition, 'up{job="kvcm"}')
    return {each["metric"]["instance"].split(":")[0]: each["value"][1] for each in found}


def missing_series(composition: Composition) -> list[str]:
    """Return the queries of the dashboards that have no series."""
    dashboards = [json.loads(path.read_text()) for path in sorted((ROOT / "deploy/grafana").glob("*.json"))]
    found = [target["expr"] for each in dashboards for panel in each["panels"] for target in panel.get("targets", ())]
    assert len(found) > 30
    queries = [re.sub(r"\$(\w+)", lambda name: _VARIABLES.get(name[1], ".*"), query) for query in found]
    # Dashboards hide series that are 0 while nothing is wrong: for those, look for the series without "> 0".
    return [query for query in queries if not _result(composition, query.removesuffix(" > 0"))]


def _result(composition: Composition, query: str) -> list[Any]:
    url = f"http://prometheus:9090/api/v1/query?{urlencode({'query': query})}"
    done = composition.running["manager-1"].execute(["python", "-c", _ASK, url])
    assert done.returncode == 0, done
    return list(json.loads(done.stdout)["data"]["result"])
