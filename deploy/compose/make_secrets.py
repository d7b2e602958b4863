"""Makes the secrets of docker-compose.yml, once: the job `setup` runs it before anything else starts.

Everything lies in one volume. Access is decided by owner and group of each file, since the services have
users of their own and none is root. Existing files stay.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from kvcm.model.principals import new_key

__all__ = ["GROUPS", "make_secrets"]

GROUPS = {"valkey.conf": 10010, "valkey.password": 10010, "grafana.password": 10012}
"""Groups that read a file; all others are read by their owner alone."""


def make_secrets(directory: Path) -> None:
    """Make the missing files, and those that follow from the store's password.

    Args:
        directory: the volume.
    """
    _kept(directory / "admin.key", new_key().text)
    _kept(directory / "grafana.password", secrets.token_urlsafe(24))
    password = _kept(directory / "valkey.password", secrets.token_urlsafe(32))
    _write(directory / "valkey.conf", f"requirepass {password}")
    _write(directory / "store.uri", f"redis://:{password}@valkey:6379/?cluster_name=compose")


def _kept(path: Path, text: str) -> str:
    if not path.exists():
        _write(path, text)
    return path.read_text(encoding="ascii").strip()


def _write(path: Path, text: str) -> None:
    """Write a file that appears complete, for the users that may read it."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "w") as file:
        file.write(f"{text}\n")
    if group := GROUPS.get(path.name):
        os.chown(temporary, -1, group)
        temporary.chmod(0o440)
    temporary.replace(path)


if __name__ == "__main__":
    make_secrets(Path(sys.argv[1]))
