"""The master's metric names. Gauges read the state when scraped; calls count themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from tanghulu.store.master.core import Master
from tanghulu.store.master.directory.waiters import WaitBoard
from tanghulu.store.master.election.ownership import EtcdOwnership
from tanghulu.types import Role


@dataclass
class CallCounts:
    """Counts of the directory's calls, as plain numbers: adding to a Counter costs more than many calls do."""

    announcements: int = 0
    report_pieces: int = 0
    reported: int = 0
    accepted: int = 0
    client_commits: int = 0
    refused: int = 0
    removed: int = 0
    retracted: int = 0
    found: int = 0
    missing: int = 0
    placements: int = 0


class _CallCollector(Collector):
    """Reads the counts for Prometheus (from the metrics thread: plain attribute reads only)."""

    def __init__(self, counts: CallCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Yield the counters of the directory's calls."""
        counts = self._counts
        announcements = {"none": counts.announcements - counts.report_pieces, "piece": counts.report_pieces}
        chunks = {
            "accepted": counts.accepted,
            "reported": counts.reported,
            "client_commit": counts.client_commits,
            "refused": counts.refused,
            "removed": counts.removed,
            "retracted": counts.retracted,
        }
        keys = {"found": counts.found, "missing": counts.missing}
        yield _family("announcements", "Announcements of nodes.", "report", announcements)
        yield _family(
            "announced_chunks",
            "Announced chunks: accepted, reported (in a report of all that a node holds), client_commit (by clients, "
            "ahead of their node), refused (another version was "
            "first, or deleted), removed, retracted (committed by clients, and their put failed).",
            "outcome",
            chunks,
        )
        yield _family("located_keys", "Keys that were looked up.", "outcome", keys)
        yield CounterMetricFamily("tanghulu_master_placements", "Placements given.", value=counts.placements)


class _CopyCollector(Collector):
    """Copies between nodes since this master began (or began to lead)."""

    def __init__(self, master: Master) -> None:
        self._master = master

    def collect(self) -> Iterator[Metric]:
        """Yield the copies by reason and outcome, and the bytes of completed copies."""
        orders = self._master.copies.orders
        copies = CounterMetricFamily(
            "tanghulu_master_copies", "Copies ordered from nodes.", labels=["reason", "outcome"]
        )
        for (reason, outcome), number in list(orders.num_done.items()):
            copies.add_metric([reason.name.lower(), outcome], number)
        yield copies
        moved = {reason.name.lower(): number for reason, number in list(orders.bytes_done.items())}
        yield _family("copied_bytes", "Bytes of the copies that were made.", "reason", moved)


def _family(name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"tanghulu_master_{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


class MasterMetrics:
    """The metrics of a master, as /metrics shows them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.counts = CallCounts()
        registry.register(_CallCollector(self.counts))
        self.expired_leases = Counter(
            "tanghulu_master_expired_leases_total", "Instances whose lease ran out.", ["component"], registry=registry
        )
        self.elections = Counter(
            "tanghulu_master_elections_total", "Elections that this master has won.", registry=registry
        )
        self.cut_off_followers = Counter(
            "tanghulu_master_cut_off_followers_total", "Followers that lagged too far behind.", registry=registry
        )
        self.followers = Gauge("tanghulu_master_followers", "Open event streams.", ["stream"], registry=registry)

    def observe(self, master: Master) -> None:
        """Register gauges of the state of ``master``; called once."""
        self._gauge("keys", "Keys in the directory.", lambda: master.directory.num_keys)
        self._gauge("nodes", "Registered store nodes.", lambda: master.directory.num_nodes)
        self._gauge(
            "known_slots",
            "Slots of keys, of 1024, reported by all nodes.",
            lambda: master.directory.num_known_slots,
        )
        self._gauge("rebuilding", "1 while nodes have yet to tell their keys.", lambda: not master.directory.is_ready)
        self._gauge(
            "pending_commits",
            "Keys committed by clients that no node has confirmed yet.",
            lambda: master.directory.num_pending_commits,
        )
        self._gauge("event_sequence", "Number of the newest directory event.", lambda: master.directory.log.last)
        self._observe_copies(master)
        instances = Gauge("tanghulu_master_instances", "Live instances.", ["component"], registry=self._registry)
        for role in Role:
            instances.labels(role.value).set_function(_reader(master, role))

    def _observe_copies(self, master: Master) -> None:
        self._registry.register(_CopyCollector(master))

    def observe_waits(self, board: WaitBoard) -> None:
        """Register a gauge of the number of calls waiting for keys; called once."""
        self._gauge("waiting_calls", "Calls that wait for keys to be stored.", lambda: len(board))

    def observe_ownership(self, ownership: EtcdOwnership) -> None:
        """Register gauges of the ranges owned by this one of several masters, and of its lead; called once."""
        self._gauge(
            "owned_ranges", "Ranges of keys, of 64, that this master answers for.", lambda: len(ownership.owned)
        )
        self._gauge("leading", "1 while this master leads.", lambda: ownership.leads)
        self._gauge("term", "The term that this master leads, or led last.", lambda: ownership.term)

    def _gauge(self, name: str, help: str, read: Callable[[], int | bool]) -> None:
        Gauge(f"tanghulu_master_{name}", help, registry=self._registry).set_function(lambda: float(read()))


def _reader(master: Master, role: Role) -> Callable[[], float]:
    return lambda: float(master.leases.num_by_role[role])
