"""Users, passwords, databases and encryption."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from ports import free_port
from redis_servers import Standalone, standalone

from kvcm.model.errors import StorageIOError
from kvcm.store.redis.client import RedisClient
from kvcm.store.redis.uri import parse_redis_uri

PASSWORD = "pa$$"
ENCODED = "pa%24%24"


@asynccontextmanager
async def connected(uri: str) -> AsyncIterator[RedisClient]:
    client = RedisClient.of(parse_redis_uri(uri))
    try:
        yield client
    finally:
        await client.close()


async def test_a_password_alone_is_of_the_default_user(tmp_path: Path) -> None:
    with standalone(tmp_path, password=PASSWORD) as made:
        port = made.server.port
        async with connected(f"redis://:{ENCODED}@127.0.0.1:{port}/?cluster_name=c") as client:
            await client.check()
        async with connected(f"redis://127.0.0.1:{port}/?cluster_name=c") as client:
            with pytest.raises(StorageIOError, match=r"Authentication required.*check user and password"):
                await client.mget([[b"k"]])


async def test_an_acl_user_may_do_what_it_was_allowed(redis_standalone: Standalone) -> None:
    port = redis_standalone.server.port
    with redis_standalone.server.admin() as admin:
        admin.execute_command("ACL", "SETUSER", "app", "on", f">{PASSWORD}", "~mine:*", "+@all")
    async with connected(f"redis://app:{ENCODED}@127.0.0.1:{port}/?cluster_name=c") as client:
        await client.check()
        assert await client.execute([(b"SET", b"mine:k", b"v"), (b"GET", b"mine:k")]) == [b"OK", b"v"]
        with pytest.raises(StorageIOError, match="NOPERM"):
            await client.mget([[b"other:k"]])


async def test_a_wrong_password_is_refused_without_being_shown(redis_standalone: Standalone) -> None:
    port = redis_standalone.server.port
    async with connected(f"redis://nobody:wr0ng@127.0.0.1:{port}/?cluster_name=c") as client:
        with pytest.raises(StorageIOError, match="invalid username-password") as caught:
            await client.mget([[b"k"]])
    assert "wr0ng" not in str(caught.value)


async def test_databases_are_apart(redis_standalone: Standalone) -> None:
    port = redis_standalone.server.port
    async with (
        connected(f"redis://127.0.0.1:{port}/4?cluster_name=c") as four,
        connected(f"redis://127.0.0.1:{port}/5?cluster_name=c") as five,
    ):
        await four.execute([(b"SET", b"only-in-4", b"x")])
        assert await four.mget([[b"only-in-4"]]) == [[b"x"]]
        assert await five.mget([[b"only-in-4"]]) == [[None]]


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """Make a self-signed certificate for a host name, and its key."""
    certificate, key = directory / f"{name}.crt", directory / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
         "-addext", f"subjectAltName=DNS:{name}", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


async def test_encryption_checks_both_sides(tmp_path: Path) -> None:
    server_certificate, server_key = certificate(tmp_path, "localhost")
    stranger, _ = certificate(tmp_path, "stranger")
    tls_port = free_port()
    options = ["--tls-port", str(tls_port), "--tls-cert-file", str(server_certificate), "--tls-key-file",
               str(server_key), "--tls-ca-cert-file", str(server_certificate), "--tls-auth-clients", "yes"]  # fmt: skip
    own = f"cert_file={server_certificate}&key_file={server_key}"
    with standalone(tmp_path, extra=options):
        base = f"rediss://localhost:{tls_port}/?cluster_name=c"
        async with connected(f"{base}&ca_file={server_certificate}&{own}") as client:
            await client.check()
        for wrong in (f"&ca_file={stranger}&{own}", f"&{own}"):
            async with connected(base + wrong) as client:
                with pytest.raises(StorageIOError, match=r"(?i)certificate"):
                    await client.mget([[b"k"]])
        async with connected(f"{base}&ca_file={server_certificate}") as client:
            with pytest.raises(StorageIOError):
                await client.mget([[b"k"]])
        by_number = base.replace("localhost", "127.0.0.1") + f"&ca_file={server_certificate}&{own}"
        async with connected(by_number) as client:
            with pytest.raises(StorageIOError, match=r"(?i)certificate"):
                await client.mget([[b"k"]])
        async with connected(by_number + "&check_hostname=false") as client:
            await client.check()


async def test_a_file_that_is_not_there_is_named(redis_standalone: Standalone) -> None:
    port = redis_standalone.server.port
    async with connected(f"rediss://127.0.0.1:{port}/?cluster_name=c&ca_file=/nowhere/ca.pem") as client:
        with pytest.raises(StorageIOError, match=r"/nowhere/ca\.pem is not a file"):
            await client.mget([[b"k"]])
