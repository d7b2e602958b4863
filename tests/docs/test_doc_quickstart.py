"""The quick start, the tour of resources and the engine of one's own, run as they are written, but for the ports."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from doc_pages import DOCS, ROOT, document, shell_blocks
from ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MOST_SECONDS = 500
_OWN_PORTS = ("rpc_port=6381", "http_port=6382", "admin_rpc_port=6491", "admin_http_port=6492")
_SERVE = "kvcm serve --data-dir data"
_REGISTER = """curl -s -X POST http://127.0.0.1:6382/api/registerInstance -d '{"instance_group": "default",
  "instance_id": "MODEL", "block_size": 64, "location_spec_infos": [{"name": "tp0", "size": 1024}],
  "model_deployment": {"model_name": "m", "dtype": "bfloat16"}}'"""
_CURVE = "$A/groups/default/curve"
_READY = "until curl -sfo /dev/null http://127.0.0.1:6492/readyz; do sleep 0.1; done"


def moved(script: str) -> str:
    """Return the script with free ports in place of those that are written, 6379 and 64…; `${n}` stands for a digit."""
    options = " ".join(f"-e kvcm.service.{port}" for port in _OWN_PORTS)
    script = script.replace(_SERVE, f"{_SERVE} {options}")
    script = script.replace("tenant_engine.py ", "tenant_engine.py --manager 127.0.0.1:6381 ")
    script = f"export KVCM_MANAGER=http://127.0.0.1:6492\n{script}"
    for end in "1234":  # ports that a loop makes of its variable are made ahead
        script = script.replace(f"64${{n}}{end}", f"$(echo ${{port_{end}[$n]}})")
    loops = [f"port_{end}=({' '.join(f'64{number}{end}' for number in '012')})" for end in "1234"]
    script = "\n".join([*loops, script])
    for port in sorted(set(re.findall(r"\b6(?:379|4\d\d|38[12])\b", script))):
        script = re.sub(rf"\b{port}\b", str(free_port()), script)
    return script


def run(script: str, folder: Path) -> str:
    """Run a script in a shell of its own, end everything that it left, and return what it said."""
    (folder / "docs").symlink_to(DOCS)
    kept = {key: value for key, value in os.environ.items() if not key.lower().startswith("kvcm")}
    environment = {**kept, "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}", "PYTHONPATH": str(ROOT),
                   "COLUMNS": "160"}  # fmt: skip
    with (folder / "said").open("w+b") as said, subprocess.Popen(
        ["bash", "-c", f"set -euo pipefail\n{moved(script)}"], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
        stdout=said, stderr=said, start_new_session=True,
    ) as shell:  # fmt: skip
        try:
            code = shell.wait(MOST_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    text = (folder / "said").read_text()
    assert code == 0, text
    return text


def test_the_quick_start_works_as_printed(tmp_path: Path) -> None:
    page = DOCS / "quickstart.md"
    said = run("\n".join(shell_blocks(page)), tmp_path)
    promised = re.findall(r"# (default: loaded .*)$", page.read_text(), re.MULTILINE)
    assert re.findall(r"^default: loaded .*$", said, re.MULTILINE) == promised
    assert len(promised) == 5
    assert "an engine can load the first 24 of 24 blocks" in said
    assert 'kvcm_lookup_tokens_total{group="default",result="hit"} 384.0' in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs", "said"]  # it cleans up


def test_the_tour_of_resources_works_as_printed(tmp_path: Path) -> None:
    start = f"{_SERVE} 2> log &\n{_READY}\n"
    # The block with traffic of ten minutes is left out, and a model registered in its place.
    blocks = [block for block in shell_blocks(DOCS / "rest.md") if "traffic.py" not in block]
    tour = "\n".join([blocks[0], _REGISTER, *blocks[1:]])
    tour = tour.replace("curl -s", "curl -s --fail-with-body").replace(
        "--fail-with-body $A/groups/default/curve", _CURVE
    )
    said = run(start + tour + "\nkill %1; wait", tmp_path)
    assert '"capacity":600000000' in said.replace(" ", "")
    assert said.count('"title"') == 1  # the only problem: a manager that does not sample has no curve
    assert "set kvcm.optimizer.sampled_keys" in said


def test_a_custom_engine_loads_its_saved_blocks(tmp_path: Path) -> None:
    program = next(text for language, text in document(DOCS / "engines.md").fences if language == "python")
    engine = f"python - << 'END'\n{program}END\n"
    said = run(f"{_SERVE} 2> log &\n{_READY}\n{engine}{engine}kill %1; wait", tmp_path)
    assert re.findall(r"^loaded .*$", said, re.MULTILINE) == ["loaded 0 of 3 blocks", "loaded 3 of 3 blocks"]
