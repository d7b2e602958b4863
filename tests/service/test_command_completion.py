"""Names that the shell completes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from command_runner import COMMANDS
from ports import free_port
from test_transport_process import ManagerProcess
from test_transport_sites import Site, unique
from typer.testing import CliRunner


def _completed(words: str, url: str) -> list[str]:
    """Return what bash is told for a line that ends in the middle of a word."""
    environment = {
        "_KVCM_COMPLETE": "complete_bash",
        "COMP_WORDS": f"kvcm {words}",
        "COMP_CWORD": str(len(words.split())),
        "KVCM_MANAGER": url,
    }
    done = CliRunner().invoke(COMMANDS, prog_name="kvcm", env=environment)
    assert done.stderr == ""
    return done.stdout.split()


def test_names_come_from_the_manager(server: ManagerProcess, site: Site) -> None:
    url = f"http://{server.address.admin_http}"
    storage, quota = site.storage(), unique("completed")
    group = site.group(storage)
    instance = site.instance(group)
    site.api.ok("CapacityService.SetGlobalQuota", global_quota={"name": quota, "capacity_bytes": 1})
    assert _completed(f"group show {group[:-1]}", url).count(group) == 1
    assert storage in _completed(f"storage drain {storage[:4]}", url)
    assert storage in _completed(f"group update x --storage {storage[:4]}", url)
    assert instance in _completed(f"instance show {instance[:4]}", url)
    assert instance in _completed(f"get {instance[:4]}", url)
    assert _completed("quota remove compl", url) == [quota]
    assert _completed("group show no-such", url) == []


def test_the_manager_of_the_line_is_asked(server: ManagerProcess, site: Site) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    group = site.group()
    line = f"group show --manager http://{server.address.admin_http} {group}"
    assert group in _completed(line, nowhere)


def test_without_a_manager_there_is_nothing_to_propose_and_no_word_of_it() -> None:
    assert _completed("group show a", f"http://127.0.0.1:{free_port()}") == []


def test_commands_and_options_are_completed(server: ManagerProcess) -> None:
    assert _completed("group cr", "http://127.0.0.1:1") == ["create"]
    assert "--quota-type" in _completed("group create x --quo", "http://127.0.0.1:1")


def test_bash_completes_after_the_installation(server: ManagerProcess, site: Site, tmp_path: Path) -> None:
    storage = site.storage()
    command = str(Path(sys.executable).with_name("kvcm"))
    environment = {
        **{key: value for key, value in os.environ.items() if not key.lower().startswith("kvcm")},
        "HOME": str(tmp_path),
        "PATH": f"{Path(command).parent}:{os.environ['PATH']}",
        "KVCM_MANAGER": f"http://{server.address.admin_http}",
    }
    # Which shell runs is found out from the parents of the process.
    install = f"{command} --install-completion; true"
    subprocess.run(["bash", "-c", install], env=environment, check=True, capture_output=True, cwd=tmp_path)
    line = (
        "source .bash_completions/kvcm.sh; COMP_WORDS=(kvcm storage show " + storage[:5] + "); COMP_CWORD=3; "
        '_kvcm_completion kvcm; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert storage in done.stdout.split(), (done.stdout, done.stderr)
