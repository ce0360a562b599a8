"""The page /dashboard in a real browser, beside a cluster under load that loses a worker."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser import PATIENCE_MS, all_is_reachable, launched, opened
from tests.e2e.cluster import LiveCluster, running_cluster

FLAGS = ("--engine", "mock", "--model", "mock", "--debug", "mock_speedup=20", "--prefill", "1", "--decode", "2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with running_cluster(tmp_path_factory.mktemp("dashboard"), *FLAGS) as live:
        yield live


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as browser:
        yield browser


def _opened(browser: Browser, cluster: LiveCluster, width: int = 1280, scheme: str = "light") -> tuple[Page, list[str]]:
    return opened(browser, f"{cluster.url}/dashboard", "#workers table", width, scheme)


def _ask(cluster: LiveCluster, number: int, max_tokens: int = 8) -> None:
    body = {"prompt": f"{'the same beginning ' * 100}{number % 5}", "max_tokens": max_tokens}
    cluster.http.post(f"{cluster.url}/v1/completions", json=body).raise_for_status()


def _percent(page: Page, name: str) -> float:
    text = page.locator("#now div", has=page.get_by_text(name, exact=True)).locator("dd").inner_text()
    return float(text.split()[0])


@pytest.mark.slow
def test_the_page_shows_what_happens(cluster: LiveCluster, browser: Browser) -> None:
    for number in range(50):
        _ask(cluster, number)
    page, errors = _opened(browser, cluster)
    cached = cluster.metric("conductor", "tanghulu_conductor_cached_tokens_total")
    prompt = cluster.metric("conductor", "tanghulu_conductor_prompt_tokens_total")
    expect(page.locator("#now")).to_contain_text("cache hits since start", timeout=PATIENCE_MS)
    assert abs(_percent(page, "cache hits since start") - 100 * cached / prompt) <= 1
    expect(page.locator("#health")).to_have_text("all is well", timeout=PATIENCE_MS)
    expect(page.locator("#nodes tbody tr")).to_have_count(1)

    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(_ask, cluster, number, 400) for number in range(8)]
        expect(page.locator("#requests tbody tr")).to_have_count(8, timeout=PATIENCE_MS)
        victim = cluster.entry("decode")
        expect(page.locator("#requests")).to_contain_text("decoding", timeout=PATIENCE_MS)
        os.kill(victim["pid"], signal.SIGKILL)
        port = victim["address"].rpartition(":")[2]
        expect(page.locator("#events")).to_contain_text(
            re.compile(rf"decode-{port}-\w+ is (gone|not connected)"), timeout=PATIENCE_MS
        )
        expect(page.locator("#events")).to_contain_text("moved to another worker", timeout=PATIENCE_MS)
        for each in running:
            each.result()
    assert errors == []


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_cut_off(cluster: LiveCluster, browser: Browser, width: int, scheme: str) -> None:
    page, errors = _opened(browser, cluster, width, scheme)
    all_is_reachable(page, width)
    assert errors == []


@pytest.mark.slow
def test_no_request_to_any_other_host(cluster: LiveCluster, browser: Browser) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{cluster.url}/dashboard")
    page.wait_for_selector("#workers table", timeout=PATIENCE_MS)
    assert all(url.startswith((cluster.url, "data:")) for url in asked)
    policy = cluster.http.get(f"{cluster.url}/dashboard").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
