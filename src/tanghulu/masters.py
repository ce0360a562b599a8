"""The masters of a store: one address, several, or those that etcd names; and the credentials to show them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tanghulu.auth.credentials import NOTHING_TO_SHOW, Credentials
from tanghulu.errors import InvalidRequest
from tanghulu.types import Address


@dataclass(frozen=True, slots=True)
class Masters:
    """The address of the master, those of several of which one leads, or the etcd in which they elect the leader.

    Written ``host:port``, ``host:port,host:port``, or ``etcd://host:port[,host:port][/namespace]``. ``credentials``
    are shown to the masters at ``addresses``; others, and nodes, are shown credentials derived for them.
    """

    addresses: tuple[Address, ...]
    in_etcd: bool = False
    namespace: str = "default"
    credentials: Credentials = field(default=NOTHING_TO_SHOW, repr=False)

    @classmethod
    def parse(cls, text: str) -> Masters:
        """Read the text that a user wrote; raises InvalidRequest with the part that was wrong."""
        in_etcd = text.startswith("etcd://")
        listed, _, namespace = text.removeprefix("etcd://").partition("/")
        addresses = tuple(Address.parse(part.strip()) for part in listed.split(","))
        if namespace and not in_etcd:
            raise InvalidRequest(f"{text!r}: only etcd:// addresses end in a namespace")
        return cls(addresses, in_etcd, namespace or "default")

    @classmethod
    def of(cls, value: Masters | Address | str) -> Masters:
        """``value`` in this form; one Address is one master."""
        if isinstance(value, Masters):
            return value
        if isinstance(value, Address):
            return cls((value,))
        if not isinstance(value, str):
            raise InvalidRequest(f"a master is named by 'host:port' or 'etcd://host:port', not by {value!r:.80}")
        return cls.parse(value)

    def showing(self, credentials: Credentials) -> Masters:
        """These masters with other ``credentials`` to show them."""
        return replace(self, credentials=credentials)

    def credentials_for(self, address: Address) -> Credentials:
        """The credentials to show to the master at ``address``, which may be one that another has named."""
        is_typed = not self.in_etcd and address in self.addresses
        return self.credentials if is_typed else self.credentials.to(address)

    @property
    def several(self) -> bool:
        """Whether the master may be here now and there later."""
        return self.in_etcd or len(self.addresses) > 1

    def __str__(self) -> str:
        listed = ",".join(map(str, self.addresses))
        return f"etcd://{listed}/{self.namespace}" if self.in_etcd else listed
