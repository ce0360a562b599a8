"""Clients on both sides of a fork, with real processes: a child is told to connect, its parent notices nothing.

Each test runs in a fresh interpreter. In pytest's own process other tests have used gRPC, and a forked child that
collects gRPC's left-over objects waits for ever for gRPC's threads, which it has not.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import tanghulu
from tanghulu import aio
from tanghulu.errors import InvalidRequest
from tanghulu.store.client import Client
from tests.store.cluster import Cluster, eventually
from tests.store.fault_tools import Background, child, says

LARGE = bytes(range(256)) * 4096  # 1 MiB: under a lease where memory is mapped


def in_fresh_interpreter(test: Callable[..., Any]) -> Callable[..., None]:
    """The test, run with its fixtures' values in a new process that has imported this module and has one thread."""

    @functools.wraps(test)
    def run(**values: object) -> None:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
            processes.submit(_run, test.__name__, values).result()

    return run


def _run(name: str, values: dict[str, object]) -> None:
    result = inspect.unwrap(globals()[name])(**values)
    if inspect.isawaitable(result):
        asyncio.run(result)  # type: ignore[arg-type]


def in_child(work: Callable[[], object]) -> str:
    """What ``work`` returned or raised in a forked child, which must end by itself."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            said = str(work())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the parent is to see it
            said = f"{type(error).__name__}: {error}"
        os.write(theirs, said.encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        said = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0, f"the child died; it said {said!r}"
    return said


def connected(address: str, transport: str | None) -> Client:
    """A client that has spoken with master and node, and has leases, mappings and write buffers where it may."""
    client = tanghulu.connect(address, transport=transport)
    client.put_many([(f"fork/{name}", name.encode() * 50) for name in "abc"])
    client.put("fork/large", LARGE)
    for name in "abc":
        client.put(f"fork/again-{name}", b"small")
        assert client.get(f"fork/{name}") == name.encode() * 50
    return client


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with Cluster(1) as cluster:
        yield cluster.address


@pytest.fixture(params=[None, "shm", "tcp"], ids=["any", "shm", "tcp"])
def pinned(request: pytest.FixtureRequest) -> str | None:
    return request.param  # type: ignore[no-any-return]


@in_fresh_interpreter
def test_every_call_in_the_child_names_the_process_that_opened_the_client(address: str, pinned: str | None) -> None:
    calls: list[Callable[[Client], object]] = [
        lambda store: store.get("fork/a"),
        lambda store: store.get_into("fork/large", bytearray(len(LARGE))),
        lambda store: store.get_many(["fork/a", "fork/large"]),
        lambda store: store.put("fork/new", b"1"),
        lambda store: store.put("fork/new-large", LARGE),
        lambda store: store.exists("fork/a"),
        lambda store: store.wait_for("fork/a"),
        lambda store: store.remove("fork/a"),
        lambda store: store.nodes(),
        lambda store: store.register(bytearray(8)),
    ]
    with connected(address, pinned) as client:
        wanted = f"InvalidRequest: this client was opened by process {os.getpid()} and does not survive fork"
        for call in calls:
            said = in_child(lambda call=call: call(client))  # type: ignore[misc]
            assert said.startswith(wanted), said
            assert "call tanghulu.connect() in the child" in said
        assert client.get("fork/a") == b"a" * 50
        assert not client.exists("fork/new")
        assert client.get("fork/large") == LARGE


@in_fresh_interpreter
def test_a_child_that_closes_collects_or_exits_leaves_its_parent_alone(address: str, pinned: str | None) -> None:
    client = connected(address, pinned)
    chunk = client.get("fork/large")
    held: list[Any] = [client, chunk, chunk.numpy()]

    def collects() -> str:
        held[0].close()
        held[1].close()
        held.clear()
        gc.collect()
        pages = [bytearray(8 << 20) for _ in range(8)]  # what lies where the segment was is not unmapped under them
        return str(sum(map(len, pages)))

    assert in_child(collects) == str(64 << 20)
    assert in_child(lambda: None) == "None"
    assert chunk == LARGE
    for number in range(20):
        client.put(f"fork/after-{number}", b"%d" % number)
        assert client.get(f"fork/after-{number}") == b"%d" % number
    held.clear()
    chunk.close()
    client.close()


@in_fresh_interpreter
def test_a_child_connects_by_itself_while_its_parent_goes_on(address: str, pinned: str | None) -> None:
    def works() -> str:
        client.close()
        with tanghulu.connect(address, transport=pinned) as own:
            for number in range(200):
                own.put(f"fork/child-{number}", b"child %d" % number)
                assert own.get(f"fork/child-{number}") == b"child %d" % number
            return "done"

    with connected(address, pinned) as client:

        def step() -> None:
            for name in "abc":
                assert client.get(f"fork/{name}") == name.encode() * 50
            assert client.get("fork/large") == LARGE

        with Background(step) as first, Background(step) as second:
            eventually(lambda: bool(first.num_done and second.num_done))
            assert [in_child(works) for _ in range(3)] == ["done"] * 3
        assert not first.errors + second.errors


def _descriptors() -> dict[int, str]:
    return {int(each.name): os.readlink(each) for each in list(Path("/proc/self/fd").iterdir()) if each.is_symlink()}


@in_fresh_interpreter
def test_a_child_keeps_no_connection_open(address: str, pinned: str | None) -> None:
    """So the peers see the parent go when it goes, though its child lives."""
    before = _descriptors()
    with connected(address, pinned) as client:
        client.get("fork/large").close()
        opened = {fd for fd, link in _descriptors().items() if fd not in before and link.startswith("socket:")}
        assert opened
        assert in_child(lambda: {_descriptors()[fd] for fd in opened}) == "{'/dev/null'}"
        assert client.get("fork/large") == LARGE


def test_an_interpreter_that_ends_in_the_child_leaves_the_parent_alone(address: str) -> None:
    code = """
client = tanghulu.connect(sys.argv[1])
client.put("fork/ends", b"e" * MIB)
chunk, view = client.get("fork/ends"), client.get("fork/ends").numpy()
for transport in ("shm", "tcp"):
    other = tanghulu.connect(sys.argv[1], transport=transport)
    other.get("fork/ends").close()
    if os.fork() == 0:
        sys.exit(7)  # with all that an interpreter does at its end
    print(os.waitstatus_to_exitcode(os.wait()[1]), other.get("fork/ends") == b"e" * MIB, bytes(chunk) == b"e" * MIB)
"""
    with child(code, address) as parent:
        assert says(parent) == "7 True True"
        assert says(parent) == "7 True True"


@in_fresh_interpreter
def test_inherited_memory_is_reserved_and_not_readable(address: str) -> None:
    with connected(address, "shm") as client, client.get("fork/large") as chunk:
        address = chunk.numpy().__array_interface__["data"][0]

        def protection() -> str:
            for line in Path("/proc/self/maps").read_text().splitlines():
                begin, end = (int(each, 16) for each in line.split()[0].split("-"))
                if begin <= address < end:
                    return line.split()[1]
            return "not mapped"

        assert protection().startswith("r")
        assert in_child(protection) == "---p"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@in_fresh_interpreter
async def test_an_asyncio_client_refuses_in_the_child(address: str, transport: str) -> None:
    async with aio.connect(address, transport=transport) as client:
        await client.put("fork/aio", LARGE)
        chunk = await client.get("fork/aio")

        def works() -> str:
            with pytest.raises(InvalidRequest, match=rf"opened by process {os.getppid()} .* tanghulu.aio.connect"):
                asyncio.run(client.get("fork/aio"))  # type: ignore[arg-type]
            asyncio.run(client.close())
            chunk.close()
            gc.collect()

            async def own() -> str:
                async with aio.connect(address, transport=transport) as mine:
                    return str(await mine.get("fork/aio") == LARGE)

            return asyncio.run(own())

        assert in_child(works) == "True"
        assert chunk == LARGE
        for _ in range(10):
            assert await client.get("fork/aio") == LARGE
        chunk.close()


@in_fresh_interpreter
def test_forks_beside_busy_threads(address: str) -> None:
    """A fork may come while other threads hold connections and locks: the child has none of these threads."""
    with connected(address, None) as client:
        stopping = threading.Event()
        wrong: list[object] = []

        def read(name: str) -> None:
            while not stopping.is_set():
                with client.get("fork/large") as chunk:
                    if client.get(f"fork/{name}") != name.encode() * 50 or chunk != LARGE:
                        wrong.append(name)

        threads = [threading.Thread(target=read, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                assert in_child(lambda: client.exists("fork/a")).startswith("InvalidRequest")
                assert in_child(lambda: client.close()) == "None"
        finally:
            stopping.set()
            for thread in threads:
                thread.join()
        assert not wrong


def _read_by_own(address: str) -> bytes:
    with tanghulu.connect(address) as own:
        return own.get("fork/a").bytes()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@in_fresh_interpreter
def test_multiprocessing(address: str, method: str) -> None:
    with connected(address, None) as client:
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map(_read_by_own, [address] * 4) == [b"a" * 50] * 4
        assert client.get("fork/a") == b"a" * 50


class _Keys:
    """A data set whose workers each open the store."""

    store: Client

    def __init__(self, address: str) -> None:
        self.address = address

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        with self.store.get("fork/a") as chunk:
            return index + len(chunk)


def _connect_worker(worker_id: int) -> None:
    from torch.utils.data import get_worker_info

    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    dataset.store = tanghulu.connect(dataset.address)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="extra: torch")
@in_fresh_interpreter
def test_a_data_loader_whose_workers_connect(address: str) -> None:
    from torch.utils.data import DataLoader

    with connected(address, None) as client:
        dataset = _Keys(address)
        dataset.store = client  # of no use in the workers, and replaced there
        loader: Any = DataLoader(dataset, num_workers=2, worker_init_fn=_connect_worker, multiprocessing_context="fork")  # type: ignore[arg-type]
        assert sorted(int(each) for each in loader) == [50 + index for index in range(8)]
        assert client.get("fork/a") == b"a" * 50
