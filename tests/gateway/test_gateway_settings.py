"""Settings of a gateway: files, options, and errors that name the field, the value and the allowed values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcm.config import ConfigError
from kvcm.gateway.settings import EngineAddress, GatewaySettings, load_gateway_settings

FILE = """
policy = "least_loaded"
port = 9000
compute_tokens_per_second = 5000
engines = ["http://10.0.0.1:8000=one", {url = "https://e.example", instance = "two"}]
"""
ENGINE = {"engines": ["http://a:1=i"], "policy": "round_robin"}


def loaded(tmp_path: Path, text: str, **options: Any) -> GatewaySettings:
    path = tmp_path / "gateway.toml"
    path.write_text(text)
    return load_gateway_settings(path, options)


def test_a_file_is_read_and_options_win(tmp_path: Path) -> None:
    settings = loaded(tmp_path, FILE, port=9001, policy=None)
    assert (settings.policy, settings.port, settings.compute_tokens_per_second) == ("least_loaded", 9001, 5000.0)
    assert settings.engines == (
        EngineAddress("http://10.0.0.1:8000", "one"),
        EngineAddress("https://e.example", "two"),
    )
    assert [each.name for each in settings.engines] == ["10.0.0.1:8000", "e.example:443"]


def test_engines_may_be_tables_of_their_own(tmp_path: Path) -> None:
    settings = loaded(tmp_path, 'policy = "round_robin"\n[[engines]]\nurl = "http://[::1]:8000/"\n')
    assert [(each.url, each.name) for each in settings.engines] == [("http://[::1]:8000", "[::1]:8000")]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"policy": "kvcm"}, "engines is empty, must be at least one engine"),
        ({"engines": ["http://a:1"]}, "manager is empty, must be host:port for policy 'kvcm'"),
        ({"engines": ["http://a:1"], "manager": "m:1"}, "engines has 'http://a:1', must be URL=INSTANCE_ID"),
        ({**ENGINE, "policy": "best"}, "policy is 'best', must be kvcm, consistent_hash, least_loaded, round_robin"),
        ({**ENGINE, "port": 70000}, "port is 70000, must be a whole number from 0 to 65535"),
        ({**ENGINE, "port": True}, "port is True, must be a whole number"),
        ({**ENGINE, "port": "80"}, "port is '80', must be a whole number"),
        ({**ENGINE, "prot": 1}, "prot is no setting; the nearest one is port"),
        ({**ENGINE, "hash_load_factor": 0.5}, "hash_load_factor is 0.5, must be a number from 1 to 1000, or 0"),
        ({**ENGINE, "compute_tokens_per_second": float("nan")}, "must be a number from 1 to 1e+09"),
        ({**ENGINE, "insecure": "yes"}, "insecure is 'yes', must be true or false"),
        ({**ENGINE, "manager": "m"}, "manager is 'm', must be host:port"),
        ({**ENGINE, "manager": "m:0"}, "manager is 'm:0', must be host:port"),
        ({**ENGINE, "host": "example.com"}, "host is 'example.com', must be an ip address, localhost, or empty"),
        (
            {**ENGINE, "host": "0.0.0.0"},
            "host is '0.0.0.0', which other hosts reach, must be a loopback address unless",
        ),
        ({**ENGINE, "max_eject_ms": 10}, "max_eject_ms is 10, must be at least eject_ms, 5000"),
        ({**ENGINE, "engines": ["http://a:1", "http://a:1/=x"]}, "must be each engine once"),
        ({**ENGINE, "engines": [{"url": "http://a:1", "name": "x"}]}, "must be tables with url and, if any, instance"),
        ({**ENGINE, "engines": [1]}, "engines is [1], must be URL or URL=INSTANCE_ID"),
        ({**ENGINE, "engines": "http://a:1"}, "must be at least one engine"),
    ],
)
def test_bad_settings_are_named(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_gateway_settings(None, options)
    assert error in str(caught.value)


_ODD = ("http://a b:1", "http://a:1#f", "http://a:1\n", "http://a:1=a b", "http://a:1=" + "x" * 257)


@pytest.mark.parametrize(
    "url",
    [
        "a:1",
        "ftp://a:1",
        "http://",
        "http://a:0",
        "http://a:99999",
        "http://a:1/x",
        "http://a:1?q",
        "http://u@a:1",
        *_ODD,
    ],
)
def test_an_engine_is_an_http_address_and_nothing_else(url: str) -> None:
    with pytest.raises(ConfigError, match="must be URL or URL=INSTANCE_ID"):
        load_gateway_settings(None, {**ENGINE, "engines": [url]})


def test_errors_name_the_file(tmp_path: Path) -> None:
    for text, error in (("port = ", "is not a TOML file"), ("port = -1", "gateway.toml: port is -1")):
        with pytest.raises(ConfigError, match=error):
            loaded(tmp_path, text)
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read: No such file"):
        load_gateway_settings(tmp_path / "nowhere.toml", {})


def test_loopback_is_bound_unless_that_is_said_otherwise() -> None:
    def bound(**options: Any) -> str:
        return load_gateway_settings(None, {**ENGINE, **options}).bind_address

    assert bound() == "127.0.0.1"
    assert bound(insecure=True) == bound(api_key_file="key") == "0.0.0.0"
    assert bound(host="::1") == "::1"
    assert bound(host="0.0.0.0", insecure=True) == "0.0.0.0"
