"""Puts waiting for masters' answers, with their chunks and deadlines: pure bookkeeping for the reporter.

A put of several chunks is one confirmation; it is done when each of its chunks has an outcome, and its ``done`` is
called in that step. Several confirmations may wait for one chunk (a second put of the key).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tanghulu.errors import TanghuluError
from tanghulu.store.node.state.holdings import Holding

#: Whether the put was the first of its key, or the reason why that is unknown.
ReportOutcome: TypeAlias = bool | TanghuluError
Done: TypeAlias = Callable[[list[ReportOutcome]], None]


@dataclass(slots=True, eq=False)
class _Confirmation:
    """One waiting put. ``outcomes[i]`` is of ``chunks[i]``; True until another outcome arrives."""

    chunks: Sequence[Holding]
    outcomes: list[ReportOutcome]
    num_open: int
    until_s: float
    done: Done


class Confirmations:
    """See the module. Times are the driver's."""

    def __init__(self) -> None:
        self._open: dict[_Confirmation, None] = {}
        self._by_chunk: dict[Holding, list[_Confirmation]] = {}

    def expect(self, chunks: Sequence[Holding], pending: Iterable[Holding], until_s: float, done: Done) -> None:
        """Call ``done`` with an outcome for each of ``chunks`` once all of ``pending`` are settled, or at ``until_s``.

        ``pending`` are those of ``chunks`` that the master has yet to confirm; the others are accepted already.
        """
        waiting = _Confirmation(chunks, [True] * len(chunks), 0, until_s, done)
        for chunk in pending:
            self._by_chunk.setdefault(chunk, []).append(waiting)
            waiting.num_open += 1
        if waiting.num_open:
            self._open[waiting] = None
        else:
            done(waiting.outcomes)

    def settle(self, chunk: Holding, stands: bool) -> None:
        """Record the master's answer."""
        for waiting in self._by_chunk.pop(chunk, ()):
            if not stands:
                waiting.outcomes[waiting.chunks.index(chunk)] = False
            waiting.num_open -= 1
            if not waiting.num_open:
                del self._open[waiting]
                waiting.done(waiting.outcomes)

    @property
    def awaited(self) -> list[Holding]:
        """The chunks with waiting puts."""
        return list(self._by_chunk)

    @property
    def next_s(self) -> float | None:
        """Time of the first deadline."""
        return min((waiting.until_s for waiting in self._open), default=None)

    def expire(self, now_s: float, error: TanghuluError) -> list[Holding]:
        """End puts past their deadline with ``error``; return the chunks that nobody waits for any more."""
        abandoned: list[Holding] = []
        for waiting in [each for each in self._open if each.until_s <= now_s]:
            del self._open[waiting]
            for index, chunk in enumerate(waiting.chunks):
                others = self._by_chunk.get(chunk, [])
                if waiting not in others:
                    continue
                waiting.outcomes[index] = error
                others.remove(waiting)
                if not others:
                    del self._by_chunk[chunk]
                    abandoned.append(chunk)
            waiting.done(waiting.outcomes)
        return abandoned

    def check(self) -> None:
        """Assert that both indexes agree."""
        counts: dict[_Confirmation, int] = {}
        for chunk, waiting_for in self._by_chunk.items():
            assert waiting_for
            for waiting in waiting_for:
                assert chunk in waiting.chunks
                counts[waiting] = counts.get(waiting, 0) + 1
        assert counts == {waiting: waiting.num_open for waiting in self._open}

    def __repr__(self) -> str:
        return f"Confirmations({len(self._open)} puts, {len(self._by_chunk)} chunks)"
