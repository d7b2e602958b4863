"""The cost model of clustering: planted coefficients are found again, and profiles of other machines are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from gpu_tier.errors import ConfigError
from gpu_tier.geometry import KVGeometry, KVKind
from gpu_tier.index import iterations
from gpu_tier.index.iterations import CostModel, Profile
from gpu_tier.index.layer_time import dense_layer_seconds
from gpu_tier.rows import KVDtype
from gpu_tier.runtime import NullRuntime

PLANTED = CostModel(alpha1=2e-3, beta1=3e-7, delta=5e-7, alpha2=1e-3, beta2=2e-6, gamma2=4e-10)
SIZES, COUNTS = (1024, 2048, 4096, 8192, 16384), (1, 3, 10, 30)
OF = iterations.fingerprint("some device", 4, {"heads": 8, "dims": 128, "m": 4, "b": 8})


def measured(model: CostModel, noise: float, seed: int = 0) -> Profile:
    random = torch.Generator().manual_seed(seed)

    def noisy(seconds: float) -> float:
        return seconds * math.exp(noise * float(torch.randn((), generator=random)))

    clustering = [(s, t, noisy(model.clustering_seconds(s, t))) for s in SIZES for t in COUNTS]
    layers = [(s, noisy(model.layer_seconds(s))) for s in SIZES for _ in range(4)]
    return iterations.fit(clustering, layers, OF)


def test_planted_coefficients_are_found() -> None:
    found = measured(PLANTED, 0.0)
    for name in PLANTED.__slots__:
        assert getattr(found.model, name) == pytest.approx(getattr(PLANTED, name), rel=1e-6)
    assert found.clustering_r2 == pytest.approx(1)
    assert found.layer_r2 == pytest.approx(1)


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 10**6))
def test_they_are_found_under_noise(seed: int) -> None:
    """With 3 % of noise what matters is right: the cost of an iteration, of a long layer, and hence T."""
    found = measured(PLANTED, 0.03, seed)
    assert found.model.beta1 == pytest.approx(PLANTED.beta1, rel=0.1)
    assert found.model.gamma2 == pytest.approx(PLANTED.gamma2, rel=0.4)
    assert found.model.layer_seconds(16384) == pytest.approx(PLANTED.layer_seconds(16384), rel=0.1)
    wanted = PLANTED.iterations(65536, 1, 10**6)
    assert found.model.iterations(65536, 1, 10**6) == pytest.approx(wanted, rel=0.4)
    assert found.clustering_r2 > 0.98


@settings(max_examples=examples(100), deadline=None)
@given(tokens=st.integers(100, 200_000))
def test_the_most_iterations_that_fit_into_a_layer_are_taken(tokens: int) -> None:
    count = PLANTED.iterations(tokens, 3, 300)
    assert 3 <= count <= 300
    if count > 3:
        assert PLANTED.clustering_seconds(tokens, count) <= PLANTED.layer_seconds(tokens)
    if count < 300:
        assert PLANTED.clustering_seconds(tokens, count + 1) > PLANTED.layer_seconds(tokens)


def test_too_few_measurements_are_refused() -> None:
    with pytest.raises(ConfigError, match="three different sizes"):
        iterations.fit_layer([(128, 1.0), (128, 1.1), (256, 2.0)])
    with pytest.raises(ConfigError, match="took some time"):
        iterations.fit_layer([(128, 1.0), (256, 0.0), (512, 2.0)])


def test_measuring_asks_for_enough_tokens_and_ends_in_time() -> None:
    clustered, layers = [], []

    def cluster(tokens: int, count: int) -> float:
        clustered.append((tokens, count))
        return PLANTED.clustering_seconds(tokens, count)

    def layer(tokens: int) -> float:
        layers.append(tokens)
        return 1e-3 * tokens

    found = iterations.measure(cluster, layer, OF, fewest=2048)
    assert min(tokens for tokens, _ in clustered) >= 2048
    assert found.model.beta1 == pytest.approx(PLANTED.beta1, rel=1e-4)
    assert max(layers) <= 4096  # a slow layer is not asked for longer and longer prompts
    assert len(set(layers)) >= 4


def test_a_profile_survives_the_disk(tmp_path: Path) -> None:
    path, profile = tmp_path / "profile.json", measured(PLANTED, 0.05)
    iterations.save(path, profile)
    assert iterations.load(path, OF) == profile
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]
    assert "processor" in json.loads(path.read_text())["fingerprint"]


def test_another_machines_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = measured(PLANTED, 0.0)
    iterations.save(path, profile)
    for changed in ({"device": "another"}, {"threads": 8}, {"m": 2}, {"new": 1}):
        with pytest.raises(ConfigError, match=next(iter(changed))):
            iterations.load(path, {**OF, **changed})
    assert iterations.load(path, OF) == profile  # and left as it was


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"beta1"', '"beta"'),
        lambda text: text.replace('"clustering_r2"', '"r2"'),
        lambda text: json.dumps({**json.loads(text), "model": {**json.loads(text)["model"], "beta1": "much"}}),
        lambda text: json.dumps({**json.loads(text), "model": {**json.loads(text)["model"], "beta1": math.nan}}),
        lambda text: json.dumps({**json.loads(text), "fingerprint": 5}),
        lambda text: json.dumps({**json.loads(text), "model": None}),
    ],
    ids=["empty", "cut off", "a list", "no beta1", "no r2", "a word", "nan", "no fingerprint", "no model"],
)
def test_a_damaged_profile_is_refused(tmp_path: Path, damage: object) -> None:
    path = tmp_path / "profile.json"
    iterations.save(path, measured(PLANTED, 0.0))
    assert callable(damage)
    path.write_text(damage(path.read_text()))
    with pytest.raises(ConfigError, match="delete it"):
        iterations.obtain(str(path), OF, lambda: measured(PLANTED, 0.0))


def test_a_profile_that_does_not_exist_is_measured_and_kept(tmp_path: Path) -> None:
    path, taken = tmp_path / "profile.json", []

    def take() -> Profile:
        taken.append(1)
        return measured(PLANTED, 0.0)

    first = iterations.obtain(str(path), OF, take)
    assert iterations.obtain(str(path), OF, take) == first
    assert len(taken) == 1


def test_a_profile_that_cannot_be_written_is_refused_before_it_is_measured(tmp_path: Path) -> None:
    def take() -> Profile:
        raise AssertionError("measured in vain")

    with pytest.raises(ConfigError, match="must be a folder in which it can be written"):
        iterations.obtain(str(tmp_path / "missing" / "profile.json"), OF, take)


def test_without_a_file_it_is_measured_once_in_a_process() -> None:
    taken = []

    def take() -> Profile:
        taken.append(1)
        return measured(PLANTED, 0.0)

    of = {**OF, "device": "that of this test"}
    assert iterations.obtain("", of, take) is iterations.obtain("", of, take)
    assert len(taken) == 1


@pytest.mark.parametrize("kind", list(KVKind))
def test_a_layer_of_any_geometry_can_be_measured(kind: KVKind) -> None:
    geometry = KVGeometry(kind, 2, 1, 24, 16, KVDtype.F32, page_size=16)
    ticks = iter(range(100))
    seconds = dense_layer_seconds(geometry, 4, NullRuntime(), clock=lambda: float(next(ticks)))
    assert [seconds(32), seconds(64)] == [1.0, 1.0]
