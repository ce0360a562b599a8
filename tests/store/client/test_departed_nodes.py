"""A node that died takes its memory with it, though clients that had it mapped live on; with real processes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

import tanghulu
from tanghulu import aio
from tanghulu.errors import MasterUnavailable, TanghuluError
from tests.store.cluster import Cluster, eventually, num_fds
from tests.store.fault_tools import MIB, value

NUM_RESTARTS = 3


def num_mappings() -> int:
    """Nodes' segments that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("/memfd:tanghulu" in line for line in lines)


@pytest.mark.parametrize("puts", [True, False], ids=["puts", "gets"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_client_lets_go_of_nodes_that_died(transport: str, puts: bool) -> None:
    with Cluster(1, "64MiB") as nodes, tanghulu.connect(nodes.address) as putter:
        with tanghulu.connect(nodes.address, transport=transport) as store:
            counts: list[tuple[int, int]] = []
            for number in range(NUM_RESTARTS + 1):
                if number:
                    nodes.nodes[-1].kill()
                    nodes.add_node("64MiB")
                    eventually(lambda: [each.id for each in putter.nodes()] == [nodes.nodes[-1].name])
                writer = store if puts else putter
                for name in ("small", "again", "large"):
                    writer.put(f"{number}/{name}", value(name, 4 * MIB if name == "large" else 4096))
                eventually(lambda number=number: store.get(f"{number}/small") == value("small", 4096))  # type: ignore[misc]
                assert store.get(f"{number}/large") == value("large", 4 * MIB)
                putter.put(f"{number}/by-another", b"1")
                putter.nodes()
                counts.append((num_mappings(), num_fds()))
        assert len({mappings for mappings, _ in counts[1:]}) == 1, counts
        assert counts[-1][1] <= counts[1][1], counts


async def lists(store: aio.AsyncClient, name: str) -> None:
    """Wait until the master lists this node alone; a busy machine may keep it from answering in time."""
    names: list[str] = []
    while names != [name]:
        with contextlib.suppress(MasterUnavailable):
            names = [each.id for each in await store.nodes()]
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_an_asyncio_client_lets_go_of_nodes_that_died(transport: str) -> None:
    with Cluster(1, "64MiB") as nodes:
        async with aio.connect(nodes.address, transport=transport) as store:
            counts: list[tuple[int, int]] = []
            for number in range(NUM_RESTARTS + 1):
                if number:
                    await asyncio.to_thread(nodes.nodes[-1].kill)
                    await asyncio.to_thread(nodes.add_node, "64MiB")
                await lists(store, nodes.nodes[-1].name)
                for name in ("small", "again", "large"):
                    await store.put(f"{number}/{name}", value(name, 4 * MIB if name == "large" else 4096))
                assert await store.get(f"{number}/large") == value("large", 4 * MIB)
                counts.append((num_mappings(), num_fds()))
            assert len({mappings for mappings, _ in counts}) == 1, counts
            assert counts[-1][1] <= counts[1][1], counts


def test_a_client_that_finds_an_index_silent_lets_go() -> None:
    """It only gets, and hears of no other node; what it holds of the dead one it may look at as long as it likes."""
    with Cluster(1, "64MiB") as nodes, tanghulu.connect(nodes.address, transport="shm") as store:
        before = num_mappings()
        store.put("held", value("held"))
        chunk, other = store.get("held"), store.get("held")
        other.close()
        assert num_mappings() > before
        nodes.nodes[-1].kill()

        def gone() -> bool:
            with contextlib.suppress(TanghuluError):
                store.get("absent", deadline_s=0.1)
            return not store._driver.context.mapped

        eventually(gone)
        assert chunk == value("held")
        chunk.close()
        del chunk, other
        eventually(lambda: num_mappings() == before)
