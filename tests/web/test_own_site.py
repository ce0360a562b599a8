"""What pages of other sites may ask a port for, and under which names one on loopback answers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from tanghulu.web.access import OwnSite, listed

HERE = "http://localhost:8000"
CROSS = {"sec-fetch-site": "cross-site"}


async def asked(site: OwnSite, method: str = "GET", **headers: str) -> httpx.Response:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=site), base_url=HERE) as http:
        return await http.request(method, "/flush_cache", headers=given)


def site(host: str = "127.0.0.1", **options: Any) -> OwnSite:
    return OwnSite(PlainTextResponse("done"), host, **options)


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_pages_of_other_sites_are_refused(method: str) -> None:
    for headers in ({"origin": "https://evil.example"}, {"origin": "http://[x"}, {"sec_fetch_site": "cross-site"}):
        refused = await asked(site(), method, **headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    for headers in ({}, {"origin": HERE}, {"sec_fetch_site": "same-origin"}, {"sec_fetch_site": "none"}):
        assert (await asked(site(), method, **headers)).status_code == 200


async def test_a_link_is_followed_and_a_form_is_not_sent() -> None:
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert (await asked(site(), **link)).status_code == 200
    assert (await asked(site(), "POST", **link)).status_code == 403


async def test_origins_that_are_listed_are_let_in() -> None:
    page = {"origin": "https://a.example", "sec_fetch_site": "cross-site"}
    assert (await asked(site(origins=["https://a.example"]), "POST", **page)).status_code == 200
    assert (await asked(site(origins=["*"]), "POST", **page)).status_code == 200
    assert (await asked(site(origins=["https://b.example"]), "POST", **page)).status_code == 403


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "a.localhost.evil:1"])
async def test_a_name_that_was_led_to_loopback_is_refused(host: str) -> None:
    refused = await asked(site(), host=host, origin=f"http://{host}")
    assert (refused.status_code, "--allowed-hosts" in refused.text) == (403, True)
    assert (await asked(site("0.0.0.0"), host=host)).status_code == 200  # other hosts reach it by any name


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "10.0.0.1", "a.b."]
)
async def test_addresses_and_listed_names_are_answered(host: str) -> None:
    assert (await asked(site(names=listed("x, a.b")), host=host)).status_code == 200
