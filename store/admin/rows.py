"""The rows of ``--json`` and of the HTTP answers. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import msgspec

from tanghulu.store.client.model import NodeView, Status
from tanghulu.store.directory_feed import DirectoryEvent, DirectoryEventKind

Row = dict[str, Any]


def plain(value: Any) -> Any:
    """Convert dataclasses, structs, enums, mappings and (named) tuples to JSON's types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, msgspec.Struct):
        return plain(msgspec.structs.asdict(value))
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def totals(nodes: Sequence[NodeView]) -> dict[str, int]:
    """Return totals over the whole store; each copy of a chunk counts."""
    return {
        "num_nodes": len(nodes),
        "num_chunks": sum(n.num_chunks for n in nodes),
        "used_bytes": sum(n.used_bytes for n in nodes),
        "capacity_bytes": sum(n.capacity_bytes for n in nodes),
        "ssd_used_bytes": sum(n.ssd_used_bytes for n in nodes),
        "ssd_capacity_bytes": sum(n.ssd_capacity_bytes for n in nodes),
    }


def put(status: Status) -> Row:
    """Return the row for a put's result."""
    return {"key": status.key, "existed": status.existed, "num_replicas": status.num_replicas}


def events(event: DirectoryEvent) -> Iterator[Row]:
    """Yield one row for each key of ``event``, or one with key "" if it names none."""
    name = event.kind.name.lower()
    for key in event.keys or ("",):
        yield {"event": name, "node": event.node_id, "key": key, "sequence": event.sequence}


class Beginning:
    """Filter of events for a follower that may want changes only, without the existing keys."""

    def __init__(self, *, snapshot: bool) -> None:
        self._snapshot = snapshot
        self._synced = False

    def shows(self, event: DirectoryEvent) -> bool:
        """Return whether to show ``event``, the next one."""
        shown = self._synced or self._snapshot
        if event.kind is DirectoryEventKind.RESET:
            self._synced = False
        elif event.kind is DirectoryEventKind.SYNCED:
            self._synced = True
        return shown
