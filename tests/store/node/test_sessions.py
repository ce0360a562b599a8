"""Clients that come back: what they held before they may give back after."""

from __future__ import annotations

import os

from structlog.testing import capture_logs

from tanghulu.store.node.rpc.sessions import OTHER_NAMESPACE, Greeting, Sessions
from tanghulu.types import ChunkKey
from tests.store.node.rig import make_state, new, put


def own_pidfd() -> int:
    return os.pidfd_open(os.getpid())


async def test_leases_of_all_lost_sessions_can_be_given_back() -> None:
    state = make_state()
    put(state, new("k"))
    chunk = state.chunks.find(ChunkKey("k"))
    assert chunk is not None
    sessions = Sessions(state, lambda: None)
    held: list[int] = []
    for _ in range(20):
        session = sessions.open(Greeting("client", os.getpid(), True, frozenset(held), pidfd=own_pidfd))
        held.append(state.leases.pin(chunk, session.holder).lease_id)
        sessions.leave(session)
    session = sessions.open(Greeting("client", os.getpid(), True, frozenset(held), pidfd=own_pidfd))
    sessions.check()
    assert chunk.num_leases == 20
    assert len(session.owned) == 21
    state.leases.unpin(held, session.owned)
    assert chunk.num_leases == 0
    sessions.leave(session)
    session = sessions.open(Greeting("client", os.getpid(), True, pidfd=own_pidfd))
    assert len(session.owned) == 1, "what holds nothing is forgotten"
    sessions.leave(session)
    sessions.forget_ended()
    sessions.close()


async def test_a_client_whose_process_is_unknown_gets_copies_and_the_log_says_why_once() -> None:
    sessions = Sessions(make_state(), lambda: None)
    with capture_logs() as logs:
        for name in ("one", "two"):
            session = sessions.open(Greeting(name, 0, True, pidfd=own_pidfd))
            assert not session.holder.maps
            sessions.leave(session)
    (line,) = logs
    assert (line["event"], line["reason"]) == ("client.gets_copies", OTHER_NAMESPACE)
    sessions.close()
