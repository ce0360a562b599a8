"""The store's work for each request of an engine's scheduler: blocks to load, blocks to save. Pure.

The engine asks how much of a request's prefix can be loaded, allocates room, and waits for the end of the load; it may
preempt a running request, and end one at any time. Three rules hold in every case:

* an ordered load is waited for, even if its request has ended: its blocks are being written to;
* a request is loaded at most once between two preemptions: an engine that lost all of a load asks again, and would get
  the same answer from a store that does not respond;
* blocks whose load failed are computed, and saved again.

Example with blocks of 16 tokens: a prompt of 100, 2 blocks in the engine's own cache, 5 in the store. ``match`` returns
48 tokens (blocks 2, 3 and 4; for a prompt of 80 it would be 32, as an engine must compute the last token), ``allocate``
orders their load, and after its end the step that fills block 5 orders its save.

Every rank of an engine writes its part of a save and acknowledges its end, successful or not. The engine must not give
a pinned block to another request before all ranks have (`PendingSaves`). So a job pins its blocks when ordered, and its
last acknowledgement releases them. Example with two ranks: job 7 pins blocks 3 and 4; the first acknowledgement
releases nothing, the second 3 and 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

#: Among the transfer parameters of a request that wants to know, at its end, what was loaded for it (`Loaded`).
REPORT_LOADS = "tanghulu_report_loads"


class Block(NamedTuple):
    """A block of an engine's cache: its name and its index."""

    block_hash: bytes
    block_id: int


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Blocks to write to the store."""

    job_id: int
    blocks: tuple[Block, ...]


@dataclass(slots=True)
class _Pending:
    block_ids: list[int]
    num_awaited: int


class PendingSaves:
    """The jobs not yet acknowledged by all ranks. Blocks beyond ``max_bytes`` are not saved, but counted."""

    def __init__(self, num_ranks: int, block_bytes: int, max_bytes: int) -> None:
        assert num_ranks > 0
        assert block_bytes > 0
        self._num_ranks, self._block_bytes = num_ranks, block_bytes
        self._max_blocks = max_bytes // block_bytes
        self._pending: dict[int, _Pending] = {}
        self._next_id = 0
        self.num_pinned = 0
        self.num_skipped = 0

    def __bool__(self) -> bool:
        return bool(self._pending)

    def order(self, blocks: Sequence[Block]) -> SaveJob | None:
        """Return a job for as many leading ``blocks`` as there is room for; the caller pins the blocks of the job.

        A prefix without its beginning is useless, so the last blocks are left out.
        """
        taken = tuple(blocks[: max(0, self._max_blocks - self.num_pinned)])
        self.num_skipped += len(blocks) - len(taken)
        if not taken:
            return None
        job = SaveJob(self._next_id, taken)
        self._next_id += 1
        self._pending[job.job_id] = _Pending([block.block_id for block in taken], self._num_ranks)
        self.num_pinned += len(taken)
        return job

    def acknowledge(self, job_id: int, num_ranks: int = 1) -> list[int]:
        """Note that ``num_ranks`` more ranks ended the job; returns the unpinned blocks, none before the last rank."""
        pending = self._pending[job_id]
        pending.num_awaited -= num_ranks
        assert pending.num_awaited >= 0, f"job {job_id} was acknowledged by more ranks than there are"
        if pending.num_awaited:
            return []
        del self._pending[job_id]
        self.num_pinned -= len(pending.block_ids)
        return pending.block_ids

    def check(self) -> None:
        assert self.num_pinned == sum(len(each.block_ids) for each in self._pending.values())
        assert self.num_pinned <= max(0, self._max_blocks)
        assert all(0 < each.num_awaited <= self._num_ranks for each in self._pending.values())


class RequestState(Enum):
    """State of a request with respect to the store."""

    WAITING = auto()  # not looked up yet, or preempted
    MATCHED = auto()  # the engine knows how much can be loaded, and has not allocated room yet
    LOADING = auto()  # its load is in progress
    COMPUTING = auto()  # the engine computes the rest
    LEFT = auto()  # it ended during its load


class RequestEvent(Enum):
    """Events of a request."""

    MATCH = auto()
    LOAD = auto()
    COMPUTE = auto()
    LOADED = auto()
    PREEMPT = auto()
    LEAVE = auto()


_S, _E = RequestState, RequestEvent
#: None drops the request.
TRANSITIONS: dict[tuple[RequestState, RequestEvent], RequestState | None] = {
    (_S.WAITING, _E.MATCH): _S.MATCHED,
    (_S.WAITING, _E.COMPUTE): _S.COMPUTING,
    (_S.WAITING, _E.PREEMPT): _S.WAITING,
    (_S.WAITING, _E.LEAVE): None,
    (_S.MATCHED, _E.MATCH): _S.MATCHED,
    (_S.MATCHED, _E.LOAD): _S.LOADING,
    (_S.MATCHED, _E.COMPUTE): _S.COMPUTING,
    (_S.MATCHED, _E.PREEMPT): _S.WAITING,
    (_S.MATCHED, _E.LEAVE): None,
    (_S.LOADING, _E.LOADED): _S.COMPUTING,
    (_S.LOADING, _E.LEAVE): _S.LEFT,
    (_S.COMPUTING, _E.COMPUTE): _S.COMPUTING,
    (_S.COMPUTING, _E.PREEMPT): _S.WAITING,
    (_S.COMPUTING, _E.LEAVE): None,
    (_S.LEFT, _E.LOADED): None,
}


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Blocks to read from the store, in the order of the prompt."""

    request_id: str
    blocks: tuple[Block, ...]


class Loaded(NamedTuple):
    """Tokens of a prompt whose load was ordered, and of the leading ones among them that arrived."""

    ordered: int
    arrived: int


@dataclass(slots=True)
class _Request:
    state: RequestState = RequestState.WAITING
    num_preemptions: int = 0
    num_matched: int = 0  # earlier blocks are the engine's own or the store's
    num_computed: int = 0  # of those, the engine's own
    num_saved: int = 0  # earlier blocks are in the store, or were given to it
    loading: tuple[Block, ...] = ()
    loaded: Loaded | None = None  # the first time


class RequestBook:
    """All requests that the engine has not ended, and those whose load is still in progress."""

    def __init__(self, block_tokens: int, saves: PendingSaves, min_blocks: int = 1) -> None:
        assert block_tokens > 0
        self._block_tokens, self._min_blocks, self.saves = block_tokens, min_blocks, saves
        self._requests: dict[str, _Request] = {}
        self._loads: list[LoadJob] = []

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def computes(self) -> bool:
        """Whether the engine is computing a request, as far as it has reported."""
        return any(request.state is RequestState.COMPUTING for request in self._requests.values())

    def arrive(self, request_id: str) -> None:
        """Add a new request of the engine; an existing one is unchanged."""
        self._requests.setdefault(request_id, _Request())

    def may_load(self, request_id: str, num_preemptions: int) -> bool:
        """Return whether to query the store for the request: not during or after its load, but again once preempted."""
        request = self._requests[request_id]
        if num_preemptions > request.num_preemptions:
            self._move(request_id, RequestEvent.PREEMPT)
            request.num_preemptions = num_preemptions
        return request.state in (RequestState.WAITING, RequestState.MATCHED)

    def match(self, request_id: str, num_tokens: int, num_computed_tokens: int, num_stored: int) -> int:
        """Return the number of tokens to load if the store holds the first ``num_stored`` blocks."""
        request = self._requests[request_id]
        self._move(request_id, RequestEvent.MATCH)
        request.num_saved = max(request.num_saved, num_stored)
        request.num_computed = num_computed_tokens // self._block_tokens
        usable = min(num_stored, (num_tokens - 1) // self._block_tokens)
        if num_computed_tokens % self._block_tokens or usable - request.num_computed < self._min_blocks:
            usable = request.num_computed
        request.num_matched = usable
        return (usable - request.num_computed) * self._block_tokens

    def allocate(self, request_id: str, num_tokens: int, hashes: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """Note that the engine allocated room to load ``num_tokens``; ``block_ids`` begin at the prompt's start."""
        request = self._requests[request_id]
        if not num_tokens:
            self._move(request_id, RequestEvent.COMPUTE)
            return
        wanted = range(request.num_computed, request.num_matched)
        assert num_tokens == len(wanted) * self._block_tokens, f"{num_tokens} tokens, {len(wanted)} blocks were offered"
        self._move(request_id, RequestEvent.LOAD)
        request.loading = tuple(Block(hashes[index], block_ids[index]) for index in wanted)
        self._loads.append(LoadJob(request_id, request.loading))

    def take_loads(self) -> list[LoadJob]:
        """Return the loads ordered since the last call; each of them must end with ``load_ended``."""
        taken, self._loads = self._loads, []
        return taken

    def load_ended(self, request_id: str, bad_block_ids: set[int]) -> None:
        """Note the end of a load; the blocks from the first bad one on are computed, and then saved."""
        request = self._requests[request_id]
        bad = [index for index, block in enumerate(request.loading) if block.block_id in bad_block_ids]
        if request.loaded is None:
            arrived = bad[0] if bad else len(request.loading)
            request.loaded = Loaded(len(request.loading) * self._block_tokens, arrived * self._block_tokens)
        if bad:
            request.num_saved = min(request.num_saved, request.num_computed + bad[0])
        request.loading = ()
        self._move(request_id, RequestEvent.LOADED)

    def computed(
        self, request_id: str, num_tokens: int, hashes: Sequence[bytes], block_ids: Sequence[int]
    ) -> SaveJob | None:
        """Return the save due once this step has computed the first ``num_tokens``; the caller pins its blocks."""
        request = self._requests[request_id]
        assert request.state is RequestState.COMPUTING, f"{request_id} computes while it is {request.state.name}"
        num_full = min(num_tokens // self._block_tokens, len(hashes))
        fresh = [Block(hashes[index], block_ids[index]) for index in range(request.num_saved, num_full)]
        request.num_saved = max(request.num_saved, num_full)
        return self.saves.order(fresh) if fresh else None

    def leave(self, request_id: str) -> Loaded | None:
        """Note that the engine ended the request, or its client disconnected; return what was loaded before it ran."""
        loaded = self._requests[request_id].loaded
        self._move(request_id, RequestEvent.LEAVE)
        return loaded

    def check(self) -> None:
        self.saves.check()
        for request in self._requests.values():
            under_way = request.state in (RequestState.LOADING, RequestState.LEFT)
            assert under_way == bool(request.loading)
        assert {job.request_id for job in self._loads} <= self._requests.keys()

    def _move(self, request_id: str, event: RequestEvent) -> None:
        request = self._requests[request_id]
        following = TRANSITIONS[request.state, event]
        if following is None:
            del self._requests[request_id]
        else:
            request.state = following
