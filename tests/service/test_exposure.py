"""Who counts as somebody else who can read a file with a secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvcm.exposure import is_exposed

_ANOTHER = 12345


@pytest.mark.parametrize(("mode", "exposed"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_the_owner_s_own_file_is_for_the_owner_alone(tmp_path: Path, mode: int, exposed: bool) -> None:
    file = tmp_path / "secret"
    file.touch()
    file.chmod(mode)
    assert is_exposed(file) is exposed


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize(("mode", "exposed"), [(0o440, False), (0o640, False), (0o444, True)])
def test_a_mounted_secret_is_read_through_its_group(tmp_path: Path, mode: int, exposed: bool) -> None:
    file = tmp_path / "secret"
    file.touch()
    os.chown(file, _ANOTHER, os.getegid())
    file.chmod(mode)
    assert is_exposed(file) is exposed
