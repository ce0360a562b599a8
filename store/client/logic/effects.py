"""What the client's logic asks its shell to do. The logic is a generator: it yields one of these, is sent the result.

The same logic is driven by a blocking shell (threads, blocking sockets) and by an asyncio shell; neither decides
anything.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NewType, TypeAlias, TypeVar

from tanghulu.rpc.fast_client import Call
from tanghulu.transfer_engine.engine import TransferRequest

#: Whom a call goes to: a node's instance id, or MASTER.
PeerId = NewType("PeerId", str)
MASTER = PeerId("")


@dataclass(slots=True)
class Ask:
    """Send every call, to one peer after the other or to several at once, and wait for all answers.

    Result: list[Reply | TanghuluError], one per call. A peer that cannot be reached is NodeUnavailable, or
    MasterUnavailable. ``within_s``: of the deadline, what these calls may take; None: all of it. ``meanwhile``: work
    that is done while the peer of a single call, a node, has it.
    """

    calls: Sequence[tuple[PeerId, Call[Any]]]
    within_s: float | None = None
    meanwhile: Callable[[], None] | None = None


@dataclass(slots=True)
class Stream:
    """Send ``call`` to ``node``, asking the master meanwhile; then say the last word to the node.

    ``ask`` gives the call to the master, if there is one, and is told which life of the node that is. ``meanwhile``
    is work that has to be done before the last word: the head of ``call`` has left, the payload perhaps not.
    ``word`` makes the last word of the master's answer (None: it was not asked), and ``drop`` is said when it comes
    to none. Result: Reply | TanghuluError, the answer to ``call``. ``within_s``: what the master's call may take.
    """

    node: PeerId
    call: Call[Any]
    ask: Callable[[int], Call[Any] | None]
    meanwhile: Callable[[], None]
    word: Callable[[Any], Call[Any]]
    drop: Call[Any]
    within_s: float


@dataclass(slots=True)
class Tell:
    """Send every call and do not wait: nobody needs the answers, and a peer that cannot be told finds out by itself.

    Calls that follow to the same peer are answered after it has heard these. Result: None.
    """

    calls: Sequence[tuple[PeerId, Call[Any]]]


@dataclass(slots=True)
class Reach:
    """Open the node's segment. Result: Link | TanghuluError; ``copies`` wants one that does not use a mapping."""

    node: PeerId
    copies: bool = False


@dataclass(slots=True)
class Move:
    """Transfer everything. Result: list[TanghuluError | None], one per request."""

    requests: Sequence[TransferRequest]


@dataclass(slots=True)
class Deliver:
    """Transfer everything, and ask the master meanwhile. Result: (as ``Move``'s, Reply | TanghuluError).

    ``within_s``: what the master's call may take.
    """

    requests: Sequence[TransferRequest]
    question: Call[Any]
    within_s: float


@dataclass(slots=True)
class Sleep:
    """Wait before trying again. Result: None."""

    seconds: float


Instruction: TypeAlias = Ask | Stream | Tell | Reach | Move | Deliver | Sleep
T = TypeVar("T")
#: A piece of the client's logic that ends with a T.
Logic: TypeAlias = Generator[Instruction, Any, T]


#: Copies through mapped memory come in portions of about this size, so that checksums find the bytes in the cache.
PORTION_BYTES = 2 << 20


def portions(requests: Sequence[TransferRequest]) -> Iterator[tuple[int, Sequence[TransferRequest]]]:
    """(position of the first, requests) to move one after the other: all at once, but for mapped memory."""
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
    """The end of one operation. ``now_s`` is the shell's clock, so that the logic itself owns no time."""

    until_s: float
    now_s: Any

    def remaining_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, float(self.until_s - self.now_s()))

    def remaining_ms(self) -> int:
        """What a peer is told: a little less than is left, so that its typed answer arrives in time."""
        return max(1, int(self.remaining_s() * 900))
