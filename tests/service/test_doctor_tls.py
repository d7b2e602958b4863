"""The doctor and a manager that speaks TLS: for every obstacle, it gives advice."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from authorities import Authority, Pair, dns, ip
from command_runner import port_options
from test_transport_drivers import eventually
from test_transport_process import ManagerProcess, manager, run_kvcm
from tls_site import TlsSite, tls_manager

from kvcm.commands.connection import Connection
from kvcm.doctor.findings import Finding, Level
from kvcm.doctor.manager import check_manager

ENDED = dt.timedelta(minutes=-1)


@pytest.fixture(scope="module", params=["optional", "required"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsSite]:
    """A manager that looks at certificates of clients, or demands them."""
    with tls_manager(tmp_path_factory.mktemp("site"), f"kvcm.tls.client_auth={request.param}") as made:
        yield made


def _is_required(site: TlsSite) -> bool:
    return "required" in {each.get("kvcm.tls.client_auth") for each in site.process.events("settings")}


def _own(site: TlsSite) -> Pair:
    return site.clients.issue("operator", [dns("operator.example")])


def _asked(process: ManagerProcess, scheme: str, ca: Path | None = None, own: Pair | None = None) -> list[Finding]:
    """The findings of the doctor, by the authority that it trusts and the certificate that it shows."""
    shown: dict[str, Any] = {} if own is None else {"cert_file": own.cert, "cert_key_file": own.key}
    manager, key = f"{scheme}://{process.address.admin_http}", process.data_dir / "admin.key"
    connection = Connection(manager=manager, key_file=key if key.exists() else None, ca_file=ca, **shown)
    return list(check_manager(connection.admin(), is_expected=True, shows_certificate=own is not None))


def _advice(found: list[Finding]) -> str:
    """The advice of the only finding."""
    (finding,) = found
    assert (finding.level, finding.check) == (Level.FAIL, "manager")
    return finding.advice


def test_a_manager_that_is_asked_as_it_wants_is_well(site: TlsSite) -> None:
    found = _asked(site.process, "https", site.authority.file, _own(site))
    assert {each.level for each in found} == {Level.OK}
    assert any("is ready" in each.found for each in found)


def test_an_authority_that_is_not_given_or_another_one_is_reported(site: TlsSite) -> None:
    for ca in (None, site.clients.file):
        found = _asked(site.process, "https", ca, _own(site))
        assert _advice(found) == "give --ca-file with the authority that issued the manager's certificate"
        assert "certificate verify failed" in found[0].found


def test_a_certificate_that_is_demanded_and_not_shown_is_reported(site: TlsSite) -> None:
    found = _asked(site.process, "https", site.authority.file)
    if not _is_required(site):
        assert {each.level for each in found} == {Level.OK}
    else:
        assert "give --cert-file and --cert-key-file" in _advice(found)


@pytest.mark.parametrize("flaw", ["foreign", "ended"])
def test_a_certificate_that_is_not_believed_is_reported(site: TlsSite, flaw: str) -> None:
    authority = Authority.make(site.clients.directory / "foreign") if flaw == "foreign" else site.clients
    own = authority.issue(flaw, [dns("operator.example")], ENDED if flaw == "ended" else dt.timedelta(days=1))
    advice = _advice(_asked(site.process, "https", site.authority.file, own))
    assert advice == "give a --cert-file that has not ended, of an authority in the manager's kvcm.tls.client_ca_file"


def test_plain_text_to_a_port_with_tls_gets_the_advice_to_encrypt(site: TlsSite) -> None:
    assert "ask https:// and give --ca-file" in _advice(_asked(site.process, "http"))


def test_tls_to_a_port_of_plain_text_is_reported(server: ManagerProcess) -> None:
    assert "ask http://" in _advice(_asked(server, "https"))


@pytest.mark.parametrize(
    ("names", "lasts", "advice"),
    [
        (("localhost", "127.0.0.1"), ENDED, "renew the manager's certificate (kvcm.tls.cert_file)"),
        (("elsewhere.example", "127.0.0.9"), dt.timedelta(days=1), "ask by a name that its certificate has"),
    ],
    ids=["ended", "other names"],
)
def test_a_bad_certificate_is_found(tmp_path: Path, names: tuple[str, str], lasts: dt.timedelta, advice: str) -> None:
    authority = Authority.make(tmp_path / "ca")
    pair = authority.issue("server", [dns(names[0]), ip(names[1])], lasts)
    tls = (f"kvcm.tls.cert_file={pair.cert}", f"kvcm.tls.key_file={pair.key}")
    with manager(tmp_path / "manager", *tls) as process:
        assert advice in _advice(_asked(process, "https", authority.file))


def test_the_options_of_serve_are_enough_beside_what_a_client_needs(site: TlsSite, tmp_path: Path) -> None:
    process, own = site.process, _own(site)
    settings = {
        "kvcm.tls.cert_file": site.pair.cert, "kvcm.tls.key_file": site.pair.key,
        "kvcm.tls.client_ca_file": site.clients.file, "kvcm.auth.mode": "required",
        "kvcm.tls.client_auth": "required" if _is_required(site) else "optional",
    }  # fmt: skip
    options = [part for key, value in settings.items() for part in ("-e", f"{key}={value}")]
    options += port_options(*process.address)
    client = ("--ca-file", str(site.authority.file), "--key-file", str(process.data_dir / "admin.key"))
    shown = ("--cert-file", str(own.cert), "--cert-key-file", str(own.key))

    def asked() -> Any:
        """Nothing where a busy manager answers too late."""
        command = ("doctor", "--data-dir", str(process.data_dir), *options, *client, *shown, "--json")
        done = run_kvcm(tmp_path, *command, KVCM_KEY="")
        return done if done.stdout.count("held by a manager") == 4 else None

    done = eventually(asked, 60)
    findings = json.loads(done.stdout)["findings"]
    assert (done.returncode, [each for each in findings if each["level"] == "fail"]) == (0, []), done.stderr
    assert all(each["advice"] for each in findings if each["level"] != "ok")
