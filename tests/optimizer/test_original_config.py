"""The configuration of the original optimizer, and what is refused of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from original_documents import config, document, group, instance

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.groups.original import OriginalConfig, OriginalInstance


def test_a_document_is_read() -> None:
    read = config(group(instance("a"), instance("b", "random_lru", sample_rate=0.5)), mode=1, batch=7)
    assert (read.eviction_mode, read.batch_size, read.trace_type) == (1, 7, "publisher_log")
    assert (read.trace_file_path, read.output_result_path) == ("t.log", "out")
    assert read.instances == (OriginalInstance("a"), OriginalInstance("b", 16, "random_lru", 0.5))
    assert read.block_sizes == {"a": 16, "b": 16}
    assert read.groups[0].storages[0].unique_name == "s"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trace_type": "csv"}, "trace_type: 'csv'; allowed: qwen_bailian, publisher_log, optimizer_schema"),
        ({"trace_file_path": 3}, "trace_file_path: 3; allowed: a text"),
        ({"eviction_params": 3}, "eviction_params: 3; allowed: an object"),
        ({"eviction_params": {"eviction_mode": 4}}, "eviction_mode: 4; allowed: a whole number from 1 to 3"),
        ({"eviction_params": {"eviction_mode": True}}, "eviction_mode: True; allowed: a whole number from 1 to 3"),
        (
            {"eviction_params": {"eviction_mode": 1, "eviction_batch_size_per_instance": 0}},
            "eviction_params.eviction_batch_size_per_instance: 0; allowed: a whole number from 1 to",
        ),
        (
            {"eviction_params": {"eviction_mode": 2}},
            "eviction_params.eviction_batch_size_per_instance: missing; it has to be there",
        ),
        ({"instance_groups": []}, r"instance_groups: []; allowed: a list of at least one object"),
        ({"instance_groups": [3]}, "instance_groups[0]: 3; allowed: an object"),
        ({"instance_groups": [group(storages=[])]}, "instance_groups[0].storages: []; allowed: a list"),
        ({"instance_groups": [group(used_percentage=1.5)]}, "used_percentage: 1.5; allowed: a number from 0 to 1"),
        ({"instance_groups": [group(quota_capacity="4")]}, "quota_capacity: '4'; allowed: a whole number from 0"),
        ({"instance_groups": [group(hierarchical_eviction_enabled=1)]}, "enabled: 1; allowed: true, false"),
        ({"instance_groups": [group(instance(policy="lfu"))]}, "'lfu'; allowed: lru, random_lru, leaf_aware_lru"),
        ({"instance_groups": [group(instance(sample_rate=0))]}, "sample_rate: 0; allowed: a number above 0 up to 1"),
        ({"instance_groups": [group(instance(""))]}, "instance_id has 0 bytes of UTF-8, allowed are 1 to 256"),
        ({"instance_groups": [group(instance(), instance())]}, "instance_id: 'a' stands there twice; allowed: each"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as refused:
        OriginalConfig.parse(json.dumps(json.loads(document()) | change))
    assert message in str(refused.value)


def test_every_field_that_is_needed_is_named_when_it_is_missing() -> None:
    whole = json.loads(document(mode=1))
    for name in whole:
        with pytest.raises(OptionError, match=f"^{name}: missing; it has to be there"):
            OriginalConfig.parse(json.dumps({each: value for each, value in whole.items() if each != name}))


@pytest.mark.parametrize("text", ["", "{", "3", "null", "[]", '"x"', b"\xff", "[" * 100_000])
def test_what_is_no_document_is_refused(text: str | bytes) -> None:
    with pytest.raises(OptionError, match="config: "):
        OriginalConfig.parse(text)


def test_plain_options_make_one_group() -> None:
    plain = OriginalConfig.plain(["a", "b"], 8, policy="leaf_lru")
    assert plain.groups[0].limit == 8
    assert [each.policy for each in plain.instances] == ["leaf_aware_lru"] * 2
    assert (plain.trace_type, plain.eviction_mode) == ("", 3)
    with pytest.raises(OptionError, match="policy_type: 'sieve'; allowed: lru, random_lru, leaf_aware_lru"):
        OriginalConfig.plain(["a"], 8, policy="sieve")
