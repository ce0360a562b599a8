"""Places for connections and calls: shares of tenants, a reserve for operators, and a short queue of strangers. Pure.

A peer that has not presented a token, a stranger, takes no place: strangers have a few of their own. When one more
comes, the oldest connection of the address with the most strangers is closed; behind a proxy, where all have one
address, the oldest of all. Of the other places a tenant has at most a share, and an eighth is reserved for operators,
so that the cluster's own processes always get in. Example with 16 places and a share of 4: a tenant has 4, tenants and
others together 14, and an operator's processes all 16 if nobody else is connected.

gRPC does not report a message's size until all of it has arrived. So each arriving message counts as the largest
accepted size until it is complete, and from then until the end of its call as its actual size. Calls that find no
room wait, and callers take turns. Example: room for four messages. Four callers send 60 MiB each and the fifth waits.
The first of the four arrives with 1 KiB: the fifth is received beside the three others and that 1 KiB.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tanghulu.auth.api_keys import ApiKey, KeyRight
from tanghulu.auth.tenants import Identity, Right
from tanghulu.errors import Overloaded

T = TypeVar("T", bound=Hashable)
#: One in this many of all places is reserved for operators.
_RESERVED = 8
#: A tenant has at most one in this many connections.
CONNECTIONS_ONE_IN = 8


@dataclass(frozen=True, slots=True)
class Caller:
    """Owner of a place. ``has_share``: limited to a share; ``is_operator``: may use the reserve."""

    name: str = ""
    has_share: bool = False
    is_operator: bool = True

    @classmethod
    def of(cls, identity: Identity | None) -> Caller:
        """Return the caller with a token. Tokens of one tenant share its places; None if no tokens are required."""
        if identity is None:
            return cls()
        if identity.tenant:
            return cls(f"tenant {identity.tenant}", has_share=True, is_operator=False)
        return cls(f"token {identity.token_name}", is_operator=identity.may(Right.JOIN))

    @classmethod
    def of_key(cls, key: ApiKey) -> Caller:
        """Return the caller with an API key."""
        is_operator = key.may(KeyRight.ADMIN)
        return cls(key.client, not is_operator, is_operator)


#: The caller if tokens are not required.
ANYBODY = Caller()


class Places:
    """Places of one kind, ``what`` in errors. A share is one in ``one_in`` of them, and at most ``most_share``."""

    def __init__(self, what: str, one_in: int, most_share: int | None = None) -> None:
        self._what, self._one_in, self._most_share = what, one_in, most_share
        self._taken: Counter[Caller] = Counter()
        self._num_others = 0

    def __len__(self) -> int:
        return self._taken.total()

    def take(self, caller: Caller, most: int) -> None:
        """Take one of ``most`` places. Raises Overloaded."""
        share = max(1, min(most // self._one_in, self._most_share or most))
        if caller.has_share and self._taken[caller] >= share:
            raise Overloaded(f"{caller.name} has {share} {self._what} here, its limit; close some")
        if len(self) >= most or (not caller.is_operator and self._num_others >= most - most // _RESERVED):
            raise Overloaded(f"this process has reached its limit of {most} {self._what}; retry later")
        self._taken[caller] += 1
        self._num_others += not caller.is_operator

    def give_back(self, caller: Caller) -> None:
        """Release a place."""
        self._taken[caller] -= 1
        self._num_others -= not caller.is_operator
        if not self._taken[caller]:
            del self._taken[caller]

    def check(self) -> None:
        """Assert that the counts agree."""
        assert all(count > 0 for count in self._taken.values())
        assert self._num_others == sum(n for caller, n in self._taken.items() if not caller.is_operator)


def host_of(transport: asyncio.BaseTransport) -> str:
    """Return the address of a connection's peer; "" for a Unix socket."""
    name = transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) else ""


class Strangers(Generic[T]):
    """Connections of peers that have not authenticated, in order of arrival."""

    def __init__(self) -> None:
        self._hosts: dict[T, str] = {}
        self._of_host: dict[str, dict[T, None]] = {}

    def __len__(self) -> int:
        return len(self._hosts)

    def __contains__(self, connection: object) -> bool:
        return connection in self._hosts

    def enter(self, connection: T, host: str) -> None:
        """Add a connection from ``host`` as the newest."""
        self._hosts[connection] = host
        self._of_host.setdefault(host, {})[connection] = None

    def make_way(self, most: int) -> T | None:
        """Remove and return the connection to evict if there are more than ``most``."""
        if len(self._hosts) <= most:
            return None
        crowded = max(self._of_host, key=lambda each: len(self._of_host[each]))
        oldest = next(iter(self._of_host[crowded]))
        self.leave(oldest)
        return oldest

    def leave(self, connection: T) -> None:
        """Remove a connection; no error if it was not a stranger's."""
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


class RequestRoom:
    """The room for calls' messages, and the calls waiting for it. Pure.

    Call ``enter``, then ``came``, then ``leave``; the last two return the calls admitted as a result. Callers with a
    share have at most half of the room.
    """

    def __init__(self, most_bytes: int, message_bytes: int) -> None:
        assert message_bytes <= most_bytes, "one message has room at least"
        self._most_bytes, self._message_bytes = most_bytes, message_bytes
        self._share_bytes = max(message_bytes, most_bytes // 2)
        self._held: dict[Hashable, tuple[Caller, int]] = {}
        self._held_bytes = 0
        self._bytes_of: Counter[Caller] = Counter()
        #: By caller, the next to be served first.
        self._waiting: OrderedDict[Caller, OrderedDict[Hashable, None]] = OrderedDict()

    @property
    def num_held(self) -> int:
        """Number of calls that have room."""
        return len(self._held)

    @property
    def num_waiting(self) -> int:
        """Number of calls waiting for room."""
        return sum(map(len, self._waiting.values()))

    def enter(self, call: Hashable, caller: Caller = ANYBODY) -> bool:
        """Return whether the call's message may arrive now; otherwise it waits for its turn."""
        if caller not in self._waiting and self._next_caller() is None and self._may_come(caller):
            self._hold(call, caller, self._message_bytes)
            return True
        self._waiting.setdefault(caller, OrderedDict())[call] = None
        return False

    def came(self, call: Hashable, num_bytes: int) -> list[Hashable]:
        """Note that the message has arrived with ``num_bytes``."""
        caller = self._let_go(call)
        if caller is not None:
            self._hold(call, caller, num_bytes)
        return self._next()

    def leave(self, call: Hashable) -> list[Hashable]:
        """Note that the call has ended, whether or not it had its turn."""
        self._let_go(call)
        for caller, calls in self._waiting.items():
            if call in calls:
                self._remove(caller, call)
                break
        return self._next()

    def _may_come(self, caller: Caller) -> bool:
        if caller.has_share and self._bytes_of[caller] + self._message_bytes > self._share_bytes:
            return False
        return self._held_bytes + self._message_bytes <= self._most_bytes

    def _hold(self, call: Hashable, caller: Caller, num_bytes: int) -> None:
        self._held[call] = caller, num_bytes
        self._held_bytes += num_bytes
        self._bytes_of[caller] += num_bytes

    def _let_go(self, call: Hashable) -> Caller | None:
        caller, num_bytes = self._held.pop(call, (None, 0))
        if caller is not None:
            self._held_bytes -= num_bytes
            self._bytes_of[caller] -= num_bytes
            if not self._bytes_of[caller]:
                del self._bytes_of[caller]
        return caller

    def _remove(self, caller: Caller, call: Hashable) -> None:
        calls = self._waiting[caller]
        del calls[call]
        if not calls:
            del self._waiting[caller]

    def _next_caller(self) -> Caller | None:
        return next((caller for caller in self._waiting if self._may_come(caller)), None)

    def _next(self) -> list[Hashable]:
        served: list[Hashable] = []
        while (caller := self._next_caller()) is not None:
            self._waiting.move_to_end(caller)
            call = next(iter(self._waiting[caller]))
            self._remove(caller, call)
            self._hold(call, caller, self._message_bytes)
            served.append(call)
        return served

    def check(self) -> None:
        """Assert that the sums are correct and bounded, and that nobody waits while there is room."""
        of_callers: Counter[Caller] = Counter()
        for caller, num_bytes in self._held.values():
            of_callers[caller] += num_bytes
        assert self._bytes_of == of_callers
        assert self._held_bytes == of_callers.total() <= self._most_bytes
        assert all(n <= self._share_bytes for caller, n in of_callers.items() if caller.has_share)
        assert all(calls and not calls.keys() & self._held.keys() for calls in self._waiting.values())
        assert self._next_caller() is None
