"""The curl examples of docs/store_over_http.md, as they stand; only the port is this gateway's."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store.cluster import Cluster
from tests.store.gateway.running_gateway import serving

PAGE = (Path(__file__).parents[3] / "docs" / "store_over_http.md").read_text()
COMMANDS = re.search(r"```sh\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, bytes]]:
    """What each command printed, by the command."""
    assert COMMANDS is not None
    folder, answers = tmp_path_factory.mktemp("docs"), {}
    with Cluster(1, "64MiB") as cluster, serving(cluster.address) as gateway:
        for command in COMMANDS[1].splitlines():
            here = command.replace("127.0.0.1:7480", gateway.address)
            done = subprocess.run(["bash", "-ec", here], cwd=folder, capture_output=True, timeout=60)
            assert done.returncode == 0, (command, done.stderr)
            answers[command.replace("http://127.0.0.1:7480", "")] = done.stdout
        yield answers


@pytest.mark.slow
def test_every_example_does_what_it_says(said: dict[str, bytes]) -> None:
    def answer(part: str) -> bytes:
        (found,) = [output for command, output in said.items() if part in command]
        return found

    assert json.loads(answer("/ready")) == {"ready": True, "missing": []}
    assert json.loads(answer("'forty-two'"))["existed"] is False
    assert answer("curl -sS /v1/values/demo/answer") == b"forty-two"
    assert answer("-r 6-8") == b"two"
    assert b"content-length: 9" in answer("-I ")
    assert json.loads(answer("-T big.bin"))["key"] == "demo/big"
    assert answer("cmp - big.bin") == b""
    assert [row["key"] for row in json.loads(answer("limit=100"))["chunks"]] == ["demo/answer", "demo/big"]
    assert json.loads(answer("curl -sS /v1/chunks/demo/answer"))["size_bytes"] == 9
    assert json.loads(answer("/v1/stat"))["num_nodes"] == 1
    assert json.loads(answer("/v1/check")) == {"num_chunks": 2, "findings": [], "left": []}
    assert sum(row["num_chunks"] for row in json.loads(answer("/v1/evict")).values()) == 1
    assert set(json.loads(answer("/v1/policy")).values()) == {"reuse"}
    assert answer("/v1/events").count(b"event: ") >= 2
    assert json.loads(answer("-X DELETE '/v1/chunks?prefix"))["missing"] == []


def test_no_example_touches_what_workers_keep_or_how_the_cluster_runs() -> None:
    assert COMMANDS is not None
    assert "kv/" not in COMMANDS[1]
    assert "PUT http://127.0.0.1:7480/v1/policy" not in COMMANDS[1]
    assert '"bytes"' not in COMMANDS[1]


def test_the_page_names_every_route_and_every_option() -> None:
    for option in ("require-token", "insecure", "max-clients", "max-requests", "max-streams", "max-in-flight-bytes"):
        assert f"--{option}" in PAGE
    for route in ("values", "chunks", "nodes", "stat", "tenants", "evict", "policy", "replicate", "check", "events"):
        assert f"/v1/{route}" in PAGE
