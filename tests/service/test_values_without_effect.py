"""Values without effect are reported where an operator looks: the answer, the command line, the log, `kvcm doctor`."""

from __future__ import annotations

import json
from pathlib import Path

from test_transport_process import ManagerProcess, manager, run_kvcm
from test_transport_sites import Site, group_spec


def _reasons(process: ManagerProcess) -> list[tuple[str, str]]:
    return [(event["name"], event["reason"]) for event in process.events("without_effect")]


def test_values_without_effect_are_reported_by_answers_log_and_doctor(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    document = {
        "storage_config": {
            "type": "file", "global_unique_name": "s", "storage_spec": {"root_path": f"{root}/", "colour": "red"},
        },
        "instance_group": {"name": "g", "storage_candidates": ["s"], "quota": {"capacity": 1 << 20}},
    }  # fmt: skip
    startup = tmp_path / "startup.json"
    startup.write_text(json.dumps(document))
    settings = (f"kvcm.startup_config={startup}", f"kvcm.data_dir={tmp_path / 'data'}")
    with manager(tmp_path, *settings) as process, process.api() as api:
        assert _reasons(process) == [
            (str(startup), "startup document.storage_config.storage_spec.colour is unknown here and has no effect")
        ]
        site = Site(api)
        spec = group_spec("odd", "s", "t")
        spec["cache_config"]["meta_indexer_config"]["meta_cache_policy_config"] = {"type": "LRU", "capacity": 77}
        message = api.ok("AdminService.CreateInstanceGroup", instance_group=spec).header.status.message
        for text in ("['t'] do not exist", "storage_unique_name 's' has no effect", "capacity 77 has no effect"):
            assert text in message
        fields = {"global_unique_name": "u", "dummy": {"root_path": "u"}, "used_percentage": 0.5}
        assert "used_percentage 0.5" in api.ok("AdminService.AddStorage", storage=fields).header.status.message
        updated = api.ok("AdminService.UpdateStorage", storage=fields, force_update=True).header.status.message
        assert "force_update has no effect" in updated
        level = api.ok("AdminService.UpdateLogger", log_level="INFO", module_name="cache").header.status.message
        assert "module_name has no effect" in level
        assert site.group("s")  # says nothing that is not so
        doctor = run_kvcm(tmp_path, "doctor", "--manager", f"http://{process.address.admin_http}")
        for text in ("group odd: cache_config.meta_indexer_config", "storage u: used_percentage 0.5 has no effect"):
            assert text in " ".join(doctor.stdout.split())
    with manager(tmp_path, *settings) as process:
        named = {name for name, _ in _reasons(process)}
        assert named == {str(startup), "group odd", "storage u"}
