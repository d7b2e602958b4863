"""`kvcm trace`: what it says, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvcm.cli import app
from kvcm.optimizer.readers import read_trace


def run(*arguments: object, code: int = 0) -> tuple[str, str]:
    """Return what a command prints, and what it complains of."""
    done = CliRunner().invoke(app, ["trace", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.stdout, done.stderr


def refused(*arguments: object) -> str:
    """Return the one line of a refusal."""
    stdout, stderr = run(*arguments, code=2)
    assert not stdout
    (line,) = stderr.splitlines()
    assert line.startswith("kvcm: ")
    return line


@pytest.fixture
def file(tmp_path: Path) -> Path:
    base = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "session": "acme"}
    lines = [json.dumps(base | {"hash_ids": ids}) for ids in ([1, 2, 3], [1, 2, 4])]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join([lines[0], "{}", lines[1]]))
    return path


def test_info_prints_the_contents_of_a_trace(file: Path) -> None:
    stdout, stderr = run("info", file, "--block-tokens", 512, "--json")
    facts = json.loads(stdout)
    assert (facts["requests"], facts["accesses"], facts["unique_blocks"]) == (2, 6, 4)
    assert (facts["block_tokens"], facts["sessions"], facts["bad_lines"]) == (512, 1, 1)
    assert stderr.splitlines() == [
        f"kvcm: {file}:2: Object missing required field timestamp",
        f"kvcm: {file}: bad lines left out: 1",
    ]
    assert "unique blocks" in run("info", file, "--no-cache")[0]


def test_info_keeps_the_binary_form_unless_reported_otherwise(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = file.parent / "cache"
    monkeypatch.setenv("KVCM_CACHE_DIRECTORY", str(cache))
    run("info", file, "--no-cache")
    assert not cache.exists()
    run("info", file)
    assert [each.suffix for each in (cache / "traces").iterdir()] == [".kvtrace"]


def test_convert_writes_another_format_and_names_the_fields_that_it_drops(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gz"
    stdout, stderr = run("convert", file, out, "--to", "optimizer_schema")
    assert stdout == f"wrote {out}: 2 requests\n"
    assert "kvcm: optimizer_schema does not hold sessions: left out" in stderr
    assert read_trace(out, use_cache=False).block_tokens == 512
    assert "exists: choose another name, or give --force" in refused("convert", file, out, "--to", "mooncake")
    assert "format: 'csv' is none; allowed: mooncake" in refused("convert", file, tmp_path / "x", "--to", "csv")
    _, stderr = run("convert", file, out, "--to", "qwen_bailian", "--force", code=2)
    assert "blocks of qwen_bailian have 16 tokens, those of in.jsonl 512" in stderr


def test_anonymise_writes_the_same_format(file: Path, tmp_path: Path) -> None:
    out, other, salt = tmp_path / "out", tmp_path / "other", tmp_path / "salt"
    salt.write_text("a secret of 16 bytes or more\n")
    assert "others can read the secret" in refused("anonymise", file, out, "--salt-file", salt)
    salt.chmod(0o600)
    stdout, stderr = run("anonymise", file, out, "--salt-file", salt)
    assert stdout == f"wrote {out}: 2 lines of mooncake\n"
    assert "bad lines left out: 1" in stderr
    assert "secret" not in stdout + stderr + out.read_text()
    run("anonymise", file, other, "--salt-file", salt)
    assert other.read_bytes() == out.read_bytes()
    run("anonymise", file, other, "--force")
    assert other.read_bytes() != out.read_bytes()
    assert json.loads(other.read_text().splitlines()[0])["timestamp"] == 0
    salt.write_text("short")
    assert "salt: has 5 bytes; allowed: 16 to 64" in refused("anonymise", file, other, "--salt-file", salt, "--force")


def test_a_read_error_is_one_line(tmp_path: Path) -> None:
    assert "No such file" in refused("info", tmp_path / "none")
    assert "is a directory" in refused("anonymise", tmp_path, tmp_path / "out")
    (tmp_path / "text").write_text("Dear diary,\n")
    assert "of no known format" in refused("info", tmp_path / "text")
    assert "is out of range" in refused("info", tmp_path / "text", "--format", "mooncake", "--block-tokens", 1 << 40)
    assert "No such file" in refused("convert", tmp_path / "none", tmp_path / "out", "--to", "mooncake")
