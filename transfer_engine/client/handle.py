"""TransferHandle drives one BatchState: it performs its instructions and turns completions into events.

The waiting thread drives: it posts, polls and applies, so a blocking caller never hops threads. One thread at a time
has the turn. Links are borrowed for this batch alone, from the first post to the end; a batch to several peers borrows
them in one global order, so that two batches cannot each hold what the other waits for.

When the batch ends by deadline or cancellation, the connections carrying its slices are closed, in this thread, before
``wait`` returns: nothing lands in the caller's buffers afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from tanghulu.errors import DeadlineExceeded, NodeUnavailable, Overloaded, TanghuluError
from tanghulu.runtime.clock import Clock
from tanghulu.transfer_engine.client.batch_state import BatchState, Post
from tanghulu.transfer_engine.client.remote import LinkPool
from tanghulu.transfer_engine.client.requests import (
    BatchResult,
    TransferCancelled,
    TransferRequest,
    TransferState,
    admit_deadline,
)
from tanghulu.transfer_engine.core.paths import Path
from tanghulu.transfer_engine.core.slices import SliceState
from tanghulu.transfer_engine.core.transport import Arrived, Completion, Corrupt, Link, Lost
from tanghulu.transfer_engine.core.wire import digest_of

#: Longest deadline; longer ones are shortened to it, so that every wait ends.
LONGEST_WAIT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class EngineResources:
    """State shared by all handles of an engine. ``lock`` guards the health of paths, and is held for decisions only."""

    clock: Clock
    lock: threading.Lock
    executor: Callable[[], Executor]


class TransferHandle:
    """One submitted batch. Ends by ``wait``, ``wait_async`` or ``cancel``; dropping it cancels it."""

    def __init__(self, resources: EngineResources, batch: BatchState, requests: Sequence[TransferRequest]) -> None:
        self._resources = resources
        self._batch = batch
        self._requests = requests
        self._targets = list(dict.fromkeys(each.target for each in requests))
        self._target_of = {path: target for target in self._targets for path in target.pools}
        self._links: dict[LinkPool, Link] = {}
        self._turn = threading.Lock()
        self._stop: TanghuluError | None = None

    # --- what callers do

    def wait(self, deadline_s: float) -> BatchResult:
        """Drive the batch to its end, at most ``deadline_s`` seconds from now.

        Requests incomplete by then have DeadlineExceeded. Returns the same result when called again. Raises
        InvalidRequest if ``deadline_s`` is not a number.
        """
        admit_deadline(deadline_s)
        deadline_s = min(deadline_s, LONGEST_WAIT_S)
        return self._wait_until(self._resources.clock.now_s() + deadline_s, deadline_s)

    async def wait_async(self, deadline_s: float) -> BatchResult:
        """Wait in asyncio: one of the engine's threads drives. Cancelling the coroutine cancels the batch."""
        admit_deadline(deadline_s)
        if self._batch.finished:
            return self._result()
        deadline_s = min(deadline_s, LONGEST_WAIT_S)
        until_s = self._resources.clock.now_s() + deadline_s
        loop = asyncio.get_running_loop()
        driving = loop.run_in_executor(self._resources.executor(), self._wait_until, until_s, deadline_s)
        try:
            return await asyncio.shield(driving)
        except asyncio.CancelledError:
            self.cancel()
            with contextlib.suppress(TanghuluError):
                await driving
            raise

    def cancel(self) -> None:
        """End the batch soon, from any thread; incomplete requests have TransferCancelled.

        Returns at once if another thread is waiting (which then returns); otherwise the batch has ended on return.
        """
        self._stop = self._stop or TransferCancelled("the batch was cancelled by its caller")
        if self._turn.acquire(blocking=False):
            try:
                self._finish(self._stop)
            finally:
                self._turn.release()
        else:
            self._wake()

    def status(self) -> list[TransferState]:
        """Return the state of each request. Moves what it can without waiting, unless another thread drives."""
        if not self._batch.finished and self._turn.acquire(blocking=False):
            try:
                self._advance_now()
            finally:
                self._turn.release()
        return [self._request_state(index) for index in range(len(self._requests))]

    @property
    def done(self) -> bool:
        """Whether every request has ended."""
        return self._batch.finished

    @property
    def done_bytes(self) -> int:
        """Bytes of slices that have arrived, including those of unfinished requests."""
        return self._batch.done_bytes

    def story(self, index: int) -> list[str]:
        """Return the history of one request's slices, for debugging."""
        return self._batch.story(index)

    def check(self) -> None:
        """Assert the invariants; links are held only while something is under way."""
        with self._turn:
            self._batch.check()
            assert not (self._batch.finished and self._links)

    def __del__(self) -> None:
        if not self._batch.finished:
            self._finish(TransferCancelled("the batch's handle was dropped"))

    def __repr__(self) -> str:
        return f"TransferHandle({len(self._requests)} requests{', done' if self.done else ''})"

    # --- for the engine

    def start(self) -> None:
        """Post what can be posted without waiting; copies over shm are left to the waiting thread."""
        if all(target.paths.paths[0].transport == "shm" for target in self._targets):
            return
        with self._turn:
            self._advance_now()

    # --- driving; the caller has the turn

    def _wait_until(self, until_s: float, deadline_s: float) -> BatchResult:
        clock = self._resources.clock
        if not self._turn.acquire(timeout=max(0.0, until_s - clock.now_s())):  # another thread keeps driving
            self._stop = self._stop or _expired(deadline_s)
            self._wake()
            self._turn.acquire()
        try:
            self._drive(until_s, deadline_s)
        finally:
            if not self._batch.finished:
                self._finish(TransferCancelled("the thread that drove the batch was interrupted"))
            self._let_go()
            self._turn.release()
        return self._result()

    def _drive(self, until_s: float, deadline_s: float) -> None:
        batch, clock = self._batch, self._resources.clock
        if not batch.finished and not self._borrow_all(until_s):
            self._finish(_expired(deadline_s, "other batches use all links to a peer; "))
        while not batch.finished:
            now_s = clock.now_s()
            if self._stop is not None or now_s >= until_s:
                self._finish(self._stop or _expired(deadline_s))
                return
            self._step(now_s, until_s)

    def _advance_now(self) -> None:
        if self._borrow_all(None):
            now_s = self._resources.clock.now_s()
            self._step(now_s, now_s)
        if self._batch.finished:
            self._let_go()

    def _step(self, now_s: float, until_s: float) -> None:
        """Post, poll once (waiting until ``until_s`` at most), apply."""
        batch, lock = self._batch, self._resources.lock
        with lock:
            posts = batch.advance(now_s)
        for post in posts:
            self._perform(post)
        stall_s = batch.next_stall_s()
        wait_s = (until_s if stall_s is None else min(until_s, stall_s)) - self._resources.clock.now_s()
        completions = self._poll(0.0 if self._stop is not None else max(0.0, wait_s))
        now_s = self._resources.clock.now_s()
        with lock:
            for completion in completions:
                self._apply(completion, now_s)
            stalled = batch.stalled(now_s)
        for path in stalled:
            self._cut(path)
        for check in batch.take_checks():
            digest = digest_of(check.memory)
            with lock:
                batch.checked(check.request_index, digest, now_s)

    def _perform(self, post: Post) -> None:
        try:
            link = self._link(post.path)
        except TanghuluError as error:
            with self._resources.lock:
                self._batch.lost(post.path, error, self._resources.clock.now_s())
            return
        if post.piece.state is SliceState.POSTED:  # not lost with an earlier post of this step
            link.post(post.piece, post.path)

    def _apply(self, completion: Completion, now_s: float) -> None:
        if isinstance(completion, Arrived):
            self._batch.arrived(completion.slice_id, now_s)
        elif isinstance(completion, Lost):
            self._batch.lost(completion.path, completion.error, now_s)
        elif isinstance(completion, Corrupt):
            self._batch.corrupt(completion.slice_id, completion.error, now_s)
        else:
            self._batch.refused(completion.slice_id, completion.error, now_s)

    def _poll(self, timeout_s: float) -> list[Completion]:
        links = list(self._links.values())
        if len(links) == 1:
            return links[0].poll(timeout_s)
        ended = [each for link in links for each in link.poll(0.0)]
        if ended or timeout_s <= 0 or not links:
            return ended
        waiter = select.poll()
        for link in links:
            if link.fileno() >= 0:
                waiter.register(link.fileno(), select.POLLIN)
        waiter.poll(timeout_s * 1000)
        return [each for link in links for each in link.poll(0.0)]

    def _finish(self, error: TanghuluError) -> None:
        """End everything unfinished with ``error``, close its connections, and return the links."""
        if not self._batch.finished:
            for path in self._batch.give_up(error, self._resources.clock.now_s()):
                self._cut(path)
        self._let_go()

    # --- links

    def _borrow_all(self, until_s: float | None) -> bool:
        """Hold a link of every target's first transport: all of them or, on False, no new one."""
        fresh: list[LinkPool] = []
        for target in self._targets if len(self._targets) == 1 else sorted(self._targets, key=id):
            pool = target.pools[target.paths.paths[0]]
            if pool in self._links or target.closed:
                continue
            link: Link | None
            try:
                link = pool.borrow(until_s)
            except NodeUnavailable:
                continue  # just closed: its slices are lost when they are posted
            if link is None:
                for each in fresh:
                    each.give_back(self._links.pop(each))
                return False
            self._links[pool] = link
            fresh.append(pool)
        return True

    def _link(self, path: Path) -> Link:
        target = self._target_of[path]
        pool = target.pools[path]
        link = self._links.get(pool)
        if link is None:
            link = pool.borrow(None)
            if link is None:
                raise Overloaded(f"other batches use all {path.transport} links to {target!r}; try again later")
            self._links[pool] = link
        return link

    def _cut(self, path: Path) -> None:
        link = self._links.get(self._target_of[path].pools[path])
        if link is not None:
            link.cut(path)

    def _let_go(self) -> None:
        while self._links:
            pool, link = self._links.popitem()
            pool.give_back(link)

    def _wake(self) -> None:
        for link in list(self._links.values()):
            link.wake()

    # --- results

    def _request_state(self, index: int) -> TransferState:
        ended, error = self._batch.request_state(index)
        if not ended:
            return TransferState.OPEN
        return TransferState.COMPLETE if error is None else TransferState.FAILED

    def _result(self) -> BatchResult:
        errors = tuple(self._batch.errors())
        done = sum(each.length for each, error in zip(self._requests, errors, strict=True) if error is None)
        return BatchResult(errors, done)


def _expired(deadline_s: float, why: str = "") -> DeadlineExceeded:
    return DeadlineExceeded(f"{why}not complete within {deadline_s:g} s; any part of it may have arrived")
