"""The parts of a driver that both kinds have: they differ in how they wait, not in what they are made of."""

from __future__ import annotations

import os
from typing import Any, ClassVar, NoReturn, ParamSpec, TypeAlias, TypeVar

from tanghulu.auth.certificate_roles import NODE
from tanghulu.discovery.masters import MasterFinder
from tanghulu.errors import InvalidRequest, TanghuluError
from tanghulu.runtime.clock import SystemClock
from tanghulu.runtime.fork import notify_in_children, refuse_inherited
from tanghulu.store.client.drivers.connections import NodeSessions
from tanghulu.store.client.logic.context import Context
from tanghulu.store.client.logic.master_calls import MasterCalls
from tanghulu.store.client.logic.messages import AnyReply
from tanghulu.store.client.logic.placement import NodeTable
from tanghulu.store.client.settings import Settings
from tanghulu.transfer_engine.core.config import EngineConfig
from tanghulu.transfer_engine.engine import Buffer, TransferEngine

P = ParamSpec("P")
T = TypeVar("T")
Outcome: TypeAlias = AnyReply | TanghuluError


class Driver:
    """A client's state, its transfer engine, its calls to masters and its sessions at nodes.

    ``connect`` is the function that opens a client with such a driver.
    """

    connect: ClassVar[str]

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        clock = SystemClock()
        self.context = Context(
            settings.host_id,
            settings.place,
            clock,
            NodeTable(settings.host_id),
            settings.uses_unix,
            settings.wait_s,
            settings.streams,
            settings.waits_for_master,
        )
        self._engine = TransferEngine(
            transports=settings.engine_transports,
            host_id=settings.host_id,
            clock=clock,
            config=EngineConfig(tls=settings.master.credentials.tls.to(NODE)),
        )
        finder = MasterFinder(settings.master)
        self._masters = MasterCalls(self.context, finder, settings.master_answer_s, waits=settings.waits_for_master)
        self._sessions = NodeSessions(settings, self.context)
        self._closed = False
        self._pid = os.getpid()
        notify_in_children(self)

    def register(self, buffer: Any) -> Buffer:
        """See TransferEngine.register."""
        if self._closed:
            self._refuse_closed()
        return self._engine.register(buffer)

    def forget_in_child(self) -> None:
        """Refuse all calls: connections, leases and mapped memory are the parent's."""
        self._closed = True

    def _refuse_closed(self) -> NoReturn:
        """Raise the error of an unusable client: closed, or opened by another process."""
        refuse_inherited("this client", self._pid, f"call {self.connect}() in the child")
        raise InvalidRequest("the client is closed")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.settings.master}{', closed' if self._closed else ''})"
