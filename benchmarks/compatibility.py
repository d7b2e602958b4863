"""Which features of which engines the tests have shown: what they noted under `build/features/` since it was emptied.

python benchmarks/compatibility.py --json benchmarks/results/compatibility.json
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from report import Row, arguments, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from feature_records import DIRECTORY, ENGINES, FEATURES


def results() -> dict[tuple[str, str, str], dict[str, bool]]:
    """Return how each test ended, by feature, engine and version: one that failed and then passed has failed."""
    found: dict[tuple[str, str, str], dict[str, bool]] = defaultdict(dict)
    for file in sorted(DIRECTORY.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            tests = found[record["feature"], record["engine"], record["version"]]
            tests[record["test"]] = record["passed"] and tests.get(record["test"], True)
    return found


def row(feature: str, engine: str, version: str, tests: dict[str, bool]) -> Row:
    """Return the row of a feature of an engine."""
    passed, ran = sum(tests.values()), len(tests)
    return Row(feature, f"{engine} {version}", passed, "tests", ran, passed / ran, "= 1", passed == ran)


def main() -> int:
    """Print and write the findings."""
    options = arguments(__doc__ or "").parse_args()
    order = {name: at for at, name in enumerate((*FEATURES, *ENGINES))}
    found = sorted(results().items(), key=lambda item: (order[item[0][0]], order[item[0][1]]))
    if not found:
        print(f"no test has noted a feature in {DIRECTORY}", file=sys.stderr)
        return 1
    return (
        0 if publish("features that tests have shown", [row(*key, tests) for key, tests in found], options.json) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
