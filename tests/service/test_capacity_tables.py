"""What `kvcm group usage` shows on a wide terminal, and on one of 80 columns."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from kvcm.capacity_tables import print_usage
from kvcm.model.storages import StorageType
from kvcm.service.usage_values import (
    GlobalQuotaUsage,
    GroupStorageUsage,
    GroupUsage,
    InstanceUsage,
    StorageUsage,
    TypeUsage,
    Usage,
    UsageReport,
)

GIB = 1 << 30

CHAT = GroupUsage(
    "chat",
    Usage(9 * GIB, GIB // 4, 10 * GIB, 8 * GIB, 7 * GIB),
    (
        TypeUsage(StorageType.ST_MOONCAKE, Usage(5 * GIB, 0)),
        TypeUsage(StorageType.ST_NFS, Usage(4 * GIB, GIB // 4, 4 * GIB, 3 * GIB, 2 * GIB)),
    ),
    (GroupStorageUsage("moon", 5 * GIB, 0), GroupStorageUsage("nfs", 4 * GIB, GIB)),
    (
        InstanceUsage("Qwen/Qwen3-8B", 2100, -1, 9 * GIB, "leaf_lru"),
        InstanceUsage("[red]llama", 0, 1_000_000, 0, "s3fifo"),
    ),
    GIB // 2,
    GIB,
    7,
)
CALM = GroupUsage("calm", Usage(0, 0, GIB, GIB // 2, GIB // 4), (), (), (), 0, 0, 0)
NFS = StorageUsage("nfs", Usage(4 * GIB, GIB // 4, 8 * GIB, 7 * GIB, 6 * GIB), GIB, 2.25, 120, 3)
MOON = StorageUsage("moon", Usage(5 * GIB, 0), 0, 0.0, 0, 0)
TEAM = GlobalQuotaUsage("team", Usage(9 * GIB, GIB // 4, 12 * GIB, 10 * GIB, 9 * GIB), ("calm", "chat"))

SEEN = """\
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
group chat was refused room 7 times since the manager started
storage nfs is oversubscribed: its groups may use 2.25 times its capacity
storage nfs fails to delete: 120 locations wait
"""


DEFAULT = GroupUsage(
    "default",
    Usage(189 << 20, 2 << 20, 10 * GIB, 8 * GIB, 7 * GIB),
    (TypeUsage(StorageType.ST_NFS, Usage(189 << 20, 2 << 20, 10 * GIB, 8 * GIB, 7 * GIB)),),
    (GroupStorageUsage("shared", 189 << 20, 0),),
    (InstanceUsage("demo", 189, 1_000_000, 189 << 20, "leaf_lru"),),
    0,
    0,
    0,
)
SHARED = StorageUsage("shared", Usage(189 << 20, 0, 20 * GIB, 18 * GIB, 17 * GIB), 0, 0.5, 12_345, 0)

SEEN_AT_80 = """\
                                                             evict
group                         used  deleting     limit       above  down to    %
────────────────────────────────────────────────────────────────────────────────
default  total           189.0 MiB   2.0 MiB  10.0 GiB     8.0 GiB  7.0 GiB  1.8
         type file       189.0 MiB   2.0 MiB  10.0 GiB     8.0 GiB  7.0 GiB  1.8
         storage shared  189.0 MiB

instance  group         used  blocks    at most  policy
─────────────────────────────────────────────────────────
demo      default  189.0 MiB     189  1,000,000  leaf_lru

storage       used     limit  evict above   down to    %  quotas  to delete
───────────────────────────────────────────────────────────────────────────
shared   189.0 MiB  20.0 GiB     18.0 GiB  17.0 GiB  0.9  × 0.50     12,345
"""


def _shown(report: UsageReport, *, width: int = 160, colour: bool = False) -> str:
    text = io.StringIO()
    print_usage(
        report, Console(file=text, width=width, force_terminal=colour, color_system="standard" if colour else None)
    )
    return "".join(f"{line.rstrip()}\n" for line in text.getvalue().splitlines())


def test_four_tables_and_a_sentence_for_whatever_asks_for_something_to_be_done() -> None:
    assert _shown(UsageReport((CALM, CHAT), (NFS, MOON), (TEAM,))) == SEEN


def test_a_terminal_of_80_columns_is_wide_enough() -> None:
    assert _shown(UsageReport((DEFAULT,), (SHARED,), ()), width=80) == SEEN_AT_80


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
    shown = _shown(UsageReport((replace(CALM, name="g", total=usage),), (), ()))
    sentences = [line for line in shown.splitlines() if line.startswith("group g ")]
    assert len(sentences) == len(words)
    assert all(word in line for word, line in zip(words, sentences, strict=True))


@pytest.mark.parametrize(
    ("used", "deleting", "colour"), [(8, 0, ""), (9, 0, "33"), (9, 1, ""), (10, 0, "1;31"), (10, 5, "1;31"), (0, 0, "")]
)
def test_what_is_above_its_mark_is_yellow_and_what_is_full_is_red(used: int, deleting: int, colour: str) -> None:
    report = UsageReport((), (replace(MOON, usage=Usage(used, deleting, 10, 8, 7)),), ())
    found = re.search(rf"(?:\x1b\[((?!0m)[0-9;]+)m)? *{10 * used:.1f}", _shown(report, colour=True))
    assert found is not None
    assert (found[1] or "") == colour


@pytest.mark.parametrize(("ratio", "is_said"), [(1.0, False), (1.01, True), (0.0, False)])
def test_an_oversubscribed_storage_is_said_in_words_and_colour(ratio: float, is_said: bool) -> None:
    shown = _shown(UsageReport((), (replace(NFS, oversubscription=ratio),), ()), colour=True)
    assert (f"\x1b[33m× {ratio:.2f}" in shown, "is oversubscribed" in shown) == (is_said, is_said)


def test_guarantees_that_a_storage_cannot_keep_are_said() -> None:
    for guaranteed, is_said in ((8 * GIB, False), (8 * GIB + 1, True)):
        shown = _shown(UsageReport((), (replace(NFS, guaranteed_bytes=guaranteed),), ()))
        assert ("cannot keep its guarantees" in shown) == is_said
