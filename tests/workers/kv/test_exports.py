"""Exports: blocks are given back exactly once, and never under a reader."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tanghulu.errors import ChunkNotFound
from tanghulu.types import LeaseId, RequestId
from tanghulu.workers.engine.exports import ExportState, KvExport
from tanghulu.workers.kv.exports import ExportTable


def _kv(name: str, *blocks: int, state: ExportState = ExportState.COMPLETE) -> KvExport:
    return KvExport(RequestId(name), RequestId(name), blocks or (1, 2), 50 * len(blocks or (1, 2)), state)


def test_released_unread_is_free_at_once() -> None:
    table = ExportTable(10, itertools.count(1))
    export = table.add(_kv("a"), 0)
    assert table.release(export.export_id) == ["a"]
    assert table.release(export.export_id) == []
    with pytest.raises(ChunkNotFound, match="compute the prompt"):
        table.get(export.export_id)


def test_released_under_a_reader_waits_for_it() -> None:
    table = ExportTable(10, itertools.count(1))
    export = table.add(_kv("a"), 0)
    table.pinned(export, [LeaseId(1), LeaseId(2)], 0)
    assert table.release(export.export_id) == []
    assert table.lease_freed(LeaseId(1)) == []
    with pytest.raises(ChunkNotFound):
        table.get(export.export_id)
    assert table.lease_freed(LeaseId(2)) == ["a"]


def test_after_a_dead_reader_another_may_come() -> None:
    table = ExportTable(10, itertools.count(1))
    export = table.add(_kv("a"), 0)
    table.pinned(export, [LeaseId(1)], 0)
    assert table.lease_freed(LeaseId(1)) == []
    assert table.get(export.export_id) is export
    assert not export.leases


def test_what_only_a_dead_reader_knew_of_is_free_at_once() -> None:
    table = ExportTable(10, itertools.count(1))
    export = table.add(_kv("a"), 0, one_reader=True)
    table.pinned(export, [LeaseId(1), LeaseId(2)], 0)
    assert table.lease_freed(LeaseId(1)) == []
    assert table.lease_freed(LeaseId(2)) == ["a"]
    assert table.release(export.export_id) == []


def test_nobody_came_in_time() -> None:
    table = ExportTable(10, itertools.count(1))
    table.add(_kv("a"), 0)
    late = table.add(_kv("b"), 5)
    assert table.expire(9.9) == []
    assert table.expire(10) == ["a"]
    table.pinned(late, [LeaseId(1)], 14)  # a reader renews
    assert table.expire(20) == []
    assert table.expire(24) == []  # its time is up, but somebody reads
    assert table.lease_freed(LeaseId(1)) == ["b"]
    assert len(table) == 0


@given(
    st.lists(st.tuples(st.sampled_from(["add", "pin", "free", "release", "expire"]), st.integers(0, 5)), max_size=80)
)
def test_every_export_is_given_back_once_and_never_while_read(events: list[tuple[str, int]]) -> None:
    table, now_s, leases, made = ExportTable(10, itertools.count(1)), 0.0, 0, 0
    open_leases: dict[int, str] = {}
    given: list[str] = []
    for event, pick in events:
        now_s += 1
        back: list[RequestId] = []
        live = list(table._exports.values())
        target = live[pick % len(live)] if live else None
        if event == "add":
            made += 1
            table.add(_kv(str(made)), now_s)
        elif event == "pin" and target is not None and not target.released:
            leases += 1
            open_leases[leases] = target.kv.name
            table.pinned(target, [LeaseId(leases)], now_s)
        elif event == "free" and open_leases:
            lease = sorted(open_leases)[pick % len(open_leases)]
            del open_leases[lease]
            back = table.lease_freed(LeaseId(lease))
        elif event == "release" and target is not None:
            back = table.release(target.export_id)
        elif event == "expire":
            back = table.expire(now_s)
        assert not set(back) & set(open_leases.values())
        given += back
        table.check()
    assert len(given) == len(set(given))
    assert len(given) + len(table) == made


def test_an_export_grows_while_it_is_read() -> None:
    table = ExportTable(10, itertools.count(1))
    export = table.add(_kv("a", 1, 2, state=ExportState.GROWING), 0)
    table.pinned(export, [LeaseId(1)], 0)
    assert table.add(_kv("a", 1, 2, 7, 8, state=ExportState.GROWING), 0) is export
    assert (export.kv.block_ids, export.kv.num_tokens) == ((1, 2, 7, 8), 200)
    assert table.release(export.export_id) == [], "its own worker alone ends it"
    assert table.expire(18) == [], "a prefill may take long"
    table.check()
    assert table.add(_kv("a", 1, 2, 7, 8, 9), 19) is export
    table.watched(export, 20)
    assert table.expire(29) == []
    assert table.release(export.export_id) == []
    assert table.lease_freed(LeaseId(1)) == ["a"]
    table.check()


@pytest.mark.parametrize("is_read", [False, True])
def test_what_is_withdrawn_is_given_back_when_nobody_reads_it(is_read: bool) -> None:
    table = ExportTable(10, itertools.count(1))
    export = table.add(_kv("a", state=ExportState.GROWING), 0)
    withdrawn = _kv("a", state=ExportState.WITHDRAWN)
    if is_read:
        table.pinned(export, [LeaseId(1)], 0)
        assert table.withdraw(withdrawn) == []
        with pytest.raises(ChunkNotFound):
            table.get(export.export_id)
        assert table.lease_freed(LeaseId(1)) == ["a"]
    else:
        assert table.withdraw(withdrawn) == ["a"]
    table.check()
    assert len(table) == 0
    assert table.withdraw(_kv("never shown", state=ExportState.WITHDRAWN)) == ["never shown"]
