"""The effects requested by the client's logic from its driver. The logic is a generator: it yields one, is sent its
result.

The same logic runs under a blocking driver (threads, blocking sockets) and under an asyncio driver; neither decides
anything.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NewType, TypeAlias, TypeVar

import numpy as np

from tanghulu.rpc.fast_client import Call
from tanghulu.store.protocol.shared_index import IndexPlace, IndexReader
from tanghulu.transfer_engine.engine import RemoteSegment, TransferRequest
from tanghulu.types import Address

#: Destination of a call: a node's instance id, MASTER, or an ``owner_peer``.
PeerId = NewType("PeerId", str)
MASTER = PeerId("")
#: Prefix of the id of a master that owns some ranges of keys.
OWNER = "@"


def owner_peer(address: Address) -> PeerId:
    """Return the peer for the master at ``address``, which owns some ranges of keys; MASTER is the leading one."""
    return PeerId(f"{OWNER}{address}")


def owner_address(peer: PeerId) -> Address:
    """Return the address of an ``owner_peer``."""
    return Address.parse(peer[len(OWNER) :])


def is_owner(peer: PeerId) -> bool:
    """Return whether ``peer`` is an ``owner_peer``."""
    return peer[:1] == OWNER


def is_master(peer: PeerId) -> bool:
    """Return whether ``peer`` is MASTER or an ``owner_peer``, not a node."""
    return not peer or peer[0] == OWNER


@dataclass(slots=True)
class CallPeers:
    """Send every call, sequentially to one peer or in parallel to several, and wait for all answers.

    Result: list[Reply | TanghuluError], one per call. An unreachable peer is NodeUnavailable, or MasterUnavailable.
    ``within_s``: the part of the deadline that these calls may take; None: all of it. ``meanwhile``: work done while
    the peer of a single call, a node, processes it. ``waits``: wait for a single absent master; False if the caller can
    do without the answer, or repeats the call by itself.
    """

    calls: Sequence[tuple[PeerId, Call[Any]]]
    within_s: float | None = None
    meanwhile: Callable[[], None] | None = None
    waits: bool = True


@dataclass(slots=True)
class Notify:
    """Send every call without waiting for its answer; an unreachable peer finds out by itself.

    The peer takes them before calls sent to it later. Result: None.
    """

    calls: Sequence[tuple[PeerId, Call[Any]]]


@dataclass(slots=True)
class OpenSegment:
    """Open the node's segment. Result: NodeLink | TanghuluError; ``copies`` requests one that avoids mappings."""

    node: PeerId
    copies: bool = False


@dataclass(slots=True)
class Transfer:
    """Transfer everything, and meanwhile send ``calls``, if any, to the masters.

    Result: (list[TanghuluError | None], one per request; list[Reply | TanghuluError], one per call). ``within_s``: time
    limit of the masters' calls.
    """

    requests: Sequence[TransferRequest]
    calls: Sequence[tuple[PeerId, Call[Any]]] = ()
    within_s: float = 0.0


@dataclass(slots=True)
class Sleep:
    """Wait before trying again. Result: None."""

    seconds: float


Effect: TypeAlias = CallPeers | Notify | OpenSegment | Transfer | Sleep
T = TypeVar("T")
#: A piece of the client's logic that returns a T.
Logic: TypeAlias = Generator[Effect, Any, T]


#: Size of the portions of copies through mapped memory, so that checksums find the bytes in the cache.
PORTION_BYTES = 2 << 20


def portions(requests: Sequence[TransferRequest]) -> Iterator[tuple[int, Sequence[TransferRequest]]]:
    """Yield (position of the first, requests) to move one after the other: all at once, except for mapped memory."""
    start = num_bytes = 0
    for position, request in enumerate(requests):
        if position > start and num_bytes >= PORTION_BYTES and request.target.transport == "shm":
            yield start, requests[start:position]
            start, num_bytes = position, 0
        num_bytes += request.length
    if start < len(requests):
        yield start, requests[start:]


@dataclass(slots=True)
class Deadline:
    """The end of one operation. ``now_s`` is the driver's clock, so the logic itself needs no clock."""

    until_s: float
    now_s: Callable[[], float]

    def remaining_s(self) -> float:
        """Return the seconds left, at least 0."""
        left_s = self.until_s - self.now_s()
        return left_s if left_s > 0.0 else 0.0

    def within(self, seconds: float) -> Deadline:
        """Return the end of a part of the operation that begins now and may take ``seconds``."""
        return Deadline(min(self.until_s, self.now_s() + seconds), self.now_s)

    def remaining_ms(self) -> int:
        """Return the deadline for a peer: a little less than is left, so that its typed answer arrives in time."""
        return max(1, int(self.remaining_s() * 900))

    def patience_ms(self, num_others: int) -> int:
        """Return the time a put may wait for room at a node: less if there are ``num_others`` to try after it."""
        return max(1, int(self.remaining_s() * 900) // (1 + min(num_others, 2)))


@dataclass(frozen=True, slots=True, eq=False)
class NodeLink:
    """An open segment of a node. ``view`` is its memory if it is mapped here, at ``address``; else None."""

    remote: RemoteSegment
    view: memoryview | None = field(init=False)
    address: int = field(init=False)

    def index(self, place: IndexPlace | None, key_scope: str = "") -> IndexReader | None:
        """Return the shared index at ``place``; None if there is none or the memory is not mapped."""
        published = self.remote.map_published()
        if self.view is None or published is None or place is None:
            return None
        return IndexReader(self.view, published, place, key_scope)

    def __post_init__(self) -> None:
        view = self.remote.map()
        address = 0 if view is None else np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        object.__setattr__(self, "view", view)
        object.__setattr__(self, "address", address)
