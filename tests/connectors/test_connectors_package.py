"""Rules for the code of `connectors`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvcm import connectors

ROOT = Path(connectors.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Modules that may need torch or transformers; all others work with the base install.
NEEDS_TORCH = {
    f"kvcm.connectors.{name}"
    for name in ("layout.tensors", "layout.gather", "layout.rows_triton", "reuse.model_weights")
}

ENGINE_PACKAGES = ("transformers", "vllm", "sglang")
ENGINES = {
    "kvcm.connectors.transformers": "KVReuse",
    "kvcm.connectors.vllm": "KVCMConnector",
    "kvcm.connectors.sglang": "KVCMStorage",
}


def module_name(path: Path) -> str:
    parts = ("kvcm", *path.relative_to(ROOT.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_nothing_is_a_script() -> None:
    # A script inside connectors would have this folder first on its path and import our `transformers`.
    for path in FILES:
        text = path.read_text()
        assert not text.startswith("#!"), path
        assert not path.stat().st_mode & 0o111, path
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        assert "__name__" not in names or "__main__" not in text, path


def test_only_protocol_and_model_of_the_manager_are_imported() -> None:
    allowed = ("kvcm.protocol", "kvcm.model", "kvcm.connectors", "kvcm.gpu_tier.connector")
    for path in FILES:
        may_import = (*allowed, "kvcm.old_names") if path == ROOT / "__init__.py" else allowed
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        assert all(name.startswith(may_import) for name in imported if name.startswith("kvcm")), path
        assert "pickle" not in imported, path


def test_the_base_install_is_enough_outside_of_engines() -> None:
    modules = [module_name(path) for path in FILES]
    plain = [name for name in modules if not name.startswith(tuple(ENGINES)) and name not in NEEDS_TORCH]
    blocked = ("torch", *ENGINE_PACKAGES, "uvloop", "structlog", "typer", "rich")
    done = imported(plain, without=blocked)
    assert done.returncode == 0, done.stderr


def test_no_engine_is_needed_outside_of_engines() -> None:
    modules = [module_name(path) for path in FILES]
    done = imported([name for name in modules if not name.startswith(tuple(ENGINES))], without=ENGINE_PACKAGES)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ENGINES)
def test_a_connector_is_imported_without_its_engine(package: str) -> None:
    done = imported([package], without=("torch", *ENGINE_PACKAGES))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ENGINES)
def test_a_connector_without_its_engine_says_which_it_needs(package: str) -> None:
    done = imported([package], without=ENGINE_PACKAGES, and_then=f"from {package} import {ENGINES[package]}")
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith(f"ImportError: {package}"), done.stderr
    assert re.search(rf"{package.rpartition('.')[2]} .*\d\.\d+", said, re.IGNORECASE), said


def imported(modules: list[str], without: tuple[str, ...], and_then: str = "") -> subprocess.CompletedProcess[str]:
    """Import modules in a process where packages cannot be found."""
    program = f"""
import importlib, sys
for name in {without!r}:
    sys.modules[name] = None
for name in {modules!r}:
    importlib.import_module(name)
{and_then}
"""
    return subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, check=False, text=True)
