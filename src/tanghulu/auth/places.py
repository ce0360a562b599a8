"""Places for connections and calls: shares of tenants, a reserve for operators, and a short queue of strangers. Pure.

Whoever has not shown a token, a stranger, takes no place: strangers have a few of their own, and when one more comes,
the oldest of the address that has most of them is hung up on. Behind a proxy all have one address, and the oldest goes.
Of the other places a tenant has at most a share, and an eighth is left to operators, so that the cluster's own
processes get in however many others there are. Example with 16 places and a share of 4: a tenant has 4, tenants and
others together 14, and an operator's processes all 16 where nobody else is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tanghulu.auth.api_keys import ApiKey, KeyRight
from tanghulu.auth.tenants import Identity, Right
from tanghulu.errors import Overloaded

T = TypeVar("T", bound=Hashable)
#: Of all places, one in so many is left to operators.
_RESERVED = 8


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose place it is. ``has_share``: it takes no more than a share; ``is_operator``: the reserve is for it."""

    name: str = ""
    has_share: bool = False
    is_operator: bool = True

    @classmethod
    def of(cls, identity: Identity | None) -> Caller:
        """The caller with a token. Tokens of one tenant share its places; None where no tokens are asked for."""
        if identity is None:
            return cls()
        if identity.tenant:
            return cls(f"tenant {identity.tenant}", has_share=True, is_operator=False)
        return cls(f"token {identity.token_name}", is_operator=identity.may(Right.JOIN))

    @classmethod
    def of_key(cls, key: ApiKey) -> Caller:
        """The caller with an API key."""
        is_operator = key.may(KeyRight.ADMIN)
        return cls(key.client, not is_operator, is_operator)


#: Where nobody shows a token.
ANYBODY = Caller()


class Places:
    """Places of one kind, ``what`` in errors. ``share`` None: an eighth of all."""

    def __init__(self, what: str, share: int | None = None) -> None:
        self._what, self._share = what, share
        self._taken: Counter[Caller] = Counter()
        self._num_others = 0

    def __len__(self) -> int:
        return self._taken.total()

    def take(self, caller: Caller, most: int) -> None:
        """Take one of ``most`` places. Raises Overloaded."""
        share = max(1, most // _RESERVED if self._share is None else min(self._share, most // 4))
        if caller.has_share and self._taken[caller] >= share:
            raise Overloaded(f"{caller.name} has {share} {self._what} here, which is its share; end some of them")
        if len(self) >= most or (not caller.is_operator and self._num_others >= most - most // _RESERVED):
            raise Overloaded(f"this process serves {most} {self._what} and takes no more; try again later")
        self._taken[caller] += 1
        self._num_others += not caller.is_operator

    def give_back(self, caller: Caller) -> None:
        """Give a place back."""
        self._taken[caller] -= 1
        self._num_others -= not caller.is_operator
        if not self._taken[caller]:
            del self._taken[caller]

    def check(self) -> None:
        """Assert that what is counted is counted once."""
        assert all(count > 0 for count in self._taken.values())
        assert self._num_others == sum(n for caller, n in self._taken.items() if not caller.is_operator)


def host_of(transport: asyncio.BaseTransport) -> str:
    """The address that a connection comes from; "" of a Unix socket."""
    name = transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) else ""


class Strangers(Generic[T]):
    """Connections of whoever has not shown who it is, in the order in which they came."""

    def __init__(self) -> None:
        self._hosts: dict[T, str] = {}
        self._of_host: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._hosts)

    def __contains__(self, connection: object) -> bool:
        return connection in self._hosts

    def enter(self, connection: T, host: str) -> None:
        """Enter a connection from ``host``, as the newest."""
        self._hosts[connection] = host
        self._of_host.setdefault(host, {})[connection] = None

    def make_way(self, most: int) -> T | None:
        """Remove and return the connection that makes way if there are more than ``most``."""
        if len(self._hosts) <= most:
            return None
        crowded = max(self._of_host, key=lambda each: len(self._of_host[each]))
        oldest = next(iter(self._of_host[crowded]))
        self.leave(oldest)
        return oldest

    def leave(self, connection: T) -> None:
        """The connection is a stranger's no more; no error if it was none."""
        host = self._hosts.pop(connection, None)
        if host is None:
            return
        own = self._of_host[host]
        del own[connection]
        if not own:
            del self._of_host[host]

    def check(self) -> None:
        """Assert that both tables have the same connections."""
        assert {each: host for host, own in self._of_host.items() for each in own} == self._hosts
        assert all(self._of_host.values())
