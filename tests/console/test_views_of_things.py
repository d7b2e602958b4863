"""Storages, instances and keys as pages show them."""

from __future__ import annotations

from typing import Any

import pytest

from kvcm.console.views.instances import instance_views
from kvcm.console.views.keys import key_views
from kvcm.console.views.roles import shown_role
from kvcm.console.views.storages import shares_of, storage_views


def storage(name: str, health: str = "SH_UP", *, is_available: bool = True, reason: str = "") -> dict[str, Any]:
    status = {"health": health, "reason": reason}
    spec = {"nfs": {"root_path": "/kv/", "key_count_per_file": 0}, "mooncake": None}
    return {"global_unique_name": name, "is_available": is_available, "status": status, **spec}


def drain(name: str, state: str) -> dict[str, Any]:
    return {"kind": "drain", "storage": name, "state": state, "left_bytes": 1, "reason": "", "started_ms": 1}


def test_storages_that_somebody_should_look_at_come_first() -> None:
    found = storage_views(
        [
            *(storage("b"), storage("a"), storage("draining"), storage("new", "SH_UNSPECIFIED")),
            *(storage("off", is_available=False), storage("slow", "SH_DEGRADED"), storage("down", "SH_DOWN")),
        ],
        {"storages": []},
        [drain("draining", "running"), {**drain("a", "running"), "kind": "removal"}],
    )
    assert [view.name for view in found] == ["down", "off", "slow", "draining", "a", "b", "new"]
    assert {view.name: [text for text, _ in view.badges] for view in found} == {
        "down": ["down"], "off": ["disabled", "up"], "slow": ["degraded"], "draining": ["draining", "up"],
        "a": ["up"], "b": ["up"], "new": ["not probed yet"],
    }  # fmt: skip


def test_a_storage_tells_what_is_known_of_it() -> None:
    usage = {"usage": {"used_bytes": 7}, "deletion_backlog": 2, "deletion_failures": 3, "oversubscription": 1.5}
    (view,) = storage_views(
        [storage("old", reason="slow")],
        {"storages": [{"storage_unique_name": "old", **usage}]},
        [drain("old", "done")],
    )
    assert (view.kind, view.reason, view.settings) == ("Shared directory", "slow", [("root_path", "/kv/")])
    assert (view.usage["used_bytes"], view.deletions, view.failures, view.oversubscription) == (7, 2, 3, 1.5)
    assert [text for text, _ in view.badges] == ["drained", "up"]


def test_groups_on_a_storage_are_ordered_by_what_they_use() -> None:
    groups = [
        {"name": name, "storages": [{"storage_unique_name": where, "used_bytes": used, "guaranteed_bytes": 0}]}
        for name, where, used in (("a", "disk", 1), ("b", "disk", 5), ("c", "other", 9))
    ]
    assert [share.group for share in shares_of("disk", {"groups": groups})] == ["b", "a"]


def test_instances_know_the_bytes_of_their_blocks_and_what_they_use() -> None:
    model = {"model_name": "m", "dtype": "bf16", "use_mla": True, "tp_size": 2, "pp_size": 0, "dp_size": 1}
    model |= {"lora_name": "", "extra": "", "user_data": "note"}
    parts = [{"name": f"tp{rank}", "size": 3, "kind": "LSK_FULL_ATTENTION"} for rank in range(2)]
    instances = [
        {
            "instance_id": name, "instance_group_name": group, "location_spec_infos": parts, "model_deployment": model,
        }
        for name, group in (("z", "a"), ("a", "b"), ("b", "a"))
    ]  # fmt: skip
    used = {"instance_id": "b", "key_count": 4, "max_key_count": -1, "used_bytes": 24, "policy": "lru"}
    found = instance_views(instances, [{"instances": [used]}])
    assert [(view.group, view.name) for view in found] == [("a", "b"), ("a", "z"), ("b", "a")]
    assert (found[0].block_bytes, found[0].usage["key_count"], found[1].usage["key_count"]) == (6, 4, 0)
    assert found[0].deployment == [
        ("Parallelism", "2 ways by tensor, 1 ways by data"), ("Attention", "multi-head latent"), ("Note", "note"),
    ]  # fmt: skip
    assert found[0].parts[0] == ("tp0", 3, "full attention")


@pytest.mark.parametrize(
    ("changes", "scope", "verbs", "ends_soon"),
    [
        ({}, "all groups", "", False),
        ({"instance_groups": ["*"], "verbs": ["MATCH", "PIN"]}, "all groups", "match, pin", False),
        ({"instance_groups": ["a", "b"], "expires_at_ms": 1_000_000}, "a, b", "", True),
        ({"expires_at_ms": 1_000_000, "account": "grace"}, "all groups", "", False),
        ({"expires_at_ms": 20 * 86_400_000}, "all groups", "", False),
    ],
)
def test_keys_tell_where_they_count_and_whether_they_end_soon(
    changes: dict[str, Any], scope: str, verbs: str, ends_soon: bool
) -> None:
    key = {"key_id": "k", "name": "n", "role": "ROLE_ENGINE", "instance_groups": [], "verbs": [], "account": ""}
    (view,) = key_views([{**key, "expires_at_ms": 0, **changes}], 0)
    assert (view.role, view.scope, view.verbs, view.ends_soon) == ("engine", scope, verbs, ends_soon)


def test_roles_have_one_name_on_accounts_and_keys() -> None:
    assert [shown_role(role) for role in ("ROLE_USER", "ROLE_VIEWER", "ROLE_ADMIN", "ROLE_NEW")] == [
        "viewer", "viewer", "administrator", "role_new",
    ]  # fmt: skip
