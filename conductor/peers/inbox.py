"""Requests of peers, counted in this conductor's decisions.

Pure. A peer's request counts like an own one: its prefill tokens until its worker's reports include them, its blocks as
coming until its first token, its decode worker's room until it arrives there. It is never dropped by age, only when its
peer frees it, sends a snapshot without it, or disappears itself.
"""

from __future__ import annotations

from collections.abc import Callable

from tanghulu.conductor.peers.outbox import Begun, News
from tanghulu.conductor.routing.in_flight import InFlightBlocks
from tanghulu.conductor.routing.worker_state import LoadTracker
from tanghulu.types import InstanceId

#: Most requests counted of one peer; load beyond them is not taken into account.
MAX_REQUESTS_OF_A_PEER = 65_536

LoadOf = Callable[[InstanceId], LoadTracker | None]


class PeerRequests:
    """The requests of all peers. ``load_of`` gives a worker's tracker, None for an unknown worker."""

    def __init__(self, in_flight: InFlightBlocks, load_of: LoadOf) -> None:
        self._in_flight, self._load_of = in_flight, load_of
        self._of_peer: dict[InstanceId, dict[str, Begun]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of_peer.values()))

    @property
    def peers(self) -> list[InstanceId]:
        """Peers that have reported something."""
        return list(self._of_peer)

    def on_news(self, peer: InstanceId, news: News) -> None:
        if news.snapshot:
            self.forget(peer)
        requests = self._of_peer.setdefault(peer, {})
        for begun in news.begun:
            if len(requests) < MAX_REQUESTS_OF_A_PEER and begun.request_id not in requests:
                requests[begun.request_id] = begun
                self._begin(_key(peer, begun.request_id), begun)
        for request_id in news.prefilled:
            if request_id in requests:
                self._prefilled(_key(peer, request_id), requests[request_id])
        for request_id in news.freed:
            begun_or_none = requests.pop(request_id, None)
            if begun_or_none is not None:
                self._free(_key(peer, request_id), begun_or_none)

    def forget(self, peer: InstanceId) -> None:
        """Forget ``peer``, which has left, and its requests."""
        for request_id, begun in self._of_peer.pop(peer, {}).items():
            self._free(_key(peer, request_id), begun)

    def check(self) -> None:
        assert all(len(requests) <= MAX_REQUESTS_OF_A_PEER for requests in self._of_peer.values())

    def _begin(self, key: str, begun: Begun) -> None:
        worker, decode = self._load_of(begun.worker), self._load_of(begun.decode) if begun.decode else None
        if not begun.prefilled:
            self._in_flight.begin(key, begun.worker, begun.hashes)
            if worker is not None:
                worker.sent(key, begun.prefill_tokens, begun.num_blocks)
        if decode is not None:
            decode.reserve_decode(key, begun.num_blocks)

    def _prefilled(self, key: str, begun: Begun) -> None:
        self._in_flight.end(key)
        worker = self._load_of(begun.worker)
        if worker is not None:
            worker.on_report(key)

    def _free(self, key: str, begun: Begun) -> None:
        self._prefilled(key, begun)
        decode = self._load_of(begun.decode) if begun.decode else None
        if decode is not None:
            decode.release_decode(key)


def _key(peer: InstanceId, request_id: str) -> str:
    """Return the key of a peer's request, which differs from that of any own request."""
    return f"{peer}/{request_id}"
