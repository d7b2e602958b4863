"""Tables of results as Markdown and JSON: one place that says what was found and how far it carries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_tier.errors import ConfigError

__all__ = ["Cell", "ResultTable", "write"]

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class ResultTable:
    """One table.

    Attributes:
        title: what it shows.
        columns: their names, with units.
        rows: cells; None where there is no figure.
        note: how it was measured, and what it does not say.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ConfigError("rows", row, f"must have the {len(self.columns)} columns {', '.join(self.columns)}")

    def markdown(self) -> str:
        """Return the table with its title and its note."""
        lines = [f"## {self.title}", ""]
        if self.note:
            lines += [self.note, ""]
        lines += [_line(self.columns), _line("---" for _ in self.columns)]
        lines += [_line(map(_text, row)) for row in self.rows]
        return "\n".join([*lines, ""])


def write(title: str, tables: Sequence[ResultTable], folder: Path, plots: Sequence[str] = ()) -> None:
    """Write `report.md` and `report.json` into a folder, which is made if need be.

    Args:
        title: of the report.
        tables: in the order in which they are to be read.
        folder: where to.
        plots: files in the folder that the report shows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [f"# {title}\n", *(f"![{Path(plot).stem}]({plot})\n" for plot in plots), *(t.markdown() for t in tables)]
    (folder / "report.md").write_text("\n".join(pieces))
    document = {"title": title, "tables": [asdict(table) for table in tables]}
    (folder / "report.json").write_text(json.dumps(document, indent=1) + "\n")


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(cell: Cell) -> str:
    if cell is None:
        return "–"
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell).replace("|", "\\|")
