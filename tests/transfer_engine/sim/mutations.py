"""Small wrongs put into the production classes, one at a time: the simulation must notice each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tanghulu.transfer_engine.client import batch_state
from tanghulu.transfer_engine.client.batch_state import BatchLimits, BatchState
from tanghulu.transfer_engine.client.handle import TransferHandle
from tanghulu.transfer_engine.core import access
from tanghulu.transfer_engine.core.access import AccessTable, LeaseEvent, LeaseState
from tanghulu.transfer_engine.core.admission import PeerAdmission
from tanghulu.transfer_engine.core.transport import Arrived, Fences
from tanghulu.transfer_engine.transports.tcp.listener import TcpConnection
from tanghulu.transfer_engine.transports.tcp.stream import TcpStream
from tanghulu.transfer_engine.transports.tcp.transport import TcpLink

Mutation = Callable[[pytest.MonkeyPatch], None]


def fences_are_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Fences, "since", lambda self, num_seen: (self.num_added, []))


def fences_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PeerAdmission, "fence", lambda self, head: None)


def a_range_is_free_while_it_is_written(patch: pytest.MonkeyPatch) -> None:
    def step(self: Any, lease: Any, event: Any, freed: Any) -> None:
        if lease.step(event) is LeaseState.DRAINING:
            self._free(lease, freed)

    patch.setattr(AccessTable, "_step", step)
    patch.setattr(AccessTable, "end", lambda self, lease_id, moved=False: [])


def quarantine_ends_by_time(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(access.TRANSITIONS, (LeaseState.ACTIVE, LeaseEvent.LOST_MAPPED), LeaseState.DRAINING)


def windows_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch_state.PathLoad, "full", False)


def what_is_lost_counts_as_arrived(patch: pytest.MonkeyPatch) -> None:
    def lost(self: Any, path: Any, error: Any, now_s: float) -> None:
        for slice_id in list(self._loads[path].slices):
            self.arrived(slice_id, now_s)

    patch.setattr(BatchState, "lost", lost)


def a_refusal_counts_as_arrival(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TcpStream, "_refused", lambda self, error, ended: self._arrived(ended))


def retries_have_no_end(patch: pytest.MonkeyPatch) -> None:
    begin = BatchState.__init__

    def endless(self: Any, requests: Any, limits: BatchLimits) -> None:
        begin(self, requests, BatchLimits(limits.limits, 1000, limits.slice_deadline_s))

    patch.setattr(BatchState, "__init__", endless)


def the_deadline_is_overslept(patch: pytest.MonkeyPatch) -> None:
    wait = TransferHandle._wait_until

    def late(self: Any, until_s: float, deadline_s: float) -> Any:
        return wait(self, until_s + (0.2 if deadline_s else 0.0), deadline_s)

    patch.setattr(TransferHandle, "_wait_until", late)


def a_cut_closes_nothing(patch: pytest.MonkeyPatch) -> None:
    """But for what is broken anyway: a broken socket is ready for ever."""
    cut, broke = TcpLink.cut, TcpLink._break

    def broken(self: Any, path: Any, why: Any) -> None:
        self.cut = lambda path: cut(self, path)
        try:
            broke(self, path, why)
        finally:
            del self.cut

    patch.setattr(TcpLink, "_break", broken)
    patch.setattr(TcpLink, "cut", lambda self, path: None)
    patch.setattr(TcpLink, "reusable", property(lambda self: not self._closed))


def a_lost_connection_keeps_its_transfer(patch: pytest.MonkeyPatch) -> None:
    def lost(self: Any, exc: Any) -> None:
        self._admitted = False
        self._admission.closed(self)
        self._transport = None

    patch.setattr(TcpConnection, "connection_lost", lost)


def checksums_of_slices_agree(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TcpStream, "_compared", lambda self, piece, landed: Arrived(piece.slice_id))
    patch.setattr(PeerAdmission, "compare", lambda self, head: None)


def checksums_of_requests_agree(patch: pytest.MonkeyPatch) -> None:
    checked = BatchState.checked

    def agree(self: Any, index: int, digest: int, now_s: float) -> None:
        checked(self, index, self._requests[index].given.checksum, now_s)

    patch.setattr(BatchState, "checked", agree)


def notices_are_not_known_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PeerAdmission, "notice", lambda self, head, data: self._on_notice(head.session_id, data))


def nobody_is_notified(patch: pytest.MonkeyPatch) -> None:
    go_on = BatchState._go_on

    def silent(self: Any, index: int) -> None:
        given = self._requests[index].given
        self._requests[index].notified = given is not None and given.notice is not None
        go_on(self, index)

    patch.setattr(BatchState, "_go_on", silent)


MUTATIONS: tuple[Mutation, ...] = (
    fences_are_not_told,
    fences_are_ignored,
    a_range_is_free_while_it_is_written,
    quarantine_ends_by_time,
    windows_are_not_kept,
    what_is_lost_counts_as_arrived,
    a_refusal_counts_as_arrival,
    retries_have_no_end,
    the_deadline_is_overslept,
    a_cut_closes_nothing,
    a_lost_connection_keeps_its_transfer,
    checksums_of_slices_agree,
    checksums_of_requests_agree,
    notices_are_not_known_again,
    nobody_is_notified,
)
