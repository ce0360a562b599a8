"""/dashboard of `tanghulu store serve`: by the tokens of the API; in a real browser it shows what the store does."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.browser import PATIENCE_MS, all_is_reachable, launched, opened
from tests.store.cluster import Cluster, eventually
from tests.store.gateway.running_gateway import Gateway, error_of, serving
from tests.store.guarded_cluster import TOKENS, Secured, write_tokens

PAGE = {"accept": "text/html"}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    file = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    write_tokens(file, list(TOKENS))
    with Secured(file) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(secured: Secured) -> Iterator[Gateway]:
    with serving(secured.address) as running:
        yield running


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2, "64MiB") as running:
        yield running


@pytest.fixture(scope="module")
def gateway(cluster: Cluster) -> Iterator[Gateway]:
    with serving(cluster.address) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


def test_without_a_token_nothing_is_shown(guarded: Gateway) -> None:
    with guarded.asks() as nobody, guarded.asks("wrong") as stranger:
        for path in ("/dashboard", "/dashboard/state", "/dashboard/events"):
            assert error_of(nobody.get(path)) == (401, "unauthorized")
            assert error_of(stranger.get(path)) == (401, "unauthorized")
        asked = nobody.get("/dashboard", headers=PAGE)
        assert (asked.status_code, 'action="/login"' in asked.text) == (401, True)
        assert "set-cookie" not in nobody.post("/login", data={"key": "wrong", "next": "/dashboard"}).headers
        entered = nobody.post("/login", data={"key": "secret-operator", "next": "//evil.example"})
        assert (entered.status_code, entered.headers["location"]) == (303, "/dashboard")
        assert {"httponly", "samesite=strict"} <= set(entered.headers["set-cookie"].lower().split("; "))
        assert nobody.get("/dashboard", headers=PAGE).status_code == 200, "the cookie shows the token"
        assert nobody.get("/v1/nodes").status_code == 401, "it is for the page alone"


def test_a_tenant_sees_no_other_and_no_metrics(guarded: Gateway, secured: Secured) -> None:
    with guarded.asks("secret-acme") as acme, guarded.asks("secret-operator") as operator:
        assert acme.put("/v1/values/mine", content=b"x" * 100).status_code == 201
        eventually(lambda: _tenants(operator) >= {"acme", "initech"}, 30)
        shown = acme.get("/dashboard/state").json()
        assert _tenants(acme) == {"acme"}
        assert not {"traffic", "evictions_by"} & shown.keys()
        assert "get_hit_ratio_total" not in shown["now"]
        assert (shown["error"], shown["silent"]) == ("", [])
        assert {"traffic", "evictions_by"} <= operator.get("/dashboard/state").json().keys()


def test_a_stream_ends_with_its_token(secured: Secured, guarded: Gateway) -> None:
    with guarded.asks("secret-temporary") as leaving:
        with leaving.stream("GET", "/dashboard/events") as events:
            lines = events.iter_lines()
            assert json.loads(next(line for line in lines if line).removeprefix("data: "))["nodes"]
            write_tokens(secured.file, [name for name in TOKENS if name != "temporary"])
            for _ in lines:
                pass
        assert leaving.get("/dashboard/state").status_code == 401


def _tenants(asking: httpx.Client) -> set[str]:
    return {row["tenant"] for row in asking.get("/dashboard/state").json().get("tenants", [])}


@pytest.mark.slow
def test_the_page_shows_what_happens(cluster: Cluster, gateway: Gateway, browser: Browser) -> None:
    page, errors = opened(browser, f"{gateway.url}/dashboard", "#nodes table")
    expect(page.locator("#health")).to_have_text("all is well", timeout=PATIENCE_MS)
    expect(page.locator("#nodes tbody tr")).to_have_count(2)
    for absent in ("workers", "requests", "sources", "tenants"):
        expect(page.locator(f"#{absent}")).to_be_hidden()
    with gateway.asks() as store:
        for number in range(40):
            store.put(f"/v1/values/page-{number}", content=os.urandom(1000))
            for key in (f"page-{number}", f"page-{number}", f"none-{number}"):
                store.get(f"/v1/values/{key}")
    hits, misses = (
        sum(node.metric(f"tanghulu_node_{name}_total") for node in cluster.nodes) for name in ("hits", "misses")
    )
    total = page.locator("#now div", has=page.get_by_text("hits since start", exact=True)).locator("dd")
    expect(total).to_have_text(f"{100 * hits / (hits + misses):.1f} %", timeout=PATIENCE_MS)
    expect(page.locator("#traffic")).to_contain_text("shm", timeout=PATIENCE_MS)
    with gateway.asks() as store:
        assert store.post("/v1/evict", json={"bytes": "1MiB"}).status_code == 200
    expect(page.locator("#events")).to_contain_text("chunks evicted: ", timeout=PATIENCE_MS)

    victim = cluster.add_node("64MiB")
    expect(page.locator("#nodes tbody tr")).to_have_count(3, timeout=PATIENCE_MS)
    victim.kill()
    expect(page.locator("#events")).to_contain_text(re.compile(r"node .* is (gone|silent)"), timeout=PATIENCE_MS)
    cluster.nodes.remove(victim)
    assert errors == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_off(gateway: Gateway, browser: Browser, width: int, scheme: str) -> None:
    page, errors = opened(browser, f"{gateway.url}/dashboard", "#nodes table", width, scheme)
    all_is_reachable(page, width)
    assert errors == []


@pytest.mark.slow
def test_a_browser_logs_in_and_asks_no_other_host(guarded: Gateway, browser: Browser, tmp_path: Path) -> None:
    page = browser.new_context().new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{guarded.url}/dashboard")
    page.get_by_label("Token").fill("secret-operator")
    page.get_by_role("button").click()
    page.wait_for_selector("#tenants table", timeout=PATIENCE_MS)
    assert all(url.startswith((guarded.url, "data:")) for url in asked)
    policy = httpx.get(f"{guarded.url}/dashboard", headers={"authorization": "Bearer secret-operator"}, trust_env=False)
    assert policy.headers["content-security-policy"].startswith("default-src 'none'")
