"""The operations of operators, as orders of ``steps``; results are values for JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from tanghulu.errors import ChunkNotFound, Conflict, DeadlineExceeded, NodeNotFound, NodeUnavailable, TanghuluError
from tanghulu.store.admin.rows import Row, plain
from tanghulu.store.admin.steps import Order, Pause, Question, asking
from tanghulu.store.client.model import NodeView

_POLL_S = 0.25


def _views(node: str) -> Order[list[NodeView]]:
    """List all nodes; raise NodeNotFound if ``node`` is not among them ("" names no node and is accepted)."""
    views: list[NodeView] = yield asking("nodes")
    if node and all(view.id != node for view in views):
        known = ", ".join(view.id for view in views) or "none"
        raise NodeNotFound(f"no node is called {node!r}; there are: {known}")
    return views


def _chosen(node: str) -> Order[list[str]]:
    """Return ``node`` alone, or all nodes if it is ""."""
    views = yield from _views(node)
    return [node] if node else [view.id for view in views]


def evict(node: str, keys: Sequence[str], num_bytes: int) -> Order[Row]:
    """Evict ``keys``, and ``num_bytes`` by the policy, on one node or (``node`` "") on each; return node -> evicted."""
    chosen = yield from _chosen(node)
    evicted = {}
    for each in chosen:
        evicted[each] = plain((yield asking("evict", each, keys, num_bytes=num_bytes)))
    return evicted


def policy(node: str, name: str | None) -> Order[dict[str, str]]:
    """Return the eviction policy of one node or (``node`` "") of all, after switching to ``name`` if given."""
    chosen = yield from _chosen(node)
    policies = {}
    for each in chosen:
        policies[each] = yield asking("eviction_policy", each, name)
    return policies


def replicate(keys: Sequence[str], holders: int, for_s: float) -> Order[Row]:
    """Have ``keys`` copied ahead of demand."""
    num_taken = yield asking("replicate", keys, holders=holders, for_s=for_s)
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

    def complain(self) -> None:
        """Raise the failure, if any, or ChunkNotFound for missing keys."""
        if self.failure is not None:
            raise self.failure
        complain_of(self.missing)


def complain_of(missing: Sequence[str]) -> None:
    """Raise ChunkNotFound for keys missing from the store, if any."""
    if missing:
        raise ChunkNotFound(f"not in the store: {' '.join(missing)}")


def missing(keys: Sequence[str]) -> Order[list[str]]:
    """Return those of ``keys`` that are missing from the store."""
    there: list[bool] = yield asking("exists_many", keys)
    return [key for key, is_there in zip(keys, there, strict=True) if not is_there]


def remove(keys: Sequence[str]) -> Order[RemovalOutcome]:
    """Remove the chunks of ``keys``."""
    outcomes: list[bool | TanghuluError] = yield asking("remove_many", keys)
    missing = tuple(key for key, outcome in zip(keys, outcomes, strict=True) if outcome is False)
    failures = [outcome for outcome in outcomes if isinstance(outcome, TanghuluError)]
    return RemovalOutcome(len(outcomes) - len(missing) - len(failures), missing, failures[0] if failures else None)


def undrain(node: str) -> Order[Row]:
    """Have ``node`` take new chunks again."""
    yield from _views(node)
    yield asking("drain", node, draining=False)
    return {"node": node, "draining": False}


def drain(
    node: str, *, wait: bool, timeout_s: float | None = None, on_view: Callable[[NodeView], None] = lambda view: None
) -> Order[Row]:
    """Have the chunks of ``node`` moved away; ``wait`` until the node may be stopped, at most ``timeout_s``.

    ``on_view`` receives the node's state at each poll. DeadlineExceeded is raised when the time is up, while the drain
    continues. Raises Conflict if no other node accepts chunks.
    """
    began_s = time.monotonic()
    views = yield from _views(node)
    if all(view.draining for view in views if view.id != node):
        raise Conflict(f"no other node takes chunks: start one before {node} is drained")
    yield asking("drain", node)
    num_chunks = (yield from _until_drained(node, began_s, timeout_s, on_view)) if wait else 0
    seconds = round(time.monotonic() - began_s, 3)
    return {"node": node, "drained": wait, "num_chunks": num_chunks, "seconds": seconds}


def _until_drained(
    node: str, began_s: float, timeout_s: float | None, on_view: Callable[[NodeView], None]
) -> Generator[Question | Pause, Any, int]:
    """Wait until the node may be stopped; return the number of its chunks, all of them also held elsewhere."""
    was_draining = False
    while True:
        views: list[NodeView] = yield asking("nodes")
        view = next((view for view in views if view.id == node), None)
        if view is None:
            raise NodeUnavailable(f"{node} is gone; what only it held is lost")
        if was_draining and not view.draining:
            raise Conflict(f"somebody undrained {node}")
        was_draining = view.draining
        on_view(view)
        if view.drained:
            return view.num_chunks
        if timeout_s is not None and time.monotonic() - began_s >= timeout_s:
            raise DeadlineExceeded(f"{node} is not drained after {timeout_s:g} s; {view.num_unsafe} chunks are left")
        yield Pause(_POLL_S)
