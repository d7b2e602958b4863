"""Certificates, as the doctor sees them."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcm.doctor.certificates import check_authorities, check_certificate, check_expiry, shown_certificate
from kvcm.doctor.findings import Finding, Level

DAY = 86_400.0


class Pair(NamedTuple):
    """A certificate that vouches for itself, and its key."""

    cert: str
    key: str


def _made(directory: Path, name: str, *options: str) -> Pair:
    made = Pair(str(directory / f"{name}.pem"), str(directory / f"{name}.key"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
         "365", "-subj", f"/CN={name}", *options, "-keyout", made.key, "-out", made.cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One for a year and two names."""
    names = "subjectAltName=DNS:kvcm.example,IP:10.0.0.1"
    return _made(tmp_path_factory.mktemp("pair"), "good", "-addext", names)


def _findings(pair: Pair, now: float | None = None) -> list[Finding]:
    return list(check_certificate(pair.cert, pair.key, time.time() if now is None else now))


def test_a_good_certificate_tells_its_names_and_its_end(pair: Pair) -> None:
    (finding,) = _findings(pair)
    assert (finding.level, "kvcm.example, 10.0.0.1" in finding.found) == (Level.OK, True)
    assert "ends in 36" in finding.found
    assert "notAfter" in shown_certificate(pair.cert, pair.key)


def test_one_that_ends_soon_or_has_ended_is_told(pair: Pair) -> None:
    now = time.time()
    assert _findings(pair, now + 352 * DAY)[0].level is Level.WARN
    assert _findings(pair, now + 366 * DAY)[0].level is Level.FAIL


def test_one_that_has_really_ended_cannot_be_shaken_hands_with(tmp_path: Path) -> None:
    pair, request = _made(tmp_path, "ended"), tmp_path / "request"
    ask = ["openssl", "req", "-new", "-key", pair.key, "-subj", "/CN=ended", "-out", request]
    sign = ["openssl", "x509", "-req", "-in", request, "-signkey", pair.key, "-days", "-1", "-out", pair.cert]
    for command in (ask, sign):
        subprocess.run(command, check=True, capture_output=True)
    (finding,) = _findings(pair)
    assert (finding.level, "has expired" in finding.found) == (Level.FAIL, True)


def test_a_key_of_another_certificate_is_a_failure(pair: Pair, tmp_path: Path) -> None:
    other = _made(tmp_path, "other")
    (finding,) = _findings(Pair(pair.cert, other.key))
    assert (finding.level, "cannot be used together" in finding.found) == (Level.FAIL, True)


def test_a_certificate_without_names_is_told(tmp_path: Path) -> None:
    assert [each.level for each in _findings(_made(tmp_path, "nameless"))] == [Level.OK, Level.WARN]


def test_what_is_no_certificate_is_a_failure(pair: Pair, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("hello")
    assert _findings(Pair(str(text), str(text)))[0].level is Level.FAIL
    assert "is not a file" in _findings(Pair(str(tmp_path / "none"), pair.key))[0].found


def test_authorities_are_listed_with_their_ends(pair: Pair, tmp_path: Path) -> None:
    (finding,) = check_authorities(pair.cert, time.time())
    assert (finding.level, "authority good" in finding.found) == (Level.OK, True)
    text = tmp_path / "text"
    text.write_text("hello")
    (finding,) = check_authorities(str(text), time.time())
    assert finding.level is Level.FAIL
    (finding,) = check_authorities(str(tmp_path / "none"), time.time())
    assert finding.level is Level.FAIL


@pytest.mark.parametrize(("left", "level"), [(15 * DAY, Level.OK), (13 * DAY, Level.WARN), (-1.0, Level.FAIL)])
def test_expiry(left: float, level: Level) -> None:
    assert check_expiry("it", 1e9 + left, 1e9).level is level
