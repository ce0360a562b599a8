"""The modelled etcd as masters reach it in a simulated store: their calls are late, lost, or done behind their caller's
back, and what watches are told is held back, by host.

``SimEtcdClient`` stands where the masters' driver has its ``EtcdClient``: the driver itself is the production's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from random import Random
from typing import Any
from unittest import mock

from tanghulu.errors import MasterUnavailable
from tanghulu.protos import etcd_pb2
from tanghulu.store.master.election import ownership
from tanghulu.store.master.election.masters_view import KeySeen
from tests.store.sim.etcd_model import EtcdModel, NoSuchLeaseError
from tests.virtual.loop import HOST, Network

ETCD = "etcd"
CLUSTER = 77
#: As often leases are looked at, and a request that cannot pass tries again.
_STEP_S = 0.05
#: For so long a request waits for a cut link, in its socket.
_SOCKET_S = 2.0


class SimEtcd:
    """One etcd on a host of its own. ``held`` are the hosts whose watches are told nothing until then."""

    def __init__(self, network: Network, prefix: bytes, rng: Random) -> None:
        self.model = EtcdModel()
        self.network, self.prefix = network, prefix
        self.changed = asyncio.Event()  # set for a moment
        self.held: dict[str, float] = {}
        self.gone_until_s = 0.0
        self._rng = rng
        HOST.set(ETCD)
        self._tick()

    @property
    def now_s(self) -> float:
        return self.network.loop.time()

    @property
    def is_gone(self) -> bool:
        return self.now_s < self.gone_until_s

    def _tick(self) -> None:
        before = len(self.model.history)
        if self.is_gone:
            self.model.stood_still(_STEP_S)
        else:
            self.model.tick(self.now_s)
        if len(self.model.history) != before:
            self.changed.set()
            self.changed.clear()
        self.network.loop.call_later(_STEP_S, self._tick)

    def holder(self, name: str) -> str:
        """The value of the range's key ``name``; "" without the key."""
        key = self.model.keys.get(name)
        return "" if key is None else key.text[1:]

    def passes(self, host: str) -> bool:
        """Whether bytes pass between ``host`` and etcd now."""
        return not self.is_gone and not self.network.is_cut(host, ETCD)

    def breaks_watch(self) -> bool:
        """Whether a watch that hears nothing ends now, and begins anew with all keys."""
        return self._rng.random() < 0.05

    def ask(self, host: str, do: Callable[[], Any], answered: Callable[[Any], None]) -> None:
        """Have ``do`` done when the request arrives, if it does, and the answer told at ``host``, if it arrives."""
        loop, until_s = self.network.loop, self.now_s + self._rng.uniform(0.0, _SOCKET_S)

        def replies(answer: Any) -> None:
            if self.passes(host):
                answered(answer)
            elif self.now_s < until_s:
                loop.call_later(_STEP_S, replies, answer)

        def arrives() -> None:
            if self.passes(host):
                before = len(self.model.history)
                answer = do()
                if len(self.model.history) != before:
                    self.changed.set()
                    self.changed.clear()
                loop.call_later(self.network.latency_s(ETCD, host), replies, answer)
            elif self.now_s < until_s:
                loop.call_later(_STEP_S, arrives)

        loop.call_later(self.network.latency_s(host, ETCD), arrives)


class SimEtcdClient:
    """``EtcdClient`` of a process on the host that makes it. ``is_dead``: its process was killed."""

    def __init__(self, etcd: SimEtcd, deadline_s: float) -> None:
        self._etcd, self._deadline_s = etcd, deadline_s
        self._host = HOST.get()
        self.is_dead = False

    async def close(self) -> None:
        return

    async def _ask(self, do: Callable[[], Any]) -> Any:
        if self.is_dead:
            raise MasterUnavailable("the process was killed")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._etcd.ask(self._host, do, lambda answer: None if future.done() else future.set_result(answer))
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await future
        except TimeoutError:
            raise MasterUnavailable("etcd did not answer") from None
        if isinstance(answer, NoSuchLeaseError):
            raise MasterUnavailable("the lease is over")
        return answer

    async def grant(self, ttl_s: float) -> int:
        etcd = self._etcd
        lease: int = await self._ask(lambda: etcd.model.grant(math.ceil(ttl_s), etcd.now_s))
        return lease

    async def keep_alive(self, lease: int) -> bool:
        etcd = self._etcd
        known: bool = await self._ask(lambda: etcd.model.keep_alive(lease, etcd.now_s))
        return known

    async def revoke(self, lease: int) -> None:
        await self._ask(lambda: self._etcd.model.revoke(lease))

    async def put(self, key: bytes, value: bytes, lease: int) -> None:
        await self._ask(lambda: self._write({}, [self._seen(key, value, lease)]))

    async def range(self, key: bytes, end: bytes = b"") -> etcd_pb2.RangeResponse:
        def read() -> etcd_pb2.RangeResponse:
            model = self._etcd.model
            response = etcd_pb2.RangeResponse()
            response.header.revision, response.header.cluster_id = model.revision, CLUSTER
            response.kvs.extend(self._pair(each) for each in model.keys.values())
            return response

        found: etcd_pb2.RangeResponse = await self._ask(read)
        return found

    async def transact(self, request: etcd_pb2.TxnRequest) -> etcd_pb2.TxnResponse:
        # A key whose creation is compared is written once only, so that it is created when it is written last.
        guards = {self._name(each.key): each.mod_revision or each.create_revision for each in request.compare}
        puts = []
        for each in request.success:
            put, gone = each.request_put, each.request_delete_range
            is_put = each.HasField("request_put")
            puts.append(
                self._seen(put.key, put.value, put.lease) if is_put else self._seen(gone.key, b"", 0, is_put=False)
            )
        succeeded = await self._ask(lambda: self._write(guards, puts))
        return etcd_pb2.TxnResponse(succeeded=succeeded)

    async def watch_together(
        self, key: bytes, end: bytes, revision: int
    ) -> AsyncGenerator[Sequence[etcd_pb2.Event], None]:
        etcd, history = self._etcd, self._etcd.model.history
        index = next((i for i, each in enumerate(history) if each.revision >= revision), len(history))
        while not self.is_dead:
            while index == len(history):
                await etcd.changed.wait()
            await asyncio.sleep(etcd.network.latency_s(ETCD, self._host))
            await asyncio.sleep(max(etcd.held.get(self._host, 0.0) - etcd.now_s, 0.0))
            while not etcd.passes(self._host):
                await asyncio.sleep(_STEP_S)
                if etcd.breaks_watch():
                    raise MasterUnavailable("the watch broke")
            changes, index = history[index:], len(history)
            yield [self._event(each) for each in changes]

    # --- keys of the model

    def _write(self, guards: dict[str, int], puts: list[KeySeen]) -> bool | NoSuchLeaseError:
        try:
            return self._etcd.model.transact(guards, puts)
        except NoSuchLeaseError as error:
            return error

    def _name(self, key: bytes) -> str:
        assert key.startswith(self._etcd.prefix)
        return key[len(self._etcd.prefix) :].decode()

    def _seen(self, key: bytes, value: bytes, lease: int, *, is_put: bool = True) -> KeySeen:
        return KeySeen(self._name(key), 0, lease, text="=" + value.decode("latin-1") if is_put else "")

    def _pair(self, key: KeySeen) -> etcd_pb2.KeyValue:
        name, value = self._etcd.prefix + key.name.encode(), key.text[1:].encode("latin-1")
        return etcd_pb2.KeyValue(key=name, mod_revision=key.revision, lease=key.lease, value=value)

    def _event(self, key: KeySeen) -> etcd_pb2.Event:
        kind = etcd_pb2.Event.PUT if key.text else etcd_pb2.Event.DELETE
        return etcd_pb2.Event(type=kind, kv=self._pair(key))


@contextlib.contextmanager
def reached_by(etcd: SimEtcd) -> Iterator[None]:
    """What drivers that are made meanwhile take for etcd."""

    def make(addresses: Any, deadline_s: float) -> SimEtcdClient:
        return SimEtcdClient(etcd, deadline_s)

    with mock.patch.object(ownership, "EtcdClient", make):
        yield
