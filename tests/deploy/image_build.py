"""Carries the Dockerfile out, without a registry: buildah builds it, on a base made of Debian's packages.

The base has the name of the one in the Dockerfile, but Debian's own Python.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composed import ROOT
from materials import PIP_CONF, base_archive, base_name, fetch_packages

__all__ = ["Image", "Workshop", "can_build"]


def can_build() -> bool:
    """Whether the programs are there."""
    return all(map(shutil.which, ("buildah", "mmdebstrap")))


@dataclass(frozen=True, slots=True)
class Image:
    """A built image.

    Attributes:
        root: its files, in a directory that may be written.
        config: of the image: user, environment, entry point…
        size_bytes: of all its files, the base's included.
        package_bytes: of those of the package and what it needs.
    """

    root: Path
    config: Mapping[str, Any]
    size_bytes: int
    package_bytes: int


class Workshop:
    """Builds images below one directory.

    Args:
        directory: where everything is kept; the base and the packages are used again.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._containers: list[str] = []
        self._driver = "overlay" if _has_overlays(directory) else "vfs"  # the latter copies everything for every stage

    def built(self, target: str, extras: Sequence[str], version: str) -> Image:
        """Build a target of the Dockerfile.

        Args:
            target: its stage.
            extras: of the package, as the stage installs them.
            version: the build argument.
        """
        self._base()
        fetch_packages(self._wheels, extras)
        pip_conf = self._directory / "pip.conf"
        pip_conf.write_text(PIP_CONF)
        tag = f"localhost/kvcm-{target}:test"
        self._buildah(
            "bud", "--pull-never", "--isolation", "chroot", "--format", "docker", "--target", target, "--tag", tag,
            "--volume", f"{self._wheels}:/wheels:ro", "--volume", f"{pip_conf}:/etc/pip.conf:ro",
            "--build-arg", f"KVCM_VERSION={version}", str(ROOT),
        )  # fmt: skip
        root = self._opened(tag)
        inspected = json.loads(self._buildah("inspect", "--type", "image", tag))
        return Image(root, inspected["Docker"]["config"], _size(root), _size(root / "opt/kvcm"))

    def close(self) -> None:
        """Unmount and remove the containers."""
        for container in self._containers:
            self._buildah("umount", container)
            self._buildah("rm", container)
        self._containers.clear()

    @property
    def _wheels(self) -> Path:
        return self._directory / "wheels"

    def _base(self) -> None:
        tag = f"docker.io/library/{base_name()}"
        if self._has(tag):
            return
        archive = self._directory / "base.tar"
        base_archive(archive)
        recipe = self._directory / "base.Dockerfile"
        recipe.write_text(
            "FROM scratch\nADD base.tar /\nENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin\n"
        )
        self._buildah("bud", "--isolation", "chroot", "--file", str(recipe), "--tag", tag, str(self._directory))
        archive.unlink()

    def _has(self, tag: str) -> bool:
        return any(tag in (image.get("names") or ()) for image in json.loads(self._buildah("images", "--json") or "[]"))

    def _opened(self, tag: str) -> Path:
        container = self._buildah("from", "--pull-never", tag).strip()
        self._containers.append(container)
        return Path(self._buildah("mount", container).strip())

    def _buildah(self, *words: str) -> str:
        command = ["buildah", "--root", self._directory / "store", "--runroot", self._directory / "run",
                   "--storage-driver", self._driver, *words]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"buildah {words[0]}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout


def _has_overlays(directory: Path) -> bool:
    """Return whether overlays can be mounted on the directory's file system."""
    parts = {name: directory / "overlay" / name for name in ("lower", "upper", "work", "all")}
    for part in parts.values():
        part.mkdir(parents=True, exist_ok=True)
    options = ",".join(f"{name}dir={parts[name]}" for name in ("lower", "upper", "work"))
    tried = subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", parts["all"]], capture_output=True)
    if tried.returncode == 0:
        subprocess.run(["umount", parts["all"]], check=True)
    return tried.returncode == 0


def _size(root: Path) -> int:
    reported = subprocess.run(["du", "-sxB1", root], capture_output=True, text=True, check=True)
    return int(reported.stdout.split()[0])
