"""Which of the gateway's clients to keep: one for each token, the least recently used goes first. Pure.

An entry in use is never closed. Example with two places: A and B are entered and given back, C is entered: A goes.
Were A and B in use, C would be refused, since to wait for a place is the caller's business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tanghulu.errors import Overloaded

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(slots=True)
class _Entry(Generic[V]):
    value: V
    used_s: float
    verified_s: float
    num_uses: int = 0
    dropped: bool = False


class ClientBook(Generic[K, V]):
    """Values by key, with who uses them; methods that make values superfluous return those to close."""

    def __init__(self, max_entries: int, idle_s: float, verify_s: float) -> None:
        self._max_entries = max_entries
        self._idle_s = idle_s
        self._verify_s = verify_s
        self._entries: OrderedDict[K, _Entry[V]] = OrderedDict()  # least recently used first
        self._leaving: dict[int, _Entry[V]] = {}  # dropped, and still in use

    def take(self, key: K, now_s: float) -> V | None:
        """The value of ``key``, in use from now on; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        entry.used_s = now_s
        entry.num_uses += 1
        return entry.value

    def enter(self, key: K, value: V, now_s: float) -> list[V]:
        """Add ``value``, not in use, just verified. Raises Overloaded if all places are in use."""
        assert key not in self._entries
        closing: list[V] = []
        if len(self._entries) >= self._max_entries:
            oldest = next((key for key, entry in self._entries.items() if not entry.num_uses), None)
            if oldest is None:
                raise Overloaded(f"{self._max_entries} tokens are in use at this gateway; try again in a moment")
            closing.append(self._entries.pop(oldest).value)
        self._entries[key] = _Entry(value, now_s, now_s)
        return closing

    def give_back(self, key: K, value: V, now_s: float) -> list[V]:
        """``value`` is not used any more by one who took it."""
        entry = self._leaving.get(id(value)) or self._entries[key]
        assert entry.value is value
        entry.num_uses -= 1
        entry.used_s = now_s
        if entry.dropped and not entry.num_uses:
            del self._leaving[id(value)]
            return [value]
        return []

    def drop(self, key: K, value: V) -> list[V]:
        """Nobody may take ``value`` any more; it is to be closed when its last user gives it back."""
        entry = self._entries.get(key)
        if entry is None or entry.value is not value:
            return []
        del self._entries[key]
        if not entry.num_uses:
            return [value]
        entry.dropped = True
        self._leaving[id(value)] = entry
        return []

    def is_due(self, key: K, value: V, now_s: float) -> bool:
        """Whether it is time to ask whether the key still stands; counts as done, so that one asks."""
        entry = self._entries.get(key)
        if entry is None or entry.value is not value or now_s - entry.verified_s < self._verify_s:
            return False
        entry.verified_s = now_s
        return True

    def expire(self, now_s: float) -> list[V]:
        """What nobody has used for a while."""
        gone = [k for k, e in self._entries.items() if not e.num_uses and now_s - e.used_s >= self._idle_s]
        return [self._entries.pop(key).value for key in gone]

    def clear(self) -> list[V]:
        """Everything, in use or not."""
        every = [entry.value for entry in (*self._entries.values(), *self._leaving.values())]
        self._entries.clear()
        self._leaving.clear()
        return every

    def __len__(self) -> int:
        return len(self._entries)

    def check(self) -> None:
        """Assert the bound, and that what leaves is in use and stands in one place only."""
        assert len(self._entries) <= self._max_entries
        assert all(entry.num_uses >= 0 and not entry.dropped for entry in self._entries.values())
        assert all(entry.num_uses > 0 and entry.dropped for entry in self._leaving.values())
        assert not {id(entry.value) for entry in self._entries.values()} & set(self._leaving)

    def __repr__(self) -> str:
        return f"ClientBook({len(self._entries)} of {self._max_entries}, {len(self._leaving)} leaving)"
