"""Engines and the scores of a prompt as the page of KV residency shows them."""

from __future__ import annotations

from typing import Any

from kvcm.console.pages.residency import engine_views, scores_of


def reporter(engine: str, state: str = "complete", quiet_ms: int = 0, **blocks: int) -> dict[str, Any]:
    media = [{"medium": medium, "blocks": count} for medium, count in blocks.items()]
    return {"engine": engine, "rank": 0, "state": state, "quiet_ms": quiet_ms, "media": media, "gaps": 0}


def score(engine: str, *tokens: int, load: float = 0.0, compute: float = 1.0, saved: float = 0.0) -> dict[str, Any]:
    fields = ("gpu_tokens", "host_tokens", "disk_tokens", "storage_tokens")
    return {
        "engine": engine, "rank": 0, **dict(zip(fields, tokens, strict=True)), "load_seconds": load,
        "compute_seconds": compute, "score": saved, "is_complete": True,
    }  # fmt: skip


def scores(*engines: dict[str, Any], prompt: int = 1000, stored: int = 0) -> Any:
    return scores_of({"engines": list(engines), "prompt_tokens": prompt, "storage_tokens": stored})


def test_engines_that_need_attention_come_first_and_bars_are_of_one_scale() -> None:
    found = engine_views([
        reporter("a", gpu=50, host=200), reporter("b", "quiet", 61_000), reporter("c", "partial", 2000, disk=100),
    ])  # fmt: skip
    assert [(view.engine, view.kind, view.last_report) for view in found] == [
        *[("b", "bad", "1 min ago"), ("c", "warn", "2 s ago"), ("a", "good", "now")]
    ]
    assert found[2].media == [("gpu", "GPU", 50, 0.25), ("host", "Host", 200, 1.0), ("disk", "Disk", 0, 0.0)]
    assert found[0].media == [("gpu", "GPU", 0, 0.0), ("host", "Host", 0, 0.0), ("disk", "Disk", 0, 0.0)]
    assert engine_views([]) == []


def test_the_shares_of_a_prompt_follow_each_other_and_fill_it() -> None:
    (found,) = scores(score("a", 100, 400, 400, 700, load=0.01, compute=0.3, saved=0.69), stored=700).engines
    assert [(share.name, share.first, share.tokens) for share in found.shares] == [
        *[("gpu", 0, 100), ("host", 100, 300), ("disk", 400, 0), ("storage", 400, 300), ("computed", 700, 300)]
    ]
    assert (found.load, found.compute, found.saved, found.note) == ("10 ms", "300 ms", "690 ms", "")
    assert found.summary == (
        "Tokens of the prompt for a: GPU memory 100, host memory 300, disk 0, storages 300, computed 300"
    )


def test_an_engine_that_computes_rather_than_to_load_says_so() -> None:
    (found,) = scores(score("a", 100, 100, 100, 700, compute=0.9, saved=0.1)).engines
    assert found.shares[-1].tokens == 300
    assert found.note == "It computes 600 more of them, since loading them takes longer."


def test_the_headline_names_the_best_engine_or_why_there_is_none() -> None:
    best = score("a", 500, 500, 500, 500, compute=0.5, saved=0.5) | {"rank": 3}
    assert scores(best, score("b", 0, 0, 0, 0)).headline == (
        "a, rank 3 serves it best and saves 500 ms; 0 of 1,000 tokens lie in storages."
    )
    assert scores(score("b", 0, 0, 0, 0)).headline.startswith("No engine saves anything: each computes")
    none = scores(stored=64)
    assert (none.engines, none.headline) == (
        [], "No engine reports, so there is none to choose; 64 of 1,000 tokens lie in storages."
    )  # fmt: skip


def test_many_engines_are_counted() -> None:
    found = scores(*[score(f"e{number}", 0, 0, 0, 0) for number in range(700)])
    assert (len(found.engines), found.left_out) == (500, 200)
