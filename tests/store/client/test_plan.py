"""Which way a put takes, as a table: sizes x replicas x how its node is reached, and what excludes a way."""

from __future__ import annotations

from typing import Any

import pytest

from tanghulu.store.client.logic.plan import (
    BUFFER,
    INLINE,
    PLAIN_TRANSFER,
    TRANSFER,
    Access,
    Committer,
    Route,
    joint_committer,
    plan,
)
from tanghulu.store.client.model import PutOptions
from tanghulu.store.protocol.checksums import Checksums
from tanghulu.store.protocol.types import NewChunk, Pin
from tanghulu.types import ChunkKey

KIB, MIB = 1 << 10, 1 << 20
SHM, NEAR, TCP, UCX = Access.MAPPED, Access.NEAR, Access.MESSAGES, Access.ENGINE
#: (replicas, access): the routes of 4 KiB, 64 KiB, 200 KiB, 1 MiB, and a byte more than that.
SIZES = (4 * KIB, 64 * KIB, 200 * KIB, MIB, MIB + 1)
TABLE: dict[tuple[int, Access], tuple[Route, ...]] = {
    (1, SHM): (BUFFER, BUFFER, BUFFER, BUFFER, TRANSFER),
    (1, NEAR): (INLINE, INLINE, TRANSFER, TRANSFER, TRANSFER),
    (1, TCP): (INLINE, INLINE, INLINE, INLINE, PLAIN_TRANSFER),
    (1, UCX): (INLINE, INLINE, PLAIN_TRANSFER, PLAIN_TRANSFER, PLAIN_TRANSFER),
    (2, SHM): (INLINE, INLINE, PLAIN_TRANSFER, PLAIN_TRANSFER, PLAIN_TRANSFER),
    (2, NEAR): (INLINE, INLINE, PLAIN_TRANSFER, PLAIN_TRANSFER, PLAIN_TRANSFER),
    (2, TCP): (INLINE, INLINE, INLINE, INLINE, PLAIN_TRANSFER),
    (2, UCX): (INLINE, INLINE, PLAIN_TRANSFER, PLAIN_TRANSFER, PLAIN_TRANSFER),
}


def route(size: int, access: Access, key: str = "k", sums: Checksums | None = None, **named: Any) -> Route:
    travels = {name: named.pop(name) for name in ("several", "in_round", "in_pieces") if name in named}
    options = PutOptions(**named)
    new = NewChunk(
        ChunkKey(key), 1, size, sums or Checksums(0, ()), options.pin, options.ttl_s, replicas=options.replicas
    )
    return plan(new, options, access, **travels)


@pytest.mark.parametrize(("replicas", "access"), TABLE)
def test_the_route_by_size_replicas_and_access(replicas: int, access: Access) -> None:
    assert tuple(route(size, access, replicas=replicas) for size in SIZES) == TABLE[replicas, access]


@pytest.mark.parametrize(
    "why",
    [
        {"pin": Pin.HARD},
        {"prefer_node": "n"},
        {"visible": False},
        {"part_bytes": 1024},
        {"ttl_s": 2e6},
        {"sums": Checksums(2048, (1, 2))},
        {"key": "k" * 300},
        {"key": "\N{CJK UNIFIED IDEOGRAPH-7CD6}" * 100},
        {"in_round": True},
        {"in_pieces": True},
    ],
    ids=lambda why: next(iter(why)),
)
def test_what_keeps_a_value_out_of_a_write_buffer(why: dict[str, Any]) -> None:
    assert route(4 * KIB, SHM, **why) == INLINE
    large = TRANSFER if why.get("visible", True) else PLAIN_TRANSFER
    assert route(200 * KIB, SHM, **why) == large


@pytest.mark.parametrize(
    "harmless",
    [
        {"pin": Pin.SOFT},
        {"ttl_s": 60.0},
        {"sums": Checksums(0, (1,))},
        {"several": True},
        {"key": "\N{CJK UNIFIED IDEOGRAPH-7CD6}" * 60},
    ],
    ids=lambda why: next(iter(why)),
)
def test_what_a_write_buffer_takes(harmless: dict[str, Any]) -> None:
    assert route(4 * KIB, SHM, **harmless) == BUFFER


def test_what_keeps_a_value_out_of_a_message() -> None:
    assert route(200 * KIB, TCP, several=True) == PLAIN_TRANSFER
    for harmless in (
        {"in_round": True},
        {"visible": False},
        {"pin": Pin.HARD},
        {"prefer_node": "n"},
        {"part_bytes": 1024},
        {"in_pieces": True},
    ):
        assert route(200 * KIB, TCP, **harmless) == INLINE


def test_who_commits_what_is_transferred_together() -> None:
    assert joint_committer([TRANSFER, TRANSFER], 1, by_mapping=True) is Committer.CLIENT
    assert joint_committer([TRANSFER, PLAIN_TRANSFER], 1, by_mapping=True) is Committer.NODE
    assert joint_committer([TRANSFER, TRANSFER], 2, by_mapping=True) is Committer.NODE
    assert joint_committer([TRANSFER], 1, by_mapping=False) is Committer.NODE
