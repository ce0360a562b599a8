"""GET /metrics of a process: open, or for tokens and keys that may see it; over TLS one silent client stops nobody."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from tanghulu.auth.api_keys import ApiKeysFile, new_key
from tanghulu.auth.credentials import Credentials, TlsFiles
from tanghulu.auth.derived_tokens import hash_of
from tanghulu.auth.tenants import new_token
from tanghulu.auth.tls import HTTP1, ServerTls, client_context
from tanghulu.auth.tokens import TokensFile, load
from tanghulu.errors import ConfigError
from tanghulu.runtime import metrics_server
from tanghulu.runtime.metrics_server import MetricsAuthorizer, MetricsServer
from tanghulu.runtime.scraping import scrape, summed
from tanghulu.types import Address
from tests.tls_files import Authority

TOKENS = {name: new_token() for name in ("prometheus", "worker", "tenant", "reader", "admin")}
RIGHTS = {
    "prometheus": 'rights = ["metrics"]',
    "worker": 'rights = ["join"]',
    "tenant": 'rights = ["write", "read"]\ntenant = "acme"',
    "reader": 'rights = ["read"]',
    "admin": 'rights = ["admin"]',
}


def write_tokens(path: Path, **rights: str) -> Path:
    path.touch(0o600)
    rows = (f'[[tokens]]\nname = "{n}"\nsha256 = "{hash_of(TOKENS[n])}"\n{lines}\n' for n, lines in rights.items())
    path.write_text("\n".join(rows))
    return path


@contextlib.contextmanager
def served(authorizer: MetricsAuthorizer | None = None, tls: ServerTls | None = None) -> Iterator[str]:
    registry = CollectorRegistry()
    Counter("puts", "Puts", registry=registry).inc(3)
    server = MetricsServer(registry, "127.0.0.1", 0, authorizer, tls)
    if authorizer is not None:
        authorizer.answer_at(Address("127.0.0.1", server.port))
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.close()


async def _seen(address: str, token: str, tls: TlsFiles = TlsFiles()) -> bool:  # noqa: B008 - it is frozen
    (page,) = await scrape([address], Credentials(token=token, tls=tls))
    assert not page or summed(page)["puts_total"] == 3
    return bool(page)


async def test_without_tokens_all_see_them() -> None:
    with served() as address:
        assert await _seen(address, "")


async def test_with_tokens_those_with_the_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "_REFRESH_S", 0.0)
    file, key, own = write_tokens(tmp_path / "tokens.toml", **RIGHTS), new_key(), new_token()
    keys = tmp_path / "keys.toml"
    keys.touch(0o600)
    keys.write_text(f'[[keys]]\nname = "k"\nrights = ["metrics"]\nsha256 = "{hash_of(key)}"\n')
    with served(MetricsAuthorizer(TokensFile(file), ApiKeysFile(keys), Credentials(token=own))) as address:
        seen = {name: await _seen(address, token) for name, token in TOKENS.items()}
        assert seen == {"prometheus": True, "worker": True, "tenant": False, "reader": False, "admin": True}
        assert await _seen(address, own)
        elsewhere = Credentials(token=TOKENS["prometheus"]).to(Address("127.0.0.1", 1)).token
        for token, status in (
            (key, 200),
            (own, 200),
            (TOKENS["prometheus"], 200),
            ("", 401),
            ("wrong", 401),
            (elsewhere, 401),
            (TOKENS["reader"], 403),
        ):
            shown = {"authorization": f"Bearer {token}"} if token else {}
            async with httpx.AsyncClient(trust_env=False) as http:
                answer = await http.get(f"http://{address}/metrics", headers=shown)
            assert (answer.status_code, "puts" in answer.text) == (status, status == 200)
            assert status == 200 or answer.headers["www-authenticate"] == "Bearer"
        write_tokens(file, admin=RIGHTS["admin"])
        assert not await _seen(address, TOKENS["prometheus"])


async def _live(address: str, tls: TlsFiles) -> int:
    async with httpx.AsyncClient(trust_env=False, verify=client_context(tls)) as http:
        return (await http.get(f"{'https' if tls else 'http'}://{address}/live")).status_code


async def test_probes_need_no_token(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens.toml", admin=RIGHTS["admin"])
    with served(MetricsAuthorizer(TokensFile(file), None, Credentials())) as address:
        assert not await _seen(address, "")
        assert await _live(address, TlsFiles()) == 200


async def test_over_tls_a_silent_client_stops_nobody(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    cert, key = authority.sign("host")
    ours = TlsFiles(cert, key, authority.ca)
    with served(tls=ServerTls(ours, mutual=True, protocol=HTTP1)) as address:
        host, _, port = address.partition(":")
        with socket.create_connection((host, int(port))):
            assert await _seen(address, "", ours)
        stranger = TlsFiles(ca=authority.ca)
        assert not await _seen(address, "", stranger)  # no certificate
        assert await _live(address, stranger) == 200
        assert not await _seen(address, "")  # no TLS


def test_metrics_tell_of_all_tenants_so_no_tenant_gets_the_right(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'metrics' is for operators, because it sees all tenants"):
        load(write_tokens(tmp_path / "tokens.toml", tenant='rights = ["metrics"]\ntenant = "acme"'))


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_silent_connections_make_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encrypted: bool) -> None:
    """Each has a thread: they are few, and keep nobody out."""
    monkeypatch.setattr(metrics_server, "MAX_CONNECTIONS", 3)
    authority = Authority(tmp_path)
    cert, key = authority.sign("host")
    tls = ServerTls(TlsFiles(cert=cert, key=key), mutual=False, protocol=HTTP1) if encrypted else None
    with served(tls=tls) as address, contextlib.ExitStack() as silent:
        host, port = address.removeprefix("https://").split(":")
        opened = [silent.enter_context(socket.create_connection((host, int(port)), timeout=60)) for _ in range(8)]
        assert await _seen(address, "", TlsFiles(ca=authority.ca) if encrypted else TlsFiles())
        for each in opened[:5]:
            with contextlib.suppress(ConnectionError):
                assert each.recv(1) == b""
