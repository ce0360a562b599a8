"""State of one transfer batch, from slices to results: pure decisions. Events and times go in, posts come out.

``handle`` performs a loop over one BatchState:

    posts = batch.advance(now)         give each slice to its path's link
    arrived / corrupt / refused / lost   reported by the links' completions
    for check in batch.take_checks()   compute its checksum, report it to checked(); more posts may follow
    paths = batch.stalled(now)         cut these; their slices are retried elsewhere
    paths = batch.give_up(now, error)  deadline or cancel: cut these; nothing may land afterwards

A slice lost by its path is retried on another, at most ``retries_max`` more times; a slice that the peer refused with a
typed error is not retried. Anything that arrived with a wrong checksum, a slice or a whole request, is moved once more,
over other paths if any are left. When all of a request's bytes have arrived and are correct, its notice is posted as a
slice of its own. When one slice of a request has failed for good, its waiting slices are cancelled and its posted ones
awaited, so that a request is never reported while its bytes are still moving.

``PathLoad`` holds the batch's slices under way on one path: window, progress, measured rate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tanghulu.errors import ChecksumMismatch, NodeUnavailable, TanghuluError, TransferFailed
from tanghulu.transfer_engine.core.buffers import Buffer
from tanghulu.transfer_engine.core.config import TransportLimits
from tanghulu.transfer_engine.core.paths import Path, PathTable
from tanghulu.transfer_engine.core.slices import Notice, Opcode, Slice, SliceEvent, SliceState, cut

#: Least bytes, and least time, over which a path's rate is measured.
MEASURED_BYTES = 1 << 20
MEASURED_S = 0.005


@dataclass(slots=True)
class PathLoad:
    """The slices of a batch now on ``path``, by number."""

    path: Path
    table: PathTable
    limits: TransportLimits
    slices: dict[int, Slice] = field(default_factory=dict)
    num_bytes: int = 0
    progress_s: float = 0.0
    busy_from_s: float = 0.0
    busy_bytes: int = 0

    @property
    def full(self) -> bool:
        """Whether the window takes no more slices."""
        return self.num_bytes >= self.limits.window_bytes or len(self.slices) >= self.limits.window_slices

    def add(self, piece: Slice, now_s: float) -> None:
        """Count a slice posted on the path."""
        if not self.slices:
            self.progress_s = self.busy_from_s = now_s
            self.busy_bytes = 0
        self.slices[piece.slice_id] = piece
        self.num_bytes += piece.length
        self.table.begun(self.path, piece.length)

    def remove(self, piece: Slice, now_s: float) -> None:
        """Count a slice that has ended there, with any outcome."""
        del self.slices[piece.slice_id]
        self.num_bytes -= piece.length
        self.progress_s = now_s
        self.table.ended(self.path, piece.length)

    def measure(self, num_bytes: int, now_s: float) -> None:
        """Count an arrival, and report the rate to the table when enough was counted."""
        self.busy_bytes += num_bytes
        took_s = now_s - self.busy_from_s
        if self.busy_bytes >= MEASURED_BYTES and took_s >= MEASURED_S:
            self.table.measured(self.path, self.busy_bytes / took_s, now_s)
            self.busy_from_s, self.busy_bytes = now_s, 0

    def check(self) -> None:
        """Assert the invariants: the window is kept, except by the last slice."""
        assert self.num_bytes == sum(piece.length for piece in self.slices.values())
        assert len(self.slices) <= self.limits.window_slices
        longest = max((piece.length for piece in self.slices.values()), default=0)
        assert self.num_bytes < self.limits.window_bytes + longest


class AdmittedRequest(NamedTuple):
    """One admitted request: offsets are in bounds, ``paths`` leads to its target."""

    opcode: Opcode
    buffer: Buffer
    local_offset: int
    remote_offset: int
    length: int
    lease_id: int
    paths: PathTable
    verified: bool = False
    checksum: int | None = None
    notice: Notice | None = None


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Limits of one batch; ``limits`` by transport."""

    limits: Mapping[str, TransportLimits]
    retries_max: int
    slice_deadline_s: float


class Post(NamedTuple):
    """Instruction: give ``piece`` to the link of ``path``."""

    piece: Slice
    path: Path


class Check(NamedTuple):
    """Instruction: compute the checksum of these bytes."""

    request_index: int
    memory: memoryview


@dataclass(slots=True)
class _Request:
    given: AdmittedRequest | None
    slices: list[Slice]
    #: Slices that have not ended, and a checksum check that is due.
    num_open: int
    error: TanghuluError | None = None
    checking: bool = False
    checked: bool = False
    notified: bool = False


class BatchState:
    """One batch in flight; a request given as an error has failed before it began."""

    def __init__(self, requests: Sequence[AdmittedRequest | TanghuluError], limits: BatchLimits) -> None:
        self._limits = limits
        self._slices: dict[int, Slice] = {}
        self._waiting: dict[PathTable, deque[Slice]] = {}
        self._loads: dict[Path, PathLoad] = {}
        self._num_open = 0  # the sum of all requests'
        self._checks: list[int] = []
        self._requests = [self._cut(index, request) for index, request in enumerate(requests)]

    # --- instructions

    def advance(self, now_s: float) -> list[Post]:
        """Fill the windows. Every returned post must be performed or reported lost."""
        posts: list[Post] = []
        for table, waiting in self._waiting.items():
            while waiting:
                piece = waiting[0]
                path = table.choose(
                    now_s, piece.lost_on, self._in_flight_bytes, piece.length, self._is_full, piece.needs
                )
                if path is None:
                    break
                waiting.popleft()
                posts.append(self._post(piece, path, now_s))
        return posts

    def arrived(self, slice_id: int, now_s: float) -> None:
        """Record that all bytes of the slice are in place."""
        piece = self._slices[slice_id]
        load = self._unload(piece, now_s)
        if piece.notice is None:
            load.table.succeeded(load.path, piece.length, now_s - piece.posted_s)
            load.measure(piece.length, now_s)
        else:
            load.table.succeeded(load.path)
        piece.step(SliceEvent.ARRIVED, now_s)
        self._close(piece)
        self._go_on(piece.request_index)

    def corrupt(self, slice_id: int, error: TanghuluError, now_s: float) -> None:
        """Record that the slice arrived with bytes other than those sent."""
        piece = self._slices[slice_id]
        load = self._unload(piece, now_s)
        load.table.corrupted(load.path)
        self._again(piece, now_s, error.message)
        self._retry(piece, load.table, now_s, error if piece.num_corrupt > 1 else None)

    def take_checks(self) -> list[Check]:
        """Return the requests whose checksum is due; ``checked`` must be called for each."""
        due, self._checks = self._checks, []
        checks: list[Check] = []
        for index in due:
            given = self._requests[index].given
            assert given is not None
            checks.append(Check(index, given.buffer.view(given.local_offset, given.length)))
        return checks

    def checked(self, index: int, digest: int, now_s: float) -> None:
        """Record the checksum of the request's bytes; does nothing for a request given up meanwhile."""
        request = self._requests[index]
        given = request.given
        assert given is not None
        if not request.checking:
            return
        request.checking = False
        self._count_open(request, -1)
        if digest == given.checksum:
            request.checked = True
            self._go_on(index)
            return
        error = ChecksumMismatch(f"{given.length} bytes arrived with checksum {digest:#x}, not {given.checksum:#x}")
        for path in {piece.path for piece in request.slices if piece.path is not None}:
            given.paths.corrupted(path)
        if any(piece.num_corrupt for piece in request.slices):
            request.error = error
            return
        for piece in request.slices:
            self._again(piece, now_s, error.message)
            self._waiting[given.paths].append(piece)
        self._count_open(request, len(request.slices))

    def refused(self, slice_id: int, error: TanghuluError, now_s: float) -> None:
        """Record that the peer answered with a typed error: the path works, the request does not."""
        piece = self._slices[slice_id]
        load = self._unload(piece, now_s)
        load.table.succeeded(load.path)
        piece.step(SliceEvent.REFUSED, now_s, f"{error.code}: {error.message}")
        self._close(piece)
        self._fail(piece, error, now_s)

    def lost(self, path: Path, error: TanghuluError, now_s: float) -> None:
        """Record that the path broke; retry everything in flight on it elsewhere, where allowed."""
        load = self._loads[path]
        if not load.slices:
            return
        load.table.failed(path, now_s, len(load.slices))
        for piece in list(load.slices.values()):
            self._unload(piece, now_s)
            piece.step(SliceEvent.LOST, now_s, error.message)
            piece.lost_on.append(path)
            is_last = piece.num_posts > self._limits.retries_max + piece.num_corrupt
            self._retry(piece, load.table, now_s, _exhausted(piece, path, error) if is_last else None)

    def stalled(self, now_s: float) -> list[Path]:
        """Return paths with slices in flight and none finished in the slice deadline; they are lost, so cut them."""
        limit_s = self._limits.slice_deadline_s
        paths = [path for path, load in self._loads.items() if load.slices and now_s >= load.progress_s + limit_s]
        for path in paths:
            self.lost(path, TransferFailed(f"no slice finished on {path.label} for {limit_s:g} s"), now_s)
        return paths

    def next_stall_s(self) -> float | None:
        """Return the time at which ``stalled`` must be called if nothing arrives first, or None."""
        busy = [load.progress_s for load in self._loads.values() if load.slices]
        return min(busy) + self._limits.slice_deadline_s if busy else None

    def give_up(self, error: TanghuluError, now_s: float) -> list[Path]:
        """End everything unfinished with ``error``; return the paths that must be cut."""
        paths = [path for path, load in self._loads.items() if load.slices]
        for request in self._requests:
            if request.num_open and request.error is None:
                request.error = error
        for path in paths:
            for piece in list(self._loads[path].slices.values()):
                self._unload(piece, now_s)
                piece.step(SliceEvent.CANCEL, now_s)
                self._close(piece)
        for waiting in self._waiting.values():
            for piece in waiting:
                self._drop_waiting(piece, SliceEvent.CANCEL, now_s)
            waiting.clear()
        for request in self._requests:
            if request.checking:
                request.checking = False
                self._count_open(request, -1)
        self._checks.clear()
        return paths

    # --- questions

    @property
    def finished(self) -> bool:
        """Whether every slice has ended."""
        return self._num_open == 0

    def errors(self) -> list[TanghuluError | None]:
        """Return each request's error, None where all its bytes have arrived; for a finished batch only."""
        assert self.finished, "slices are still on their way"
        return [request.error for request in self._requests]

    def request_state(self, index: int) -> tuple[bool, TanghuluError | None]:
        """Return (whether all its slices have ended, its error so far)."""
        request = self._requests[index]
        return request.num_open == 0, request.error

    @property
    def done_bytes(self) -> int:
        """Bytes of slices that have arrived."""
        done = (piece for piece in self._slices.values() if piece.state is SliceState.DONE)
        return sum(piece.length for piece in done if piece.notice is None)

    def story(self, index: int) -> list[str]:
        """Return the history of the request's slices, in order of time."""
        steps = [
            (at_s, piece.slice_id, order, f"{event.value} {path.label if path else ''} {note}".strip())
            for piece in self._requests[index].slices
            for order, (at_s, event, path, note) in enumerate(piece.events)
        ]
        return [f"{at_s:.6f} slice {slice_id} {text}" for at_s, slice_id, _, text in sorted(steps)]

    def check(self) -> None:
        """Assert the invariants: every slice is counted under its own state."""
        posted = [piece for piece in self._slices.values() if piece.state is SliceState.POSTED]
        waiting = [piece for piece in self._slices.values() if piece.state is SliceState.WAITING]
        assert len(posted) == sum(len(load.slices) for load in self._loads.values())
        assert len(waiting) == sum(len(queue) for queue in self._waiting.values())
        for load in self._loads.values():
            load.check()
        for request in self._requests:
            is_open = [piece for piece in request.slices if piece.state in (SliceState.WAITING, SliceState.POSTED)]
            assert request.num_open == len(is_open) + request.checking
            if not request.num_open and request.error is None:
                assert all(piece.state is SliceState.DONE for piece in request.slices)
                assert request.given is None or request.checked or request.given.checksum is None
                assert request.given is None or request.notified or request.given.notice is None
        assert self._num_open == sum(request.num_open for request in self._requests)

    # --- inside

    def _cut(self, index: int, request: AdmittedRequest | TanghuluError) -> _Request:
        if isinstance(request, TanghuluError):
            return _Request(None, [], 0, request)
        waiting = self._waiting.setdefault(request.paths, deque())
        if not waiting:
            for path in request.paths.paths:
                self._loads[path] = PathLoad(path, request.paths, self._limits.limits[path.transport])
        slice_bytes = self._limits.limits[request.paths.paths[0].transport].slice_bytes
        pieces = [
            Slice(
                len(self._slices) + number + 1,
                index,
                request.opcode,
                request.buffer,
                request.local_offset + offset,
                request.remote_offset + offset,
                length,
                request.lease_id,
                request.verified,
            )
            for number, (offset, length) in enumerate(cut(request.length, slice_bytes))
        ]
        self._slices.update((piece.slice_id, piece) for piece in pieces)
        waiting.extend(pieces)
        self._num_open += len(pieces)
        return _Request(request, pieces, len(pieces))

    def _go_on(self, index: int) -> None:
        """Once all slices of a request have arrived, have its checksum compared and then its owner notified."""
        request = self._requests[index]
        given = request.given
        if request.num_open or request.error is not None or given is None:
            return
        if given.checksum is not None and not request.checked:
            request.checking = True
            self._count_open(request, 1)
            self._checks.append(index)
        elif given.notice is not None and not request.notified:
            request.notified = True
            self._count_open(request, 1)
            size = len(given.notice.data)
            piece = Slice(len(self._slices) + 1, index, Opcode.WRITE, given.buffer, 0, 0, size, 0, False, given.notice)
            request.slices.append(piece)
            self._slices[piece.slice_id] = piece
            self._waiting[given.paths].append(piece)

    def _again(self, piece: Slice, now_s: float, why: str) -> None:
        """Count the slice as waiting, to be moved by another path than the one that brought wrong bytes."""
        piece.step(SliceEvent.CORRUPT, now_s, why)
        piece.num_corrupt += 1
        if piece.path is not None:
            piece.lost_on.append(piece.path)

    def _retry(self, piece: Slice, table: PathTable, now_s: float, exhausted: TanghuluError | None) -> None:
        """Have the slice wait for another path, unless its request has failed or, being ``exhausted``, fails now."""
        if self._requests[piece.request_index].error is not None:
            self._drop_waiting(piece, SliceEvent.CANCEL, now_s)
        elif exhausted is not None:
            self._drop_waiting(piece, SliceEvent.EXHAUSTED, now_s)
            self._fail(piece, exhausted, now_s)
        else:
            self._waiting[table].appendleft(piece)

    def _post(self, piece: Slice, path: Path, now_s: float) -> Post:
        self._loads[path].add(piece, now_s)
        piece.path = path
        piece.posted_s = now_s
        piece.num_posts += 1
        piece.step(SliceEvent.POST, now_s)
        return Post(piece, path)

    def _in_flight_bytes(self, path: Path) -> int:
        return self._loads[path].num_bytes

    def _is_full(self, path: Path) -> bool:
        return self._loads[path].full

    def _unload(self, piece: Slice, now_s: float) -> PathLoad:
        assert piece.path is not None, f"slice {piece.slice_id} is on no path"
        load = self._loads[piece.path]
        load.remove(piece, now_s)
        return load

    def _drop_waiting(self, piece: Slice, event: SliceEvent, now_s: float) -> None:
        piece.step(event, now_s)
        self._close(piece)

    def _close(self, piece: Slice) -> None:
        self._count_open(self._requests[piece.request_index], -1)

    def _count_open(self, request: _Request, change: int) -> None:
        request.num_open += change
        self._num_open += change

    def _fail(self, piece: Slice, error: TanghuluError, now_s: float) -> None:
        """Fail the request of ``piece``: cancel its waiting slices."""
        request = self._requests[piece.request_index]
        if request.error is not None:
            return
        request.error = error
        mine = {each.slice_id for each in request.slices if each.state is SliceState.WAITING}
        if not mine:
            return
        for waiting in self._waiting.values():
            kept = [each for each in waiting if each.slice_id not in mine]
            for each in waiting:
                if each.slice_id in mine:
                    self._drop_waiting(each, SliceEvent.CANCEL, now_s)
            waiting.clear()
            waiting.extend(kept)


def _exhausted(piece: Slice, path: Path, last: TanghuluError) -> TanghuluError:
    message = f"{piece.length} bytes failed on {piece.num_posts} paths, last {path.label}: {last.message}"
    return NodeUnavailable(message) if isinstance(last, NodeUnavailable) else TransferFailed(message)
