"""Leases that outlive their client: a view of a closed client's chunk keeps its lease until the view is dropped.

A closed client has no connections. When a view is dropped, a connection to its node is opened for a moment: the node
recognizes the client by its id, and ends the leases that it names. One thread of the process does that for all closed
clients, because nothing may be sent from inside a garbage collection. It starts when the first client is closed before
its views.

Example: a client reads k and m without a copy and is closed; the array over k is dropped. HELLO states that m is held,
UNPIN ends the lease of k, and k's range can be used again.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import time
from queue import SimpleQueue

from tanghulu.auth.certificate_roles import NODE
from tanghulu.errors import NodeUnavailable, PeerSilent, TanghuluError
from tanghulu.rpc.fast_client import FastConnection
from tanghulu.store.client.drivers.connections import NodeSessions, Target, target_of
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.effects import PeerId
from tanghulu.store.client.settings import Settings
from tanghulu.store.protocol import methods
from tanghulu.store.protocol.messages import UnpinRequest

#: Leases dropped within this time are returned together.
_GATHER_S = 0.02
#: Time of one attempt at a node, and the pause before the next: a stalled one may recover.
_ATTEMPT_S, _PAUSE_S = 5.0, 1.0


class LateLeases:
    """The leases of a closed client on nodes whose memory it maps."""

    def __init__(self, settings: Settings, context: Context, sessions: NodeSessions) -> None:
        self._tls, self._leases, self._sessions = settings.master.credentials.tls.to(NODE), context.leases, sessions
        self._targets: dict[PeerId, Target] = {}
        now_s = context.clock.now_s()
        for node in context.leases.holders():
            with contextlib.suppress(NodeUnavailable):
                target = target_of(node, settings, context.nodes, now_s)
                if target.unix_path is not None:
                    self._targets[node] = target

    def watch(self) -> None:
        """Return leases from now on as their views are dropped."""
        if self._targets:
            _worker().take(self)

    def on_drop(self, queue: SimpleQueue[LateLeases]) -> None:
        """Have the worker of ``queue`` check these leases whenever one is dropped."""
        self._leases.on_drop = lambda: queue.put(self)

    def give_back(self) -> bool:
        """Return the dropped leases; False means to try again."""
        is_done = True
        for node, lease_ids in self._leases.take_dropped().items():
            target = self._targets.get(node)
            if target is not None and not self._return(node, target, lease_ids):
                is_done = False
                for lease_id in lease_ids:
                    self._leases.hold(node, lease_id)
                    self._leases.dropped.append((node, lease_id))
        return is_done

    def _return(self, node: PeerId, target: Target, lease_ids: list[int]) -> bool:
        try:
            connection = FastConnection(target.address, target.unix_path, _ATTEMPT_S, tls=self._tls)
        except PeerSilent:
            return False
        except TanghuluError:
            return True  # its process has ended, and with it all leases
        try:
            for call in (self._sessions.hello(node, target), methods.UNPIN.call(UnpinRequest(lease_ids))):
                connection.call(call.method, call.request, call.reply_type, deadline_s=_ATTEMPT_S)
        except NodeUnavailable:
            return True
        except TanghuluError:
            return False
        finally:
            connection.close()
        return True


class _Worker:
    """The thread that returns leases for all closed clients of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._queue: SimpleQueue[LateLeases] = SimpleQueue()  # whose put() may interrupt itself, in a collection
        _thread.start_new_thread(self._run, ())  # a client may be dropped in a collection, where Thread fails

    def take(self, late: LateLeases) -> None:
        late.on_drop(self._queue)
        self._queue.put(late)  # leases dropped before that

    def _run(self) -> None:
        while True:
            late = self._queue.get()
            time.sleep(_GATHER_S)
            if not late.give_back():
                time.sleep(_PAUSE_S)
                self._queue.put(late)


_the_worker: list[_Worker] = []


def _worker() -> _Worker:
    """Return the worker of this process; a forked child has none of its parent's threads."""
    if not _the_worker or _the_worker[0].pid != os.getpid():
        _the_worker[:] = [_Worker()]
    return _the_worker[0]
