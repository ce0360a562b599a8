"""A real `tanghulu store serve` beside a cluster, and HTTP clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.store.cluster import Process

STORE = "tanghulu.cli.store"


class Gateway(Process):
    """A gateway to the master at ``address``; ``asks`` it, with a token or without."""

    def __init__(self, address: str, *flags: str) -> None:
        super().__init__(STORE, "serve", "--port", "0", "--master", address, *flags)
        self.scheme = "https" if "--tls-cert" in flags else "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.address}"

    def asks(self, token: str = "", tenant: str = "") -> httpx.Client:
        shown = {"authorization": f"Bearer {token}"} if token else {}
        if tenant:
            shown["tanghulu-tenant"] = tenant
        return httpx.Client(base_url=self.url, headers=shown, timeout=60.0, trust_env=False, verify=False)


@contextmanager
def serving(address: str, *flags: str) -> Iterator[Gateway]:
    """A gateway that must end well."""
    gateway = Gateway(address, *flags)
    try:
        yield gateway
    finally:
        gateway.stop()


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """(status, code) of a refusal in the house's shape."""
    body = answer.json()["error"]
    assert set(body) == {"message", "type", "code", "param"}, body
    assert body["message"]
    return answer.status_code, body["code"]
