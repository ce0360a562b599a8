"""Grants to report: a master takes the reports of a few nodes at a time, piece by piece. Pure.

After a restart of the master every node has all its chunks to report. If all reported at once, each message would wait
for one of every other node, longer than a node waits for an answer, and the work would be thrown away and repeated. So
a node first announces that it has a report, and sends it when granted, piece by piece; the others ask again. Requests
are granted in order of arrival. A node that does not use its grant loses it.

Example: 100 nodes ask. Four of them are granted "4,096 keys" and report; 96 receive "none yet" and ask five times a
second. When the first has sent its last piece, the node that has waited longest is granted at its next request.
"""

from __future__ import annotations

from collections import OrderedDict

#: Nodes that report concurrently: enough that the master never waits for the next piece.
MAX_REPORTING = 4
#: Keys of one piece of a report: some 10 ms of the master's time.
PIECE_KEYS = 4096
#: A node silent for this time has no grant, and no place in the queue.
SILENT_S = 1.0


class ReportGrants:
    """See the module; ``now_s`` is of one monotonic clock in all calls."""

    def __init__(self) -> None:
        self.piece_keys = PIECE_KEYS
        self._granted: dict[str, float] = {}  # node id -> time of its last request
        self._waiting: OrderedDict[str, float] = OrderedDict()

    def ask(self, node_id: str, now_s: float) -> int:
        """Return the maximum number of keys in the next piece of ``node_id``'s report; 0: ask again."""
        for silent in [each for each, asked_s in self._granted.items() if now_s > asked_s + SILENT_S]:
            del self._granted[silent]
        if node_id not in self._granted:
            self._waiting[node_id] = now_s
            while now_s > next(iter(self._waiting.values())) + SILENT_S:
                self._waiting.popitem(last=False)
            num_free = MAX_REPORTING - len(self._granted)
            if all(first != node_id for first, _ in zip(self._waiting, range(num_free), strict=False)):
                return 0
            del self._waiting[node_id]
        self._granted[node_id] = now_s
        return self.piece_keys

    def end(self, node_id: str) -> None:
        """Record that ``node_id`` has reported everything, or has left."""
        self._granted.pop(node_id, None)
        self._waiting.pop(node_id, None)

    def check(self) -> None:
        """Assert the bound, and that no node both waits and reports."""
        assert len(self._granted) <= MAX_REPORTING
        assert not self._granted.keys() & self._waiting.keys()

    def __repr__(self) -> str:
        return f"ReportGrants({len(self._granted)} report, {len(self._waiting)} wait)"
