"""The old names of packages: `connectors` and `gpu_tier` are `kvcm.connectors` and `kvcm.gpu_tier`, for one release.

An old name is an alias: importing `connectors.client` imports `kvcm.connectors.client`, and both names are the same
module object, so that classes and module state exist once.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

__all__ = ["alias_package"]


def alias_package(old: str, new: str) -> None:
    """Make `import old.x` return the module `new.x`; `old/__init__.py` calls this while it is imported."""
    warnings.warn(
        f"the package {old!r} is called {new!r} now; the old name is removed in the next release",
        DeprecationWarning,
        stacklevel=3,
    )
    sys.meta_path.insert(0, _AliasFinder(old, new))
    sys.modules[old] = importlib.import_module(new)


class _AliasFinder(MetaPathFinder):
    def __init__(self, old: str, new: str) -> None:
        self._old = old + "."
        self._new = new + "."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(self._old):
            return None
        found = importlib.util.find_spec(self._new + fullname.removeprefix(self._old))
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _AliasLoader(found), origin=found.origin, is_package=is_package)


class _AliasLoader(InspectLoader):
    """Loads the module under its new name and returns that, so that no module exists twice."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._spec.name)
        self._spec = module.__spec__ or self._spec
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # importlib has set the one of the old name

    def get_code(self, fullname: str) -> CodeType | None:  # for `python -m`
        assert isinstance(self._spec.loader, InspectLoader)
        return self._spec.loader.get_code(self._spec.name)

    def get_source(self, fullname: str) -> str | None:
        assert isinstance(self._spec.loader, InspectLoader)
        return self._spec.loader.get_source(self._spec.name)
