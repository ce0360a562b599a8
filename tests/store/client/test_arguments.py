"""What callers pass: every wrong value is refused with InvalidRequest, and disturbs no other value."""

from __future__ import annotations

import asyncio
import copy
import ctypes
import gc
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tanghulu
from tanghulu.errors import ChunkNotFound, InvalidRequest
from tanghulu.masters import Masters
from tanghulu.store.client import Client
from tanghulu.store.client.settings import MAX_DEADLINE_S, Settings
from tests.store.cluster import Cluster

with_names = np.zeros(3, [("Offset", "<i4"), ("Pointer", "<f8")])

#: Objects that their bytes do not say.
NO_MEMORY: dict[str, Callable[[], Any]] = {
    "objects": lambda: np.array([object(), object()]),
    "objects in a struct": lambda: np.zeros(3, [("a", "O"), ("b", "<i4")]),
    "a view of objects": lambda: memoryview(np.array([object()])),
    "ctypes' objects": lambda: (ctypes.py_object * 4)(),
    "pointers": lambda: (ctypes.c_char_p * 4)(),
    "pointers to ints": lambda: (ctypes.POINTER(ctypes.c_int) * 4)(),
    "masked": lambda: np.ma.array([1, 2, 3], mask=[0, 1, 0]),
    "not contiguous": lambda: np.zeros((4, 4))[:, ::2],
    "empty": lambda: np.zeros(0),
    "conjugated": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "negated": lambda: torch.ones(4, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.ones(4, 4).to_sparse(),
    "strided": lambda: torch.ones(4, 4).t(),
    "on no device": lambda: torch.ones(4, device="meta"),
    "text": lambda: "text",
    "nothing": lambda: None,
}


@pytest.mark.parametrize("kind", NO_MEMORY)
def test_what_is_no_plain_memory_is_refused_everywhere(client: Client, kind: str) -> None:
    wrong = NO_MEMORY[kind]()
    client.put("there", bytes(64))
    refused: list[Callable[[], object]] = [
        lambda: client.put("k", wrong),
        lambda: client.put("k", [b"head", wrong]),
        lambda: client.get_into("there", wrong),
        lambda: client.get_into("there", [bytearray(60), wrong]),
        lambda: client.get_many_into(["there"], [wrong]),
        lambda: client.get_many_into(["there"], [[bytearray(60), wrong]]),
        lambda: client.register(wrong),
    ]
    for call in refused:
        with pytest.raises(InvalidRequest):
            call()
    statuses = client.put_many([("a", b"1"), ("bad", wrong), ("b", b"2")])
    assert [bool(status) for status in statuses] == [True, False, True]
    assert client.exists_many(["a", "bad", "b"]) == [True, False, True]


@pytest.mark.parametrize(
    "value",
    [
        np.arange(200_000).reshape(400, 500).view(np.matrix),
        np.arange(12.0).reshape(3, 4).view(np.recarray),
        np.array(7),
        np.array(["2026-01-01"], "datetime64[s]"),
        np.arange(3, dtype=complex),
        with_names,
        memoryview(np.arange(12).reshape(3, 4)),
        (ctypes.c_int * 3)(1, 2, 3),
        torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).requires_grad_(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_all_bytes_of_a_value_arrive(client: Client, value: Any) -> None:
    wanted = value.detach().view(torch.uint8).numpy().tobytes() if torch.is_tensor(value) else bytes(memoryview(
        value.view(np.uint8) if isinstance(value, np.ndarray) and value.dtype.kind == "M" else value
    ))  # fmt: skip
    client.put("k", value)
    client.put("pieces", [b"head", value, b"tail"])
    assert client.get("k").bytes() == wanted
    assert client.get("pieces").bytes() == b"head" + wanted + b"tail"
    target = copy.deepcopy(value.detach() if torch.is_tensor(value) else np.zeros(len(wanted), np.uint8))
    assert client.get_into("k", target) == len(wanted)


def test_an_empty_piece_is_named(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="piece 1 of the value: bytes is empty"):
        client.put("k", [b"head", b""])


def test_chunks_are_values_and_arrays_and_can_be_copied(client: Client) -> None:
    client.put("k", b"x" * 300_000)
    with client.get("k") as chunk:
        client.put("again", chunk)
        assert np.asarray(chunk).dtype == np.uint8
        assert np.asarray(chunk, np.float32).shape == (300_000,)
        copies = [copy.copy(chunk), pickle.loads(pickle.dumps(chunk))]
    assert [each.bytes() for each in copies] == [b"x" * 300_000] * 2
    assert client.get("again").bytes() == b"x" * 300_000


WRONG_CALLS: dict[str, Callable[[Client], object]] = {
    "replicas of a float": lambda c: c.put("k", b"x", replicas=2.0),  # type: ignore[arg-type]
    "replicas of a list": lambda c: c.put("k", b"x", replicas=[2]),  # type: ignore[arg-type]
    "no replicas": lambda c: c.put_many({"k": b"x"}, replicas=0),
    "pin": lambda c: c.put("k", b"x", pin=1),  # type: ignore[arg-type]
    "ttl of nan": lambda c: c.put("k", b"x", ttl_s=math.nan),
    "ttl of text": lambda c: c.put("k", b"x", ttl_s="5"),  # type: ignore[arg-type]
    "part_bytes": lambda c: c.put("k", b"x", part_bytes=1.5),  # type: ignore[arg-type]
    "prefer_node": lambda c: c.put("k", b"x", prefer_node="no-such-node"),
    "checksums": lambda c: c.put("k", b"x", checksums=5),  # type: ignore[arg-type]
    "no items": lambda c: c.put_many(5),  # type: ignore[arg-type]
    "deadline of nan": lambda c: c.get("k", deadline_s=math.nan),
    "negative deadline": lambda c: c.get("k", deadline_s=-1),
    "deadline of text": lambda c: c.exists("k", deadline_s="5"),  # type: ignore[arg-type]
    "offset": lambda c: c.get_range("k", 0.5),  # type: ignore[arg-type]
    "negative length": lambda c: c.get_range("k", 0, np.int64(-1)),  # type: ignore[arg-type]
    "negative limit": lambda c: c.list_keys(limit=-1),
    "limit": lambda c: c.list_keys(limit="5"),  # type: ignore[arg-type]
    "prefix that is no UTF-8": lambda c: c.list_keys("\ud800"),
    "prefix of bytes": lambda c: c.list_keys(b"kv/"),  # type: ignore[arg-type]
    "empty pattern": lambda c: c.remove_matching(""),
    "pattern of bytes": lambda c: c.remove_matching(b"kv/"),  # type: ignore[arg-type]
    "pattern": lambda c: c.remove_matching("("),
    "holders": lambda c: c.replicate(["k"], holders=1.5),  # type: ignore[arg-type]
    "many holders": lambda c: c.replicate(["k"], holders=1 << 40),
    "for nan": lambda c: c.replicate(["k"], for_s=math.nan),
    "bytes to evict": lambda c: c.evict("node", num_bytes=-1),
    "policy that is no UTF-8": lambda c: c.eviction_policy(c.nodes()[0].id, "\ud800"),
    "node of bytes": lambda c: c.drain(b"node"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", WRONG_CALLS)
def test_a_wrong_argument_is_named(client: Client, kind: str) -> None:
    with pytest.raises(InvalidRequest):
        WRONG_CALLS[kind](client)


def test_a_wrong_option_spoils_no_later_call(client: Client) -> None:
    with pytest.raises(InvalidRequest, match=r"replicas=2\.0 is not a whole number"):
        client.put("k", b"x", replicas=2.0)  # type: ignore[arg-type]
    assert client.put("k", b"x", replicas=2)
    assert client.put("k2", b"x", replicas=np.int64(2))  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers(client: Client) -> None:
    client.put("k", bytes(range(100)), ttl_s=np.float32(60))  # type: ignore[arg-type]
    assert client.get_range("k", np.int64(3), np.int64(4)).bytes() == bytes(range(3, 7))  # type: ignore[arg-type]
    assert client.list_keys(limit=np.uint8(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [math.inf, 1e12])
def test_the_longest_deadlines(cluster: Cluster, seconds: float) -> None:
    with tanghulu.connect(cluster.address, deadline_s=seconds) as patient:
        assert patient.put("k", b"x")
        assert patient.get("k", deadline_s=seconds).bytes() == b"x"
        assert patient.remove("k")
        assert patient._driver.settings.deadline_s == MAX_DEADLINE_S


def test_a_deadline_of_0_does_not_wait(client: Client) -> None:
    client.put("there", b"x")
    assert client.wait_for_many(["there", "never"], deadline_s=0) == [True, False]


def test_a_key_that_is_none_is_its_own_outcome(client: Client) -> None:
    client.put("k", b"x")
    odd: Any = ["k", "", "none", 5]
    kinds = [type(each) for each in client.get_many(odd)]
    assert kinds[1:] == [InvalidRequest, ChunkNotFound, InvalidRequest]
    buffers = [bytearray(1) for _ in odd]
    assert [type(each) for each in client.get_many_into(odd, buffers)] == [int, *kinds[1:]]
    removed = client.remove_many(odd)
    assert removed[0] is True
    assert [type(each) for each in removed[1:]] == [InvalidRequest, bool, InvalidRequest]


@pytest.mark.parametrize("place", ["garbage", "a/b", "a//c", 5])
def test_a_place_is_checked(place: Any) -> None:
    with pytest.raises(InvalidRequest, match="place"):
        Settings(master=Masters.parse("h:1"), place=place)


@pytest.mark.parametrize(
    "address", ["host:1;host:2", "host", ":1", "host:", "host:70000", "127.0.0.1:²", "a b:1", "[x]:1"]
)
def test_an_address_is_checked(address: str) -> None:
    with pytest.raises(InvalidRequest, match=r"address|host"):
        tanghulu.connect(address)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_client_is_not_copied(client: Client, how: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match="a client cannot be copied or pickled"):
        how(client)
    assert client.exists_many(["k"]) == [False]


def test_a_client_that_was_not_awaited_says_so(cluster: Cluster) -> None:
    opening: Any = tanghulu.aio.connect(cluster.address)
    with pytest.raises(InvalidRequest, match="not open yet"):
        opening.get("k")
    assert not hasattr(opening, "nonsense")


def test_a_client_closed_in_another_loop(cluster: Cluster) -> None:
    async def opened() -> Any:
        return await tanghulu.aio.connect(cluster.address)

    with asyncio.Runner() as own:
        client = own.run(opened())
        with asyncio.Runner() as another, pytest.raises(InvalidRequest, match="another event loop"):
            another.run(client.close())
        own.run(client.close())
    with asyncio.Runner() as own:
        left_open = own.run(opened())
    asyncio.run(left_open.close())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # its transports: they could be closed by their loop alone
        del left_open
        gc.collect()
