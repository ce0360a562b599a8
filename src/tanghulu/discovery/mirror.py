"""A watcher's copy of the instances, and the changes to report when its source returns. Pure.

A returned source, or its replacement, sends a fresh snapshot; only the differences are reported. An instance missing
from it may still live: a restarted master has no instance until each has registered again (within a third of its
lease). So missing instances are doubted for ``grace_s`` before they are reported as DELETE.
"""

from __future__ import annotations

from tanghulu.discovery.base import EventKind, Instance, InstanceEvent


class InstanceMirror:
    """The known instances: takes snapshots, changes and a time; returns the events to report."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._known: dict[str, Instance] = {}
        self._doubted: dict[str, float] = {}  # id -> when it is reported as gone
        self._seen: set[str] | None = None  # ids of the unfinished snapshot
        self._synced = False

    def begin(self) -> None:
        """Begin a snapshot; instances missing from it are doubted anew."""
        self._seen = set()
        self._doubted.clear()

    def put(self, instance: Instance) -> list[InstanceEvent]:
        """Add ``instance``, from the snapshot or as a change."""
        if self._seen is not None:
            self._seen.add(instance.id)
        self._doubted.pop(instance.id, None)
        if self._known.get(instance.id) == instance:
            return []
        self._known[instance.id] = instance
        return [InstanceEvent(EventKind.PUT, instance)]

    def delete(self, instance_id: str) -> list[InstanceEvent]:
        """Remove the instance at the source's request."""
        self._doubted.pop(instance_id, None)
        instance = self._known.pop(instance_id, None)
        return [InstanceEvent(EventKind.DELETE, instance)] if instance is not None else []

    def synced(self, now_s: float) -> list[InstanceEvent]:
        """Complete the snapshot."""
        assert self._seen is not None, "a snapshot ended that did not begin"
        for instance_id in self._known.keys() - self._seen:
            self._doubted[instance_id] = now_s + self._grace_s
        self._seen = None
        if self._synced:
            return self.expire(now_s)
        self._synced = True
        return [InstanceEvent(EventKind.SYNCED)]

    def expire(self, now_s: float) -> list[InstanceEvent]:
        """Remove the doubted instances whose grace has ended; returns the events to report."""
        gone = sorted(instance_id for instance_id, at_s in self._doubted.items() if at_s <= now_s)
        return [event for instance_id in gone for event in self.delete(instance_id)]

    def check(self) -> None:
        """Assert that only known instances are doubted."""
        assert self._doubted.keys() <= self._known.keys()
        assert all(instance.id == key for key, instance in self._known.items())

    def __repr__(self) -> str:
        return f"InstanceMirror({len(self._known)} instances, {len(self._doubted)} doubted)"
