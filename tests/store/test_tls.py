"""TLS with real processes: gRPC and the fast lane are encrypted, certificates are verified, both ways if so asked."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import tanghulu
from tanghulu import aio
from tanghulu.auth.credentials import Credentials, TlsFiles
from tanghulu.auth.tls import ServerTls, client_context
from tanghulu.errors import ConfigError, MasterUnavailable, TanghuluError, Unauthorized
from tanghulu.masters import Masters
from tanghulu.rpc.frames import PREAMBLE
from tanghulu.store.directory_feed import DirectoryEventKind, follow_directory
from tanghulu.types import Address
from tests.store.guarded_cluster import Encrypted
from tests.tls_files import Authority


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Encrypted]:
    with Encrypted(tmp_path_factory.mktemp("tls")) as running:
        yield running


@pytest.mark.parametrize("transport", [None, "tcp"])
def test_values_of_all_sizes(cluster: Encrypted, transport: str | None) -> None:
    with tanghulu.connect(cluster.address, transport=transport, **cluster.shown) as store:
        for size in (10, 64 << 10, 900_000, 5 << 20):
            key = f"{transport}-{size}"
            value = bytes(range(256)) * (size // 256) + b"!" * (size % 256)
            assert not store.put(key, value).existed
            assert store.get(key).bytes() == value
        keys = [f"{transport}-many-{number}" for number in range(200)]
        assert all(status.ok for status in store.put_many([(key, b"x" * 5000) for key in keys]))
        assert store.match_prefix(keys) == 200
        assert {chunk.bytes() for chunk in store.get_many(keys)} == {b"x" * 5000}
        assert store.remove_matching(f"^{transport}-") == 204


async def test_asyncio_and_events(cluster: Encrypted) -> None:
    masters = Masters.parse(cluster.address).showing(Credentials(tls=cluster.files))
    async with aio.connect(cluster.address, transport="tcp", **cluster.shown) as store:
        await store.put("event", b"1" * 100_000)
        assert (await store.get("event")).bytes() == b"1" * 100_000
        async with asyncio.timeout(30):
            async for batch in follow_directory(masters):
                if any("event" in event.keys for event in batch if event.kind is DirectoryEventKind.STORED):
                    break
        assert await store.remove("event")


def test_nothing_is_let_in_plain_over_tcp(cluster: Encrypted) -> None:
    for address in (cluster.address, cluster.nodes[0].address):
        at = Address.parse(address)
        with socket.create_connection((at.host, at.port), timeout=10) as plain:
            plain.sendall(PREAMBLE + bytes(16))
            assert b"TANGHULU" not in plain.recv(100)
    with pytest.raises(MasterUnavailable):
        tanghulu.connect(cluster.address, transport="tcp", deadline_s=1.0)


def test_who_shows_no_certificate_is_not_let_in(cluster: Encrypted) -> None:
    with pytest.raises(TanghuluError):
        tanghulu.connect(cluster.address, transport="tcp", deadline_s=1.0, tls_ca=cluster.ca)


def test_another_authoritys_host_is_not_believed(cluster: Encrypted, tmp_path: Path) -> None:
    other = Authority(tmp_path)
    cert, key = cluster.authority.sign("client")
    with pytest.raises(Unauthorized, match="certificate"):
        tanghulu.connect(cluster.address, transport="tcp", tls_ca=other.ca, tls_cert=cert, tls_key=key)
    stranger = other.sign("stranger")
    with pytest.raises(TanghuluError):
        tanghulu.connect(
            cluster.address,
            transport="tcp",
            deadline_s=1.0,
            tls_ca=cluster.ca,
            tls_cert=stranger[0],
            tls_key=stranger[1],
        )


async def test_asyncio_verifies_too(cluster: Encrypted, tmp_path: Path) -> None:
    with pytest.raises(Unauthorized, match="certificate"):
        await aio.connect(cluster.address, transport="tcp", tls_ca=Authority(tmp_path).ca)


def test_bad_files_are_named(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("host")
    _, other_key = authority.sign("other")
    with pytest.raises(ConfigError, match="must be given together"):
        ServerTls(TlsFiles(cert), mutual=False)
    with pytest.raises(ConfigError, match="--tls-ca"):
        ServerTls(TlsFiles(cert, key), mutual=True)
    with pytest.raises(ConfigError, match=r"other\.key"):
        ServerTls(TlsFiles(cert, other_key), mutual=False)
    with pytest.raises(ConfigError, match=r"missing\.pem"):
        client_context(TlsFiles(ca=str(tmp_path / "missing.pem")))


def test_replaced_files_are_read_again(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("host")
    tls = ServerTls(TlsFiles(cert, key), mutual=False)
    client = TlsFiles(ca=authority.ca)
    before = client_context(client)
    assert client_context(client) is before
    assert not tls.refresh()
    authority.sign("host")
    assert tls.refresh()
    assert not tls.refresh()
