"""Values of up to 1 MiB inside messages, with real processes; and clients killed or stopped in the middle of them."""

from __future__ import annotations

import asyncio

import pytest

import tanghulu
import tanghulu.aio
from tanghulu.errors import ChunkNotFound
from tanghulu.store.client import Client
from tests.store.cluster import Cluster, eventually
from tests.store.fault_tools import MIB, child, read, says, stopped, value

_DIE = """
import signal

def die(*_):
    os.kill(os.getpid(), signal.SIGSTOP if sys.argv[4] == "stop" else signal.SIGKILL)
"""
#: Ends its own process where the name of a step says, in a put over tcp that a thousandth of a second takes else.
_MURDERED = (
    _DIE
    + """
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.rpc.frames import encode_head

def cut(self, call, call_id, until):
    body, payload = call.body, b"".join(call.attachment)
    head = encode_head(call.method, call_id, len(body), len(payload)) + body
    data, first = memoryview(head + payload), {"head": 0, "half": MIB // 2, "value": MIB}[sys.argv[2]]
    self._send_all(data[: len(head) + first], until)
    die()
    self._send_all(data[len(head) + first :], until)

client = tanghulu.connect(sys.argv[1], transport="tcp", deadline_s=float(sys.argv[5]))
client.put("before", bytes(MIB))
FastConnection._send = cut
print("ready")
client.put(sys.argv[3], random.Random(sys.argv[3]).randbytes(4096) * 256)
print("done")
"""
)
STEPS = ["head", "half", "value"]
#: Ends its process when the master has accepted what it moved to a mapped node, and the node does not know.
_PROMISES = (
    _DIE
    + """
from tanghulu.store.client.logic import carriers

client = tanghulu.connect(sys.argv[1])
client.put("before", bytes(MIB))
carriers._commit_at_nodes = die
print("ready")
client.put(sys.argv[3], random.Random(sys.argv[3]).randbytes(4096) * 512)
print("done")
"""
)


@pytest.fixture(scope="module")
def small() -> Cluster:  # type: ignore[misc]
    with Cluster(1, "16MiB") as cluster:
        yield cluster


@pytest.mark.parametrize("size", [(64 << 10) + 1, 300_000, MIB])
def test_a_value_without_mapped_memory_goes_inside_a_message(cluster: Cluster, client: Client, size: int) -> None:
    node = cluster.nodes[0]
    text = value("large", 1 << 20)[:size]
    with tanghulu.connect(cluster.address, transport="tcp") as remote:
        before = node.metric("tanghulu_node_written_bytes_total", transport="inline")
        assert not remote.put("large/bytes", text).existed
        assert not remote.put("large/pieces", [text[:60_000], text[60_000:]]).existed
        assert not remote.put("large/unseen", remote.register(bytearray(text)), visible=False).existed
        assert not remote.put("large/parts", text, part_bytes=50_000, pin="soft", ttl_s=60.0).existed
        assert remote.put("large/bytes", text).existed
        written = node.metric("tanghulu_node_written_bytes_total", transport="inline") - before
        assert written >= 4 * size
        assert remote.stat("large/parts").checksums.part_bytes == 50_000
        for key in ("bytes", "pieces", "unseen", "parts"):
            assert client.get(f"large/{key}").bytes() == text


async def test_asyncio_sends_them_too_and_other_calls_go_on_meanwhile(cluster: Cluster, client: Client) -> None:
    async with tanghulu.aio.connect(cluster.address, transport="tcp") as remote:
        puts = [remote.put(f"large/aio/{n}", value(f"large/aio/{n}")) for n in range(8)]
        found = [remote.exists(f"large/aio/none/{n}") for n in range(8)]
        outcomes = await asyncio.gather(*puts, *found)
        assert not any(status.existed for status in outcomes[:8])
        assert outcomes[8:] == [False] * 8
    for n in range(8):
        assert client.get(f"large/aio/{n}").bytes() == value(f"large/aio/{n}")


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_a_client_that_is_killed_in_mid_put_leaves_nothing_half_done(small: Cluster, step: str) -> None:
    key = f"killed/{step}"
    node = small.nodes[0]
    with child(_MURDERED, small.address, step, key, "kill", "5.0") as victim:
        assert says(victim) == "ready"
        assert says(victim) == ""  # it has ended
        with tanghulu.connect(small.address, transport="tcp", deadline_s=5.0) as client:
            if step != "value":  # else the acknowledgement was lost
                assert isinstance(read(client, key), ChunkNotFound)
                assert not client.put(key, value(key)).existed
            eventually(lambda: read(client, key) is None)
            client.remove(key)
        eventually(lambda: node.metric("tanghulu_node_used_bytes") == MIB)  # that of "before"


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_a_client_that_is_stopped_in_mid_put_holds_its_range_only_till_its_deadline(small: Cluster, step: str) -> None:
    """Nobody else writes or reads there meanwhile; afterwards the node needs it no more."""
    key = f"stopped/{step}"
    node = small.nodes[0]
    with child(_MURDERED, small.address, step, key, "stop", "2.0") as victim:
        assert says(victim) == "ready"
        with tanghulu.connect(small.address, transport="tcp", deadline_s=5.0) as client:
            eventually(lambda: "T" in _state(victim.pid))
            for number in range(40):  # more than the node holds
                client.put(f"other/{number % 20}/{number}", value(f"other/{number}"))
                assert read_as(client, f"other/{number % 20}/{number}", f"other/{number}")
            client.remove_matching("^other/")
            rest = 2 * MIB if step == "value" else MIB
            eventually(lambda: node.metric("tanghulu_node_used_bytes") <= rest)
            with stopped(victim.pid):
                pass  # wakes it
            assert says(victim) in ("done", "")
            eventually(lambda: read(client, key) is None or not client.put(key, value(key)).existed)
            assert read(client, key) is None
            client.remove(key)


@pytest.mark.slow
def test_a_put_to_another_node_is_no_hit_on_what_was_only_promised() -> None:
    """The promise is not kept: its client is killed when the master has accepted, before the node has heard of that."""
    with Cluster(2, "16MiB") as cluster, tanghulu.connect(cluster.address, transport="tcp") as client:
        eventually(lambda: len(client.nodes()) == 2)
        for node in client.nodes():  # one of them has the promise
            key = f"promised/{node.id}"
            with child(_PROMISES, cluster.address, "", key, "kill") as victim:
                assert says(victim) == "ready"
                assert says(victim) == ""
            assert not client.put(key, value(key), prefer_node=node.id).existed
            assert read(client, key) is None


def read_as(client: Client, key: str, text: str) -> bool:
    with client.get(key) as chunk:
        return bytes(chunk) == value(text)


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0]
