"""The connections to one peer that were given up with a WRITE on them. Owns their tokens, knows no socket.

Every stream to that peer, old or new, tells the ones it has not told yet before it sends its next slice; the peer cuts
them (see ``wire``). So whatever this process does to the segment after it gave a connection up is served after the peer
has stopped reading that connection: a retry, and also the next batch.
"""

from __future__ import annotations

import threading

#: So many are kept; a connection that was given up longer ago has long been read to its end or reset.
MAX_TOKENS = 1024


class Fences:
    """An append-only list of tokens with a bounded memory; safe to use from several threads."""

    def __init__(self) -> None:
        self.num_added = 0
        self._tokens: list[int] = []
        self._lock = threading.Lock()

    def add(self, token: int) -> None:
        """The connection of ``token`` was closed while the peer may still be writing from it."""
        with self._lock:
            self._tokens.append(token)
            self.num_added += 1
            if len(self._tokens) > MAX_TOKENS:
                del self._tokens[0]

    def since(self, num_told: int) -> tuple[int, list[int]]:
        """(how many were added so far, those of them that come after the first ``num_told`` and are still kept)."""
        with self._lock:
            missing = min(self.num_added - num_told, len(self._tokens))
            return self.num_added, self._tokens[len(self._tokens) - missing :]
