"""The speed of KV transfers between places, fitted from the reads measured by workers. Pure.

A read measures one link, from the host of the worker that held the KV to the host of the reader. It is also evidence
for all links between these racks, for all between these zones, and for all links of the same range: within a host, a
rack, a zone, or beyond. The narrowest of these with any measurement gives the speed; old reads fade, large reads weigh
more.

Example: two racks. Within rack a, a worker read 10 GB in 1 s; from rack b to rack a, another read 2 GB in 2 s. From any
host of b to any host of a without a measurement: 1 GB/s, as between the racks. From a to b: also 1 GB/s, as between any
racks of a zone. Within rack b: 10 GB/s, as within any rack.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator

from tanghulu.types import Place

#: Share of the past kept at each read over a link.
FADE = 0.9
#: Most links remembered; the one unused for longest is forgotten.
MAX_LINKS = 16384


class _Rate:
    __slots__ = ("num_bytes", "seconds")

    def __init__(self) -> None:
        self.num_bytes = self.seconds = 0.0

    def add(self, num_bytes: float, seconds: float) -> None:
        self.num_bytes = FADE * self.num_bytes + num_bytes
        self.seconds = FADE * self.seconds + seconds


class LinkSpeeds:
    """Fitted speeds: ``observe`` reads, query ``bytes_per_s``."""

    def __init__(self) -> None:
        self._rates: OrderedDict[Hashable, _Rate] = OrderedDict()

    def __len__(self) -> int:
        return len(self._rates)

    def observe(self, source: Place, target: Place, num_bytes: int, seconds: float) -> None:
        """Record that ``num_bytes`` went from ``source`` to ``target`` in ``seconds``; ignored if either is zero."""
        if num_bytes <= 0 or seconds <= 0:
            return
        for link in _links(source, target):
            rate = self._rates.setdefault(link, _Rate())
            rate.add(num_bytes, seconds)
            self._rates.move_to_end(link)
        while len(self._rates) > MAX_LINKS:
            self._rates.popitem(last=False)

    def bytes_per_s(self, source: Place, target: Place) -> float:
        """Return the expected speed between two places; 0 if nothing comparable was ever measured."""
        rates = self._rates
        for link in _links(source, target):
            rate = rates.get(link)
            if rate is not None:
                return rate.num_bytes / rate.seconds
        return 0.0

    def check(self) -> None:
        assert len(self._rates) <= MAX_LINKS
        assert all(rate.num_bytes > 0 and rate.seconds > 0 for rate in self._rates.values())


def _links(source: Place, target: Place) -> Iterator[Hashable]:
    """Yield the links for which a read between these places is evidence, from the narrowest to the widest."""
    yield source, target
    if (source.zone, source.rack) == (target.zone, target.rack):
        yield "within", source.zone, source.rack, source.host == target.host
        yield "host" if source.host == target.host else "rack"
        return
    yield source.zone, source.rack, target.zone, target.rack
    if source.zone != target.zone:
        yield source.zone, target.zone
        yield "beyond"
    else:
        yield "zone"
