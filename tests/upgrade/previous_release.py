"""The code of the release before this one, out of the repository's history."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).parents[2]

_BEFORE_THE_FIRST_TAG: Final = "20836a47e"
"""What counts as the previous release until one has been tagged: the last commit before upgrades were tested."""


@dataclass(frozen=True, slots=True)
class Release:
    """A release to run.

    Attributes:
        name: for people.
        code: directory of its packages.
    """

    name: str
    code: Path

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that runs it."""
        own = {key: value for key, value in os.environ.items() if not key.lower().startswith("kvcm")}
        return {**own, "PYTHONPATH": str(self.code)}

    def runs_its_own_code(self) -> bool:
        """Whether a process with the environment really takes these packages."""
        asked = subprocess.run(
            [sys.executable, "-c", "import connectors, kvcm; print(connectors.__file__, kvcm.__file__, sep='\\n')"],
            cwd="/", env=self.environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return all(Path(line).is_relative_to(self.code) for line in asked.stdout.splitlines())


THIS = Release("this release", ROOT)


def previous_release(folder: Path) -> Release:
    """Unpack the previous release into a folder.

    It is that of the last tag before this commit, else the commit named above, else the commit before. A test that
    needs it is skipped where the history has none of them.
    """
    commit = _last_tag() or _existing(_BEFORE_THE_FIRST_TAG) or _existing("HEAD~1")
    if not commit:
        pytest.skip("the history of this clone has no previous release (a shallow clone?)")
    archive = subprocess.run(
        ["git", "archive", commit, "kvcm", "connectors", "proto"], cwd=ROOT, capture_output=True, check=True
    )
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    release = Release(commit, folder)
    assert release.runs_its_own_code()
    return release


def _last_tag() -> str:
    """Return the last tag of a release before this commit, "" when there is none."""
    return _git("describe", "--tags", "--abbrev=0", "--match", "v[0-9]*", "HEAD^")


def _existing(commit: str) -> str:
    return _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
