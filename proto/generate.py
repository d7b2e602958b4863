"""Regenerates kvcm/protocol from the .proto files beside this script: `python proto/generate.py`.

Descriptors keep the file names of the contract (`meta_service.proto`), so the compiler runs with this folder as its
root. The modules it writes import each other by those names; the imports are rewritten to where the modules really lie.
"""

import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc_tools  # type: ignore[import-untyped]
from grpc_tools import protoc

__all__ = ["WELL_KNOWN", "generate", "main"]

SOURCE = Path(__file__).resolve().parent
WELL_KNOWN = Path(grpc_tools.__file__).parent / "_proto"
"""Where the compiler has google/protobuf/*.proto."""
TARGET = SOURCE.parent / "kvcm" / "protocol"
PACKAGE = "kvcm.protocol"

_IMPORT = re.compile(r"^import (\w+_pb2) as ", re.MULTILINE)
_IMPORT_V1 = re.compile(r"^from kvcm\.v1 import (\w+_pb2) as ", re.MULTILINE)

_DOCSTRINGS = {
    ".": '"""Messages and calls of the wire contract, generated from proto/ by proto/generate.py; never edited."""\n',
    "kvcm": '"""Package kvcm of the wire contract, generated; never edited."""\n',
    "kvcm/v1": '"""Our own additions to the wire contract, generated; never edited."""\n',
}


def generate(target: Path) -> None:
    """Replaces `target` by the generated code.

    Raises:
        RuntimeError: The compiler refused a file; its complaint is on stderr and `target` is as before.
        FileExistsError: `target` holds something else than generated code and is left alone.
    """
    with TemporaryDirectory() as folder:
        fresh = Path(folder)
        _compile(fresh)
        for module in [*fresh.rglob("*.py"), *fresh.rglob("*.pyi")]:
            module.write_text(_rewritten(module.read_text("utf-8")), "utf-8")
        for package, docstring in _DOCSTRINGS.items():
            (fresh / package / "__init__.py").write_text(docstring, "utf-8")
        _remove(target)
        shutil.copytree(fresh, target)


def main() -> None:
    """Regenerates the committed code."""
    generate(TARGET)


def _remove(target: Path) -> None:
    """Removes earlier output as a whole: a deleted .proto file must not leave its modules behind."""
    if not target.exists():
        return
    if any(target.iterdir()) and not list(target.glob("*_pb2.py")):
        raise FileExistsError(f"{target} holds something else than generated code; name another folder")
    shutil.rmtree(target)


def _compile(target: Path) -> None:
    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    files = sorted(str(path) for path in SOURCE.rglob("*.proto"))
    if protoc.main(["protoc", f"-I{SOURCE}", f"-I{WELL_KNOWN}", *outputs, *files]) != 0:
        raise RuntimeError("protoc failed; its message above names the file and the line")


def _rewritten(text: str) -> str:
    text = _IMPORT.sub(rf"from {PACKAGE} import \1 as ", text)
    return _IMPORT_V1.sub(rf"from {PACKAGE}.kvcm.v1 import \1 as ", text)


if __name__ == "__main__":
    main()
