"""The old import names `connectors` and `gpu_tier` are those of kvcm.connectors and kvcm.gpu_tier, for one release."""

from __future__ import annotations

import subprocess
import sys

_ALIASES = """
import importlib, sys, warnings

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import connectors.client
    from connectors import keys
    from connectors.transfer import TransferEngine
import gpu_tier.config
import kvcm.connectors.client, kvcm.connectors.keys, kvcm.connectors.transfer, kvcm.gpu_tier.config

assert [each.category for each in caught] == [DeprecationWarning], caught
assert "kvcm.connectors" in str(caught[0].message), caught[0].message
assert caught[0].filename == "<string>", "the warning names the code that imports"
assert connectors is kvcm.connectors and connectors.client is kvcm.connectors.client and keys is kvcm.connectors.keys
assert TransferEngine is kvcm.connectors.transfer.TransferEngine
assert gpu_tier.config is kvcm.gpu_tier.config
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] in ("connectors", "gpu_tier"):
        assert sys.modules[f"kvcm.{name}"] is module, f"{name} exists twice"
        assert module.__name__ == module.__spec__.name == f"kvcm.{name}"
try:
    importlib.import_module("connectors.nothing")
except ModuleNotFoundError as error:
    assert error.name == "connectors.nothing", error.name
else:
    raise AssertionError("a module that does not exist was found")
importlib.reload(connectors.keys)
"""

_LIGHT = """
import sys
import kvcm.connectors.keys
assert "importlib.metadata" not in sys.modules, "engines do not ask for the version"
import kvcm
assert kvcm.__version__ and kvcm.__version__ is kvcm.__version__
assert "importlib.metadata" in sys.modules
try:
    kvcm.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError("every name was an attribute")
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_an_old_name_is_the_very_module_and_warns_once() -> None:
    done = python("-c", _ALIASES)
    assert done.returncode == 0, done.stderr


def test_a_module_runs_by_its_old_name() -> None:
    done = python("-W", "error::RuntimeWarning", "-m", "connectors.pool_agent", "--help")
    assert done.returncode == 0, done.stderr
    done = python("-c", "import runpy; assert '__all__' in runpy.run_module('connectors.keys')")
    assert done.returncode == 0, done.stderr


def test_connectors_do_not_read_the_version() -> None:
    done = python("-c", _LIGHT)
    assert done.returncode == 0, done.stderr
