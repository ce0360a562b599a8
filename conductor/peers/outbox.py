"""Changes of a conductor's own requests, to be reported to its peers.

Pure. The table of requests in progress is authoritative; an outbox for each peer holds the changes since the last
report to it. Changes are merged while they wait: a request begun and freed in between is never reported. An outbox that
grows beyond ``MAX_CHANGES`` (its peer reads too slowly) is emptied, and its peer gets a snapshot, which repairs any
difference.

    began a        outbox {begun: a}
    prefilled a    outbox {begun: a, prefilled}
    freed a        outbox {}                        # a is never reported to the peer
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from tanghulu.rpc.wire import U32, FastMessage
from tanghulu.types import BlockHash, InstanceId

MAX_CHANGES = 8192
MAX_PEERS = 64
#: Requests in one message; a larger snapshot is split into several.
MAX_BEGUN = 256
NOBODY = InstanceId("")


class Begun(FastMessage, frozen=True):
    """One submission to one worker, for a peer. ``decode`` has a slot reserved; "" if that is the same worker.

    ``hashes`` are those of its full blocks, none once it is ``prefilled``.
    """

    request_id: str
    worker: InstanceId
    prefill_tokens: U32
    num_blocks: U32
    hashes: Sequence[BlockHash]
    decode: InstanceId = NOBODY
    prefilled: bool = False


class News(FastMessage, frozen=True):
    """Changes of requests; a ``snapshot`` voids all earlier ones. An empty message is the heartbeat of a stream."""

    snapshot: bool = False
    begun: Sequence[Begun] = ()
    prefilled: Sequence[str] = ()
    freed: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.snapshot or self.begun or self.prefilled or self.freed)

    def parts(self) -> Iterator[News]:
        """Yield the same in messages of at most MAX_BEGUN requests; at least one."""
        last = max(0, len(self.begun) - 1) // MAX_BEGUN
        for number in range(last):
            yield News(self.snapshot and not number, self.begun[number * MAX_BEGUN : (number + 1) * MAX_BEGUN])
        yield News(self.snapshot and not last, self.begun[last * MAX_BEGUN :], self.prefilled, self.freed)


@dataclass(eq=False)
class Outbox:
    """Changes not yet reported to one peer. ``wake`` is called when there is one."""

    wake: Callable[[], None]
    all_anew: bool = True
    begun: dict[str, Begun] = field(default_factory=dict)
    prefilled: list[str] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.begun) + len(self.prefilled) + len(self.freed)

    def clear(self) -> None:
        self.begun, self.prefilled, self.freed = {}, [], []


class OwnRequests:
    """This conductor's requests at workers, and an outbox for each peer that follows them."""

    def __init__(self, max_changes: int = MAX_CHANGES) -> None:
        self._max_changes = max_changes
        self._live: dict[str, Begun] = {}
        self._outboxes: list[Outbox] = []

    def __len__(self) -> int:
        return len(self._live)

    def follow(self, wake: Callable[[], None]) -> Outbox | None:
        """Open the outbox of a new peer, starting with a snapshot; None if there are MAX_PEERS already."""
        if len(self._outboxes) >= MAX_PEERS:
            return None
        outbox = Outbox(wake)
        self._outboxes.append(outbox)
        return outbox

    def unfollow(self, outbox: Outbox) -> None:
        self._outboxes.remove(outbox)

    def began(self, begun: Begun) -> None:
        self._live[begun.request_id] = begun
        for outbox in self._outboxes:
            if not outbox.all_anew:
                outbox.begun[begun.request_id] = begun
            self._changed(outbox)

    def prefilled(self, request_id: str) -> None:
        """Record the first output of a request's worker; no error if it has ended or that is already recorded."""
        begun = self._live.get(request_id)
        if begun is None or begun.prefilled:
            return
        done = self._live[request_id] = structs.replace(begun, hashes=(), prefilled=True)
        for outbox in self._outboxes:
            if request_id in outbox.begun:
                outbox.begun[request_id] = done
            elif not outbox.all_anew:
                outbox.prefilled.append(request_id)
            self._changed(outbox)

    def freed(self, request_id: str) -> None:
        """Record that a request has left its worker; no error if already recorded."""
        if self._live.pop(request_id, None) is None:
            return
        for outbox in self._outboxes:
            if outbox.begun.pop(request_id, None) is None and not outbox.all_anew:
                outbox.freed.append(request_id)
            self._changed(outbox)

    def take(self, outbox: Outbox) -> News:
        """Empty ``outbox``; return its contents."""
        if outbox.all_anew:
            news = News(True, list(self._live.values()))
            outbox.all_anew = False
        else:
            news = News(False, list(outbox.begun.values()), outbox.prefilled, outbox.freed)
        outbox.clear()
        return news

    def check(self) -> None:
        assert len(self._outboxes) <= MAX_PEERS
        for outbox in self._outboxes:
            assert len(outbox) <= self._max_changes
            assert not (outbox.all_anew and len(outbox))
            assert outbox.begun.items() <= self._live.items()

    def _changed(self, outbox: Outbox) -> None:
        if len(outbox) > self._max_changes:
            outbox.clear()
            outbox.all_anew = True
        outbox.wake()
