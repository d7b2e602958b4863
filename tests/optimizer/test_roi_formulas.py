"""The formulas of the return on a cache, and the inputs that they are given."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.roi import PRESETS, LengthProfile, deployment, fit_profile, parse_deployment, read_profile

numbers = st.floats(1e-3, 1e3)
shares = st.floats(0.01, 1.0)


def one(value: float) -> np.ndarray:
    return np.array([value])


@given(linear=numbers, quadratic=st.floats(0, 1), tokens=st.floats(1, 1e6), share=st.floats(0, 1))
def test_loaded_and_computed_tokens_are_a_prefill(linear: float, quadratic: float, tokens: float, share: float) -> None:
    cached = share * tokens
    whole = deployment.prefill_seconds(linear, quadratic, one(tokens), one(0))
    parts = deployment.prefill_seconds(linear, quadratic, one(cached), one(0))
    rest = deployment.prefill_seconds(linear, quadratic, one(tokens), one(cached))
    assert parts + rest == pytest.approx(whole)
    assert rest >= 0


@given(
    linear=numbers, quadratic=st.just(0.0) | st.floats(1e-6, 10), link=numbers, latency=st.just(0.0) | numbers,
)  # fmt: skip
def test_at_the_threshold_loading_is_computing(linear: float, quadratic: float, link: float, latency: float) -> None:
    threshold = deployment.load_threshold_tokens(linear, quadratic, link_seconds=link, latency=latency)
    assert (threshold == math.inf) == (quadratic == 0 and linear <= link)
    assume(math.isfinite(threshold))

    def gain(tokens: float) -> float:
        return linear * tokens + quadratic * tokens * tokens / 2 - latency - tokens * link

    assert gain(threshold) == pytest.approx(0, abs=1e-6 * (1 + latency + threshold * (linear + link)))
    assert gain(threshold * 1.01 + 1e-6) > gain(threshold)
    assert threshold == 0 or gain(threshold * 0.99) < 1e-9 + gain(threshold)


def test_the_threshold_of_a_constant_throughput() -> None:
    # L0 / (1/P − b/(BW·u)): 30 ms over (40 µs − 10 µs) a token.
    assert deployment.load_threshold_tokens(40e-6, 0, link_seconds=10e-6, latency=30e-3) == pytest.approx(1000)
    assert deployment.load_threshold_tokens(40e-6, 0, link_seconds=10e-6, latency=0) == 0
    assert deployment.load_threshold_tokens(40e-6, 0, link_seconds=40e-6, latency=0) == math.inf


def test_a_load_takes_its_latency_and_its_bytes_over_the_usable_bandwidth() -> None:
    seconds = deployment.load_seconds(one(1000), kv_bytes=100, bandwidth=1e6, usable=0.5, latency=0.25)
    assert seconds == pytest.approx(0.45)


@given(prefill=numbers, kv_bytes=numbers, bandwidth=numbers, usable=shares, offered=numbers)
def test_at_saturation_links_are_as_busy_as_gpus(
    prefill: float, kv_bytes: float, bandwidth: float, usable: float, offered: float
) -> None:
    share = deployment.saturation_share(prefill, kv_bytes=kv_bytes, bandwidth=bandwidth, usable=usable)
    assert 0 < share < 1
    assert offered * (1 - share) / prefill == pytest.approx(offered * share * kv_bytes / (bandwidth * usable))


@given(without=numbers, relieved=st.floats(0, 1), links=st.just(0.0) | numbers, part=st.floats(0, 1))
def test_no_other_part_of_loads_needs_fewer_nodes(without: float, relieved: float, links: float, part: float) -> None:
    relief = relieved * without

    def nodes(share: float) -> float:
        return max(without - share * relief, share * links)

    best = float(deployment.loaded_part(without, one(relief), one(links))[0])
    assert 0 <= best <= 1
    assert nodes(best) <= nodes(part) * (1 + 1e-12)
    assert nodes(best) <= without * (1 + 1e-12)


def test_nodes_are_bought_whole_and_rounding_buys_none() -> None:
    assert deployment.whole_nodes(np.array([0.0, 1.0, 1 + 1e-12, 1.001, 3.0])).tolist() == [0, 1, 1, 2, 3]
    assert deployment.gpus_saved(8, 5.0, np.array([5.0, 2.5])).tolist() == [0, 20]


def test_storage_is_paid_by_the_month_and_gib() -> None:
    assert deployment.storage_price_per_hour(one(730 * 2**30), 0.1) == pytest.approx(0.1)


@given(st.lists(st.tuples(st.floats(1, 1e5), st.floats(1e-3, 1e3)), min_size=1, max_size=6), numbers, numbers)
def test_no_other_profile_fits_better(points: list[tuple[float, float]], linear: float, quadratic: float) -> None:
    found = fit_profile(points)
    assert min(found.linear, found.quadratic) >= 0

    def squares(a: float, q: float) -> float:
        return sum((a * n + q * n * n / 2 - seconds) ** 2 for n, seconds in points)

    least = squares(found.linear, found.quadratic)
    around = ((1.01, 1), (1, 0.99), (0, 1), (1, 0))
    others = [(found.linear * a, found.quadratic * q) for a, q in around]
    for other in (*others, (linear * 1e-4, quadratic * 1e-8), (found.linear + 1e-6, found.quadratic)):
        assert least <= squares(*other) * (1 + 1e-6) + 1e-12


def test_points_are_read_from_csv_and_json(tmp_path: Path) -> None:
    points = [(1000, 0.1), (2000, 0.3), (4000, 1.0)]
    table = tmp_path / "points.csv"
    table.write_text("tokens, seconds\n" + "".join(f"{tokens}, {seconds}\n" for tokens, seconds in points))
    pairs, rows = tmp_path / "pairs.json", tmp_path / "rows.json"
    pairs.write_text(json.dumps(points))
    rows.write_text(json.dumps([{"tokens": tokens, "seconds": seconds} for tokens, seconds in points]))
    assert read_profile(table) == read_profile(pairs) == read_profile(rows) == fit_profile(points)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "a,b\n1,2\n", "tokens,seconds\n1\n", "tokens,seconds\nx,1\n", "[[1]]", '[{"tokens": 1}]', "[1]", "[",
     "[[0, 1]]", "[[1, 0]]", "[[1, NaN]]", "[[1, -1]]"],
)  # fmt: skip
def test_a_file_without_points_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "points").write_text(text)
    with pytest.raises(OptionError, match=r"profile: .*allowed"):
        read_profile(tmp_path / "points")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"profile: .*none"):
        read_profile(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match=r"profile: .*bytes"):
        read_profile(tmp_path / "bytes")


def test_a_deployment_is_a_preset_and_its_differences() -> None:
    asked = parse_deployment("deepseek_v3,gpu_hour=2.5,bandwidth=50e9")
    assert asked == replace(PRESETS["deepseek_v3"], price_per_gpu_hour=2.5, bandwidth_bytes_per_second=50e9)
    assert parse_deployment("qwen3_coder_480b") == PRESETS["qwen3_coder_480b"]
    assert parse_deployment(" prefill = 5e4 , offered=1000") == replace(
        PRESETS["deepseek_v3"], prefill_tokens_per_second=5e4, offered_tokens_per_second=1000.0
    )


def test_a_deployment_names_its_profile(tmp_path: Path) -> None:
    (tmp_path / "points.json").write_text("[[1000, 0.1], [2000, 0.3]]")
    profile = parse_deployment(f"deepseek_v3,profile={tmp_path / 'points.json'}").profile
    assert profile.seconds(one(2000), one(0)) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("deepseek", "'deepseek' is no preset; .*did you mean deepseek_v3"),
        ("deepseek_v3,bandwith=1", "'bandwith' is no input; .*did you mean bandwidth"),
        ("deepseek_v3,gpu_hour=cheap", "gpu_hour is 'cheap'; allowed: a number"),
        ("deepseek_v3,usable=1.5", "usable_share is 1.5; allowed: above 0, up to 1"),
    ],
)
def test_an_invalid_deployment_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=f"deployment: {message}"):
        parse_deployment(text)


@pytest.mark.parametrize("name", deployment.RANGES)
def test_every_input_has_a_range(name: str) -> None:
    with pytest.raises(OptionError, match=f"deployment: {name} is -1"):
        replace(PRESETS["deepseek_v3"], **{name: -1})
    assert deployment.RANGES[name].clamp(-1) in deployment.RANGES[name]
    assert deployment.RANGES[name].clamp(1e30) in deployment.RANGES[name]


@pytest.mark.parametrize("coefficients", [(0.0, 0.0), (-1.0, 1.0), (1.0, math.nan)])
def test_a_profile_takes_time(coefficients: tuple[float, float]) -> None:
    with pytest.raises(OptionError, match="profile: linear"):
        LengthProfile(*coefficients)
