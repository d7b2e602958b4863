"""kvcm/protocol is what proto/generate.py makes of the .proto files: nothing edited, missing or left over."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load_generator() -> ModuleType:
    """proto/ is a folder of scripts, not a package."""
    spec = importlib.util.spec_from_file_location("kvcm_proto_generate", ROOT / "proto" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def test_committed_code_is_up_to_date(tmp_path: Path) -> None:
    load_generator().generate(tmp_path)
    fresh, committed = files(tmp_path), files(ROOT / "kvcm" / "protocol")
    hint = "run `make proto`"
    assert sorted(fresh) == sorted(committed), hint
    assert [name for name in fresh if fresh[name] != committed[name]] == [], hint


def test_earlier_output_is_replaced_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "removed_service_pb2.py").write_text("")
    load_generator().generate(tmp_path)
    assert "removed_service_pb2.py" not in files(tmp_path)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="holds something else"):
        load_generator().generate(tmp_path)
    assert files(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.parametrize("name", ["meta", "admin", "debug", "kv_meta", "kvcm.v1.lease", "kvcm.v1.group"])
def test_every_module_can_be_imported(name: str) -> None:
    module = importlib.import_module(f"kvcm.protocol.{name}_service_pb2_grpc")
    assert any(attribute.endswith("ServiceStub") for attribute in vars(module))
