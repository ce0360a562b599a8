"""Turns of clients sharing a resource: each has one item served before any has a second one served.

Pure. (Start-time fair queueing: Goyal, Vin and Cheng, SIGCOMM '96, with equal costs.) An item's turn is a number fixed
on arrival; smaller numbers go first. The numbers of one client grow by one over its weight; a client that had nothing
waiting begins at the turn being served, so that nobody saves up turns while idle.

Example: A has 600 items with the turns 0 to 599, of which 20 were served: the 20th had turn 19. Now B arrives with one:
its turn is 19, and it is served next, before A's turn 20. A client of weight 2 has turns 0, 0.5, 1, ...: two for each
of the others' one.
"""

from __future__ import annotations

from typing import Final

#: Clients whose turns are remembered; beyond, the one that has had no item for the longest time begins anew.
MAX_CLIENTS: Final = 4096


class FairTurns:
    """Assigns turns and tracks the last one served."""

    def __init__(self) -> None:
        self._served = 0.0
        self._next: dict[str, float] = {}

    def take(self, client: str, weight: float = 1.0) -> float:
        """Return the turn of an item of ``client`` arriving now."""
        assert weight > 0
        turn = max(self._served, self._next.pop(client, 0.0))
        if len(self._next) >= MAX_CLIENTS:
            del self._next[next(iter(self._next))]
        self._next[client] = turn + 1 / weight
        return turn

    def served(self, turn: float) -> None:
        """Note that the item with ``turn`` has been served."""
        self._served = max(self._served, turn)
