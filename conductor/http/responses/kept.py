"""The responses that later turns may refer to: in this process alone, the longest unused ones dropped first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final

import msgspec

#: Of all responses that are kept, as JSON.
MAX_KEPT_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response as its client saw it, and the ``messages`` of the conversation up to its end.

    ``owner`` is whose key it was asked for with, "" without one.
    """

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    owner: str


class KeptResponses:
    """Responses by id, ``max_bytes`` of them."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[KeptResponse, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, kept: KeptResponse) -> None:
        """Keep a response; one that alone is too large is not kept."""
        size = len(msgspec.json.encode([kept.response, kept.messages]))
        if size > self._max_bytes:
            return
        self._kept[kept.response["id"]] = (kept, size)
        self.num_bytes += size
        while self.num_bytes > self._max_bytes:
            _, (_, dropped) = self._kept.popitem(last=False)
            self.num_bytes -= dropped

    def find(self, response_id: str, owner: str) -> KeptResponse | None:
        """The response of that id that ``owner`` asked for, which counts as used now."""
        found = self._kept.get(response_id)
        if found is None or found[0].owner != owner:
            return None
        self._kept.move_to_end(response_id)
        return found[0]

    def remove(self, response_id: str, owner: str) -> bool:
        """Forget a response; False if there is none."""
        if self.find(response_id, owner) is None:
            return False
        self.num_bytes -= self._kept.pop(response_id)[1]
        return True

    def check(self) -> None:
        assert self.num_bytes == sum(size for _, size in self._kept.values()) <= self._max_bytes
