"""Processes of every role that start while there is no master: at a wrong address they end, else they wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.faults.parts import START_DEADLINE_S, Part
from tests.e2e.faults.standing import MOCK, until
from tests.free_ports import free_port
from tests.store.elected_cluster import EtcdServer

POOLS = """
[[pool]]
name = "short"
[prefill]
ttft_s = [1.0]
prompt_tokens = [4096]
pools = [["short"]]
[decode]
tbt_s = [0.05]
context_tokens = [8192]
pools = [["short"]]
"""
#: A model that is not there would be said, too, if it were looked for before the master.
NO_MODEL = ("--model", "/no/such/model")


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def every_role(folder: Path, finder: str, *model: str) -> list[Part]:
    pools = folder / "pools.toml"
    pools.write_text(POOLS)
    at = ("--master", finder)
    return [
        Part(folder, "node", "node", *at, "--memory", "16MiB"),
        Part(folder, "worker", "worker", *at, *model),
        Part(folder, "conductor", "conductor", *at),
        Part(folder, "router", "router", *at, "--grpc-port", "0", "--pools", str(pools)),
    ]


def lines(part: Part, event: str) -> list[dict[str, str]]:
    """The lines of the log of ``event``."""
    found = []
    for text in part.log_path.read_text().splitlines():
        if text.startswith("{") and (line := json.loads(text))["event"] == event:
            found.append(line)
    return found


@pytest.mark.slow
async def test_at_a_wrong_address_it_ends_with_one_line_that_says_so(tmp_path: Path, ends: ExitStack) -> None:
    master = f"127.0.0.1:{free_port()}"
    parts = every_role(tmp_path, master, *NO_MODEL)
    for part in parts:
        ends.callback(part.end)
        part.spawn()
    for part in parts:
        assert await asyncio.to_thread(part.wait_ended, START_DEADLINE_S) == 1, part.log()
        said = part.log_path.read_text().splitlines()
        assert said[-1].startswith("tanghulu "), part.log()
        assert f"master at {master}" in said[-1], part.log()
        assert said[-1].endswith("is it running, and is this its address?"), part.log()
        assert len(lines(part, "discovery.waiting")) == 1, part.log()
        assert "Traceback" not in part.log_path.read_text()


@pytest.mark.slow
async def test_while_masters_change_it_waits_and_says_so_twice(tmp_path: Path, ends: ExitStack) -> None:
    """An etcd answers, so the address is right. One that is told to stop meanwhile ends in order."""
    etcd = ends.enter_context(EtcdServer())
    master = Part(tmp_path, "master", "master", "--etcd", etcd.address, "--election-ttl-s", "2")
    ends.callback(master.end)
    await asyncio.to_thread(master.start)
    master.stop()
    parts = every_role(tmp_path, f"etcd://{etcd.address}", *MOCK)
    for part in parts:
        ends.callback(part.end)
        part.spawn()
    for part in parts:
        await until(lambda part=part: lines(part, "discovery.waiting"), START_DEADLINE_S, f"{part} waits")  # type: ignore[misc]
        assert part.alive
    told = parts[0]  # to stop meanwhile
    told.terminate()
    master.go_on()
    assert await asyncio.to_thread(told.wait_ended) == 0, told.log()
    for part in parts[1:]:
        await asyncio.to_thread(part.wait_ready)
        assert [len(lines(part, event)) for event in ("discovery.waiting", "discovery.found")] == [1, 1], part.log()
