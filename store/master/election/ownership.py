"""The role of a master: the ranges it owns, whether it leads, and the map of all masters, as used by its calls.

Of one of several masters it is the driver of RangeElection, which talks to etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass

import structlog

from tanghulu.discovery.base import Instance
from tanghulu.discovery.etcd_client import EtcdClient
from tanghulu.discovery.instance_wire import instance_from_bytes, instance_to_bytes
from tanghulu.discovery.masters import leader_key, masters_prefix
from tanghulu.errors import InvalidRequest, KeysMoved, MasterUnavailable, NotLeader
from tanghulu.protos import etcd_pb2
from tanghulu.runtime.clock import Clock
from tanghulu.store.master.election.admitted_nodes import AdmittedNodes
from tanghulu.store.master.election.masters_view import (
    ADMITTED,
    LEADER,
    MASTERS,
    NODES,
    RANGE_NUMBERS,
    KeySeen,
    range_name,
)
from tanghulu.store.master.election.range_election import (
    Announce,
    Apply,
    Claim,
    ClaimLead,
    Disown,
    HandOver,
    Lead,
    Own,
    RangeElection,
    RangeInstruction,
    Renew,
    Revoke,
    StepDown,
)
from tanghulu.store.protocol.key_slots import ALL_RANGES
from tanghulu.store.protocol.messages import ProveReply
from tanghulu.store.protocol.range_map import RangeMap
from tanghulu.store.protocol.terms import UNSIGNED, Signature
from tanghulu.types import Address

_log = structlog.get_logger(__name__)
#: Limit of every call to etcd; less than a lease, so that a hanging renewal is followed by another.
_CALL_DEADLINE_S = 1.0
_TICK_S = 0.02
_RETRY_S = 0.2
#: Seconds that a closing master tries to return its lease.
_RESIGN_S = 1.0
#: Interval of checks whether the watch has reported an admitted node: a millisecond or two after the answer.
_LOOK_S = 0.002
_WITHOUT_OWNERS = RangeMap.of_one(None)


@dataclass(frozen=True)
class Duties:
    """The actions of a master when its role changes in etcd.

    ``own(range)`` begins to serve a range, with an empty directory, ``disown(range)`` ends that, ``lead(term)`` and
    ``step_down()`` begin and end leading. ``nodes(nodes, ids)`` takes the admitted nodes whenever they change, before
    ``own``, and the ids of all, some of which are known by their id alone; None if none was ever admitted.
    """

    own: Callable[[int], None]
    disown: Callable[[int], None]
    lead: Callable[[int], None]
    step_down: Callable[[], None]
    nodes: Callable[[Mapping[str, Instance], frozenset[str] | None], None]


class ProofWaiters:
    """Callers waiting until etcd has confirmed a renewal requested after their call; one renewal serves all.

    ``num_requested`` and ``num_confirmed`` count the renewals of the lease; ``renew`` requests one.
    """

    def __init__(
        self, renew: Callable[[], None], num_requested: Callable[[], int], num_confirmed: Callable[[], int]
    ) -> None:
        self._renew = renew
        self._num_asked = num_requested
        self._num_confirmed = num_confirmed
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []  # for a renewal behind that number
        self._is_renewing = False

    async def wait(self) -> int:
        """Wait for the proof, or until the lease ends; return the number of renewals requested before."""
        number, proven = self._num_asked(), asyncio.get_running_loop().create_future()
        self._waiting.append((number, proven))
        if not self._is_renewing:
            self._is_renewing = True
            self._renew()
        await proven
        return number

    def settle(self, holds: bool) -> None:
        """Wake those whose renewal is confirmed, or all if the lease has ended; request another for the rest."""
        self._is_renewing = False
        waiting, self._waiting = self._waiting, []
        for number, proven in waiting:
            if proven.done():
                continue
            if self._num_confirmed() > number or not holds:
                proven.set_result(None)
            else:
                self._waiting.append((number, proven))
        if self._waiting:
            self._is_renewing = True
            self._renew()

    def __repr__(self) -> str:
        return f"ProofWaiters({len(self._waiting)})"


class Ownership:
    """The role of a single master: it leads, owns all ranges, and needs no proof.

    ``EtcdOwnership`` is that of one of several, which ``shares`` the ranges with others.
    """

    shares = False

    @property
    def owned(self) -> frozenset[int]:
        """The ranges that this master serves: those on which its lease is valid. The map may name other ones."""
        return ALL_RANGES

    @property
    def map(self) -> RangeMap:
        """The latest map known to this master; of version 0 before it has seen any."""
        return _WITHOUT_OWNERS

    @property
    def signature(self) -> Signature:
        """The end of every reply: the latest version of the map, its etcd, and the renewals of this master's lease."""
        return UNSIGNED

    @property
    def leads(self) -> bool:
        """Whether this master may answer as the leader now."""
        return True

    def require_lead(self) -> None:
        """Raise NotLeader unless this master leads."""

    def refusal(self) -> MasterUnavailable:
        """Return the error for callers that request keys of other masters."""
        return KeysMoved.known_in(self.map.version)

    async def prove(self) -> ProveReply:
        """Prove that this master's lease is valid; raises NotLeader."""
        return ProveReply()

    def admitting(self, node: Instance) -> contextlib.AbstractAsyncContextManager[None]:
        """Admit ``node``, whose lease begins in the body. Raises MasterUnavailable or NotLeader."""
        return contextlib.nullcontext()

    async def keep_admitted(self, present: Callable[[frozenset[str]], frozenset[str]]) -> None:
        """Forget admitted nodes that are not ``present``, a function that selects present ones among given ids."""

    def __repr__(self) -> str:
        return "Ownership()"


class EtcdOwnership(Ownership):
    """The ranges of one of several masters, whether it leads, and the map of all of them."""

    shares = True

    def __init__(
        self,
        addresses: Iterable[Address],
        instance: Instance,
        ttl_s: float,
        clock: Clock,
        duties: Duties,
    ) -> None:
        self.election = RangeElection(instance.id, ttl_s)
        self.cluster = 0
        self._client = EtcdClient(tuple(addresses), _CALL_DEADLINE_S)
        self._instance = instance
        self._prefix = masters_prefix(instance.namespace)
        self._ttl_s = ttl_s
        self._clock = clock
        self._duties = duties
        self._map = self.election.view.map(0)
        self._nodes: tuple[dict[str, Instance], frozenset[str] | None] | None = None  # as passed to the duties
        self.admitted = AdmittedNodes(
            self._client,
            instance.namespace,
            leader_key(instance.namespace),
            lambda: self.election.term,
            lambda: self.leads,
        )
        self._calls: set[asyncio.Task[None]] = set()
        self._proofs = ProofWaiters(
            lambda: self._perform(self.election.renew(self._clock.now_s())),
            lambda: self.election.num_requested,
            lambda: self.election.num_confirmed,
        )

    # --- the calls' questions

    @property
    def owned(self) -> frozenset[int]:
        """The ranges that this master may serve now."""
        return self.election.owned(self._clock.now_s())

    @property
    def map(self) -> RangeMap:
        """The latest map received by this master; replaced when it changes."""
        return self._map

    @property
    def nodes(self) -> Mapping[str, Instance]:
        """The admitted nodes known to this master; read it again for later ones."""
        return self.election.view.nodes

    @property
    def leads(self) -> bool:
        """Whether this master may answer as the leader now."""
        return self.election.leads(self._clock.now_s())

    @property
    def term(self) -> int:
        """The term in which this master leads, or led last."""
        return self.election.term

    def require_lead(self) -> None:
        """Raise NotLeader unless this master leads."""
        if not self.leads:
            raise self._not_leader()

    def _not_leader(self) -> NotLeader:
        leader = self.election.view.leader
        known = "" if leader is None or leader.id == self._instance.id else str(leader.address)
        return NotLeader.naming(known)

    @contextlib.asynccontextmanager
    async def admitting(self, node: Instance) -> AsyncIterator[None]:
        """Admit ``node``, whose lease begins in the body; this master's own watch has reported it before.

        Raises MasterUnavailable or NotLeader; then the node must not be admitted.
        """
        self.require_lead()
        async with self.admitted.admitting(node):
            try:
                async with asyncio.timeout(_CALL_DEADLINE_S):
                    while self.nodes.get(node.id) != node:  # noqa: ASYNC110 - the watch tells, within milliseconds
                        await asyncio.sleep(_LOOK_S)
            except TimeoutError:
                raise MasterUnavailable(
                    f"etcd has stored node {node.id} but not reported it back yet; register again"
                ) from None
            self.require_lead()
            yield

    async def keep_admitted(self, present: Callable[[frozenset[str]], frozenset[str]]) -> None:
        """Forget admitted nodes that are not ``present``, if this master leads."""
        admitted = self.admitted
        if self.leads and admitted.ids - present(admitted.ids):
            await admitted.keep(lambda: present(admitted.ids))

    @property
    def signature(self) -> Signature:
        """The end of every reply; see ``Ownership``."""
        return Signature(self._map.newest_term, self.election.renewals(self._clock.now_s()).packed)

    async def prove(self) -> ProveReply:
        """Wait until etcd has confirmed a renewal requested after this call.

        One renewal serves all waiters. Raises NotLeader if this master owns no range then.
        """
        self._require_any()
        requested_before = await self._proofs.wait()
        self._require_any()
        return ProveReply(self.signature, requested_before, round(self._ttl_s * 1000))

    def _require_any(self) -> None:
        if not self.owned:
            raise self._not_leader()

    # --- taking part

    async def run(self) -> None:
        """Take part until cancelled; then release everything."""
        watching = asyncio.create_task(self._watch())
        try:
            while not watching.done():
                self._perform(self.election.tick(self._clock.now_s()))
                await asyncio.sleep(_TICK_S)
            watching.result()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self._perform(self.election.resign(self._clock.now_s()))
            if self._calls:
                await asyncio.wait(self._calls, timeout=_RESIGN_S)
            for call in self._calls:
                call.cancel()
            await self._client.close()

    async def _watch(self) -> None:
        """Pass all keys to the election, now and whenever they change."""
        while True:
            try:
                await self._observe()
            except MasterUnavailable as error:
                _log.warning("master.etcd_unavailable", error=error.message)
            await asyncio.sleep(_RETRY_S)

    async def _observe(self) -> None:
        end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])
        now = await self._client.range(self._prefix, end)
        self.cluster = now.header.cluster_id
        keys = [self._key(each, each.value) for each in now.kvs]
        self._see(self.election.snapshot(keys, now.header.revision, self._clock.now_s()))
        responses = self._client.watch_together(self._prefix, end, now.header.revision + 1)
        async with contextlib.aclosing(responses):
            async for changes in responses:
                keys = [self._key(each.kv, b"" if _is_gone(each) else each.kv.value) for each in changes]
                self._see(self.election.seen(keys, self._clock.now_s()))

    def _key(self, kv: etcd_pb2.KeyValue, value: bytes) -> KeySeen:
        name = kv.key[len(self._prefix) :].decode(errors="replace")
        if name in RANGE_NUMBERS or name == ADMITTED:
            return KeySeen(name, kv.mod_revision, kv.lease, text=value.decode(errors="replace"))
        is_instance = name == LEADER or name.startswith((MASTERS, NODES))
        return KeySeen(name, kv.mod_revision, kv.lease, instance=_instance(name, value) if is_instance else None)

    def _see(self, instructions: list[RangeInstruction]) -> None:
        view = self.election.view
        self._map = view.map(self.cluster)
        nodes = (view.nodes, view.admitted)
        if self._nodes != nodes:
            self._nodes = (dict(view.nodes), view.admitted)
            if not self.leads:
                self.admitted.seen(view.nodes.values())
            self._duties.nodes(*self._nodes)
        self._perform(instructions)

    # --- instructions

    def _perform(self, instructions: list[RangeInstruction]) -> None:
        num_owned, num_disowned = 0, 0
        for instruction in instructions:
            match instruction:
                case Own(number):
                    num_owned += 1
                    self._duties.own(number)
                case Disown(number):
                    num_disowned += 1
                    self._duties.disown(number)
                case Lead(term):
                    _log.info("master.leads", term=term, known_nodes=len(self.nodes))
                    self.admitted.begin_term(self.election.view.admitted or ())
                    self.admitted.seen(self.nodes.values())
                    self._duties.lead(term)
                case StepDown():
                    _log.warning("master.stepped_down", term=self.term)
                    self._duties.step_down()
                case _:
                    self._spawn(self._ask(instruction))
        if num_owned or num_disowned:
            _log.info("master.ranges", owned=len(self.owned), came=num_owned, went=num_disowned)
        if num_disowned and not self.owned:
            self._proofs.settle(holds=False)

    def _spawn(self, call: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _ask(self, instruction: Apply | Renew | Revoke | Announce | Claim | ClaimLead | HandOver) -> None:
        match instruction:
            case Apply():
                await self._apply()
            case Renew():
                await self._renew(instruction)
            case Revoke(lease):
                with contextlib.suppress(MasterUnavailable):  # then it expires by itself
                    await self._client.revoke(lease)
            case Announce():
                await self._announce(instruction)
            case ClaimLead():
                await self._claim_lead(instruction)
            case Claim() | HandOver():
                await self._write(instruction)

    async def _apply(self) -> None:
        asked_s = self._clock.now_s()
        try:
            lease = await self._client.grant(self._ttl_s)
        except MasterUnavailable:
            self.election.apply_failed(self._clock.now_s())
        else:
            self._perform(self.election.lease_granted(lease, asked_s, self._clock.now_s()))

    async def _renew(self, renewal: Renew) -> None:
        asked_s = self._clock.now_s()
        with contextlib.suppress(MasterUnavailable):
            known = await self._client.keep_alive(renewal.lease)
            self._perform(self.election.renewed(renewal, asked_s, self._clock.now_s(), known=known))
        self._proofs.settle(holds=bool(self.owned))

    async def _announce(self, announce: Announce) -> None:
        key, value = self._prefix + f"{MASTERS}{self._instance.id}".encode(), instance_to_bytes(self._instance)
        with contextlib.suppress(MasterUnavailable):
            await self._client.put(key, value, announce.lease)
        self.election.done(announce, self._clock.now_s())

    async def _claim_lead(self, claim: ClaimLead) -> None:
        key, value = leader_key(self._instance.namespace), instance_to_bytes(self._instance)
        request = etcd_pb2.TxnRequest()
        request.compare.add(result=etcd_pb2.Compare.EQUAL, target=etcd_pb2.Compare.CREATE, key=key, create_revision=0)
        request.success.add(request_put=etcd_pb2.PutRequest(key=key, value=value, lease=claim.lease))
        with contextlib.suppress(MasterUnavailable):
            await self._client.transact(request)
        self.election.done(claim, self._clock.now_s())

    async def _write(self, write: Claim | HandOver) -> None:
        """Write the ranges' keys in one transaction; one by one if that fails, as one may have changed hands."""
        owner, terms = (
            (self._instance.id, [(number, 0) for number in write.ranges])
            if isinstance(write, Claim)
            else (write.owner, write.terms)
        )
        with contextlib.suppress(MasterUnavailable):
            if not await self._write_keys(terms, owner, write.lease) and len(terms) > 1:
                for each in terms:
                    await self._write_keys([each], owner, write.lease)
        self.election.done(write, self._clock.now_s())

    async def _write_keys(self, terms: Iterable[tuple[int, int]], owner: str, lease: int) -> bool:
        """Write the keys of ranges if each still has its term (0 if absent), all or none."""
        request = etcd_pb2.TxnRequest()
        for number, term in terms:
            key = self._prefix + range_name(number).encode()
            request.compare.add(result=etcd_pb2.Compare.EQUAL, target=etcd_pb2.Compare.MOD, key=key, mod_revision=term)
            request.success.add(request_put=etcd_pb2.PutRequest(key=key, value=owner.encode(), lease=lease))
        return (await self._client.transact(request)).succeeded

    def __repr__(self) -> str:
        return f"EtcdOwnership({self.election!r})"


def _is_gone(change: etcd_pb2.Event) -> bool:
    return bool(change.type == etcd_pb2.Event.DELETE)


def _instance(name: str, value: bytes) -> Instance | None:
    """Return the instance in a key's value; None, with a log line, for an unreadable one."""
    if not value:
        return None
    try:
        return instance_from_bytes(value)
    except InvalidRequest as error:
        _log.warning("master.unknown_key", key=name, error=str(error))
        return None
