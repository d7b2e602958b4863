"""Policies and capacities as people ask for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.options import (
    DEFAULT_CAPACITIES,
    POLICY_NAMES,
    PolicySpec,
    parse_capacities,
    parse_policies,
    parse_policy,
)

_TTLS = st.sampled_from([600.0, 0.5, 1234567.25, 1e-6])
_SAMPLES_AND_SEEDS = (st.integers(1, 4096), st.integers(0, (1 << 32) - 1))
_FLAG = st.booleans()


@given(st.builds(PolicySpec, st.sampled_from(POLICY_NAMES), _TTLS, _FLAG, *_SAMPLES_AND_SEEDS, _FLAG, _FLAG))
def test_a_label_says_all_that_has_an_effect(spec: PolicySpec) -> None:
    found = parse_policy(spec.label)
    assert found.label == spec.label
    if spec.name == "ttl":
        assert (found.ttl_seconds, found.ttl_sliding) == (spec.ttl_seconds, spec.ttl_sliding)
    if spec.name == "random_lru":
        assert (found.sample, found.seed) == (spec.sample, spec.seed)
    if spec.name == "s3fifo":
        assert found.warmup == spec.warmup
    if spec.name == "belady":
        assert found.bypass == spec.bypass


def test_lists_have_each_policy_once_in_their_order() -> None:
    assert [spec.label for spec in parse_policies("lfu, lru,lfu,ttl:seconds=600")] == ["lfu", "lru", "ttl"]
    assert [spec.name for spec in parse_policies("all")] == list(POLICY_NAMES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lur", "policies: 'lur' is no policy; there are .*did you mean lru"),
        ("", "policies: '' is no policy"),
        ("lru:warmup", "lru has no option 'warmup'; allowed: none"),
        ("ttl:second=3", "ttl has no option 'second=3'; allowed: seconds=a number from 1e-6 on, sliding, fixed"),
        ("ttl:seconds=0", "allowed: seconds=a number from 1e-6 on"),
        ("ttl:seconds=nan", "allowed: seconds=a number from 1e-6 on"),
        ("ttl:fixed=1", "allowed: fixed without a value"),
        ("random_lru:sample=0", "allowed: sample=1 to 4096"),
        ("random_lru:sample=٣", "allowed: sample=1 to 4096"),
        ("random_lru:seed=-1", "allowed: seed=0 to"),
    ],
)
def test_an_unknown_policy_is_refused(text: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parse_policies(text)


def test_shares_are_rounded_down_to_blocks_and_never_to_none() -> None:
    assert parse_capacities(DEFAULT_CAPACITIES, 172_156) == (1721, 3443, 8607, 17215, 34431, 86078, 172156)
    assert parse_capacities("29%, 5000 ,0.1%,0.2%", 100) == (29, 5000, 1)  # 100 * 0.29 is less than 29 in binary


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "0%", "x", "", "1e99", "nan", "inf%", "1_0", "٣", "1 0", "5%%"])
def test_text_that_is_no_capacity_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"capacities: .* is none; allowed: blocks such as 5000, or a share"):
        parse_capacities(text, 100)
