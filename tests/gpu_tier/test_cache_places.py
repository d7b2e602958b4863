"""The places of a block cache against dictionaries, one request, layer and head at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from gpu_tier.manager.cache_places import CachePlaces
from gpu_tier.retrieval_config import CACHE_POLICIES

LAYERS, REQUESTS = 2, 3


@dataclass
class Model:
    """A cache as the documents tell it: what each place holds, and when and how often it was used."""

    policy: str
    places: int
    held: dict[int, int] = field(default_factory=dict)  # place -> item
    used: dict[int, tuple[int, ...]] = field(default_factory=dict)  # place -> what the order is by
    uses: dict[int, int] = field(default_factory=dict)

    def step(self, wanted: list[int], clock: int, usable: int) -> list[tuple[int, int]]:
        """Return the (item, place) that have to be loaded."""
        at = {item: place for place, item in self.held.items()}
        for item in wanted:
            if item in at:
                self._touch(at[item], clock)
        free = [place for place in range(usable) if self.held.get(place) not in wanted]
        victims = sorted(free, key=lambda place: (place in self.held, self.used.get(place, ()), place))
        misses = [item for item in wanted if item not in at]
        loads = list(zip(misses, victims, strict=False))
        for item, place in loads:
            self.held[place] = item
            self.uses[place] = 1
            self.used[place] = (1, clock) if self.policy == "lfu" else (clock,)
        return loads

    def _touch(self, place: int, clock: int) -> None:
        self.uses[place] += 1
        if self.policy == "lru":
            self.used[place] = (clock,)
        elif self.policy == "lfu":
            self.used[place] = (self.uses[place], clock)


@dataclass
class Case:
    seed: int
    policy: str
    places: int
    items: int
    width: int
    heads: int


cases = st.builds(
    Case, st.integers(0, 1 << 30), st.sampled_from([p for p in CACHE_POLICIES if p != "random"]), st.integers(1, 9),
    st.integers(1, 25), st.integers(1, 9), st.sampled_from([1, 3]),
)  # fmt: skip


def cache_of(case: Case) -> CachePlaces:
    return CachePlaces(
        layers=LAYERS, max_requests=REQUESTS, heads=case.heads, places=case.places, items=case.items,
        policy=case.policy, seed=case.seed, device=torch.device("cpu"),
    )  # fmt: skip


def padded(items: list[int], width: int, rng: Random) -> list[int]:
    """Return items with -1 anywhere between them."""
    row = items + [-1] * (width - len(items))
    order = sorted(rng.sample(range(width), len(items)))
    row = [-1] * width
    for place, item in zip(order, items, strict=True):
        row[place] = item
    return row


@settings(max_examples=examples(200), deadline=None)
@given(cases)
def test_a_history_is_that_of_dictionaries(case: Case) -> None:
    rng = Random(case.seed)
    cache = cache_of(case)
    usable = torch.tensor([rng.randint(0, case.places) for _ in range(REQUESTS)] + [0])
    models: dict[tuple[int, int, int], Model] = {}
    clocks = [0] * LAYERS
    for _ in range(12):
        layer = rng.randrange(LAYERS)
        rows = rng.sample(range(REQUESTS), rng.randint(1, REQUESTS)) + [REQUESTS] * rng.randint(0, 2)
        picks = {
            (b, h): rng.sample(range(case.items), rng.randint(0, min(case.width, case.items)))
            for b, row in enumerate(rows) for h in range(case.heads) if row < REQUESTS
        }  # fmt: skip
        wanted = [[padded(picks.get((b, h), []), case.width, rng) for h in range(case.heads)] for b in range(len(rows))]
        loads = cache.update(torch.tensor([layer] * len(rows)), torch.tensor(rows), torch.tensor(wanted), usable[rows])
        for (b, h), items in picks.items():
            model = models.setdefault((layer, rows[b], h), Model(case.policy, case.places))
            expected = model.step(items, clocks[layer], int(usable[rows[b]]))
            count = int(loads.count[b, h])
            found = zip(loads.items[b, h, :count].tolist(), loads.places[b, h, :count].tolist(), strict=True)
            assert list(found) == expected
            assert (loads.items[b, h, count:] == -1).all()
            check_tables(cache, case, layer, rows[b], h, model)
        assert not loads.count[[b for b, row in enumerate(rows) if row == REQUESTS]].any()
        clocks[layer] += 1
        if rng.random() < 0.2:
            gone = rng.randrange(REQUESTS)
            cache.reset(gone)
            models = {key: model for key, model in models.items() if key[1] != gone}


def check_tables(cache: CachePlaces, case: Case, layer: int, request: int, head: int, model: Model) -> None:
    held = cache.held(layer, request)[head].tolist()
    assert {place: item for place, item in enumerate(held) if item >= 0} == model.held
    places = cache.place_of(layer)[request, head, : case.items].tolist()
    at = {item: place for place, item in model.held.items()}
    assert places == [at.get(item, -1) for item in range(case.items)]


def test_what_is_random_keeps_what_is_wanted_and_repeats_with_its_seed() -> None:
    histories = []
    for seed in (1, 1, 2):
        rng, cache = Random(5), cache_of(Case(seed, "random", 6, 30, 4, 1))
        for _ in range(40):
            wanted = rng.sample(range(30), 4)
            cache.update(torch.tensor([0]), torch.tensor([1]), torch.tensor([[wanted]]), torch.tensor([6]))
            held = cache.held(0, 1)[0].tolist()
            assert set(wanted) <= set(held)
            assert len(set(held) - {-1}) == len([item for item in held if item >= 0])
        histories.append(held)
    assert histories[0] == histories[1] != histories[2]
