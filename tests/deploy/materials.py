"""What images are made of where no registry is: Debian's packages, and packages of Python in a folder.

Packages of Python are fetched by the host's pip, which knows the way out; inside of an image they come from that
folder, by a pip.conf that only the build sees.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from composed import ROOT

__all__ = [
    "PIP_CONF", "SERVER_EXTRAS", "base_archive", "base_name", "debian_archive", "fetch_packages",
]  # fmt: skip

_MIRROR = "http://deb.debian.org/debian"
# Debian's Python 3.11.2 wants it for redis; later ones, as the image's, do not.
_OF_OLDER_PYTHONS = "async-timeout"
SERVER_EXTRAS = tuple(
    re.findall(r"requirements\.py ([a-z ]+) > server\.txt", (ROOT / "Dockerfile").read_text())[0].split()
)
"""Extras of the package that the server's image has."""

PIP_CONF = "[global]\nno-index = true\nfind-links = /wheels\ndisable-pip-version-check = true\n"


def debian_archive(archive: Path, suite: str, packages: Sequence[str], *hooks: str) -> None:
    """Write an archive of a root file system.

    Args:
        archive: where to.
        suite: of Debian.
        packages: beside the essential ones.
        hooks: commands that mmdebstrap runs at the end; `$1` is the root.
    """
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(packages)}",
         # A mirror that stands still has lists whose time is over; their signatures are checked all the same.
         "--aptopt=Acquire::Check-Valid-Until \"false\"",
         "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*",
         *(f"--customize-hook={hook}" for hook in hooks), suite, archive, _MIRROR],
        check=True,
    )  # fmt: skip


def base_name() -> str:
    """Return the name of the image that the Dockerfile builds on."""
    (name,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    return str(name)


def base_archive(archive: Path, *hooks: str) -> None:
    """Write an archive in the place of that image: of the same Debian, but with its own Python."""
    packages = ("python3", "python3-venv", "python3-pip", "ca-certificates")
    debian_archive(archive, "bookworm", packages, "ln -s /usr/bin/python3 $1/usr/local/bin/python", *hooks)


def fetch_packages(folder: Path, extras: Sequence[str]) -> None:
    """Fetch what images of the package install.

    Args:
        folder: where to.
        extras: of the package, as the stages install them.
    """
    listed = subprocess.run(
        [sys.executable, ROOT / "deploy/images/requirements.py", *extras],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    building = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--dest", folder, "--only-binary", ":all:",
         "--python-version", "3.11", "--constraint", ROOT / ".ci/constraints.txt",
         *listed.stdout.split("\n")[:-1], *building, _OF_OLDER_PYTHONS],
        check=True,
    )  # fmt: skip
