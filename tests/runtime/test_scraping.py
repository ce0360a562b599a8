"""Pages of metrics at addresses that anybody may have registered."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TypeAlias

import pytest

from tanghulu.auth.credentials import Credentials, TlsFiles
from tanghulu.auth.derived_tokens import derive
from tanghulu.errors import InvalidRequest
from tanghulu.runtime.scraping import MAX_PAGE_BYTES, metrics_url, scrape
from tanghulu.types import Address

SECRET = "tgh_an-operators-own"
_Asked: TypeAlias = tuple[str, dict[str, str]]


class _Page(BaseHTTPRequestHandler):
    """``server.answer``: status, headers and body of every page."""

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers.items())))  # type: ignore[attr-defined]
        status, headers, body = self.server.answer  # type: ignore[attr-defined]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # the reader has hung up
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(
    status: int, headers: dict[str, str], body: bytes
) -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    server = HTTPServer(("127.0.0.1", 0), _Page)
    asked: list[_Asked] = []
    server.answer, server.asked = (status, headers, body), asked  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_page_costs_a_token_of_no_use_elsewhere() -> None:
    with serving(200, {}, b"up 1\n") as (address, asked):
        assert await scrape([address, ""], Credentials(token=SECRET)) == [[("up", {}, 1.0)], []]
    ((path, headers),) = asked
    lower = {name.lower(): value for name, value in headers.items()}
    assert path == "/metrics"
    assert lower["authorization"] == f"Bearer {derive(SECRET, address)}"
    assert lower["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (200, {"content-encoding": "gzip"}, gzip.compress(b"up 1\n", mtime=0)),
        (200, {}, b"# " + b" " * MAX_PAGE_BYTES),
        (302, {"location": "/elsewhere"}, b""),
        (200, {}, b"\xff"),
        (200, {}, b"no metrics {"),
        (200, {}, b"# TYPE \x1c counter"),
        (200, {}, b"m " + b"9" * 400),
    ],
)
async def test_what_is_no_page_is_not_read(status: int, headers: dict[str, str], body: bytes) -> None:
    with serving(status, headers, body) as (address, asked):
        assert await scrape([address], Credentials(token=SECRET)) == [None]
    assert [path for path, _ in asked] == ["/metrics"]


async def test_the_scheme_and_the_path_are_the_clusters() -> None:
    assert metrics_url("h:1") == "http://h:1/metrics"
    assert metrics_url("[::1]:1", TlsFiles(ca="ca.crt")) == "https://[::1]:1/metrics"
    for odd in ("http://h:1", "h:1/x?", "h:1#", "me@h:1", "h"):
        with pytest.raises(InvalidRequest):
            metrics_url(odd)
    assert await scrape(["http://127.0.0.1:1/x?y=", "a\N{SUPERSCRIPT TWO}:80"]) == [None, None]
    assert Address.parse("h:1")
