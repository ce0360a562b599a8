"""The operations of operators, on the asyncio client; results are values for JSON.

``perform`` runs one on the blocking client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from tanghulu.errors import ChunkNotFound, Conflict, DeadlineExceeded, NodeNotFound, NodeUnavailable, TanghuluError
from tanghulu.store.admin.rows import Row, plain
from tanghulu.store.client.aio import AsyncClient
from tanghulu.store.client.client import Client
from tanghulu.store.client.model import NodeView

P = ParamSpec("P")
T = TypeVar("T")
_POLL_S = 0.25


class _Awaitable:
    """The blocking client with the methods of the asyncio one; each has ended once it is called."""

    def __init__(self, store: Client) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*arguments: Any, **options: Any) -> Any:
            return getattr(self._store, name)(*arguments, **options)

        return call


def perform(
    operation: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
    store: Client,
    *arguments: P.args,
    **options: P.kwargs,
) -> T:
    """Run ``operation`` on the blocking client; return its result or raise its error."""
    running = operation(cast(AsyncClient, _Awaitable(store)), *arguments, **options)
    try:
        running.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("an operation waits for its client alone")


async def _pause(store: AsyncClient, seconds: float) -> None:
    if isinstance(store, _Awaitable):
        time.sleep(seconds)  # noqa: ASYNC251 - no event loop runs then
    else:
        await asyncio.sleep(seconds)


async def _views(store: AsyncClient, node: str) -> list[NodeView]:
    """List all nodes; raise NodeNotFound if ``node`` is not among them ("" names no node and is accepted)."""
    views = await store.nodes()
    if node and all(view.id != node for view in views):
        known = ", ".join(view.id for view in views) or "none"
        raise NodeNotFound(f"node {node!r} is unknown; the nodes are: {known}")
    return views


async def _chosen(store: AsyncClient, node: str) -> list[str]:
    """Return ``node`` alone, or all nodes if it is ""."""
    views = await _views(store, node)
    return [node] if node else [view.id for view in views]


async def evict(store: AsyncClient, node: str, keys: Sequence[str], num_bytes: int) -> Row:
    """Evict ``keys``, and ``num_bytes`` by the policy, on one node or (``node`` "") on each; return node -> evicted."""
    return {each: plain(await store.evict(each, keys, num_bytes=num_bytes)) for each in await _chosen(store, node)}


async def policy(store: AsyncClient, node: str, name: str | None) -> dict[str, str]:
    """Return the eviction policy of one node or (``node`` "") of all, after switching to ``name`` if given."""
    return {each: await store.eviction_policy(each, name) for each in await _chosen(store, node)}


async def replicate(store: AsyncClient, keys: Sequence[str], holders: int, for_s: float) -> Row:
    """Have ``keys`` copied ahead of demand."""
    num_taken = await store.replicate(keys, holders=holders, for_s=for_s)
    return {"taken": num_taken, "keys": len(keys), "holders": holders, "for_s": for_s}


@dataclass(frozen=True, slots=True)
class RemovalOutcome:
    """The result of removing several keys; ``failure`` is the first error that prevented a removal."""

    num_removed: int
    missing: tuple[str, ...] = ()
    failure: TanghuluError | None = None

    def row(self) -> Row:
        """Return the result as an object for JSON."""
        return {"num_removed": self.num_removed, "missing": list(self.missing)}

    def plus(self, other: RemovalOutcome) -> RemovalOutcome:
        """Return the sum of two removals."""
        num_removed = self.num_removed + other.num_removed
        return RemovalOutcome(num_removed, self.missing + other.missing, self.failure or other.failure)

    def raise_failure(self) -> None:
        """Raise the failure, if any, or ChunkNotFound for missing keys."""
        if self.failure is not None:
            raise self.failure
        raise_missing(self.missing)


def raise_missing(missing: Sequence[str]) -> None:
    """Raise ChunkNotFound for keys missing from the store, if any."""
    if missing:
        raise ChunkNotFound(f"not in the store: {' '.join(missing)}")


async def missing(store: AsyncClient, keys: Sequence[str]) -> list[str]:
    """Return those of ``keys`` that are missing from the store."""
    there = await store.exists_many(keys)
    return [key for key, is_there in zip(keys, there, strict=True) if not is_there]


async def remove(store: AsyncClient, keys: Sequence[str]) -> RemovalOutcome:
    """Remove the chunks of ``keys``."""
    outcomes = await store.remove_many(keys)
    missing = tuple(key for key, outcome in zip(keys, outcomes, strict=True) if outcome is False)
    failures = [outcome for outcome in outcomes if isinstance(outcome, TanghuluError)]
    return RemovalOutcome(len(outcomes) - len(missing) - len(failures), missing, failures[0] if failures else None)


async def undrain(store: AsyncClient, node: str) -> Row:
    """Have ``node`` take new chunks again."""
    await _views(store, node)
    await store.drain(node, draining=False)
    return {"node": node, "draining": False}


async def drain(
    store: AsyncClient,
    node: str,
    *,
    wait: bool,
    timeout_s: float | None = None,
    on_view: Callable[[NodeView], None] = lambda view: None,
) -> Row:
    """Have the chunks of ``node`` moved away; ``wait`` until the node may be stopped, at most ``timeout_s``.

    ``on_view`` receives the node's state at each poll. DeadlineExceeded is raised when the time is up, while the drain
    continues. Raises Conflict if no other node accepts chunks.
    """
    began_s = time.monotonic()
    views = await _views(store, node)
    if all(view.draining for view in views if view.id != node):
        raise Conflict(f"no other node accepts chunks; start one before draining {node}")
    await store.drain(node)
    num_chunks = await _until_drained(store, node, began_s, timeout_s, on_view) if wait else 0
    seconds = round(time.monotonic() - began_s, 3)
    return {"node": node, "drained": wait, "num_chunks": num_chunks, "seconds": seconds}


async def _until_drained(
    store: AsyncClient, node: str, began_s: float, timeout_s: float | None, on_view: Callable[[NodeView], None]
) -> int:
    """Wait until the node may be stopped; return the number of its chunks, all of them also held elsewhere."""
    was_draining = False
    while True:
        view = next((view for view in await store.nodes() if view.id == node), None)
        if view is None:
            raise NodeUnavailable(f"{node} left before it was drained; chunks held only there are lost")
        if was_draining and not view.draining:
            raise Conflict(f"{node} was undrained by somebody else")
        was_draining = view.draining
        on_view(view)
        if view.drained:
            return view.num_chunks
        if timeout_s is not None and time.monotonic() - began_s >= timeout_s:
            raise DeadlineExceeded(f"{node} is not drained after {timeout_s:g} s; {view.num_unsafe} chunks are left")
        await _pause(store, _POLL_S)
