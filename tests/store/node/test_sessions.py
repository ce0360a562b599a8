"""A client that comes back again and again, in one process: what it holds it may give back, however long that takes."""

from __future__ import annotations

import os

from tanghulu.store.node.rpc.sessions import Greeting, Sessions
from tests.store.node import rig


async def test_a_lease_outlives_any_number_of_reconnects() -> None:
    state = rig.make_state()
    rig.put(state, rig.new("k"))
    sessions = Sessions(state, lambda: None)
    try:
        client = Greeting("client", os.getpid(), wants_shm=True)
        session = sessions.open(client)
        chunk = state.find(rig.ChunkKey("k"))
        assert chunk is not None
        state.pin(chunk, session.holder)
        (held,) = [lease_id for lease_id, _ in state.table.leases()]
        for _ in range(40):
            sessions.leave(session)
            session = sessions.open(Greeting("client", os.getpid(), wants_shm=True, held_lease_ids={held}))
            sessions.check()
            assert len(session.owned) == 2
        state.unpin([held], session.owned)
        assert not state.access.num_leases
        sessions.leave(session)
        assert len(sessions.open(client).owned) == 1
    finally:
        sessions.close()
