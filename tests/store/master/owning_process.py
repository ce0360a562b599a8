"""A process that owns ranges in the etcd at the address in its arguments, until it is killed."""

from __future__ import annotations

import asyncio
import sys

from tanghulu.discovery.base import Instance
from tanghulu.runtime.clock import SystemClock
from tanghulu.store.master.election.ownership import Duties, EtcdOwnership
from tanghulu.types import Address, InstanceId, Role

TTL_S = 2.0


def ownership_of(etcd: Address, name: str, owned: dict[int, int]) -> EtcdOwnership:
    """That of the master ``name``; ``owned`` is kept to what it owns: the term of each range."""
    address = Address(name, 7400)
    instance = Instance(InstanceId(name), Role.MASTER, address)

    def own(number: int) -> None:
        owned[number] = ownership.map.term_of(number)

    duties = Duties(own, owned.__delitem__, lambda term: None, lambda: None, lambda nodes, admitted: None)
    ownership = EtcdOwnership([etcd], instance, TTL_S, SystemClock(), duties)
    return ownership


async def main() -> None:
    await ownership_of(Address.parse(sys.argv[1]), sys.argv[2], {}).run()


if __name__ == "__main__":
    asyncio.run(main())
