"""What the node's other decisions ask of its desks, and the answers of a node that has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from tanghulu.store.protocol.write_buffer import DeskPlace


class DeskHoldings(Protocol):
    """What the node's other decisions ask of the desks; ``desks.Desks`` has them."""

    @property
    def num_open(self) -> int:
        """Desks that may bring chunks yet."""
        ...

    @property
    def num_heads(self) -> int:
        """Desks that clients may still look at."""
        ...

    @property
    def num_taken(self) -> int:
        """Records so far."""
        ...

    def drain(self) -> int:
        """Make chunks of what was published; how many records there were."""
        ...

    def grant(self, session_id: int, value_bytes: int, key_scope: str = "") -> DeskPlace | None:
        """A desk for values of about that size; None: no memory to spare."""
        ...

    def knows(self, session_id: int) -> bool:
        """Whether something still depends on the end of the session's process."""
        ...

    def session_closed(self, session_id: int) -> None:
        """The session's connections are gone."""
        ...

    def session_exited(self, session_id: int) -> None:
        """The session's process has ended."""
        ...

    def ranges(self) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of what is neither free nor a chunk's."""
        ...


class NoDesks:
    """A node whose memory nobody maps."""

    num_open = num_heads = num_taken = 0

    def drain(self) -> int:
        """There are none."""
        return 0

    def grant(self, session_id: int, value_bytes: int, key_scope: str = "") -> DeskPlace | None:
        """None is given."""
        return None

    def knows(self, session_id: int) -> bool:
        """None is known."""
        return False

    def session_closed(self, session_id: int) -> None:
        """There are none."""

    def session_exited(self, session_id: int) -> None:
        """There are none."""

    def ranges(self) -> Iterator[tuple[int, int]]:
        """There are none."""
        return iter(())
