"""Keys and TLS at the router with pools: its own routes ask for a key, and it shows the caller's to conductors."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tanghulu.auth.credentials import TlsFiles
from tanghulu.auth.tls import client_context
from tanghulu.conductor import route_rights
from tanghulu.conductor.pool_router.app import make_app
from tanghulu.conductor.pool_router.grid import parse_pools
from tanghulu.conductor.pool_router.main import GlobalRouter, GlobalRouterConfig
from tanghulu.discovery.base import EventKind, Instance, InstanceEvent
from tanghulu.errors import ConfigError
from tanghulu.types import Address, InstanceId, Role
from tanghulu.web.access import Need
from tests.conductor.cluster import running_cluster
from tests.conductor.key_files import bearer, routes_of, write_keys
from tests.tls_files import Authority

ONE_POOL = {
    "prefill": {"ttft_s": [1.0], "prompt_tokens": [99], "pools": [["one"]]},
    "decode": {"tbt_s": [1.0], "context_tokens": [99], "pools": [["one"]]},
}
BODY = {"prompt": "x", "max_tokens": 4}


async def test_a_key_goes_through_a_router_to_a_conductor_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    cert, key = authority.sign("host")
    keys = write_keys(tmp_path / "keys.toml", user='rights = ["inference"]', watcher='rights = ["metrics"]')
    options = {"api_keys": keys, "tls_cert": cert, "tls_key": key, "tls_ca": authority.ca}
    async with running_cluster(tmp_path, **options, token="t") as cluster:
        url = f"https://{cluster.conductor.address}"
        data = {"pool": [{"name": "one", "urls": [url]}]} | ONE_POOL
        router = GlobalRouter(
            GlobalRouterConfig(port=0, grace_s=0.0, **options), parse_pools(data), CollectorRegistry()
        )
        async with router.running(None):
            context = client_context(TlsFiles(ca=authority.ca))
            base = f"https://{router.address}"
            async with httpx.AsyncClient(base_url=base, verify=context, timeout=60, trust_env=False) as http:
                app = make_app(router.forwarder, CollectorRegistry(), 1 << 20)
                routes = routes_of(app.routes)
                assert {path for _, path in routes} == set(route_rights.POOL_ROUTER.table)
                for method, path in routes:
                    if route_rights.POOL_ROUTER.table[path] is not Need.NOTHING:
                        assert (await http.request(method, path)).status_code == 401, (method, path)
                assert (await http.get("/v1/models", headers=bearer("user"))).json() == {"object": "list", "data": []}
                assert (await http.get("/pools", headers=bearer("user"))).status_code == 403
                assert (await http.get("/pools", headers=bearer("watcher"))).json()["one"][0]["url"] == url
                aborted = await http.post("/abort_request", json={"rid": "x"}, headers=bearer("user"))
                assert aborted.json() == {"aborted": 0}
            async with httpx.AsyncClient(trust_env=False) as stranger:
                with pytest.raises(httpx.ConnectError):
                    await stranger.get(f"{base}/live")  # an authority that nobody trusts


@pytest.mark.parametrize("given", ["tls_ca", "tls_cert"])
async def test_with_any_tls_file_conductors_are_reached_by_tls_alone(tmp_path: Path, given: str) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.sign("host")
    options = {"tls_ca": authority.ca} if given == "tls_ca" else {"tls_cert": cert, "tls_key": key}
    config = GlobalRouterConfig(port=0, **options)
    plain = parse_pools({"pool": [{"name": "one", "urls": ["http://127.0.0.1:1"]}]} | ONE_POOL)
    with pytest.raises(ConfigError, match="is plain HTTP"):
        GlobalRouter(config, plain, CollectorRegistry())
    router = GlobalRouter(config, parse_pools({"pool": [{"name": "one"}]} | ONE_POOL), CollectorRegistry())
    for scheme in ("http", "https"):
        found = Instance(InstanceId(scheme), Role.CONDUCTOR, Address("127.0.0.1", 1), attributes={"scheme": scheme})
        router.apply("one", InstanceEvent(EventKind.PUT, found))
    assert [each.url for each in router.forwarder.members["one"].in_order(0.0)] == ["https://127.0.0.1:1"]
    await router.forwarder.aclose()
