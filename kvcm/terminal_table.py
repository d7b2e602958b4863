"""Tables as `kubectl` and `docker` print them: columns beside each other, no box around them, and nothing cut.

A terminal of 80 columns has no room to spare for edges, and what is cut or broken letter by letter can be neither read
nor copied. So a table that is too wide gives way in this order, and only as far as it must:

1. titles fold between words;
2. texts fold between words;
3. words of more than `WHOLE_WORD` characters break;
4. the columns no longer stand beside each other: each row becomes a list of its fields.

Numbers never fold, for half of one is another one. Left to itself rich would break them, and names before long texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

__all__ = ["WHOLE_WORD", "TerminalTable"]

WHOLE_WORD = 16
"""How many characters a word may have that no table breaks; the ids of keys and pins have as many."""

_GAP = 2
_NARROWEST = 2  # what the widest character needs
_TITLE, _QUIET = "bold", "dim"
_RULE = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
_DASHES = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)


class TerminalTable:
    """Rows below titles. While there are rows, a column in which all are empty is left out.

    Args:
        columns: their titles.
        words: those that hold words, which stand on the left and fold; the first does, all others hold numbers.
        has_titles: whether titles are shown. Without, the first column has names of fields, the second what they are.
    """

    def __init__(self, columns: Iterable[str], *, words: Iterable[str] = (), has_titles: bool = True) -> None:
        self._titles = list(columns)
        self._words = {*self._titles[:1], *words}
        self._has_titles = has_titles
        self._sections: list[list[_Row]] = [[]]

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """Add a row.

        Args:
            cells: one per column, shown as they are, without markup; those that are not given are empty.
            style: of everything that has none of its own.
        """
        texts = [Text(cell) if isinstance(cell, str) else cell.copy() for cell in cells]
        for text in texts:
            text.expand_tabs()
        self._sections[-1].append(_Row(texts, style))

    def add_section(self) -> None:
        """Set the rows that follow apart from those before."""
        if self._sections[-1]:
            self._sections.append([])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what is drawn, no wider than the console."""
        shown = self._shown_columns()
        columns = [self._column(number) for number in shown]
        room = options.max_width - _GAP * (len(columns) - 1)
        widths = _fitting(columns, room)
        if self._has_titles and sum(widths) > room:
            yield from self._lists_of_fields()
        elif columns:
            table = self._drawn(columns, widths, _DASHES if options.ascii_only else _RULE)
            self._fill(table, shown)
            yield table

    def _rows(self) -> Iterator[_Row]:
        for section in self._sections:
            yield from section

    def _shown_columns(self) -> list[int]:
        numbers, rows = range(len(self._titles)), list(self._rows())
        return [number for number in numbers if not rows or any(row.cell(number).plain.strip() for row in rows)]

    def _column(self, number: int) -> _Column:
        title = self._titles[number]
        return _Column(
            Text(title if self._has_titles else ""),
            [row.cell(number) for row in self._rows()],
            title in self._words,
            WHOLE_WORD if self._has_titles else _NARROWEST,
        )

    def _drawn(self, columns: Sequence[_Column], widths: Sequence[int], box: Box) -> Table:
        table = Table(
            box=box, show_header=self._has_titles, header_style=_TITLE, border_style=_QUIET, show_edge=False,
            pad_edge=False, padding=(0, 1, 0, 0),
        )  # fmt: skip
        for column, width in zip(columns, widths, strict=True):
            table.add_column(
                column.title, justify="left" if column.has_words else "right", width=width, overflow="fold"
            )
        return table

    def _fill(self, table: Table, shown: Sequence[int]) -> None:
        for section in self._sections:
            for row in section:
                table.add_row(*(row.cell(number) for number in shown), style=row.style)
            table.add_section()

    def _lists_of_fields(self) -> Iterator[RenderableType]:
        for number, row in enumerate(self._rows()):
            if number:
                yield Text()
            fields = TerminalTable(("field", "value"), words=("value",), has_titles=False)
            for column, title in enumerate(self._titles):
                if row.cell(column):
                    fields.add_row(Text(title, _QUIET), row.cell(column), style=row.style)
            yield fields


class _Row(NamedTuple):
    cells: Sequence[Text]
    style: str

    def cell(self, number: int) -> Text:
        return self.cells[number] if number < len(self.cells) else Text()


@dataclass(frozen=True, slots=True)
class _Column:
    """A column.

    Attributes:
        whole_word: how many characters its words have at most that never break.
    """

    title: Text
    cells: Sequence[Text]
    has_words: bool
    whole_word: int

    def full(self) -> int:
        """Return the width in which nothing folds."""
        return _width([self.title, *self.cells])

    def steps(self) -> tuple[int, int, int]:
        """Return how narrow it may become at each of the first three steps of giving way."""
        below_folded_title = max(_width(self.cells), _longest_word([self.title]))
        if not self.has_words:
            return below_folded_title, below_folded_title, below_folded_title
        folded = _longest_word([self.title, *self.cells])
        return below_folded_title, folded, min(folded, self.whole_word)


def _fitting(columns: Sequence[_Column], room: int) -> list[int]:
    """Return widths for which there is room, or else the narrowest ones."""
    widths = [column.full() for column in columns]
    for narrowest in zip(*(column.steps() for column in columns), strict=True):
        _narrow(widths, narrowest, room)
    return widths


def _narrow(widths: list[int], narrowest: Sequence[int], room: int) -> None:
    """Take from the widest of those that may become narrower, the last of equal ones, until there is room."""
    while sum(widths) > room:
        spare = [(width, number) for number, width in enumerate(widths) if width > narrowest[number]]
        if not spare:
            return
        widths[max(spare)[1]] -= 1


def _width(texts: Iterable[Text]) -> int:
    return max((line.cell_len for text in texts for line in text.split(allow_blank=True)), default=0)


def _longest_word(texts: Iterable[Text]) -> int:
    return max((cell_len(word) for text in texts for word in text.plain.split()), default=0)
