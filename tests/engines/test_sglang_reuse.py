"""SGLang reuses what it, or another of its processes, stored: the same tokens, and the same bytes page by page.

Whole pages that are swapped do not change the answer, since positions are in K already. So tokens alone prove little,
and the tests compare every page with the bytes stored under its key.
"""

from __future__ import annotations

import time
from pathlib import Path
from uuid import uuid4

import pytest
from engine_kinds import SGLANG
from engine_process import StartEngine, until
from manager_process import ManagerProcess
from sglang_rig import PAGE_TOKENS, Rig, storage_config
from stored_parts import overwrite, swapped_halves
from tiny_models import prompt_tokens


@pytest.fixture(scope="module")
def rig(
    shared_engines: StartEngine, tiny_llama: Path, manager: ManagerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Rig:
    """One engine for the tests that leave it alive; each has a prompt of its own."""
    instance_id, record = f"reuse-{uuid4().hex[:8]}", tmp_path_factory.mktemp("pages") / "record"
    files = {name: str(record.with_name(name)) for name in ("remove", "hang")}
    config = storage_config(manager.address, instance_id, record, **files)
    engine = shared_engines(SGLANG, tiny_llama, storage=config)
    return Rig(engine, record, manager, instance_id)


@pytest.fixture(scope="module")
def other_rig(rig: Rig, shared_engines: StartEngine, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """Another process that shares the instance. It believes whatever it loads, and its pool has another layout."""
    record = tmp_path_factory.mktemp("pages") / "record"
    config = storage_config(rig.manager.address, rig.instance_id, record, checksums=False)
    engine = shared_engines(SGLANG, tiny_llama, storage=config, hicache_mem_layout="layer_first")
    return Rig(engine, record, rig.manager, rig.instance_id)


@pytest.mark.feature("sglang", "the same bytes per block")
def test_stored_pages_are_loaded_again(rig: Rig) -> None:
    prompt = prompt_tokens(200, seed=1)
    computed = rig.store(prompt)
    saved = {page.key: page.digest for page in rig.pages("save")}
    rig.forget()
    reused = rig.generate(prompt)
    assert reused.tokens == computed.tokens
    assert (computed.cached_tokens, reused.cached_tokens, reused.details["storage"]) == (0, 192, 192)
    loaded = rig.pages("load")
    assert len(loaded) == len({page.digest for page in loaded}) == 12
    assert all(page.ok for page in loaded)
    assert all(page.digest == saved[page.key] == rig.stored_digest(page.key) for page in loaded)


@pytest.mark.feature("sglang", "saves, and another process loads")
@pytest.mark.feature("sglang", "host layouts page_first_direct and layer_first")
def test_another_process_with_another_layout_loads_the_same_bytes(rig: Rig, other_rig: Rig) -> None:
    prompt = prompt_tokens(333, seed=2)
    computed = rig.store(prompt)
    saved = {page.key: page.digest for page in rig.pages("save")}
    other_rig.forget()
    reused = other_rig.generate(prompt)
    assert reused.tokens == computed.tokens
    assert reused.details["storage"] == 320
    loaded = {page.key: page.digest for page in other_rig.pages("load")}
    assert len(loaded) == 20
    assert loaded.items() <= saved.items()


@pytest.mark.feature("sglang", "changed bytes, when not looked for, change the tokens")
def test_the_answer_depends_on_the_loaded_bytes(rig: Rig, other_rig: Rig) -> None:
    """If it did not, equal tokens would prove nothing."""
    prompt = prompt_tokens(200, seed=4)
    computed = rig.store(prompt)
    for page in rig.pages("save"):
        overwrite(rig.uri(page.key), swapped_halves)
    other_rig.forget()
    misled = other_rig.generate(prompt)
    assert misled.details["storage"] == 192
    assert misled.tokens != computed.tokens


@pytest.mark.feature("sglang", "partial hit")
def test_only_the_common_beginning_is_loaded(rig: Rig) -> None:
    first, second = prompt_tokens(200, seed=5), prompt_tokens(200, seed=6)
    rig.store(first)
    rig.forget()
    mixed = first[:100] + second[100:]
    partly = rig.generate(mixed)
    assert partly.details["storage"] == 96
    rig.forget()
    assert rig.generate(mixed).tokens == partly.tokens


@pytest.mark.feature("sglang", "conversation of several turns")
def test_a_later_turn_loads_the_answers_before_it(rig: Rig) -> None:
    conversation = prompt_tokens(100, seed=7)
    for turn in range(3):
        answer = rig.store(conversation, tokens=32)
        conversation = conversation + answer.tokens + prompt_tokens(20, seed=70 + turn)
    rig.forget()
    last = rig.generate(conversation)
    # All but the end of the last turn was stored: 100 + 32 + 20 + 32 + 20 + 31 tokens.
    assert last.details["storage"] == 235 // PAGE_TOKENS * PAGE_TOKENS
    rig.forget()
    assert rig.generate(conversation).tokens == last.tokens


@pytest.mark.feature("sglang", "changed bytes are found")
def test_one_wrong_bit_is_a_miss_and_is_stored_again(rig: Rig) -> None:
    prompt = prompt_tokens(200, seed=9)
    computed = rig.store(prompt)
    page = rig.pages("save")[5]
    overwrite(rig.uri(page.key), lambda stored: stored[:100] + bytes([stored[100] ^ 1]) + stored[101:])
    rig.forget()
    reused = rig.generate(prompt)
    assert reused.tokens == computed.tokens
    assert reused.details["storage"] == 5 * PAGE_TOKENS
    assert [loaded.ok for loaded in rig.pages("load")][:7] == [True] * 5 + [False, True]
    until(lambda: page.key in {saved.key for saved in rig.pages("save")})
    rig.forget()
    assert rig.generate(prompt).details["storage"] == 192
    assert rig.stored_digest(page.key) == page.digest


@pytest.mark.feature("sglang", "blocks that fail to load: computed again")
def test_pages_whose_files_are_gone_are_computed_and_stored_again(rig: Rig) -> None:
    prompt = prompt_tokens(200, seed=10)
    computed = rig.store(prompt)
    paths = {page.key: rig.uri(page.key).path for page in rig.pages("save")}
    removed = paths[rig.pages("save")[9].key]  # a file holds several pages
    Path(removed).unlink()
    gone = {key for key, path in paths.items() if path == removed}
    first_gone = min(number for number, page in enumerate(rig.pages("save")) if page.key in gone)
    rig.forget()
    reused = rig.generate(prompt)
    assert reused.tokens == computed.tokens
    assert reused.details.get("storage", 0) == first_gone * PAGE_TOKENS
    until(lambda: gone <= {saved.key for saved in rig.pages("save") if saved.ok})
    rig.forget()
    assert rig.generate(prompt).details["storage"] == 192


@pytest.mark.feature("sglang", "chunked prefill")
def test_a_prompt_that_is_computed_in_chunks(
    rig: Rig, new_engine: StartEngine, tiny_llama: Path, tmp_path: Path
) -> None:
    prompt = prompt_tokens(900, seed=12)
    computed = rig.store(prompt)
    record = tmp_path / "record"
    config = storage_config(rig.manager.address, rig.instance_id, record)
    engine = new_engine(SGLANG, tiny_llama, storage=config, chunked_prefill_size=64)
    chunked = Rig(engine, record, rig.manager, rig.instance_id)
    longer = prompt + prompt_tokens(300, seed=13)
    answer = chunked.store(longer)
    assert (answer.details["storage"], chunked.generate(prompt).tokens) == (896, computed.tokens)
    rig.forget()
    again = rig.generate(longer)
    assert (again.tokens, again.details["storage"]) == (answer.tokens, 1200 - 1200 % PAGE_TOKENS - PAGE_TOKENS)


@pytest.mark.feature("sglang", "block evicted between lookup and load")
def test_pages_that_are_removed_between_lookup_and_load(rig: Rig) -> None:
    prompt = prompt_tokens(200, seed=14)
    computed = rig.store(prompt)
    saved = {page.key: page.digest for page in rig.pages("save")}
    remove = rig.record.with_name("remove")
    remove.touch()
    try:
        rig.forget()
        leased = rig.generate(prompt)
    finally:
        remove.unlink()
    assert (leased.tokens, leased.details["storage"]) == (computed.tokens, 192)  # the lease of the lookup holds them
    assert all(page.digest == saved[page.key] for page in rig.pages("load"))
    rig.forget()
    again = rig.generate(prompt)
    assert (again.tokens, again.cached_tokens) == (computed.tokens, 0)


@pytest.mark.feature("sglang", "request aborted while it loads")
def test_a_request_that_is_aborted_while_it_loads(rig: Rig) -> None:
    prompt, other = prompt_tokens(200, seed=15), prompt_tokens(200, seed=16)
    computed = [rig.store(prompt).tokens, rig.store(other).tokens]
    hang = rig.record.with_name("hang")
    hang.touch()
    try:
        rig.forget()
        begun = time.monotonic()
        assert "abort" in rig.engine.ask("abort_after", prompt=prompt, pause=0.5).lower()
        assert time.monotonic() - begun < 4
    finally:
        hang.unlink()
    for _ in range(2):
        rig.forget()
        answers = rig.engine.generate([other, prompt], 16)
        assert [answer.tokens for answer in answers] == computed[::-1]
    assert [answer.details["storage"] for answer in answers] == [192, 192]


@pytest.mark.feature("sglang", "several requests at once")
def test_two_engines_compute_and_store_the_same_at_once(rig: Rig, other_rig: Rig) -> None:
    prompts = [prompt_tokens(250, seed=seed) for seed in range(20, 24)]
    rigs = (rig, other_rig)
    for each in rigs:
        each.forget()
        each.engine.send("generate", prompts=prompts, max_tokens=16)
    answers = [[answer["tokens"] for answer in each.engine.answer()] for each in rigs]
    assert answers[0] == answers[1]
    for each in rigs:  # one may load what the other was quicker to store
        until(lambda each=each: len({page.key for what in ("save", "load") for page in each.pages(what)}) >= 4 * 16)
    for each in rigs:
        each.forget()
        reused = each.engine.generate(prompts, 16)
        assert [answer.tokens for answer in reused] == answers[0]
        assert all(answer.cached_tokens == 240 for answer in reused)
        assert all(page.ok and page.digest == rig.stored_digest(page.key) for page in each.pages("load"))
