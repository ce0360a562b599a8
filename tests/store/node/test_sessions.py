"""Clients that come back: what they held before they may give back after."""

from __future__ import annotations

import os

from tanghulu.store.node.rpc.sessions import Greeting, Sessions
from tanghulu.types import ChunkKey
from tests.store.node.rig import make_state, new, put


async def test_leases_of_all_lost_sessions_can_be_given_back() -> None:
    state = make_state()
    put(state, new("k"))
    chunk = state.chunks.find(ChunkKey("k"))
    assert chunk is not None
    sessions = Sessions(state, lambda: None)
    held: list[int] = []
    for _ in range(20):
        session = sessions.open(Greeting("client", os.getpid(), True, frozenset(held)))
        held.append(state.leases.pin(chunk, session.holder).lease_id)
        sessions.leave(session)
    session = sessions.open(Greeting("client", os.getpid(), True, frozenset(held)))
    sessions.check()
    assert chunk.num_leases == 20
    assert len(session.owned) == 21
    state.leases.unpin(held, session.owned)
    assert chunk.num_leases == 0
    sessions.leave(session)
    session = sessions.open(Greeting("client", os.getpid(), True))
    assert len(session.owned) == 1, "what holds nothing is forgotten"
    sessions.leave(session)
    sessions.forget_ended()
    sessions.close()
