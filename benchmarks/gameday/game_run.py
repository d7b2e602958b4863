"""One game from begin to end: everything is started, the plan is carried out, everything is checked and reported."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from game_audit import read_blocks
from game_checks import EndState, check_end, judge_end, judge_prompts, settle
from game_faults import Done, Faults
from game_figures import Sample, Window
from game_ledger import Judgement, blocks_of, gone_of, judged
from game_lines import read_lines
from game_network import HOSTS, Network
from game_plan import made
from game_prober import RAISED
from game_processes import waited_for
from game_prompts import expected_tokens
from game_site import ENGINES, MANAGERS, Site
from game_storages import KEYS_PER_FILE, Storages
from game_watch import Observation, Watch

__all__ = ["Game", "GameOptions", "play"]

_CONVERSATIONS_PER_SECOND = 0.35
_FIRST_CONVERSATIONS = 12
_WARM_SECONDS = 120.0
_SETTLE_SECONDS = 120.0
_EVICTING = frozenset({"churning"})


@dataclass(frozen=True, slots=True)
class GameOptions:
    """Settings of a game.

    Attributes:
        seed: of the plan.
        seconds: that faults happen.
        lacks: capabilities that the machine lacks, and why.
        logs: folder for the game's folder.
        json: file for the figures, None for none.
        report: folder for the report, None for none.
        keeps_logs: also when the game passes.
        is_quick: whether it is a smoke run.
    """

    seed: int
    seconds: float
    lacks: Mapping[str, str]
    logs: Path
    json: Path | None
    report: Path | None
    keeps_logs: bool
    is_quick: bool = False


@dataclass(slots=True)
class Game:
    """The events and findings of a game.

    Attributes:
        options: of the game.
        began: unix seconds.
        ended: unix seconds, when the traffic ended.
        done: the outcome of each step.
        samples: of the prober.
        results: of prompts.
        observations: at the managers.
        judgement: of the ledgers.
        acknowledged: blocks in them.
        end: how it was at the end.
        wrong: violations, by check.
    """

    options: GameOptions
    began: float = 0.0
    ended: float = 0.0
    done: list[Done] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    results: list[dict[str, Any]] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    judgement: Judgement = field(default_factory=Judgement)
    acknowledged: int = 0
    end: EndState = field(default_factory=EndState)
    wrong: dict[str, list[str]] = field(default_factory=dict)

    @property
    def windows(self) -> list[Window]:
        """Faults as they happened."""
        return [
            Window(each.step.number, each.step.kind, each.began, each.ended, each.step.recovery_seconds)
            for each in sorted(self.done, key=lambda done: done.began)
        ]

    @property
    def kills(self) -> list[float]:
        """Unix seconds by which managers were ended with SIGKILL."""
        return [each.ended for each in self.done if each.step.kind in {"manager killed", "leader killed"}]


def play(options: GameOptions) -> int:
    """Play a game and return the exit code: 0 when all that must hold holds."""
    from game_report import publish_game

    folder = options.logs / f"seed-{options.seed}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    conversations = _FIRST_CONVERSATIONS + int(options.seconds * _CONVERSATIONS_PER_SECOND)
    expected = options.logs / "expected.json"
    expected_tokens(conversations, expected)
    network = Network()
    network.lay()
    storages = Storages(folder / "storages", has_fuse="fuse" not in options.lacks)
    site = Site(folder, options.seed, options.seconds, conversations, expected, network, storages)
    if options.is_quick:
        site.prober_seconds = 4.0
    game = Game(options)
    try:
        site.start()
        _play(site, game)
        _gather(site, game)
    except Exception:
        print(f"seed {options.seed}: begun at {game.began:.3f}, not ended well; logs are in {folder}", file=sys.stderr)
        raise
    finally:
        site.end()
    passed = publish_game(game)
    if passed and not options.keeps_logs:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"seed {options.seed}: begun at {game.began:.3f}; logs are in {folder}", file=sys.stderr)
    return 0 if passed else 1


def _play(site: Site, game: Game) -> None:
    """Let everything run, and carry out the plan."""
    site.start_engines()
    has_begun = waited_for(lambda: _has_begun(site), _WARM_SECONDS)
    assert has_begun, "engines do not generate, or the prober does not ask"
    watch = Watch(site.managers, {name: f"{HOSTS[name]}:6382" for name in MANAGERS})
    watch.begin()
    faults, game.began = Faults(site), time.time()
    plan = made(site.seed, site.seconds, frozenset(game.options.lacks))
    faults.play(plan, game.began)
    time.sleep(max(0.0, game.began + site.seconds - time.time()))
    game.ended = time.time()
    _end_traffic(site, game.end)
    watch.end()
    game.done, game.observations = faults.done, watch.observations
    game.end.stopped += faults.wrong
    game.end.faults = [f"step {each.step.number}, {each.step.kind}: {each.error}" for each in faults.done if each.error]


def _has_begun(site: Site) -> bool:
    files = [*(site.folder / name / "results" for name in ENGINES), site.folder / "prober" / "samples"]
    return all(file.exists() and file.stat().st_size for file in files)


def _end_traffic(site: Site, end: EndState) -> None:
    """Stop engines and prober, which must end well; everything else must still run."""
    processes = {**site.engines, "prober": site.prober}
    everything = {**processes, **site.managers, "store": site.store}
    end.stopped += [
        f"{name} is not there: {each.exit_code}" for name, each in everything.items() if not each.is_running
    ]
    for name, process in processes.items():
        code = process.stop() if process.is_running else 0
        if code:
            end.stopped.append(f"{name} was ordered to stop at the end and ended with {code}")


def _gather(site: Site, game: Game) -> None:
    """Run all checks."""
    settle(site, game.end, _SETTLE_SECONDS)
    game.samples = [
        Sample(each["at"], each["seconds"], each["is_good"], each["call"], each["reason"])
        for each in read_lines(site.folder / "prober" / "samples")
        if each["at"] >= game.began
    ]
    game.results = [each for name in ENGINES for each in read_lines(site.folder / name / "results")]
    blocks = blocks_of(each for name in ENGINES for each in read_lines(site.folder / name / "ledger"))
    game.acknowledged = len(blocks)
    roots = {name: str(site.storages.roots[name]) for name in KEYS_PER_FILE}
    found = read_blocks(site.addresses, roots, blocks.values())
    events = (each for name in MANAGERS for path in _event_files(site, name) for each in read_lines(path))
    spoiled = site.storages.spoiled
    game.judgement = judged(
        blocks.values(),
        found,
        gone_of(events),
        lambda uri: spoiled.touches(uri.path, uri.offset, uri.size),
        _EVICTING,
        game.kills,
    )
    check_end(site, game.end)
    game.wrong = {
        **judge_prompts(game.results),
        "calls of the prober that raised": [each.reason for each in game.samples if each.call == RAISED],
        "acknowledged blocks lost": game.judgement.lost,
        "acknowledged blocks with wrong bytes": game.judgement.wrong,
        **judge_end(game.end),
    }


def _event_files(site: Site, name: str) -> list[Path]:
    return sorted((site.folder / name).glob("events*"))
