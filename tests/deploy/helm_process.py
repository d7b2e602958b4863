"""Helm itself, from a package that has it as a library: installs, checks and packs a chart. A list of JSON in, one out.

A process of its own, since the library is a hundred megabytes of Go with threads and signal handlers of its own, and is
installed apart from everything else (make helm).
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import helm_sdkpy  # type: ignore[import-not-found]

__all__ = ["main"]


async def _install(release: str, chart: str, values: dict[str, Any], namespace: str, kubeconfig: str) -> dict[str, Any]:
    configuration = helm_sdkpy.Configuration(namespace=namespace, kubeconfig=kubeconfig)
    try:
        installed = await helm_sdkpy.Install(configuration).run(release, chart, values=values, wait=False, timeout=100)
    except helm_sdkpy.HelmError as error:
        return {"error": str(error)}
    hooks = [hook["manifest"] for hook in installed.get("hooks") or ()]
    return {"manifest": installed["manifest"], "hooks": hooks, "notes": installed["info"]["notes"]}


async def _upgrade(
    release: str, chart: str, values: dict[str, Any], then: dict[str, Any], namespace: str, kubeconfig: str
) -> dict[str, Any]:
    configuration = helm_sdkpy.Configuration(namespace=namespace, kubeconfig=kubeconfig)
    try:
        await helm_sdkpy.Install(configuration).run(release, chart, values=values, wait=False, timeout=100)
        upgraded = await helm_sdkpy.Upgrade(configuration).run(release, chart, values=then, wait=False, timeout=100)
    except helm_sdkpy.HelmError as error:
        return {"error": str(error)}
    return {"manifest": upgraded["manifest"]}


async def _lint(chart: str, kubeconfig: str) -> dict[str, Any]:
    configuration = helm_sdkpy.Configuration(kubeconfig=kubeconfig)
    return dict(await helm_sdkpy.Lint(configuration).run(chart))


async def _package(chart: str, directory: str, kubeconfig: str) -> dict[str, Any]:
    configuration = helm_sdkpy.Configuration(kubeconfig=kubeconfig)
    return {"file": await helm_sdkpy.Package(configuration).run(chart, directory)}


async def _do(asked: dict[str, Any]) -> dict[str, Any]:
    verbs = {"install": _install, "upgrade": _upgrade, "lint": _lint, "package": _package}
    return await verbs[asked.pop("do")](**asked)


async def _do_all(asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*map(_do, asked)))  # Helm asks a cluster a few times a second only


def main() -> None:
    """Do what standard input asks for, and answer on standard output."""
    json.dump(asyncio.run(_do_all(json.load(sys.stdin))), sys.stdout)


if __name__ == "__main__":
    main()
