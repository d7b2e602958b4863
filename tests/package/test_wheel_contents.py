"""The wheel has every file of the packages and nothing else, has the right metadata, and is reproducible."""

from __future__ import annotations

import email
import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from package_builds import ROOT, VERSION, build, packed_files, tree_of

from kvcm import __version__

_INFO = f"kvcm-{VERSION}.dist-info"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist, and the wheel from that, as `python -m build` does."""
    return build(tree_of(tmp_path_factory.mktemp("tree")))


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(dist / f"kvcm-{VERSION}-py3-none-any.whl") as opened:
        yield opened


def test_the_wheel_has_every_file_of_the_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if not name.startswith(_INFO)}
    assert packed == packed_files()


def test_the_wheel_has_its_metadata(wheel: zipfile.ZipFile) -> None:
    metadata = email.message_from_bytes(wheel.read(f"{_INFO}/METADATA"))
    assert metadata["Version"] == VERSION
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert "server" in metadata.get_all("Provides-Extra", [])
    assert metadata.get_payload().startswith("# KVCM")  # type: ignore[union-attr]
    scripts = wheel.read(f"{_INFO}/entry_points.txt").decode()
    assert all(f"{name} = " in scripts for name in ("kvcm", "kvcm-pool-agent", "kvcm-subscriber", "gpu_tier"))
    assert f"{_INFO}/licenses/LICENSE" in wheel.namelist()


def test_the_sdist_needs_no_git(dist: Path) -> None:
    with tarfile.open(dist / f"kvcm-{VERSION}.tar.gz") as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} | packed_files() <= names


def test_another_tree_of_the_same_files_gives_the_same_wheel(dist: Path, tmp_path: Path) -> None:
    other = build(tree_of(tmp_path / "elsewhere"), "--wheel")
    assert _hash(next(other.glob("*.whl"))) == _hash(next(dist.glob("*.whl")))


def test_the_version_is_that_of_git(tmp_path: Path) -> None:
    def git(*options: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example")
        subprocess.run(["git", *identity, *options], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    assert _version_of(tmp_path) == "0.2.0.dev0"
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    assert _version_of(tmp_path).startswith("0.2.0.dev1+g")
    git("tag", "v1.4.0")
    assert _version_of(tmp_path) == "1.4.0"
    git("commit", "--allow-empty", "-m", "second")
    assert _version_of(tmp_path).startswith("1.4.1.dev1+g")


def test_the_command_prints_the_installed_version() -> None:
    done = subprocess.run([sys.executable, "-m", "kvcm", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"kvcm {__version__}\n"
    assert __version__[0].isdigit()


def _version_of(tree: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SETUPTOOLS_SCM")}
    done = subprocess.run(
        [sys.executable, "-m", "setuptools_scm"],
        cwd=tree, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
