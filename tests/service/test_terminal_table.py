"""Tables: nothing is cut at any width, words stay whole, numbers stand on one line."""

from __future__ import annotations

import io
from itertools import islice
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kvcm.terminal_table import WHOLE_WORD, TerminalTable

SENTENCE = "a storage that is full takes no writes"
TITLES = ("storage", "evict above", "what to do")


def _shown(table: TerminalTable, width: int, *, colour: bool = False) -> str:
    text = io.StringIO()
    system = "standard" if colour else None
    Console(file=text, width=width, force_terminal=colour, color_system=system).print(table)  # type: ignore[arg-type]
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _table(*rows: tuple[str, ...]) -> TerminalTable:
    table = TerminalTable(TITLES, words=("what to do",))
    for row in rows:
        table.add_row(*row)
    return table


BESIDE = """\
storage  evict above  what to do
────────────────────────────────────────────────────────────
nfs_01       8.0 GiB  a storage that is full takes no writes
moon            none  nothing
"""
FOLDED = """\
           evict
storage    above  what to do
────────────────────────────────────
nfs_01   8.0 GiB  a storage that is
                  full takes no
                  writes
moon        none  nothing
"""
FIELDS = """\
storage      nfs_01
evict above  8.0 GiB
what to do   a storage
             that is
             full takes
             no writes

storage      moon
evict above  none
what to do   nothing
"""


@pytest.mark.parametrize(("width", "seen"), [(100, BESIDE), (36, FOLDED), (23, FIELDS)])
def test_a_table_gives_way_as_its_terminal_is_narrower(width: int, seen: str) -> None:
    assert _shown(_table(("nfs_01", "8.0 GiB", SENTENCE), ("moon", "none", "nothing")), width) == seen


def test_a_column_without_texts_is_left_out_while_there_are_rows() -> None:
    assert _shown(_table(("nfs_01", "", " "), ("moon",)), 80).splitlines()[0] == "storage"
    assert _shown(_table(), 80).splitlines()[0] == "storage  evict above  what to do"


def test_sections_are_set_apart_by_an_empty_line() -> None:
    table = TerminalTable(("name",))
    for name in ("chat", "calm"):
        table.add_section()
        table.add_row(name)
    table.add_section()
    assert _shown(table, 80) == "name\n────\nchat\n\ncalm\n"


@pytest.mark.parametrize(
    ("length", "width", "is_beside"),
    [
        (WHOLE_WORD, 5 * WHOLE_WORD + 8, True),
        (WHOLE_WORD, 5 * WHOLE_WORD + 7, False),
        (WHOLE_WORD + 1, 5 * WHOLE_WORD + 7, False),
    ],
)
def test_rows_become_lists_before_a_short_word_breaks(length: int, width: int, is_beside: bool) -> None:
    titles = list("12345")
    table = TerminalTable(titles, words=titles)
    table.add_row(*(letter * length for letter in "abcde"))
    lines = _shown(table, width).splitlines()
    assert [line.split() for line in lines if "─" not in line] == (
        [titles, [letter * length for letter in "abcde"]]
        if is_beside
        else [[title, letter * length] for title, letter in zip(titles, "abcde", strict=True)]
    )


def test_longer_words_break_before_rows_become_lists() -> None:
    titles = list("12345")
    table = TerminalTable(titles, words=titles)
    table.add_row(*(letter * (WHOLE_WORD + 1) for letter in "abcde"))
    assert _shown(table, 5 * WHOLE_WORD + 8).splitlines()[-1].split() == list("abcde")


def test_a_long_word_begins_on_a_line_of_its_own() -> None:
    table = TerminalTable(("found", "what"), words=("what",))
    table.add_row("see", "see http://manager-1.example:6492/console")
    assert _shown(table, 25).splitlines()[2:] == [
        "see    see",
        "       http://manager-1.e",
        "       xample:6492/consol",
        "       e",
    ]


def test_long_words_break_in_lists_of_fields_where_they_must() -> None:
    table = TerminalTable(("field", "value"), words=("value",), has_titles=False)
    table.add_row("cache_config.reclaim_strategy", "x" * 40)
    assert _shown(table, 50).splitlines() == ["cache_config.reclaim_str  " + "x" * 24, "ategy" + " " * 21 + "x" * 16]


def test_colours_stay_and_names_are_no_markup() -> None:
    table = TerminalTable(("name", "state"), words=("state",))
    table.add_row("[red]x", Text("down at last", "yellow"), style="dim")
    shown = _shown(table, 80, colour=True)
    assert ("[red]x" in shown, "\x1b[2;33mdown at last" in shown, "\x1b[1mname" in shown) == (True, True, True)


def test_an_encoding_without_lines_gets_dashes() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=stream, width=80).print(_table(("nfs_01",)))
    stream.seek(0)
    assert stream.read().split() == ["storage", "-------", "nfs_01"]


# ── any table ──


JAMO = range(0x1100, 0x1200)  # these join to one syllable
NARROW = [
    letter
    for code in range(0x100, 0x10000)
    if (letter := chr(code)).isalpha() and cell_len(letter) == 1 and code not in JAMO
]
WIDE = list(map(chr, range(0x4E00, 0x9FFF)))


class Sheet(NamedTuple):
    """A table as its user gives it; no character is in it twice."""

    titles: list[str]
    numbers: list[bool]
    rows: list[list[str]]

    def table(self) -> TerminalTable:
        """Return it as it is to be shown."""
        words = [title for title, is_number in zip(self.titles, self.numbers, strict=True) if not is_number]
        table = TerminalTable(self.titles, words=words)
        for row in self.rows:
            table.add_row(*row)
        return table


@st.composite
def sheets(draw: st.DrawFn) -> Sheet:
    """Return tables of up to eight columns, of which some hold numbers."""
    narrow, wide = iter(NARROW), iter(WIDE)

    def words(most: int, longest: int, fewest: int = 0) -> str:
        sizes = draw(st.lists(st.tuples(st.integers(1, longest), st.booleans()), min_size=fewest, max_size=most))
        return " ".join("".join(islice(wide if is_wide else narrow, size)) for size, is_wide in sizes)

    numbers = [False, *draw(st.lists(st.booleans(), max_size=7))]
    titles = [words(3, 5, 1) for _ in numbers]
    rows = [
        [words(2, 6) if is_number else words(3, 30) for is_number in numbers] for _ in range(draw(st.integers(0, 3)))
    ]
    return Sheet(titles, numbers, rows)


@given(sheet=sheets(), width=st.integers(80, 200))
def test_nothing_is_lost_at_any_width(sheet: Sheet, width: int) -> None:
    shown = _shown(sheet.table(), width)
    lines = shown.splitlines()
    assert all(cell_len(line) <= width for line in lines)
    places = {letter: (row, column) for row, line in enumerate(lines) for column, letter in enumerate(line)}
    for row in sheet.rows:
        for cell, is_number in zip(row, sheet.numbers, strict=True):
            found = [places[letter] for letter in cell.replace(" ", "")]
            assert found == sorted(found)
            whole = [cell] if is_number else [word for word in cell.split() if cell_len(word) <= WHOLE_WORD]
            assert all(text in shown for text in whole)


@given(sheet=sheets(), width=st.integers(80, 200))
def test_titles_are_whole_and_leave_only_with_their_column(sheet: Sheet, width: int) -> None:
    shown = _shown(sheet.table(), width)
    for number, title in enumerate(sheet.titles):
        is_shown = not sheet.rows or any(row[number] for row in sheet.rows)
        assert [word in shown for word in title.split()] == [is_shown] * len(title.split())


@given(sheet=sheets())
def test_where_there_is_room_a_row_is_a_line(sheet: Sheet) -> None:
    lines = _shown(sheet.table(), 2000).splitlines()
    rows = sheet.rows if any(map(any, sheet.rows)) else []
    assert [[cell in line for cell in row] for row, line in zip(rows, lines[2:], strict=bool(rows))] == [
        [True] * len(row) for row in rows
    ]
