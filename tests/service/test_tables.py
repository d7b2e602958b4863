"""Tables and sizes on a terminal: nothing is cut, and problems are named."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageSpace, StorageType
from kvcm.model.units import format_size, parse_size
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.service.translate import fill, read
from kvcm.service.usage_values import (
    DrainState,
    DrainStatus,
    GlobalQuotaUsage,
    GroupStorageUsage,
    GroupUsage,
    InstanceUsage,
    StorageStatus,
    StorageUsage,
    TypeUsage,
    Usage,
    UsageReport,
)
from kvcm.storage.health import HealthState, StorageHealth
from kvcm.terminal.tables import WHOLE_WORD, ListedStorage, TerminalTable, print_drains, print_storages, print_usage

SENTENCE = "a storage that is full takes no writes"
TITLES = ("storage", "evict above", "what to do")


def _printed(show: Callable[[Console], object], width: int = 160, *, colour: bool = False) -> str:
    """Return the text that is printed on a terminal of this width, without blanks at the ends of lines."""
    text = io.StringIO()
    show(Console(file=text, width=width, force_terminal=colour, color_system="standard" if colour else None))
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def _shown(table: TerminalTable, width: int, *, colour: bool = False) -> str:
    return _printed(lambda console: console.print(table), width, colour=colour)


def _table(*rows: tuple[str, ...]) -> TerminalTable:
    table = TerminalTable(TITLES, words=("what to do",))
    for row in rows:
        table.add_row(*row)
    return table


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


def test_on_a_narrow_terminal_a_row_is_a_list_of_fields() -> None:
    assert _shown(_table(("nfs_01", "8.0 GiB", SENTENCE), ("moon", "none", "nothing")), 23) == FIELDS


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
def test_where_there_is_space_a_row_is_a_line(sheet: Sheet) -> None:
    lines = _shown(sheet.table(), 2000).splitlines()
    rows = sheet.rows if any(map(any, sheet.rows)) else []
    assert [[cell in line for cell in row] for row, line in zip(rows, lines[2:], strict=bool(rows))] == [
        [True] * len(row) for row in rows
    ]


GIB = 1 << 30
SINCE = 1_795_248_000.0
CONFIG = StorageConfig("nfs", DummyStorageSpec())
SPACE = StorageSpace(100 * GIB, 40 * GIB)
UP = StorageStatus.of(CONFIG, StorageHealth(since=SINCE, space=SPACE))
SLOW = StorageStatus.of(
    StorageConfig("moon", DummyStorageSpec(), is_available=False),
    StorageHealth(HealthState.SH_DEGRADED, "slow: it took 2.0 s to answer", SINCE),
)
CLOSED = StorageStatus.of(StorageConfig("[red]gone", DummyStorageSpec()), None)

SEEN = """\
storage    type      state               since                    used    limit      free  of medium
────────────────────────────────────────────────────────────────────────────────────────────────────
nfs        file      up                  2026-11-21 08:00:00Z  4.0 GiB  8.0 GiB  40.0 GiB  100.0 GiB
moon       mooncake  degraded, disabled  2026-11-21 08:00:00Z      0 B     none
[red]gone  file      down                                          0 B     none
old        file                                                    0 B     none

storage moon is degraded: slow: it took 2.0 s to answer
storage [red]gone is down: it could not be opened on this manager, whose log says why
"""

SEEN_DRAINS = """\
storage     task             state    since                    left
───────────────────────────────────────────────────────────────────
old [b]nfs  drain            running  2026-11-21 08:00:00Z  1.0 GiB
gone        forget, removed  done     2026-11-21 08:00:00Z      0 B

storage old [b]nfs: 2 locations are pinned
"""


def _shown_storages(*storages: ListedStorage, colour: bool = False) -> str:
    return _printed(lambda console: print_storages(storages, console), colour=colour)


def test_a_table_of_storages_and_a_sentence_for_each_that_is_not_well() -> None:
    listed = (
        ListedStorage("nfs", "file", 4 * GIB, 8 * GIB, UP),
        ListedStorage("moon", "mooncake", 0, 0, SLOW),
        ListedStorage("[red]gone", "file", 0, 0, CLOSED),
        ListedStorage("old", "file", 0, 0, None),  # from a manager that does not report health
    )
    assert _shown_storages(*listed) == SEEN


@pytest.mark.parametrize(("status", "colour"), [(UP, None), (SLOW, "33"), (CLOSED, "1;31")])
def test_degraded_storages_are_yellow_and_those_down_are_red(status: StorageStatus, colour: str | None) -> None:
    shown = _shown_storages(ListedStorage("s", "file", 0, 0, status), colour=True)
    word = {None: "up", "33": "degraded", "1;31": "down"}[colour]
    assert (f"\x1b[{colour}m{word}" in shown) is (colour is not None)


@pytest.mark.parametrize("status", [UP, SLOW, CLOSED, StorageStatus.of(CONFIG, StorageHealth())])
def test_a_status_is_read_as_it_was_reported(status: StorageStatus) -> None:
    message = pb.StorageStatus()
    fill(message, status)
    assert read(StorageStatus, message) == status


def test_a_storage_that_is_drained_is_marked_unless_it_is_disabled_anyway() -> None:
    leaving = StorageConfig("s", DummyStorageSpec(), draining_since=SINCE)
    shown = {}
    for config in (CONFIG, leaving, replace(leaving, is_available=False)):
        status = StorageStatus.of(config, StorageHealth())
        shown[config] = re.split("  +", _shown_storages(ListedStorage("s", "file", 0, 0, status)).splitlines()[2])[2]
    assert list(shown.values()) == ["up", "up, draining", "up, disabled"]


def test_drains_are_shown_with_the_reason_of_a_delay() -> None:
    drains = [
        DrainStatus("old [b]nfs", False, DrainState.DRAIN_RUNNING, int(SINCE * 1000), GIB, "2 locations are pinned"),
        DrainStatus("gone", True, DrainState.DRAIN_DONE, int(SINCE * 1000), 0),
    ]
    assert _printed(lambda console: print_drains(drains, console)) == SEEN_DRAINS


OF_POOL = TypeUsage(StorageType.ST_MOONCAKE, Usage(5 * GIB, 0))
OF_FILES = TypeUsage(StorageType.ST_NFS, Usage(4 * GIB, GIB // 4, 4 * GIB, 3 * GIB, 2 * GIB))
STORED = (GroupStorageUsage("moon", 5 * GIB, 0), GroupStorageUsage("nfs", 4 * GIB, GIB))
QWEN = InstanceUsage("Qwen/Qwen3-8B", 2100, -1, 9 * GIB, "leaf_lru")
LLAMA = InstanceUsage("[red]llama", 0, 1_000_000, 0, "s3fifo")
TOTAL = Usage(9 * GIB, GIB // 4, 10 * GIB, 8 * GIB, 7 * GIB)
CHAT = GroupUsage("chat", TOTAL, (OF_POOL, OF_FILES), STORED, (QWEN, LLAMA), GIB // 2, GIB, 7)
CALM = GroupUsage("calm", Usage(0, 0, GIB, GIB // 2, GIB // 4), (), (), (), 0, 0, 0)
NFS = StorageUsage("nfs", Usage(4 * GIB, GIB // 4, 8 * GIB, 7 * GIB, 6 * GIB), GIB, 2.25, 120, 3)
MOON = StorageUsage("moon", Usage(5 * GIB, 0), 0, 0.0, 0, 0)
TEAM = GlobalQuotaUsage("team", Usage(9 * GIB, GIB // 4, 12 * GIB, 10 * GIB, 9 * GIB), ("calm", "chat"))

SEEN_USAGE = """\
group                                        used   deleting     limit  evict above    down to      %
─────────────────────────────────────────────────────────────────────────────────────────────────────
calm   total                                  0 B              1.0 GiB    512.0 MiB  256.0 MiB    0.0

chat   total                              9.0 GiB  256.0 MiB  10.0 GiB      8.0 GiB    7.0 GiB   90.0
       type mooncake                      5.0 GiB                 none         none       none
       type file                          4.0 GiB  256.0 MiB   4.0 GiB      3.0 GiB    2.0 GiB  100.0
       storage moon                       5.0 GiB
       storage nfs, 1.0 GiB guaranteed    4.0 GiB
       pinned                           512.0 MiB              1.0 GiB                           50.0

instance       group     used  blocks    at most  policy
──────────────────────────────────────────────────────────
Qwen/Qwen3-8B  chat   9.0 GiB   2,100             leaf_lru
[red]llama     chat       0 B       0  1,000,000  s3fifo

storage     used   deleting    limit  evict above  down to     %  guaranteed  quotas  to delete  failures
─────────────────────────────────────────────────────────────────────────────────────────────────────────
nfs      4.0 GiB  256.0 MiB  8.0 GiB      7.0 GiB  6.0 GiB  50.0     1.0 GiB  × 2.25        120         3
moon     5.0 GiB                none         none     none

global quota     used   deleting     limit  evict above  down to     %  groups
──────────────────────────────────────────────────────────────────────────────────
team          9.0 GiB  256.0 MiB  12.0 GiB     10.0 GiB  9.0 GiB  75.0  calm, chat

group chat is full on type file
group chat was refused space 7 times since the manager started
storage nfs is oversubscribed: its groups may use 2.25 times its capacity
storage nfs fails to delete: 120 locations wait
"""


def _shown_usage(report: UsageReport, *, colour: bool = False) -> str:
    return _printed(lambda console: print_usage(report, console), colour=colour)


def test_four_tables_and_a_sentence_for_whatever_asks_for_something_to_be_done() -> None:
    assert _shown_usage(UsageReport((CALM, CHAT), (NFS, MOON), (TEAM,))) == SEEN_USAGE


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        (Usage(GIB, 0, GIB, GIB, GIB), ["group g is full: writes are refused"]),
        (Usage(GIB, 0, 0), ["group g may use nothing, but its instances do"]),
        (Usage(1, 0, GIB), ["group g has no mark of its own"]),
        (Usage(1, 0, GIB, GIB, GIB), []),
        (Usage(0, 0, 0, 0, 0), []),
    ],
)
def test_a_group_is_spoken_of_only_when_there_is_something_to_do(usage: Usage, words: list[str]) -> None:
    shown = _shown_usage(UsageReport((replace(CALM, name="g", total=usage),), (), ()))
    sentences = [line for line in shown.splitlines() if line.startswith("group g ")]
    assert len(sentences) == len(words)
    assert all(word in line for word, line in zip(words, sentences, strict=True))


@pytest.mark.parametrize(
    ("used", "deleting", "colour"), [(8, 0, ""), (9, 0, "33"), (9, 1, ""), (10, 0, "1;31"), (10, 5, "1;31"), (0, 0, "")]
)
def test_usage_above_the_mark_is_yellow_and_at_the_limit_red(used: int, deleting: int, colour: str) -> None:
    report = UsageReport((), (replace(MOON, usage=Usage(used, deleting, 10, 8, 7)),), ())
    found = re.search(rf"(?:\x1b\[((?!0m)[0-9;]+)m)? *{10 * used:.1f}", _shown_usage(report, colour=True))
    assert found is not None
    assert (found[1] or "") == colour


@pytest.mark.parametrize(("ratio", "is_said"), [(1.0, False), (1.01, True), (0.0, False)])
def test_an_oversubscribed_storage_is_said_in_words_and_colour(ratio: float, is_said: bool) -> None:
    shown = _shown_usage(UsageReport((), (replace(NFS, oversubscription=ratio),), ()), colour=True)
    assert (f"\x1b[33m× {ratio:.2f}" in shown, "is oversubscribed" in shown) == (is_said, is_said)


def test_guarantees_that_a_storage_cannot_keep_are_said() -> None:
    for guaranteed, is_said in ((8 * GIB, False), (8 * GIB + 1, True)):
        shown = _shown_usage(UsageReport((), (replace(NFS, guaranteed_bytes=guaranteed),), ()))
        assert ("cannot keep its guarantees" in shown) == is_said


UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50,
}  # fmt: skip


@given(st.integers(0, 1 << 12), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " "]))
def test_a_number_with_a_unit_is_so_many_of_them(number: int, unit: str, space: str) -> None:
    assert parse_size(f"{number}{space if unit else ''}{unit}") == number * UNITS[unit]


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("1.5GiB", 3 << 29), ("0.001KB", 1), ("0", 0), ("007", 7), ("9223372036854775807", 2**63 - 1)],
)
def test_sizes_are_exact(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "GiB", "-1", "+1", "1gib", "1Gib", "1G", "1 GB ", " 1GB", "1  GB", "1e9", "1,5GB", ".5GB", "1.",
        "1_000", "1.GB", "0x10", "٣", "1٣GB", "nan", "inf", "1GiBGiB", "1\nGB", "9" * 50,
    ],
)  # fmt: skip
def test_an_invalid_size_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=re.escape("must be a number of bytes, or one with a unit of B, KB")):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("0.3B", "whole number"), ("1.0001KB", "whole number"), ("9223372036854775808", "larger"), ("8192PiB", "larger")],
)
def test_sizes_that_no_limit_can_have_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        parse_size(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (999 * 1024, "999.0 KiB"), (1023 * 1024, "1.0 MiB"),
        (3 << 29, "1.5 GiB"), (1 << 62, "4,096.0 PiB"),
    ],
)  # fmt: skip
def test_sizes_are_shown_in_the_largest_unit(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(0, 1 << 59))
def test_shown_sizes_are_short_and_near(size_bytes: int) -> None:
    number, unit = format_size(size_bytes).split()
    assert len(number) <= 5
    assert abs(float(number) * UNITS[unit] - size_bytes) <= 0.0501 * UNITS[unit]
