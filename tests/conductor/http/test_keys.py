"""API keys at the conductor: every route asks for one, its limits and its tenant hold, and nobody sees it again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tanghulu.conductor import route_rights
from tanghulu.conductor.curves import live as curves
from tanghulu.conductor.dashboard import Dashboard, router
from tanghulu.conductor.http.app import make_app
from tanghulu.errors import ConfigError, Unauthorized
from tanghulu.hashing import joined
from tanghulu.web.access import COOKIE, LoginPage, Need
from tests.conductor.cluster import Cluster, running_cluster
from tests.conductor.key_files import SECRETS, bearer, routes_of, write_keys

ASK = {"model": "tiny", "prompt": "x", "max_tokens": 4}


@contextlib.asynccontextmanager
async def keyed_cluster(run_dir: Path, **options: object) -> AsyncIterator[Cluster]:
    keys = write_keys(
        run_dir / "keys.toml",
        user='rights = ["inference"]\ntenant = "acme"',
        other='rights = ["inference"]\ntenant = "other"\nweight = 4',
        watcher='rights = ["metrics"]',
        admin='rights = ["admin"]',
        limited='rights = ["inference"]\nrequests_per_s = 0.001\ntokens_per_minute = 1000',
    )
    async with running_cluster(run_dir, api_keys=keys, **options) as cluster:
        yield cluster


def paths_of(cluster: Cluster) -> set[tuple[str, str]]:
    """(method, path) of every route, those of the dashboard included."""
    app = make_app(cluster.conductor.service).app
    app.include_router(router(cluster.conductor.dashboard))
    app.include_router(curves.router(cluster.conductor.curves))
    return routes_of(app.routes)


async def test_every_route_has_its_right_and_answers_401_without_a_key(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path) as cluster:
        routes = paths_of(cluster)
        assert {path for _, path in routes} == set(route_rights.CONDUCTOR.table)
        for method, path in sorted(routes):
            others = ({"x-api-key": "wrong"}, {"cookie": f"{COOKIE}=x"}) if path == "/metrics" else ()
            for shown in ({}, {"authorization": "Bearer wrong"}, *others):
                answer = await cluster.http.request(method, path.replace("{name:path}", "tiny"), headers=shown)
                if route_rights.CONDUCTOR.table[path] is Need.NOTHING:
                    assert path in ("/live", "/ready")
                    assert answer.status_code in (200, 503)
                    continue
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.headers["x-request-id"]
                if method != "HEAD":
                    shape = {"message", "type", *(("details",) if "/messages" in path else ("code", "param"))}
                    assert set(answer.json()["error"]) == shape
                    assert answer.json()["error"]["type"] == "authentication_error"
        unknown = await cluster.http.get("/nosuch")
        assert unknown.status_code == 401
        assert (await cluster.http.get("/nosuch", headers=bearer("user"))).status_code == 404


async def test_a_key_is_served_by_either_header_and_only_what_it_allows(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path) as cluster:
        await cluster.add()
        for shown in (bearer("user"), {"x-api-key": SECRETS["user"]}, bearer("admin")):
            answer = await cluster.http.post("/v1/completions", json=ASK, headers=shown)
            assert answer.status_code == 200, answer.text
        async with cluster.http.stream(
            "POST", "/v1/completions", json={**ASK, "stream": True}, headers=bearer("user")
        ) as r:
            assert "[DONE]" in (await r.aread()).decode()
        refused = await cluster.http.post("/v1/completions", json=ASK, headers=bearer("watcher"))
        assert refused.status_code == 403
        assert "needs the right 'inference'" in refused.json()["error"]["message"]
        for path, name, status in (
            ("/metrics", "user", 403),
            ("/metrics", "watcher", 200),
            ("/metrics", "admin", 200),
            ("/dashboard/state", "user", 403),
            ("/dashboard/state", "watcher", 200),
            ("/flush_cache", "watcher", 403),
            ("/flush_cache", "user", 403),
            ("/flush_cache", "admin", 405),  # it is a POST: a picture in a web page would be a GET
            ("/v1/models", "watcher", 200),
            ("/metrics%0A", "user", 403),  # the application's own pattern takes it for /metrics
        ):
            assert (await cluster.http.get(path, headers=bearer(name))).status_code == status, (path, name)
        basic = await cluster.http.get("/v1/models", headers={"authorization": "Basic " + SECRETS["user"]})
        assert basic.status_code == 401


async def test_a_tenant_sees_where_its_request_would_go_and_no_load_of_others(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path) as cluster:
        worker = await cluster.add()
        seen = {
            name: (await cluster.http.post("/route", json=ASK, headers=bearer(name))).json()
            for name in ("user", "admin")
        }
        assert seen["user"]["prefill"] == worker.id
        assert seen["admin"].keys() - seen["user"].keys() == {"candidates", "workers"}


async def test_limits_are_refused_with_when_to_come_back(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path) as cluster:
        await cluster.add()
        first = await cluster.http.post("/v1/completions", json=ASK, headers=bearer("limited"))
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "1"
        assert first.headers["x-ratelimit-remaining-tokens"] == "1000"
        again = await cluster.http.post("/v1/completions", json=ASK, headers=bearer("limited"))
        assert again.status_code == 429
        assert again.json()["error"]["code"] == "rate_limit_exceeded"
        assert 900 < int(again.headers["retry-after"]) <= 1001
        assert again.headers["x-ratelimit-remaining-requests"] == "0"
        assert int(again.headers["x-ratelimit-remaining-tokens"]) < 1000  # its prompt and four tokens were taken
        assert (await cluster.http.post("/v1/completions", json=ASK, headers=bearer("user"))).status_code == 200
        assert (
            "x-ratelimit-limit-requests" not in (await cluster.http.get("/v1/models", headers=bearer("user"))).headers
        )


async def test_a_tenants_prefixes_are_its_own_and_the_key_is_who_waits(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path) as cluster:
        worker = await cluster.add()
        seen = []
        for name in ("user", "other", "admin"):
            body = {**ASK, "user": "me", "cache_salt": "s"}
            assert (await cluster.http.post("/v1/completions", json=body, headers=bearer(name))).status_code == 200
            submit = worker.submits[-1]
            seen.append((submit.salt, submit.client, submit.weight))
        named = joined(b"s", b"")
        assert seen == [
            (b"@acme/" + named, "key user", 1.0),
            (b"@other/" + named, "key other", 4.0),
            (b"@/" + named, "key admin", 1.0),
        ]


async def test_responses_are_a_keys_own_in_its_tenant_however_it_is_shown(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path) as cluster:
        worker = await cluster.add()
        mine, others = ({"x-api-key": SECRETS[name]} for name in ("user", "other"))
        body = {"model": "tiny", "input": "hello", "max_output_tokens": 4}
        made = await cluster.http.post("/v1/responses", json=body, headers=mine)
        assert made.status_code == 200, made.text
        assert (worker.submits[-1].salt, worker.submits[-1].client) == (b"@acme/", "key user")
        path = f"/v1/responses/{made.json()['id']}"
        assert (await cluster.http.get(path, headers=bearer("user"))).status_code == 200
        assert (await cluster.http.get(path, headers=others)).status_code == 404
        after = {**body, "previous_response_id": made.json()["id"]}
        assert (await cluster.http.post("/v1/responses", json=after, headers=others)).status_code == 400
        assert (await cluster.http.delete(path, headers=others)).status_code == 404
        assert (await cluster.http.post("/v1/responses", json=after, headers=mine)).status_code == 200


async def test_the_single_request_of_a_key_does_not_wait_for_anothers_hundred(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path, max_in_flight=1) as cluster:
        worker = await cluster.add()
        worker.hold()
        asking = []
        for name in ("user",) * 20 + ("admin",):
            body = {**ASK, "user": f"somebody else {len(asking)}"}
            asking.append(asyncio.create_task(cluster.http.post("/v1/completions", json=body, headers=bearer(name))))
            await cluster.until(lambda: cluster.dispatcher.num_requests == len(asking))
        worker.release()
        answers = await asyncio.gather(*asking)
        assert {answer.status_code for answer in answers} == {200}
        order = [submit.client for submit in worker.submits]
        assert order.index("key admin") <= 2  # behind the one under way, and one turn of the other key


async def test_a_key_ends_its_own_requests_only(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path) as cluster:
        worker = await cluster.add()
        worker.hold()
        body = {**ASK, "rid": "mine", "stream": True}
        asking = asyncio.create_task(cluster.http.post("/v1/completions", json=body, headers=bearer("user")))
        await cluster.until(lambda: cluster.conductor.service.calls)
        for name, what, aborted in (
            ("other", {"rid": "mine"}, 0),
            ("other", {"rid": "", "abort_all": True}, 0),
            ("user", {"rid": "mine"}, 1),
        ):
            answer = await cluster.http.post("/abort_request", json=what, headers=bearer(name))
            assert answer.json() == {"aborted": aborted}, (name, what)
        assert (await asking).status_code == 200


async def test_two_keys_may_use_one_id_at_the_same_time(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path) as cluster:
        worker = await cluster.add()
        worker.hold()
        body = {**ASK, "rid": "mine", "stream": True}

        def ask(name: str) -> asyncio.Task[Any]:
            return asyncio.create_task(cluster.http.post("/v1/completions", json=body, headers=bearer(name)))

        async def abort(name: str) -> int:
            answer = await cluster.http.post("/abort_request", json={"rid": "mine"}, headers=bearer(name))
            return int(answer.json()["aborted"])

        asking = [ask("user"), ask("other")]
        await cluster.until(lambda: cluster.dispatcher.num_requests == 2)
        again = await cluster.http.post("/v1/completions", json=body, headers=bearer("user"))
        assert (again.status_code, "in use" in again.text) == (400, True)
        assert [await abort("other"), (await asking[1]).status_code, asking[0].done()] == [1, 200, False]
        asking[1] = ask("other")
        await cluster.until(lambda: cluster.dispatcher.num_requests == 2)
        assert await abort("admin") == 2
        assert [(await each).status_code for each in asking] == [200, 200]
        assert not cluster.conductor.service.calls


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dashboard that asks no master, which is not there."""

    async def nothing(_: Dashboard) -> dict[str, Any]:
        return {}

    monkeypatch.setattr(Dashboard, "snapshot", nothing)


@pytest.mark.usefixtures("no_figures")
async def test_a_revoked_key_is_refused_and_its_endless_stream_ends(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path) as cluster:
        async with cluster.http.stream("GET", "/dashboard/events", headers=bearer("watcher")) as events:
            assert events.status_code == 200
            write_keys(tmp_path / "keys.toml", admin='rights = ["admin"]')
            async with asyncio.timeout(30):
                async for _ in events.aiter_bytes():
                    pass
        assert (await cluster.http.get("/v1/models", headers=bearer("watcher"))).status_code == 401
        assert (await cluster.http.get("/v1/models", headers=bearer("admin"))).status_code == 200


@pytest.mark.usefixtures("no_figures")
async def test_a_browser_is_asked_for_the_key_and_keeps_it_in_a_cookie(tmp_path: Path) -> None:
    async with keyed_cluster(tmp_path) as cluster:
        page = await cluster.http.get("/dashboard", headers={"accept": "text/html"})
        assert page.status_code == 401
        assert 'action="/login"' in page.text
        assert 'value="/dashboard"' in page.text
        assert (await cluster.http.get("/login")).status_code == 200
        wrong = await cluster.http.post("/login", data={"key": "wrong", "next": "/docs"})
        assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False)
        for wanted, where in (
            ("/docs", "/docs"),
            ("//evil.example", "/dashboard"),
            ("https://evil.example", "/dashboard"),
        ):
            entered = await cluster.http.post("/login", data={"key": SECRETS["admin"], "next": wanted})
            assert (entered.status_code, entered.headers["location"]) == (303, where)
        said = entered.headers["set-cookie"].lower()
        assert "httponly" in said
        assert "samesite=strict" in said
        url = str(cluster.http.base_url)
        async with httpx.AsyncClient(base_url=url, cookies={COOKIE: SECRETS["admin"]}, trust_env=False) as browser:
            assert (await browser.get("/dashboard")).status_code == 200
            async with browser.stream("GET", "/dashboard/events") as events:
                assert events.status_code == 200
            assert (await browser.post("/flush_cache")).status_code == 403
            assert (await browser.post("/flush_cache", headers={"origin": "http://evil.example"})).status_code == 403
            assert (await browser.post("/flush_cache", headers={"origin": url.rstrip("/")})).status_code == 200
        assert (await cluster.http.post("/login", content=b"x" * 5000)).status_code == 413


async def test_a_file_that_cannot_be_read_refuses_to_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--api-keys"):
        async with running_cluster(tmp_path, api_keys=tmp_path / "none.toml"):
            pass


async def test_log_in_forms_that_do_not_come_are_few() -> None:
    """Strangers may send them: they hold no more than a few of the connections."""
    page, silent = LoginPage("key", "API key", "cookie"), asyncio.Event()

    async def nothing() -> Any:
        await silent.wait()
        return {"type": "http.disconnect"}

    async def admit(shown: str) -> None:
        raise Unauthorized(shown)

    scope = {"type": "http", "method": "POST", "path": "/login", "headers": [(b"content-length", b"9")]}
    coming = [asyncio.create_task(page.log_in(scope, nothing, admit)) for _ in range(16)]
    await asyncio.sleep(0)
    refused = await page.log_in(scope, nothing, admit)
    assert refused is not None
    assert refused.status_code == 429
    silent.set()
    assert await asyncio.gather(*coming) == [None] * 16
