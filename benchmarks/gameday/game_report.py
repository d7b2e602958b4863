"""Reports a game: figures as rows, a report for people, and a plot of faults over availability and hits."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from game_faults import Done
from game_figures import Window, availability, hit_rate, merged, recovery_seconds, summary
from game_plan import KINDS, LEAST_QUIET
from game_plot import draw
from game_run import Game
from game_site import MANAGERS
from game_watch import whole_since
from report import Row, is_sound, publish

__all__ = ["Recovery", "publish_game", "recoveries", "rows", "takeovers"]

_LEAST_AVAILABILITY = 99.9
_LEAST_OF_SMOKE = 99.0  # of some thousand calls: a busy machine that is late twice is not to fail a build
_MOST_REPORTED = 10


@dataclass(frozen=True, slots=True)
class Recovery:
    """The effects of the faults of a kind.

    Attributes:
        kind: of the faults.
        count: of them.
        stated_seconds: after which calls must not fail any more.
        calls: seconds after the fault's end until the last call failed, of each.
        whole: seconds until all managers were ready and agreed on a leader, of each that could be distinguished from
            others.
    """

    kind: str
    count: int
    stated_seconds: float
    calls: Sequence[float]
    whole: Sequence[float]


def publish_game(game: Game) -> bool:
    """Print, write files, and return whether everything holds that must."""
    found = rows(game)
    for what, texts in game.wrong.items():
        for text in texts[:_MOST_REPORTED]:
            print(f"{what}: {text}", file=sys.stderr)
    outside, _ = availability(game.samples, game.windows)
    for sample in outside.examples:
        print(f"failed outside of faults: {sample}, {sample.at - game.began:.1f} s", file=sys.stderr)
    options = game.options
    is_met = publish(f"gameday: seed {options.seed}, {options.seconds / 60:g} minutes", found, options.json)
    if options.report is not None:
        options.report.mkdir(parents=True, exist_ok=True)
        draw(game, options.report / f"seed_{options.seed}.svg")
        (options.report / f"seed_{options.seed}.md").write_text(_page(game, found))
    return is_met or (options.is_quick and is_sound(found))


def recoveries(game: Game) -> list[Recovery]:
    """Return the effects of faults, by kind, in the order of the table of kinds."""
    windows = game.windows
    by_kind: defaultdict[str, list[Window]] = defaultdict(list)
    for window in windows:
        by_kind[window.kind].append(window)
    return [
        Recovery(
            kind.name,
            len(by_kind[kind.name]),
            kind.recovery_seconds,
            [recovery_seconds(game.samples, windows, each) for each in by_kind[kind.name]],
            [seconds for each in by_kind[kind.name] for seconds in _whole(game, each)],
        )
        for kind in KINDS
        if by_kind[kind.name]
    ]


def _whole(game: Game, window: Window) -> list[float]:
    """Return how long it took until the managers were whole, nothing where another fault lasted at its end."""
    if any(each.number != window.number and each.began <= window.ended <= each.ended for each in game.windows):
        return []
    since = whole_since(game.observations, window.ended, MANAGERS)
    return [] if since is None else [since - window.ended]


def rows(game: Game) -> list[Row]:
    """Return the figures."""
    case = f"seed {game.options.seed}"
    return [
        *_data_path(case, game),
        *_tokens(case, game),
        *_blocks(case, game),
        *_the_end(case, game),
        *_kinds(case, game),
    ]


def _data_path(case: str, game: Game) -> Iterable[Row]:
    outside, inside = availability(game.samples, game.windows)
    covered = sum(min(end, game.ended) - begin for begin, end in merged(game.windows) if begin < game.ended)
    quiet = 100.0 * (1 - covered / (game.ended - game.began))
    least = _LEAST_OF_SMOKE if game.options.is_quick else _LEAST_AVAILABILITY
    ok = outside.percent >= least and outside.good > 0
    yield Row(case, "faults", len(game.done), "", target="> 0", ok=bool(game.done))
    # On a busy machine processes take long to be there again.
    target, is_quiet = (
        ("", None) if game.options.is_quick else (f">= {100 * LEAST_QUIET:g} %", quiet >= 100 * LEAST_QUIET)
    )
    yield Row(case, "share of the time outside of faults and their recovery", quiet, "%", target=target, ok=is_quiet)
    yield Row(case, "calls outside", outside.good + outside.bad, "")
    yield Row(case, "calls answered well, outside", outside.percent, "%", target=f">= {least} %", ok=ok)
    yield Row(case, "calls inside", inside.good + inside.bad, "")
    yield Row(case, "calls answered well, inside", inside.percent, "%")


def _tokens(case: str, game: Game) -> Iterable[Row]:
    spans = merged(game.windows)
    quiet = [each for each in game.results if not any(begin <= each["at"] <= end for begin, end in spans)]
    during = [each for each in game.results if any(begin <= each["at"] <= end for begin, end in spans)]
    count = len(game.results)
    yield Row(case, "prompts answered and compared", count, "", target="> 0", ok=count > 0)
    hits = hit_rate(quiet)  # where nothing is loaded, right tokens say nothing
    yield Row(case, "tokens of prompts that were loaded, outside", hits, "%", target="> 0 %", ok=hits > 0)
    yield Row(case, "tokens of prompts that were loaded, inside", hit_rate(during), "%")
    yield Row(
        case,
        "blocks found corrupt by engines, and computed",
        sum(each.get("blocks_corrupt", 0) for each in game.results),
        "",
    )
    yield Row(case, "slowest prompt", max((each["seconds"] for each in game.results), default=0.0), "s")


def _blocks(case: str, game: Game) -> Iterable[Row]:
    judgement = game.judgement
    yield Row(case, "blocks acknowledged", game.acknowledged, "", target="> 0", ok=game.acknowledged > 0)
    yield Row(case, "of these served with the right bytes at the end", judgement.served, "")
    yield Row(case, "of these evicted, as managers told", judgement.evicted, "")
    yield Row(
        case,
        "of these evicted, untold by a manager that was killed",
        len(judgement.untold),
        "",
    )
    yield Row(case, "of these damaged by the game", judgement.spoiled, "")


def _the_end(case: str, game: Game) -> Iterable[Row]:
    for what, texts in game.wrong.items():
        yield Row(case, what, len(texts), "", target="= 0", ok=not texts)
    settled = game.end.settled_seconds
    yield Row(case, "until nothing was open or unfinished", -1.0 if settled is None else settled, "s")
    yield Row(case, "objects without metadata that scrubs deleted", game.end.scrubbed, "")


def _kinds(case: str, game: Game) -> Iterable[Row]:
    led = takeovers(game)
    if led:
        yield Row(case, "from the kill of a leader until another one led, longest", max(led), "s")
    for each in recoveries(game):
        most = summary(each.calls)[1]
        where = f"{case}, {each.kind}"
        yield Row(
            where,
            "last call that failed after its end",
            most,
            "s",
            each.stated_seconds,
            most / each.stated_seconds,
            target="<= baseline",
            ok=most <= each.stated_seconds,
        )
        if each.whole:
            yield Row(where, "until all managers were ready with one leader, longest", summary(each.whole)[1], "s")


def _page(game: Game, found: Sequence[Row]) -> str:
    """Return the report as Markdown."""
    options = game.options
    held = "Everything that must hold held." if is_sound(found) else "**Something did not hold.**"
    lines = [
        f"# Game day, seed {options.seed}, {options.seconds / 60:g} minutes",
        "",
        f"{held} What is played and judged: [Game day](index.md). The same again:",
        f"`make gameday MINUTES={options.seconds / 60:g} SEED={options.seed}`.",
        *_left_out(game),
        "",
        f"![Faults over availability and hits](seed_{options.seed}.svg)",
        "",
        "| figure | value | wanted | |",
        "|---|---|---|---|",
        *(_figure_line(row) for row in found if "," not in row.case),
        "",
        "Recovery, by kind of fault: how long after its end the last call failed that no other fault can be blamed",
        "for, and until all managers were ready and agreed on a leader." + _takeover_sentence(game),
        "",
        "| fault | times | stated | last failed call: median | longest | managers whole: median | longest |",
        "|---|---|---|---|---|---|---|",
        *(_recovery_line(each) for each in recoveries(game)),
        "",
        "| | at | fault | what | lasted |",
        "|---|---|---|---|---|",
        *(_step_line(game, each) for each in sorted(game.done, key=lambda done: done.began)),
    ]
    return "\n".join(lines) + "\n"


def takeovers(game: Game) -> list[float]:
    """Return the seconds from each kill of a leader until the others agreed on another one."""
    found = []
    for done in game.done:
        if done.step.kind == "leader killed":
            others = [name for name in MANAGERS if name != done.target]
            since = whole_since(game.observations, done.began, others, not_led_by=done.target)
            found += [] if since is None else [since - done.began]
    return found


def _takeover_sentence(game: Game) -> str:
    found = takeovers(game)
    return f" After a leader was killed another one led within {max(found):.1f} s." if found else ""


def _left_out(game: Game) -> list[str]:
    lacks = game.options.lacks.items()
    return ["", *(f"Not played: faults that need {name}, since {why}." for name, why in lacks)] if lacks else []


def _step_line(game: Game, done: Done) -> str:
    step, at, lasted = done.step, done.began - game.began, done.ended - done.began
    return f"| {step.number} | {at:.1f} s | {step.kind} | {done.target} | {lasted:.1f} s |"


def _figure_line(row: Row) -> str:
    return f"| {row.metric} | {_shown(row)} | {row.target} | {_verdict(row)} |"


def _recovery_line(each: Recovery) -> str:
    calls, whole = summary(each.calls), summary(each.whole)
    seen = f"{whole[0]:.1f} s | {whole[1]:.1f} s" if each.whole else "– | –"
    return f"| {each.kind} | {each.count} | {each.stated_seconds:g} s | {calls[0]:.1f} s | {calls[1]:.1f} s | {seen} |"


def _shown(row: Row) -> str:
    value = f"{row.value:,.2f}" if isinstance(row.value, float) else f"{row.value:,}"
    return f"{value} {row.unit}".strip()


def _verdict(row: Row) -> str:
    return "" if row.ok is None else "yes" if row.ok else "**NO**"
