"""A node's segment as this client reaches it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tanghulu.store.protocol.shared_index import IndexPlace, IndexReader
from tanghulu.transfer_engine.engine import RemoteSegment


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """An open segment. ``view`` is its memory if it is mapped here, at ``address``; else None."""

    remote: RemoteSegment
    view: memoryview | None = field(init=False)
    address: int = field(init=False)

    def index(self, place: IndexPlace | None, key_scope: str = "") -> IndexReader | None:
        """The shared index at ``place``; None if there is none or the memory is not mapped."""
        return None if self.view is None or place is None else IndexReader(self.view, place, key_scope)

    def __post_init__(self) -> None:
        view = self.remote.map()
        address = 0 if view is None else np.frombuffer(view, np.uint8).__array_interface__["data"][0]
        object.__setattr__(self, "view", view)
        object.__setattr__(self, "address", address)
