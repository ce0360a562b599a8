"""The curl session of docs/routers.md with the routing service, as it stands; only the port is this one's."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.free_ports import free_port
from tests.store.cluster import Process

PAGE = (Path(__file__).parents[3] / "docs" / "routers.md").read_text()


@pytest.mark.slow
def test_the_session_does_what_it_says() -> None:
    (block,) = (each for each in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "/best_worker" in each)
    port = str(free_port())
    flags = ("--port", port, "--policy", "ttft-min", "--block-tokens", "64", "--discovery", "none")
    router = Process("tanghulu.conductor.routing_service.main", *flags)
    answers = {}
    try:
        for line in block.splitlines():
            if "/generate" in line:  # forwards to the worker, whose address is nobody's here
                continue
            there = line.replace("localhost:8100", f"127.0.0.1:{port}")
            told = subprocess.run(
                ["bash", "-ec", f"{there} -sS -w '\\n%{{http_code}}'"], capture_output=True, text=True, timeout=60
            )
            assert told.returncode == 0, told.stderr
            body, _, status = told.stdout.rpartition("\n")
            answers[re.search(r"8100/(\w+)", line)[1]] = (int(status), json.loads(body) if body else None)  # type: ignore[index]
    finally:
        router.stop()
    assert {status for status, _ in answers.values()} == {200}
    assert "w0" in json.dumps(answers["best_worker"][1])
