"""The masters of a store: one address, several, or those registered in etcd; and the credentials for them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tanghulu.auth.credentials import NOTHING_TO_SHOW, Credentials
from tanghulu.errors import InvalidRequest
from tanghulu.types import Address


@dataclass(frozen=True, slots=True)
class Masters:
    """The address of the master, of several masters of which one leads, or of the etcd in which they elect the leader.

    Written ``host:port``, ``host:port,host:port``, or ``etcd://host:port[,host:port][/namespace]``. ``credentials``
    are presented to the masters at ``addresses``; other masters, and nodes, get credentials derived for them.
    """

    addresses: tuple[Address, ...]
    in_etcd: bool = False
    namespace: str = "default"
    credentials: Credentials = field(default=NOTHING_TO_SHOW, repr=False)

    @classmethod
    def parse(cls, text: str) -> Masters:
        """Parse text written by a user; raises InvalidRequest with the invalid part."""
        in_etcd = text.startswith("etcd://")
        listed, _, namespace = text.removeprefix("etcd://").partition("/")
        addresses = tuple(Address.parse(part.strip()) for part in listed.split(","))
        if namespace and not in_etcd:
            raise InvalidRequest(f"{text!r}: only etcd:// addresses end in a namespace")
        return cls(addresses, in_etcd, namespace or "default")

    @classmethod
    def of(cls, value: Masters | Address | str) -> Masters:
        """Return ``value`` in this form; one Address is one master."""
        if isinstance(value, Masters):
            return value
        if isinstance(value, Address):
            return cls((value,))
        if not isinstance(value, str):
            raise InvalidRequest(f"a master is written 'host:port' or 'etcd://host:port', not {value!r:.80}")
        return cls.parse(value)

    def showing(self, credentials: Credentials) -> Masters:
        """Return these masters with other ``credentials``."""
        return replace(self, credentials=credentials)

    def credentials_for(self, address: Address) -> Credentials:
        """Return the credentials for the master at ``address``, which may have been named by another master."""
        is_typed = not self.in_etcd and address in self.addresses
        return self.credentials if is_typed else self.credentials.to(address)

    @property
    def several(self) -> bool:
        """Whether the master's address may change."""
        return self.in_etcd or len(self.addresses) > 1

    def __str__(self) -> str:
        listed = ",".join(map(str, self.addresses))
        return f"etcd://{listed}/{self.namespace}" if self.in_etcd else listed
