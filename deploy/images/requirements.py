"""Prints what the package needs with the extras that are named, so that it can be installed before the code.

python3 requirements.py server tracing gateway subscriber
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

__all__: list[str] = []


def main(extras: list[str]) -> None:
    """Print the requirements of pyproject.toml in the current directory."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    sys.stdout.writelines(f"{requirement}\n" for each in lists for requirement in each)


if __name__ == "__main__":
    main(sys.argv[1:])
