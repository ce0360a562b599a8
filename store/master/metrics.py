"""The master's metric names. Gauges read the state when they are scraped; the edge counts calls."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

from tanghulu.store.master.core import Master
from tanghulu.types import Role


class MasterMetrics:
    """What a master shows on /metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.announcements = Counter(
            "tanghulu_master_announcements_total", "Announcements of nodes.", ["report"], registry=registry
        )
        self.announced_chunks = Counter(
            "tanghulu_master_announced_chunks_total",
            "Announced chunks: accepted, refused (another version was first, or deleted), removed.",
            ["outcome"],
            registry=registry,
        )
        self.located_keys = Counter(
            "tanghulu_master_located_keys_total", "Keys that were looked up.", ["outcome"], registry=registry
        )
        self.placements = Counter("tanghulu_master_placements_total", "Placements given.", registry=registry)
        self.expired_leases = Counter(
            "tanghulu_master_expired_leases_total", "Instances whose lease ran out.", ["component"], registry=registry
        )
        self.cut_off_followers = Counter(
            "tanghulu_master_cut_off_followers_total", "Followers that lagged too far behind.", registry=registry
        )
        self.followers = Gauge("tanghulu_master_followers", "Open event streams.", ["stream"], registry=registry)
        self.found = self.located_keys.labels("found")
        self.missing = self.located_keys.labels("missing")
        self.accepted = self.announced_chunks.labels("accepted")
        self.refused = self.announced_chunks.labels("refused")
        self.removed = self.announced_chunks.labels("removed")

    def observe(self, master: Master) -> None:
        """Show the state of ``master``; called once."""
        self._gauge("keys", "Keys in the directory.", lambda: master.directory.num_keys)
        self._gauge("nodes", "Registered store nodes.", lambda: master.directory.num_nodes)
        self._gauge("rebuilding", "1 until the directory is complete.", lambda: not master.directory.rebuild.is_ready)
        self._gauge("event_sequence", "Number of the newest directory event.", lambda: master.directory.log.last)
        instances = Gauge("tanghulu_master_instances", "Live instances.", ["component"], registry=self._registry)
        for role in Role:
            instances.labels(role.value).set_function(_reader(master, role))

    def _gauge(self, name: str, help: str, read: Callable[[], int | bool]) -> None:
        Gauge(f"tanghulu_master_{name}", help, registry=self._registry).set_function(lambda: float(read()))


def _reader(master: Master, role: Role) -> Callable[[], float]:
    return lambda: float(master.leases.num_by_role[role])
