"""Writes docs/reference/: the calls of the contract, REST resources and commands, as the code has them.

`--check` writes nothing and fails when a page differs from the code.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cli_reference import cli_page
from grpc_reference import grpc_pages
from rest_reference import rest_page
from served import ask

__all__ = ["main", "pages"]

FOLDER = Path(__file__).resolve().parents[1] / "reference"


def pages() -> dict[Path, str]:
    """Return every page by its place."""
    served = ask()
    made = {**grpc_pages(served.calls), "rest.md": rest_page(served), "cli.md": cli_page()}
    return {FOLDER / name: text for name, text in made.items()}


def main() -> int:
    """Write the pages that differ, or list them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail instead of writing")
    check = parser.parse_args().check
    wanted = pages()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    left = [path for path in FOLDER.rglob("*.md") if path not in wanted]
    names = sorted(path.relative_to(FOLDER).as_posix() for path in (*stale, *left))
    if check:
        if names:
            print(f"docs/reference/ differs from the code: {', '.join(names)}; run `make reference`")
        return 1 if names else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
    for path in left:
        path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
