"""A store whose ranges of keys are shared by 1 to 4 masters, through a modelled etcd; what else: see ``world``.

Masters are killed, leave and come, stand still with and without their clocks, hear late of what etcd says, are cut off
from it, and etcd is away; nodes, clients and their links fail as everywhere. The rules are the world's, of which none
is milder because masters change, and:

* a master whose clock never stood still owns a range only while etcd says so, so at most one of them does;
* a client believes no answer that was made by a master which was not the range's owner then;
* at the end each range is owned by the master that should own it, and owners and nodes agree.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any
from unittest import mock

from prometheus_client import CollectorRegistry

from tanghulu.discovery.base import Instance
from tanghulu.discovery.masters import masters_prefix
from tanghulu.errors import TanghuluError
from tanghulu.rpc.fast_server import FastService
from tanghulu.runtime.clock import SystemClock
from tanghulu.store.client.logic.key_owners import KeyOwners
from tanghulu.store.master.core import Master
from tanghulu.store.master.directory.ranges import RangeDirectories
from tanghulu.store.master.directory.rebuild import REBUILD_S
from tanghulu.store.master.election import ownership
from tanghulu.store.master.election.masters_view import RANGE_NUMBERS, assign, range_name
from tanghulu.store.master.election.ownership import Duties, EtcdOwnership
from tanghulu.store.master.metrics import MasterMetrics
from tanghulu.store.master.rpc.directory_service import DirectoryCalls
from tanghulu.store.master.server import MasterServer
from tanghulu.store.protocol.key_slots import range_of
from tanghulu.store.protocol.terms import Term
from tanghulu.types import Address, ChunkKey, InstanceId, Role
from tests.store.sim.actors import REGISTER_TTL_S, Server, SimProcess
from tests.store.sim.etcd_process import ETCD, SimEtcd, SimEtcdClient, reached_by
from tests.store.sim.plan import Plan
from tests.store.sim.world import World
from tests.virtual.loop import HOST, on_host

TTL_S = 2.0
#: How long a fault of masters or etcd lasts, or half as long again, or less.
_FAULTS_S = (0.2, 1.0, 3.0)
_AGAIN_S = 0.1
#: As often a master looks at its election; more often costs a fifth of a life and shows nothing else.
_LOOK_S = 0.05


def address_of(number: int) -> Address:
    return Address(f"master-{number}", 1)


class _WatchedServer(MasterServer):
    """Tells the world of what is answered for keys that etcd has under another master's name."""

    world: SharedWorld
    id: str
    address: Address

    def require_owned(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        super().require_owned(keys)
        for number in set(map(range_of, keys)):
            if self.world.etcd.holder(range_name(number)) != self.id:
                self.world.counts["answered without being the owner"] += 1
                self.world.false_answers.add((self.address, number, self.ownership.map.version))


class SimOwner(SimProcess):
    """One of several masters: its core, its calls, and the production's driver of its ranges."""

    def __init__(self, number: int, world: SharedWorld, generation: int, rng: Random) -> None:
        address = address_of(number)
        super().__init__(address.host, world.network)
        HOST.set(self.host)
        clock = SystemClock()
        self.id = InstanceId(f"{self.host}-{generation:x}")
        self.core = Master(generation, clock.now_s(), rng=rng, shares=True)
        self.core.directory.grants.piece_keys = rng.choice((1, 3, 10, 4096))
        self.shell = server = _WatchedServer(self.core, clock, MasterMetrics(CollectorRegistry()), rng)
        server.world, server.id, server.address = world, self.id, address
        instance = Instance(self.id, Role.MASTER, address)
        duties = Duties(self._owns, server.disown, server.lead, server.lead_no_more, server.update_nodes)
        with reached_by(world.etcd):
            self.ownership = EtcdOwnership((), instance, TTL_S, clock, duties)
        server.ownership = self.ownership
        self._world = world
        service = FastService()
        DirectoryCalls(server).serve(service)
        world.network.listen(str(address), functools.partial(Server, service))
        self.spawn(server.run())
        self.spawn(self.ownership.run())

    def _owns(self, number: int) -> None:
        self._world.counts["ranges owned"] += 1
        self._world.restarted_master_s = self._world.loop.time()  # tombstones do not move with their ranges
        self.shell.own(number)

    def kill(self, *, silently: bool = False, resigns: bool = False) -> None:
        """The process is gone; one that ``resigns`` gives its lease back before."""
        client: Any = self.ownership._client
        assert isinstance(client, SimEtcdClient)
        client.is_dead = not resigns
        super().kill(silently=silently)

    @property
    def clock_s(self) -> float:
        """The time by the clock of this host."""
        return self.network.loop.time() - self._world.behind_s[self.host]

    @property
    def owned(self) -> frozenset[int]:
        """The ranges that this master answers for now."""
        return self.ownership.election.owned(self.clock_s)

    async def registered(self, instance: Instance, lease_id: int) -> int:
        """Enter a node, or renew its lease; raises NotLeader or MasterUnavailable."""
        server = self.shell
        server.ownership.require_lead()
        if not lease_id or not self.core.keep_alive(instance.id, lease_id, server.now_s):
            async with self.ownership.admitting(instance):
                lease_id = self.core.register(instance, REGISTER_TTL_S, server.now_s)
        server.changed()
        return lease_id

    def check(self) -> None:
        """Assert that all parts are sound."""
        self.core.check()
        self.ownership.election.check()

    def check_owned(self) -> None:
        """Assert that nothing is owned that etcd does not say."""
        world = self._world
        if not world.behind_s[self.host]:
            for number in self.owned:
                holder = world.etcd.holder(range_name(number))
                assert holder == self.id, f"{self.id} owns range {number}, which is {holder or 'nobody'}'s"


class SharedWorld(World):
    """See the module."""

    begins_s = REBUILD_S + 1.0  # an etcd that was set up anew may have been so beneath nodes that hold chunks

    def __init__(self, seed: int, plan: Plan | None = None) -> None:
        super().__init__(seed, plan or Plan.shared(Random(f"{seed} shared")))
        assert self.plan.num_masters
        self.owners: dict[str, SimOwner] = {}
        self.behind_s: Counter[str] = Counter()  # for so long the host's clock has stood still
        #: (master, range, version of its map) of answers by a master that was not the owner.
        self.false_answers: set[tuple[Address, int, int]] = set()
        self._stopped: set[str] = set()

    def run(self) -> Counter[str]:
        world, accepts = self, KeyOwners.accepts

        def checked(owners: KeyOwners, peer: Any, numbers: Iterable[int], term: Term) -> bool:
            numbers = list(numbers)
            is_believed = accepts(owners, peer, numbers, term)
            for number in numbers if is_believed else ():
                owner = owners.map.owner_of(number)
                if owner is not None and (owner, number, term.number) in world.false_answers:
                    world.fail(AssertionError(f"{owner} was believed for range {number}, which it did not own"))
            return is_believed

        with mock.patch.object(KeyOwners, "accepts", checked), mock.patch.object(ownership, "_TICK_S", _LOOK_S):
            return super().run()

    def clock_s(self) -> float:
        """The time by the clock of the current host."""
        return self.loop.time() - self.behind_s[HOST.get()]

    # --- masters

    @property
    def masters_named(self) -> str:
        return ",".join(str(address_of(number)) for number in range(self.plan.num_masters))

    @property
    def master_hosts(self) -> tuple[str, ...]:
        return tuple(address_of(number).host for number in range(self.plan.num_masters))

    @property
    def masters(self) -> list[Any]:
        return [owner for owner in self.owners.values() if owner.alive]

    def answers_for(self, directory: RangeDirectories, number: int) -> bool:
        """One that etcd does not name as the owner is not believed, if it stood still with its clock."""
        owner = next((each for each in self.owners.values() if each.core.directory is directory), None)
        return owner is not None and self.etcd.holder(range_name(number)) == owner.id

    async def registered(self, instance: Instance, lease_id: int) -> int:
        """As MasterDiscovery, which finds the leader; a call that is not answered is given up."""
        host = instance.address.host
        leaders = [each for each in self.masters if each.ownership.election.leads(each.clock_s)]
        await asyncio.sleep(self.network.latency_s(host, leaders[0].host if leaders else host))
        if not leaders or not leaders[0].alive or self.network.is_cut(host, leaders[0].host):
            return lease_id
        calling: asyncio.Task[int] = on_host(leaders[0].host, leaders[0].registered(instance, lease_id))
        try:
            await asyncio.wait([calling], timeout=1.0)
        finally:
            calling.cancel()  # nobody waits until it has ended: a leader that stands still will, when it goes on
        try:
            return calling.result() if calling.done() else lease_id
        except TanghuluError:
            return lease_id

    def _start_masters(self) -> None:
        host = HOST.get()
        self.etcd = SimEtcd(self.network, masters_prefix("default"), Random(self.rng.random()))
        for number in range(self.plan.num_masters):
            if not number or self.rng.random() < 0.7:
                self._start_owner(number)
            else:
                self.loop.call_later(self._drawn_s(), self._start_owner, number)
        HOST.set(host)

    def _start_owner(self, number: int) -> None:
        host = address_of(number).host
        known = self.owners.get(host)
        if host in self._stopped:  # nobody begins in a machine that stands still
            self.loop.call_later(_AGAIN_S, self._start_owner, number)
        elif known is None or not known.alive:
            self._generation += 1
            owner = SimOwner(number, self, self._generation, Random(self.rng.random()))
            self.owners[owner.host] = owner

    def _restart_masters(self) -> None:
        self.etcd.gone_until_s = 0.0
        self.etcd.held.clear()
        for host in list(self._stopped):
            self._go_on(host)
        for number in range(self.plan.num_masters):
            self._start_owner(number)

    # --- faults

    def _drawn_s(self) -> float:
        return self.rng.choice(_FAULTS_S) * self.rng.uniform(0.0, 1.5)

    def _fault(self) -> None:
        if self.rng.random() >= self.plan.master_faults:
            super()._fault()
            return
        kind, owner = self.rng.choice(self.plan.master_kinds), self.rng.choice(list(self.owners.values()))
        seconds = self._drawn_s()
        self.counts[kind] += 1
        match kind:
            case "stop" | "freeze":
                self._stop(owner.host, seconds, keeps_time=kind == "stop")
            case "hold":
                self.etcd.held[owner.host] = self.loop.time() + seconds
            case "etcd away":
                self.etcd.gone_until_s = self.loop.time() + seconds
            case "etcd cut":
                self._cut(owner.host, ETCD, seconds)
            case "master cut":
                self._cut(owner.host, f"client-{self.rng.randrange(self.plan.num_clients)}", seconds)
            case "fall" | "leave" if owner.alive:
                owner.kill(silently=self.rng.random() < 0.3, resigns=kind == "leave")
                self._dead.append(owner)
                self.loop.call_later(seconds, self._start_owner, int(owner.host.partition("-")[2]))

    def _stop(self, host: str, seconds: float, *, keeps_time: bool) -> None:
        if host not in self._stopped:
            self._stopped.add(host)
            self.loop.stop_host(host)
            self.loop.call_later(seconds, self._go_on, host, 0.0 if keeps_time else seconds)

    def _go_on(self, host: str, behind_s: float = 0.0) -> None:
        if host in self._stopped:
            self._stopped.discard(host)
            self.behind_s[host] += behind_s
            self.loop.go_on(host)

    # --- what must hold

    def check(self, num_nodes: int = 1 << 20) -> None:
        super().check(num_nodes)
        for owner in self.masters:
            owner.check_owned()

    def _require_absent(self, key: str, began_s: float) -> None:
        """Where nodes and their links are whole, whatever masters do, what was put before is found at once."""
        super()._require_absent(key, began_s)
        life = self.keys.get(key)
        if self.plan.faults or life is None or life.acked_s is None or life.acked_s >= began_s:
            return
        for host, node in self.nodes.items():
            chunk = node.state.chunks.find(ChunkKey(key))
            if chunk is not None and not node.state.reports.is_unconfirmed(chunk) and chunk.created_s < life.acked_s:
                self.fail(AssertionError(f"{key} was put at {life.acked_s:.3f}, {host} has it, and it was not found"))

    def _listed(self, host: str) -> set[str]:
        self._require_owners()
        return super()._listed(host)

    def _require_owners(self) -> None:
        """Each range is owned by the master that should own it."""
        wanted = assign(owner.id for owner in self.masters)
        for number in RANGE_NUMBERS.values():
            owners = [owner.id for owner in self.masters if number in owner.owned]
            assert owners == [wanted[number]], f"range {number} is owned by {owners}, not by {wanted[number]}"
