"""docs/reference/ says what the code has."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields

from doc_pages import DOCS, ROOT

from kvcm.config import Settings

_ROW = re.compile(r"^\| `(kvcm\.[\w.]+)` \| (.*?) \| (.*) \|$", re.MULTILINE)
# What the table says in words, since it depends on other settings or on the machine.
_IN_WORDS = {
    "kvcm.service.host", "kvcm.cluster_id", "kvcm.startup_config", "kvcm.storage.allowed_roots",
    "kvcm.storage.allowed_hosts", "kvcm.auth.admin_key_file", "kvcm.leader_elector.node_id",
}  # fmt: skip


def test_the_generated_pages_are_up_to_date() -> None:
    checked = subprocess.run(
        [sys.executable, "docs/site/reference.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_table_of_settings_is_the_tree_of_settings() -> None:
    rows = {key: (default, about) for key, default, about in _ROW.findall((DOCS / "configuration.md").read_text())}
    settings = Settings()
    without_effect = {"kvcm.service.io_thread_num", "kvcm.schedule_plan_executor_thread_count"}
    kept = {f.metadata["key"]: f for f in fields(Settings) if "key" in f.metadata}
    documented = {key for key in kept if not key.startswith(("kvcm.metrics.", "kvcm.event.event_publishers"))}
    uris = {key for key in rows if "://" in key}
    assert set(rows) - uris == documented - without_effect
    for key, (default, about) in rows.items():
        assert about.startswith("**hot**") == kept[key].metadata["hot"], key
        if key not in _IN_WORDS:
            assert default == _said(getattr(settings, kept[key].name)), key


def _said(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"
